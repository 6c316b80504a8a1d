"""Limits of a reward's processes, and the calls of Linux that find and end all of them. No part of it needs privileges."""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
MAX_OPEN_FILES = 1024
MAX_FILE_BYTES = 1 << 30
"""Size of the largest file that a reward may write."""
SWEEP_S = 5.0
"""Seconds after which a sweep ends although processes are left: one that forks all the time. The next sweep goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one reward that runs in child processes."""

    timeout_s: float = 30.0
    """Seconds for one call, by the wall clock, from the moment a worker begins it."""
    workers: int = 16
    """Processes of a plain reward, each with one call at a time; they are started when there is work."""
    memory_mb: int = 4096
    """Private memory of one process (RLIMIT_DATA); 0 = no limit."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def become_undumpable() -> None:
    """Keep other processes of this user from reading this one's environment and memory. It writes no core file any more."""
    _prctl(_PR_SET_DUMPABLE, 0)


def become_subreaper() -> None:
    """Become the parent of descendants after the end of their own parent: a process that has left its session is still found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; end at once if that has happened."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Take back ``end_with_parent``: this process notices the end of its parent by itself."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def limit_process(memory_mb: int) -> None:
    """Limit memory, files and core of this process and of those that it starts. Lower limits that are set stay."""
    wanted = {resource.RLIMIT_NOFILE: MAX_OPEN_FILES, resource.RLIMIT_FSIZE: MAX_FILE_BYTES, resource.RLIMIT_CORE: 0}
    if memory_mb:
        wanted[resource.RLIMIT_DATA] = memory_mb << 20
    for kind, value in wanted.items():
        soft, hard = resource.getrlimit(kind)
        most = min([value, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)])
        resource.setrlimit(kind, (most, most))


def limit_cpu(seconds: float) -> None:
    """Let this process use that much more processor time; the kernel ends it afterwards. Works beside a keeper that does not run."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = int(used.ru_utime + used.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def children_of(parents: set[int]) -> set[int]:
    """Return the living and dead children of these processes, by reading /proc."""
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended in between
            continue
        if parent in parents:
            found.add(int(name))
    return found


def end_strays(known: Callable[[], set[int]]) -> int:
    """Kill and reap the children of this process that are not ``known``, and those that become its children thereby.

    Returns the number of those that are left after ``SWEEP_S``.
    """
    end_s = time.monotonic() + SWEEP_S
    while strays := children_of({os.getpid()}) - known():
        if time.monotonic() > end_s:
            return len(strays)
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
    return 0
