"""The newest lines of the logs of a run: from the directory of the run, if it is on this machine. Follows no path of a
row: any process may write rows, and a page must not read what they name.

A page without a token answers every user of this machine: it shows them the files alone that all of them may read. Its
own user, who may read the files anyway, gets all.
"""

import os
import re
import socket
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.page.texts import made_safe
from tidemill.learner.settings.config import masked

MAX_LINES, MAX_LINE = 200, 2000  # Newest lines of an answer, and characters of a line
MAX_READ_BYTES = 1 << 18  # End of a file that is read
MAX_FILES = 500
FIRST = ("learner", "up")  # Logs that are read where none is asked for
PRIVATE = "not every user of this machine may read this log, and this page asks for no token: start it with --token"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class RunLogs:
    """Log files of one run."""

    def __init__(self, directory: Path | None) -> None:
        """``directory``: ``logs/`` of the run's directory; None = it is not on this machine."""
        self._directory = None if directory is None else directory.resolve()

    def as_map(self, name: str, rows: Sequence[LiveRow], *, may_read: Callable[[], bool] = lambda: True) -> JsonObject:
        """Return the logs that are here, the newest lines of one of them, and the places of the others. Blocks.

        ``name``: the log to read; empty = the learner's. Its lines are null, with the reason, where they are not shown.
        ``may_read``: whether the viewer may read a file that not every user of this machine may read.
        """
        try:
            files, reason = sorted(self._files()), ""
        except OSError as error:
            files, reason = [], str(error)
        chosen = name[:MAX_LINE] or next((first for first in FIRST if first in files), (files or [""])[0])
        answer = {"logs": files[:MAX_FILES], "elsewhere": self._elsewhere(set(files), rows), "name": chosen}
        end: JsonObject = {"lines": None, "before_bytes": 0, "reason": reason}
        if chosen in files:
            try:
                end |= self._end_of(chosen, may_read)
            except OSError as error:
                end["reason"] = str(error)
        elif not reason:
            end["reason"] = f"no log {chosen and f'of {chosen} '}is on this machine"
        return made_safe({**answer, **end})  # type: ignore[no-any-return]

    def name_of(self, row: LiveRow) -> str:
        """Return the name of the log that a process says it writes, if it is in this directory; else nothing."""
        place, name = os.path.split(row.log)
        is_here = row.host == socket.gethostname() and place == str(self._directory) and name.endswith(".log")
        return name.removesuffix(".log") if is_here else ""

    def _files(self) -> Iterator[str]:
        """Yield the names of the log files: no link, which might lead elsewhere."""
        if self._directory is None or not self._directory.is_dir():
            return
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(".log") and entry.name != ".log" and entry.is_file(follow_symlinks=False):
                    yield entry.name.removesuffix(".log")

    def _end_of(self, name: str, may_read: Callable[[], bool]) -> JsonObject:
        """Return the newest lines of a log, and the number of bytes before them, or why not. Raises OSError."""
        assert self._directory is not None
        descriptor = os.open(self._directory / f"{name}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            if not (state.st_mode & stat.S_IROTH and _all_may_enter(self._directory)) and not may_read():
                return {"reason": PRIVATE}
            begin = max(0, state.st_size - MAX_READ_BYTES)
            text = b"" if not stat.S_ISREG(state.st_mode) else os.pread(file.fileno(), MAX_READ_BYTES, begin)
        lines = text.split(b"\n")[bool(begin) :]
        if lines and not lines[-1]:
            lines.pop()
        newest = lines[-MAX_LINES:]
        before = state.st_size - sum(len(line) + 1 for line in newest)
        return {"lines": [_shown(line) for line in newest], "before_bytes": max(0, before)}

    def _elsewhere(self, files: Collection[str], rows: Sequence[LiveRow]) -> list[JsonObject]:
        """Return the processes without a log here: where each says that it writes one."""
        return [
            {"process": f"{row.role} {row.id}"[:200], "host": row.host[:200], "path": row.log[:MAX_LINE]}
            for row in rows
            if self.name_of(row) not in files
        ][:MAX_FILES]


def _all_may_enter(directory: Path) -> bool:
    """Return whether every user of this machine may open files in a directory that they may read."""
    return all(place.stat().st_mode & stat.S_IXOTH for place in (directory, *directory.parents))


def _shown(line: bytes) -> str:
    # Cut last: of an address that is cut first, the part of a password that is left looks like none.
    return masked(_COLOUR.sub("", line.decode(errors="replace").rstrip("\r")))[:MAX_LINE]
