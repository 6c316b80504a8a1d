"""The keeper of a server's processes, on one with the names and parts of SGLang's: the deaths that end all of it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waits import LIMIT_S, poll
from tests.whole.running import ROOT

PARTS = "echo up; (exec -a {scheduler}) & (exec -a helper sleep 600) & (exec -a sglang::detokenizer sleep 600) & wait"
PROGRAM = PARTS.format(scheduler="sglang::scheduler_TP0 sleep 600")
FORKING = PARTS.format(scheduler="""sglang::scheduler_TP0 bash -c '(sleep 2; :) & wait; echo copied; sleep 600; :'""")
"""Program with a scheduler that has a copy of itself for two seconds, as between a fork and an exec."""


@pytest.fixture
def keeper(request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str]"]:
    words = [
        sys.executable,
        "-m",
        "tidemill.actors.serving.sglang.process_group",
        "bash",
        "-c",
        getattr(request, "param", PROGRAM),
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=ROOT, text=True, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def parts(keeper: "subprocess.Popen[str]") -> dict[str, psutil.Process]:
    """Wait until all parts have a command line of their own, and the keeper watches two of them. Returns them by its
    first argument.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        below = {(one.cmdline() or [""])[0]: one for one in psutil.Process(keeper.pid).children(recursive=True)}
        if (
            below.keys() == {"bash", "sglang::scheduler_TP0", "helper", "sglang::detokenizer"}
            and watched(keeper.pid) == 2
        ):
            return below
        assert time.monotonic() < deadline, list(below)
        time.sleep(0.02)


def watched(pid: int) -> int:
    """Return the number of processes that it has a descriptor of; others appear and disappear during the listing."""
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(one))
    return sum("pidfd" in one for one in found)


def told(keeper: "subprocess.Popen[str]") -> str:
    """Return its error output, once it has ended; its input stays open till then, or it would end all at once."""
    keeper.wait(timeout=LIMIT_S)
    assert keeper.stderr is not None
    return keeper.stderr.read()


@pytest.mark.parametrize("name", ["sglang::scheduler_TP0", "sglang::detokenizer"])
def test_a_part_that_dies_ends_all(keeper: "subprocess.Popen[str]", name: str) -> None:
    whole = parts(keeper)
    whole[name].kill()
    assert f"{name} ({whole[name].pid}) has ended" in told(keeper)
    assert keeper.returncode == 128 + signal.SIGKILL
    _, alive = psutil.wait_procs(list(whole.values()), timeout=LIMIT_S)
    assert alive == []


def test_other_children_may_end_and_a_requested_end_is_no_failure(keeper: "subprocess.Popen[str]") -> None:
    whole = parts(keeper)
    whole["helper"].kill()
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.wait(timeout=3)
    keeper.send_signal(signal.SIGTERM)
    poll(lambda: len(os.listdir(f"/proc/{keeper.pid}/task")) == 2)  # the thread that watches the parts has ended
    whole["sglang::scheduler_TP0"].kill()
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.wait(timeout=3)  # it waits for the server, which got the signal, too
    whole["bash"].terminate()
    said = told(keeper)
    assert "has ended" not in said
    assert "the server ended with code -15" in said
    assert keeper.returncode == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(list(whole.values()), timeout=LIMIT_S)
    assert alive == []


@pytest.mark.parametrize("keeper", [FORKING], indirect=True)
def test_a_command_of_a_part_that_is_called_as_the_part_itself_may_end(keeper: "subprocess.Popen[str]") -> None:
    assert keeper.stdout is not None and keeper.stdout.readline() == "copied\n"
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.wait(timeout=3)
    (scheduler,) = [
        one
        for one in psutil.Process(keeper.pid).children(recursive=True)
        if one.cmdline()[0] == "sglang::scheduler_TP0"
    ]
    poll(lambda: watched(keeper.pid) == 2)
    scheduler.kill()
    assert f"sglang::scheduler_TP0 ({scheduler.pid}) has ended" in told(keeper)
