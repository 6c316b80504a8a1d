"""Scratch directories of killed processes are removed by the next process; those in use or just being created are
kept.
"""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.whole.running import ROOT
from tidemill.actors.serving.handles import HandleListener
from tidemill.bus.system.files import Scratch

PROGRAM = """
import tempfile; tempfile.tempdir = {directory!r}
from tidemill.bus.system.files import Scratch
scratch = Scratch("test")
print(scratch.path, flush=True)
input()
"""


def test_directories_of_dead_processes_are_removed_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = PROGRAM.format(directory=str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    others = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    try:
        killed, living = (Path(one.stdout.readline().strip()) for one in others)
        others[0].kill()
        others[0].wait()
        (killed / "model").mkdir()
        (killed / "model" / "weights").write_bytes(b"x" * 1000)
        (being_made := tmp_path / "tidemill-test-made").mkdir()
        (another := tmp_path / "tidemill-other-made").mkdir()
        with Scratch("test") as mine:
            assert not killed.exists()
            assert living.is_dir() and being_made.is_dir() and another.is_dir() and mine.path.is_dir()
            with Scratch("test") as second:
                assert mine.path.is_dir() and second.path != mine.path
        assert not mine.path.exists() and living.is_dir()
    finally:
        for one in others:
            one.kill()
            one.communicate()


async def test_an_engine_that_starts_leaves_the_socket_of_another_that_does_not_listen_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (other := tmp_path / "tidemill-handles-other").mkdir()
    nothing: Any = None
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(other / "push"))
        listener = HandleListener(nothing)
        assert (await listener.start()).startswith(f"ipc://{tmp_path}/tidemill-handles-")
        assert (other / "push").exists()
        await listener.close()
    assert [path.name for path in tmp_path.glob("*")] == [other.name]  # noqa: ASYNC240
