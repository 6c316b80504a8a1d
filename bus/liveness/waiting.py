"""The live row of a process that cannot begin yet: the event that it waits for, and for how long so far."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from typing import Self

from bus.liveness.heartbeats import HeartbeatPublisher
from bus.streams.bus import Bus
from bus.wire.rows import LiveRow

_log = logging.getLogger(__name__)

_UPDATE_EVERY_S = 1.0
_LOG_EVERY_S = 30.0


class Waiting:
    """Async context manager: while entered, the row names the event that is waited for. Another row of the same key may follow it."""

    def __init__(self, bus: Bus, row: LiveRow, what: str) -> None:
        self._heartbeat, self._what, self._since_s = HeartbeatPublisher(bus, row), what, time.monotonic()
        self._stack = AsyncExitStack()

    def set(self, what: str) -> None:
        """Change the thing that is waited for; empty = as before."""
        if what and what != self._what:
            self._what = what
            self._update()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._heartbeat)
        updating = asyncio.create_task(self._update_for_ever(), name=f"waiting {self._heartbeat.row.id}")
        self._stack.push_async_callback(_ended, updating)
        return self

    async def __aexit__(self, exc_type: object, *exc: object) -> None:
        await self._stack.aclose()

    def _update(self) -> None:
        self._heartbeat.update(phase="waiting", waits_for=f"{self._what}, for {time.monotonic() - self._since_s:.0f} s")

    async def _update_for_ever(self) -> None:
        logged_s = float("-inf")
        while True:
            self._update()
            if time.monotonic() - logged_s >= _LOG_EVERY_S:
                logged_s = time.monotonic()
                _log.info("waiting for %s", self._heartbeat.row.waits_for)
            await asyncio.sleep(_UPDATE_EVERY_S)


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
