"""Child processes: their output, and their end with all processes that they have started."""

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.skips import inapplicable
from tests.small_disk import small_disk
from tests.waits import LIMIT_S, until
from tidemill.bus.system.processes import Child
from tidemill.launch.run.process import report_stopped

PARENT = """
import signal, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c",
                               "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                               "print('deaf', flush=True); signal.pause()"], stdout=subprocess.PIPE)
grandchild.stdout.readline()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print(grandchild.pid, flush=True)
signal.pause()
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
    await until(child.lines)
    grandchild = os.pidfd_open(int(child.last_lines()))
    assert await child.end(120, group=True) == 3
    await _gone(grandchild)


async def test_a_keeper_is_not_killed_with_its_parent_but_sees_its_input_end(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from tidemill.bus.system.processes import Child\n"
        "async def main():\n"
        f"    child = Child('keeper', [sys.executable, '-c', {_KEEPER!r}], Path({str(tmp_path / 'log')!r}), "
        "keeper=True)\n"
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
    child = Child(
        "it", [sys.executable, "-c", "print('one'); print('error: two')"], environment={"PYTHONUNBUFFERED": "1"}
    )
    assert child.returncode is None and not child.running
    await child.start()
    assert await child.wait() == 0
    assert capfd.readouterr().err == "it: one\nit: error: two\n"
    assert child.lines() == ["one", "error: two"]
    assert child.reason() == "two"


async def test_a_log_that_is_emptied_goes_on_from_its_beginning(tmp_path: Path) -> None:
    """As logrotate with copytruncate empties it."""
    log = tmp_path / "child.log"
    log.write_text("lines of an earlier start\n" * 100)
    child = Child("child", ["sh", "-c", "echo before; read line; echo after"], log, keeper=True)
    await child.start()
    await until(lambda: child.lines() == ["before"])
    os.truncate(log, 0)
    assert child.process is not None and child.process.stdin is not None
    child.process.stdin.write(b"go on\n")
    assert await child.wait() == 0
    assert log.read_bytes() == b"after\n"
    assert child.last_lines() == "after"


async def test_the_exit_code_does_not_wait_for_output_that_another_process_holds_open() -> None:
    """The grandchild has left the group, and has inherited the output."""
    grandchild = "import signal; print('here', flush=True); signal.pause()"
    starting = f"subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True)"
    code = f"import signal, subprocess, sys; {starting}; signal.pause()"
    child = Child("parent", [sys.executable, "-c", code])
    await child.start()
    assert child.process is not None and child.process.stdout is not None
    assert await child.process.stdout.readline() == b"here\n"
    (left,) = psutil.Process(child.pid).children()
    child.send(signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        assert await child.exited() == -signal.SIGKILL
    left.kill()
    assert await child.wait() == -signal.SIGKILL


@pytest.fixture
def full_log(tmp_path: Path) -> Iterator[Path]:
    """An empty file on a disk without room."""
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        (disk.root / "log").touch()
        disk.fill(leaving=0)
        yield disk.root / "log"


async def test_the_reason_of_a_child_is_known_although_its_log_has_no_room(full_log: Path) -> None:
    """Three starts: the reason is of the last one."""
    code = (
        "import logging, sys; from tidemill.bus import exit_codes; from tidemill.bus.system import output; "
        "output.guard_standard_files()\n"
        "sys.exit(exit_codes.report(KeyError(sys.argv[1]), logging.getLogger()))"
    )
    child = Child("it", [sys.executable, "-c", code, "a"], full_log)
    await child.start()
    assert await child.wait() == 1, "and so is its exit code"
    assert child.lines() == [] and child.reason() == "KeyError: 'a'"
    child.command = (*child.command[:-1], "b")
    await child.start()
    await child.wait()
    assert child.reason() == "KeyError: 'b'"
    child.command = (sys.executable, "-c", "")
    await child.start()
    assert await child.wait() == 0 and child.reason() == ""


async def test_the_reason_is_not_written_into_a_file_of_the_childs_own_children(tmp_path: Path) -> None:
    code = (
        "import logging, os, sys; from tidemill.bus import exit_codes\n"
        "for_child = exit_codes.ReasonFile(); exit_codes.report(ValueError('mine'), logging.getLogger())\n"
        "assert for_child.read() == ''"
    )
    child = Child("it", [sys.executable, "-c", code], tmp_path / "log")
    await child.start()
    assert await child.wait() == 0, child.last_lines()
    assert child.reason() == "ValueError: mine"


@pytest.mark.parametrize("by_us", [True, False])
async def test_only_a_kill_that_is_not_ours_has_a_cause(by_us: bool, tmp_path: Path) -> None:
    child = Child("sleep", ["sleep", "3600"], tmp_path / "log")
    await child.start()
    ending = asyncio.create_task(child.wait())
    await until(lambda: child.last_look.rss_bytes)
    child.send(signal.SIGKILL) if by_us else os.kill(child.pid, signal.SIGKILL)
    assert await ending == -signal.SIGKILL
    assert child.reason() == "" if by_us else child.reason().startswith("not by Tidemill")
    assert by_us or " MB" in child.reason()


@contextmanager
def _memory_limit(limit_bytes: int) -> Iterator[Path]:
    """Make a control group with this much memory, of version 2 or 1; yield the file of its processes."""
    for mount, name in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        group = mount / f"tidemill-test-{uuid.uuid4().hex[:8]}"
        with ExitStack() as stack:
            if not (mount / "cgroup.procs").exists():
                continue
            try:
                group.mkdir()
                stack.callback(group.rmdir)
                (group / name).write_text(str(limit_bytes))
            except OSError:
                continue
            yield group / "cgroup.procs"
            return
    inapplicable("this machine lets no test make a control group with a limit")


async def test_a_child_that_the_kernel_kills_for_want_of_memory_is_named_so(tmp_path: Path) -> None:
    with _memory_limit(64 << 20) as procs:
        code = (
            f"import os, sys; open({str(procs)!r}, 'w').write(str(os.getpid()))\n"
            "kept = bytearray(b'x' * (24 << 20)); print('up', flush=True); os.read(int(sys.argv[1]), 1)\n"
            "while True: kept += b'x' * (4 << 20)"
        )
        reader, writer = os.pipe()
        child = Child("eater", [sys.executable, "-c", code, str(reader)], tmp_path / "log")
        await child.start(pass_fds=(reader,))
        ending = asyncio.create_task(child.wait())
        await until(lambda: "tidemill-test" in str(child.last_look.counters))
        os.write(writer, b"go")
        assert await ending == -signal.SIGKILL, child.last_lines()
        os.close(reader), os.close(writer)
    assert child.reason().startswith("by the kernel's OOM killer, for want of memory (it had "), child.reason()


async def test_stopped_processes_below_are_reported_once_and_when_they_continue(tmp_path: Path) -> None:
    """A child, and a child of a child: the kernel's list of processes has both."""
    child = Child("parent", [sys.executable, "-c", PARENT], tmp_path / "log")
    await child.start()
    await until(child.lines)
    grandchild = int(child.last_lines())
    events: asyncio.Queue[str] = asyncio.Queue()
    reporting = asyncio.create_task(report_stopped(events.put_nowait, every_s=0.01))
    try:
        for pid in (child.pid, grandchild):
            os.kill(pid, signal.SIGSTOP)
            text = await events.get()
            assert f"(process {pid}) is stopped by a signal (SIGSTOP); kill -CONT {pid} continues it" in text
            os.kill(pid, signal.SIGCONT)
            assert f"(process {pid}) is no longer stopped, after 0 s" in await events.get()
        os.kill(grandchild, signal.SIGSTOP)
        await events.get()
        os.kill(grandchild, signal.SIGKILL)
        assert "is no longer stopped" in await events.get()
        assert events.empty()
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        await child.end(120, group=True)
