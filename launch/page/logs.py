"""The newest lines of the logs of a run: from the directory of the run, if it is on this machine. Follows no path of a
row: any process may write rows, and a page must not read what they name.
"""

import os
import re
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.page.texts import made_safe
from tidemill.learner.settings.config import masked

MAX_LINES, MAX_LINE = 200, 2000  # Newest lines of an answer, and characters of a line
MAX_READ_BYTES = 1 << 18  # End of a file that is read
MAX_FILES = 500
FIRST = ("learner", "up")  # Logs that are read where none is asked for
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class RunLogs:
    """Log files of one run."""

    def __init__(self, directory: Path | None) -> None:
        """``directory``: ``logs/`` of the run's directory; None = it is not on this machine."""
        self._directory = directory

    def as_map(self, name: str, rows: Sequence[LiveRow]) -> JsonObject:
        """Return the logs that are here, the newest lines of one of them, and the places of the others. Blocks.

        ``name``: the log to read; empty = the learner's. Its lines are null where it is not here.
        """
        files = sorted(self._files())[:MAX_FILES]
        chosen = name[:MAX_LINE] or next((first for first in FIRST if first in files), (files or [""])[0])
        answer = {"logs": files, "elsewhere": self._elsewhere(files, rows)}
        return made_safe({**answer, "name": chosen, **self._end_of(chosen, chosen in files)})  # type: ignore[no-any-return]

    def _files(self) -> Iterator[str]:
        """Yield the names of the log files: no link, which might lead elsewhere."""
        if self._directory is None or not self._directory.is_dir():
            return
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(".log") and entry.is_file(follow_symlinks=False):
                    yield entry.name.removesuffix(".log")

    def _end_of(self, name: str, is_here: bool) -> JsonObject:
        """Return the newest lines of a log, and the number of bytes before them."""
        if not is_here or self._directory is None:
            return {"lines": None, "before_bytes": 0}
        descriptor = os.open(self._directory / f"{name}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            begin = max(0, state.st_size - MAX_READ_BYTES)
            text = b"" if not stat.S_ISREG(state.st_mode) else os.pread(file.fileno(), MAX_READ_BYTES, begin)
        lines = text.split(b"\n")[bool(begin) :]
        if lines and not lines[-1]:
            lines.pop()
        newest = lines[-MAX_LINES:]
        before = state.st_size - sum(len(line) + 1 for line in newest)
        return {"lines": [_shown(line) for line in newest], "before_bytes": max(0, before)}

    def _elsewhere(self, files: Iterable[str], rows: Sequence[LiveRow]) -> list[JsonObject]:
        """Return the processes without a log here: where each says that it writes one."""
        root, host = (self._directory or Path()).resolve(), socket.gethostname()
        here = {str(root / f"{name}.log") for name in files}
        return [
            {"process": f"{row.role} {row.id}"[:200], "host": row.host[:200], "path": row.log[:MAX_LINE]}
            for row in rows
            if row.host != host or row.log not in here
        ][:MAX_FILES]


def _shown(line: bytes) -> str:
    text = line[: 4 * MAX_LINE].decode(errors="replace").rstrip("\r")
    return masked(_COLOUR.sub("", text)[:MAX_LINE])
