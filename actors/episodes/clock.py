"""The time of an episode, which stands still while it waits for an engine: that is the cluster's fault alone."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds since its making, without those in which it was stopped."""

    def __init__(self) -> None:
        self._ran_s, self._since_s, self._stops = 0.0, time.monotonic(), 0
        self._runs = asyncio.Event()
        self._runs.set()

    @property
    def seconds(self) -> float:
        """Seconds that it ran."""
        return self._ran_s + (0.0 if self._stops else time.monotonic() - self._since_s)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stand still inside the block; blocks may overlap."""
        if not self._stops:
            self._ran_s = self.seconds
            self._runs.clear()
        self._stops += 1
        try:
            yield
        finally:
            self._stops -= 1
            if not self._stops:
                self._since_s = time.monotonic()
                self._runs.set()

    async def reaches(self, seconds: float) -> None:
        """Return when it has run for ``seconds``; never for 0, which is no limit."""
        if not seconds:
            await asyncio.Event().wait()
        while (left_s := seconds - self.seconds) > 0:
            await asyncio.sleep(left_s)
            await self._runs.wait()
