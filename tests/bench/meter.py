"""Runs a command that writes a JSON line a step, and records the time of each line and the CPU time of all its
processes by then.

Wall time on shared cores is no measure of a program of many processes; CPU time shows its cost.
"""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LOOK_EVERY_S = 0.2
MEMORY_EVERY_S = 1.0
"""Between two readings of the memory, which walk the page tables of every process."""
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Progress of a run when this many of its lines had been read."""

    lines: int
    wall_s: float
    """Seconds since the command was started."""
    cpu_s: float
    """User and system seconds of the command and all its descendants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered:
    """A command that has ended with code 0, or was ended after its time."""

    lines: list[dict[str, Any]]
    seen: list[Seen]
    peak_bytes: int = 0
    """Largest sum of the proportional set sizes of all processes, by readings a second apart; 0 = not read."""

    def at(self, line: int) -> Seen:
        """Return the first reading that includes line number ``line`` (from 1)."""
        return next(each for each in self.seen if each.lines >= line)

    def cpu_s_per_line(self, first: int, last: int) -> float:
        """Return the mean CPU time of the lines between two."""
        begin, end = self.at(first), self.at(last)
        return (end.cpu_s - begin.cpu_s) / max(1, end.lines - begin.lines)


def metered(
    command: Sequence[str],
    *,
    lines_file: Path,
    log_file: Path,
    directory: Path,
    for_s: float = 0.0,
    limit_s: float = LIMIT_S,
    with_memory: bool = False,
) -> Metered:
    """Run with one torch thread a process. Raises SystemExit with its last log lines when it fails or takes too long.

    ``for_s``: seconds after which it is ended, if it runs so long; 0 = it has to end by itself. ``with_memory``: read
    the memory of all processes, too.
    """
    lines_file.unlink(missing_ok=True)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    seen: list[Seen] = []
    peak_bytes = 0
    began_s = read_s = time.monotonic()
    with log_file.open("w") as log:
        child = subprocess.Popen(list(command), cwd=directory, env=environment, stdout=log, stderr=subprocess.STDOUT)
        tree = [psutil.Process(child.pid)]
        try:
            while child.poll() is None and time.monotonic() - began_s < (for_s or limit_s):
                num_lines = _count(lines_file)
                if not num_lines:  # all its processes exist when its first step is done; searching for them costs time
                    tree = [tree[0], *_children(tree[0])]
                if num_lines > (seen[-1].lines if seen else 0):
                    seen.append(Seen(lines=num_lines, wall_s=time.monotonic() - began_s, cpu_s=sum(map(_cpu_s, tree))))
                if with_memory and time.monotonic() - read_s >= MEMORY_EVERY_S:
                    peak_bytes = max(peak_bytes, sum(pss_bytes(each.pid) for each in [tree[0], *_children(tree[0])]))
                    read_s = time.monotonic()
                time.sleep(LOOK_EVERY_S)
        finally:
            ended_here = child.poll() is None
            if ended_here:
                child.terminate()
            child.wait()
    if child.returncode and not (for_s and ended_here):
        raise SystemExit(f"{' '.join(command[:4])} ended with {child.returncode}:\n{log_file.read_text()[-2000:]}")
    lines = [json.loads(line) for line in lines_file.read_text().splitlines()]
    if seen and seen[-1].lines < len(lines):  # the last lines came between two readings
        seen.append(Seen(lines=len(lines), wall_s=time.monotonic() - began_s, cpu_s=seen[-1].cpu_s))
    return Metered(lines=lines, seen=seen, peak_bytes=peak_bytes)


def _count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of its children that have ended; 0 when it is gone."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process, in which a page of n processes counts 1/n; 0 when it is gone."""
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:
        return 0
