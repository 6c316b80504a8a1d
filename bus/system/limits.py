"""Limits and environment of child processes, and the calls of Linux that find and end them, without privileges."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tidemill.bus.system.processes import without_proxy

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
MAX_OPEN_FILES = 1024
MAX_FILE_BYTES = 1 << 30
# Times that a process tree is read before it is killed as it is: one that forks all the time never stands still
MAX_ROUNDS = 100
# Variables that children do not inherit: they may hold the credentials of the bus
SECRET_PREFIXES = ("TIDEMILL_", "NATS_")
SWEEP_S = 5.0  # Seconds after which a sweep ends although processes are left: one that forks all the time


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of one function that runs in child processes."""

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
    """Keep other processes of this user from reading this one's environment and memory; it writes no core file."""
    _prctl(_PR_SET_DUMPABLE, 0)


def become_subreaper() -> None:
    """Become the parent of descendants whose parent has ended: one that left its session is still found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def outlive_parent() -> None:
    """Take back ``die_with_parent``: this process notices the end of its parent by itself."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def limit_process(memory_mb: int) -> None:
    """Limit memory, files and core of this process and its descendants. Lower limits that are set stay."""
    limits = {resource.RLIMIT_NOFILE: MAX_OPEN_FILES, resource.RLIMIT_FSIZE: MAX_FILE_BYTES, resource.RLIMIT_CORE: 0}
    if memory_mb:
        limits[resource.RLIMIT_DATA] = memory_mb << 20
    for kind, value in limits.items():
        soft, hard = resource.getrlimit(kind)
        bound = min([value, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)])
        resource.setrlimit(kind, (bound, bound))


def limit_cpu(seconds: float) -> None:
    """Let this process use so much more processor time; then the kernel ends it, also beside a stopped keeper."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    bound = int(used.ru_utime + used.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


def children_of(parents: set[int]) -> set[int]:
    """Return the living and dead children of these processes, by reading /proc."""
    children = set()
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended in between
            continue
        if parent in parents:
            children.add(int(name))
    return children


def end_strays(known: Callable[[], set[int]]) -> int:
    """Kill and reap the children that are not ``known``, and new ones thereby; return the number that is left."""
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


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of child processes: no credentials, no proxies, one thread for numerical libraries."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(SECRET_PREFIXES)}
    # A keeper with threads cannot fork, and OpenBLAS starts some when numpy is imported.
    return without_proxy({"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **kept})


def kill_tree(root: int, *, alive: bool) -> None:
    """Kill a process, its session, and all below it. ``alive`` = false: it was reaped, its number may be another's."""
    pids: set[int] = set()
    if alive:
        pids = {root}
        for _ in range(MAX_ROUNDS):  # stopped first: a stopped process starts nothing
            for pid in pids:
                _send(pid, signal.SIGSTOP)
            below = children_of(pids) - pids
            if not below:
                break
            pids |= below
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(root, signal.SIGKILL)
    for pid in pids:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
