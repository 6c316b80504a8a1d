"""Why the kernel killed a process: evidence of its out-of-memory killer, and the memory that the process had.

Linux counts the processes that were killed for want of memory: by control group (version 2: memory.events, version 1:
memory.oom_control), and on the whole machine (/proc/vmstat). A count that has grown since the last look at a process that is dead now
names the killer.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
CURE = "give the machine or the container more memory, or let its processes use less (docs/troubleshooting.md)"


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a process while it ran."""

    rss_bytes: int = 0
    """Its memory (resident set); 0 = not known."""
    counters: tuple[Path | None, Path | None] = (None, None)
    """Files that count killed processes: in its control group, and on the machine; None = none is known."""
    kills: tuple[int | None, int | None] = (None, None)
    """Their counts; None = not known."""


def look(pid: int, root: Path = ROOT) -> Look:
    """Look at a process. ``root`` holds the directories proc and sys."""
    group, machine = _counter_of_group(_text(root / f"proc/{pid}/cgroup"), root), root / "proc/vmstat"
    return Look(_rss_bytes(_text(root / f"proc/{pid}/status")), (group, machine), (_count(group), _count(machine)))


def cause(last: Look) -> str:
    """Return the origin of a SIGKILL that Tidemill did not send, to a process that has ended. ``last``: the last look at it."""
    memory = f"{last.rss_bytes / 1e9:.1f} GB" if last.rss_bytes >= 1e8 else f"{last.rss_bytes / 1e6:.0f} MB"
    had = f"it had {memory}" if last.rss_bytes else "its memory is not known"
    group, machine = (_grown(before, _count(counter)) for before, counter in zip(last.kills, last.counters, strict=True))
    if group or (machine and group is None):
        return f"by the kernel's OOM killer, for want of memory ({had}); {CURE}"
    if group is False or machine is False:
        return f"not by Tidemill, nor by the kernel's OOM killer by its counts ({had})"
    return f"not by Tidemill; the kernel may have done it for want of memory ({had}; see: dmesg | grep -i 'killed process')"


def _grown(before: int | None, after: int | None) -> bool | None:
    return None if before is None or after is None else after > before


def _counter_of_group(cgroups: str, root: Path) -> Path | None:
    """Return the counter of a process' control group; ``cgroups`` is the text of /proc/PID/cgroup."""
    for line in cgroups.splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, name = ("memory", "memory.oom_control") if controllers else ("", "memory.events")
        directory = root / "sys/fs/cgroup" / mount
        # In a container the path may be the host's, and the group itself is mounted.
        for file in (directory / path.lstrip("/") / name, directory / name):
            if _count(file) is not None:
                return file
    return None


def _count(file: Path | None) -> int | None:
    match = re.search(r"^oom_kill (\d+)$", _text(file), re.MULTILINE) if file is not None else None
    return int(match[1]) if match else None


def _rss_bytes(status: str) -> int:
    match = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
