"""Processes below this one that are stopped by a signal: they are alive, so their parents wait for them."""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress

LOOK_EVERY_S = 2.0
CHILD = "a child of "
STOPPED = "T"
"""State of a process after SIGSTOP or SIGTSTP; one that is halted by a debugger is in another."""


async def report_stopped(report: Callable[[str], None], *, every_s: float = LOOK_EVERY_S) -> None:
    """Background loop: report every process below this one that is stopped, and that continues or ends afterwards."""
    since: dict[int, tuple[str, float]] = {}
    while True:
        stopped = stopped_below(os.getpid())
        for pid in stopped - since.keys():
            since[pid] = program(pid), time.monotonic()
            report(f"{since[pid][0]} (process {pid}) is stopped by a signal (SIGSTOP); kill -CONT {pid} continues it")
        for pid in since.keys() - stopped:
            name, began_s = since.pop(pid)
            report(f"{name} (process {pid}) is no longer stopped, after {time.monotonic() - began_s:.0f} s")
        await asyncio.sleep(every_s)


def stopped_below(parent: int) -> set[int]:
    """Return the ids of the stopped descendants of ``parent``; none where /proc does not list them."""
    stopped, unseen = set[int](), _children(parent)
    while unseen:
        pid = unseen.pop()
        unseen += _children(pid)
        if _state(pid) == STOPPED:
            stopped.add(pid)
    return stopped


def program(pid: int) -> str:
    """Return the name of a process' program: the command of ours, the module of ``python -m``, or the program file."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [word.decode(errors="replace") for word in file.read().split(b"\0")]
        if "python" in words[0] and "-c" in words[1:3]:  # children of a reward and of a rollout program
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                parent = program(int(file.read().rpartition(")")[2].split()[1]))
            return parent if parent.startswith(CHILD) else CHILD + parent
    except OSError:
        return "a process"
    if "-m" in words[:-1]:
        place = words.index("-m") + 1
        return words[place + 1] if words[place] == "tidemill" else words[place]
    return os.path.basename(words[0]) or "a process"


def _children(pid: int) -> list[int]:
    """Return the ids of the children of a process, which the kernel lists by the thread that started them."""
    # A look at all of /proc took 4 % of an actor's processor time on a machine with 200 processes.
    children = list[int]()
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                children += map(int, file.read().split())
    return children


def _state(pid: int) -> str:
    """Return the state of a process; empty when it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split(None, 1)[0]
    return ""
