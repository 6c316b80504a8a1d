"""The origin of a SIGKILL: counts of control groups and of the machine, from files as Linux writes them."""

import os
from pathlib import Path

import pytest

from tidemill.bus.system import processes

V2, V1 = "0::/job\n", "4:memory:/job\n0::/\n"
EVENTS, CONTROL, VMSTAT = "sys/fs/cgroup/{}memory.events", "sys/fs/cgroup/memory/{}memory.oom_control", "proc/vmstat"
BY_OOM, NOT_BY_OOM, UNKNOWN = (
    "by the kernel's OOM killer, for want of memory",
    "nor by the kernel's OOM killer",
    "the kernel may have done it",
)


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("cgroups", "files", "grows", "origin"),
    [
        (V2, [EVENTS.format("job/")], 0, BY_OOM),
        (V2, [EVENTS.format("job/")], None, NOT_BY_OOM),
        (V2, [EVENTS.format("")], 0, BY_OOM),  # in a container, whose group is the mounted one
        (V1, [CONTROL.format("job/")], 0, BY_OOM),
        (V1, [CONTROL.format("job/")], None, NOT_BY_OOM),
        (V1, [CONTROL.format("")], 0, BY_OOM),
        (V2, [EVENTS.format("job/"), VMSTAT], 1, NOT_BY_OOM),  # a process of another group
        (V2, [EVENTS.format("job/"), VMSTAT], 0, BY_OOM),
        (V2, [VMSTAT], 0, BY_OOM),  # no control groups
        (V2, [VMSTAT], None, NOT_BY_OOM),
        ("", [VMSTAT], 0, BY_OOM),
        (V2, [], None, UNKNOWN),
        ("", [], None, UNKNOWN),
    ],
)
def test_the_killer_is_named_by_the_counts(
    tmp_path: Path, cgroups: str, files: list[str], grows: int | None, origin: str
) -> None:
    """``grows``: number of the file whose count is higher after the end of the process."""
    write(tmp_path, "proc/7/status", "Name:\tpython\nVmRSS:\t 8105472 kB\nThreads:\t4\n")
    write(tmp_path, "proc/7/cgroup", cgroups)
    for file in files:
        write(tmp_path, file, "low 0\noom 3\noom_kill 3\noom_group_kill 0\n")
    last = processes.look(7, tmp_path)
    (tmp_path / "proc/7/status").unlink()
    (tmp_path / "proc/7/cgroup").unlink()
    if grows is not None:
        write(tmp_path, files[grows], "low 0\noom 4\noom_kill 4\noom_group_kill 0\n")
    cause = processes.cause(last)
    assert origin in cause and "it had 8.3 GB" in cause, cause
    assert (processes.CURE in cause) is (origin == BY_OOM)


def test_the_count_of_a_group_that_is_removed_with_its_process_is_that_of_the_machine(tmp_path: Path) -> None:
    """A scope of systemd. The count of the group above is another one."""
    write(tmp_path, "proc/7/cgroup", V2)
    for file in (EVENTS.format("job/"), EVENTS.format(""), VMSTAT):
        write(tmp_path, file, "oom_kill 3\n")
    last = processes.look(7, tmp_path)
    (tmp_path / EVENTS.format("job/")).unlink()
    write(tmp_path, VMSTAT, "oom_kill 4\n")
    assert BY_OOM in processes.cause(last)


def test_without_any_file_the_cause_is_still_a_sentence() -> None:
    assert "its memory is not known" in processes.cause(processes.Look())


def test_a_look_at_this_process_has_its_memory() -> None:
    assert 1e7 < processes.look(os.getpid()).rss_bytes < 1e12
