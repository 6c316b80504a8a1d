"""Tasks that fail for good, one after the other: the end of a run in which none succeeds."""

import time
from collections.abc import Callable

from tidemill.bus.wire.messages import Dead
from tidemill.learner.errors import TasksFail

UNTRAINED_SHARE = 0.1
"""Share of ``learner.failing_s`` after which a run ends that has trained no step."""


class FailingTasks:
    """Training tasks that have died since the last complete group: where all of them fail, the run ends.

    No part of the data's state: a restart begins to count anew.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count, self._since_s = 0, 0.0
        self.reason = ""
        """Reason of the last task that died."""

    def died(self, letter: Dead) -> None:
        """Register a task that no actor tries again."""
        self._since_s = self._since_s if self._count else self._clock()
        self._count += 1
        self.reason = " ".join(letter.reason.split())

    def completed(self) -> None:
        """Register a complete group: not every task fails."""
        self._count = 0

    @property
    def trouble(self) -> str:
        """Description for the live row; empty while a task may fail alone."""
        return f"the last {self._count} tasks failed for good: {self.reason}" if self._count > 1 else ""

    def refuse(self, limit: int, within_s: float) -> None:
        """Raise TasksFail once ``limit`` tasks in a row have died over ``within_s`` seconds or more; 0 = never."""
        seconds = self._clock() - self._since_s
        if 0 < limit <= self._count and seconds >= within_s:
            raise TasksFail(self._count, seconds, self.reason)
