"""The share of the last seconds in which an engine had no work, from a clock of its idle time."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 10.0
"""Seconds over which the share is taken."""


class IdleClock:
    """Seconds in which no request was unfinished; a request is noted at its begin and at its end."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._total_s, self._since_s = clock, 0.0, clock()
        self._count = 0

    def note(self, change: int) -> None:
        """Note requests that begin (positive) or end."""
        now = self._clock()
        if not self._count:
            self._total_s += now - self._since_s
        self._count, self._since_s = self._count + change, now

    @property
    def idle_s(self) -> float:
        return self._total_s + (0.0 if self._count else self._clock() - self._since_s)


class WaitingShare:
    """The share since the reading that is ``WINDOW_S`` old, at each reading."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._history: deque[tuple[float, float]] = deque()

    def read(self, idle_s: float) -> float:
        """Return the share of idle time; 0 at the first reading. ``idle_s``: all idle seconds up to now."""
        now = self._clock()
        while len(self._history) > 1 and now - self._history[1][0] > WINDOW_S:
            self._history.popleft()
        since, before_s = self._history[0] if self._history else (now, idle_s)
        self._history.append((now, idle_s))
        return min(1.0, (idle_s - before_s) / (now - since)) if now > since else 0.0
