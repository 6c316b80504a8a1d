"""Log lines for repeated failures: the first with its traceback, then one line a minute and kind, with the number."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 60.0


@dataclass(slots=True)
class _Tally:
    since_s: float
    count: int = 0


class FailureLog:
    """A logger for a few kinds of failures, each of which may occur thousands of times."""

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
