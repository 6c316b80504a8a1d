"""Standard output and error, and log files, that a full disk, a closed pipe or a lost terminal cannot end.

Python keeps text that it could not write, tries again at exit, and replaces the exit code by 120 when that fails, too.
Files made here forget such text. Lossy ones go on; a strict one, for a command whose output is its result, raises
Unwritable once.
"""

import errno
import io
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from tidemill.bus.errors import DetailedError

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


class Unwritable(DetailedError):
    """Standard output cannot be written."""

    error: OSError
    template = "standard output cannot be written: {error.strerror}"

    @property
    def at_end(self) -> bool:
        """True when its reader has ended, which is no failure: `tidemill tail | head`."""
        return self.error.errno == errno.EPIPE


class _File(io.FileIO):
    def __init__(self, descriptor: int, *, lossy: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lossy, self._ended = lossy, False

    def write(self, data: Any) -> int:
        """Write what can be written, and count the rest as written. Raises Unwritable once, unless lossy."""
        try:
            return len(data) if self._ended else super().write(data) or len(data)
        except OSError as error:
            if self._lossy:
                return len(data)
            self._ended = True
            raise Unwritable(error) from None


def lossy(descriptor: int) -> TextIO:
    """Return a text file on an open descriptor, which it does not close: a line is written at once, or lost."""
    file = io.BufferedWriter(_File(descriptor, lossy=True))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def lossy_standard_files() -> None:
    """Make standard output and error lossy, for a process whose output is a log."""
    sys.stdout, sys.stderr = lossy(STANDARD_OUTPUT), lossy(STANDARD_ERROR)


def guard_standard_files(*, is_log: bool = False) -> None:
    """Make stderr lossy and stdout strict. Closed ones become /dev/null, or other files would get their numbers.

    ``is_log``: stdout, into which libraries and functions of the user's print, is lossy, too.
    """
    for descriptor in (STANDARD_OUTPUT, STANDARD_ERROR):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    file, before = io.BufferedWriter(_File(STANDARD_OUTPUT, lossy=is_log)), sys.stdout
    if isinstance(before, io.TextIOWrapper):
        lines = before.line_buffering or before.write_through
        sys.stdout = io.TextIOWrapper(file, encoding=before.encoding, errors=before.errors, line_buffering=lines)
    else:
        sys.stdout = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace")
    sys.stderr = lossy(STANDARD_ERROR)


EVERY_S = 60.0


@dataclass(slots=True)
class _Tally:
    since_s: float
    count: int = 0


class FailureLog:
    """A logger for a few kinds of failures that may occur thousands of times each."""

    def __init__(
        self, log: logging.Logger, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._every_s, self._clock = log, every_s, clock
        self._tallies: dict[str, _Tally] = {}

    def __call__(
        self, kind: str, text: str, *, level: int = logging.WARNING, error: BaseException | None = None
    ) -> None:
        """Log the first of its ``kind``, with the traceback of ``error``; count others, and log them now and then."""
        now, tally = self._clock(), self._tallies.get(kind)
        if tally is None:
            self._tallies[kind] = _Tally(now)
            self._log.log(level, "%s: %s", kind, text, exc_info=error)
            return
        tally.count += 1
        if now - tally.since_s < self._every_s:
            return
        self._log.log(level, "%s %d times in %.0f s, the newest: %s", kind, tally.count, now - tally.since_s, text)
        tally.since_s, tally.count = now, 0
