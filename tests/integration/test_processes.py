"""Child processes: their output, and their end with all processes that they have started."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from bus.system.processes import Child

PARENT = """
import signal, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                               "print('deaf', flush=True); time.sleep(3600)"], stdout=subprocess.PIPE)
grandchild.stdout.readline()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print(grandchild.pid, flush=True)
time.sleep(3600)
"""


async def _gone(handle: int) -> None:
    """Wait until the process of a pidfd has ended."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def test_the_end_of_a_group_is_the_end_of_all_in_it(tmp_path: Path) -> None:
    child = Child("parent", [sys.executable, "-c", PARENT], tmp_path / "log")
    await child.start()
    while not child.lines():  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.01)
    grandchild = os.pidfd_open(int(child.last_lines()))
    assert await child.end(120, group=True) == 3
    await _gone(grandchild)


async def test_a_keeper_is_not_killed_with_its_parent_but_sees_its_input_end(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from bus.system.processes import Child\n"
        "async def main():\n"
        f"    child = Child('keeper', [sys.executable, '-c', {_KEEPER!r}], Path({str(tmp_path / 'log')!r}), keeper=True)\n"
        "    await child.start(); print(child.pid, flush=True); await child.wait()\n"
        "asyncio.run(main())"
    )
    parent = Child("parent", [sys.executable, "-c", code])
    await parent.start()
    assert parent.process is not None and parent.process.stdout is not None
    keeper = os.pidfd_open(int(await parent.process.stdout.readline()))
    parent.send(signal.SIGKILL)
    assert await parent.wait() == -signal.SIGKILL
    await _gone(keeper)
    assert (tmp_path / "log").read_text() == "input ended\n"


_KEEPER = "import sys; sys.stdin.read(); print('input ended', flush=True)"


async def test_output_without_a_log_file_is_passed_on_behind_the_name(capfd: pytest.CaptureFixture[str]) -> None:
    child = Child("it", [sys.executable, "-c", "print('one'); print('error: two')"], environment={"PYTHONUNBUFFERED": "1"})
    assert child.returncode is None and not child.running
    await child.start()
    assert await child.wait() == 0
    assert capfd.readouterr().err == "it: one\nit: error: two\n"
    assert child.lines() == ["one", "error: two"]
    assert child.reason() == "two"


async def test_the_exit_code_does_not_wait_for_output_that_another_process_holds_open() -> None:
    """The grandchild has left the group, and has inherited the output."""
    grandchild = "import time; print('here', flush=True); time.sleep(3600)"
    starting = f"subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True)"
    code = f"import subprocess, sys, time; {starting}; time.sleep(3600)"
    child = Child("parent", [sys.executable, "-c", code])
    await child.start()
    assert child.process is not None and child.process.stdout is not None
    assert await child.process.stdout.readline() == b"here\n"
    (left,) = psutil.Process(child.pid).children()
    child.send(signal.SIGKILL)
    async with asyncio.timeout(60):
        assert await child.exited() == -signal.SIGKILL
    left.kill()
    assert await child.wait() == -signal.SIGKILL
