"""Ownership of an accelerator that the learner and colocated engines share: a row in the bucket ``weights``.

The learner acquires it before each step and releases it afterwards. An engine takes memory by itself only while the
engines have the accelerator, or when no learner is live, so an engine that starts or has missed a push never does so in
the middle of a step. The engine first sets ``taking_memory`` in its live row and then reads the ownership again; the
learner first writes the ownership and then reads the live rows. One of the two therefore always sees the other, and
waits.
"""

import asyncio
import logging
import time

from tidemill.bus.client.rows import Value
from tidemill.bus.errors import BusError
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus

_log = logging.getLogger(__name__)

_KEY = "turn"
_LEARNER, _ENGINES = "learner", "engines"
_POLL_S = 0.5  # Interval of looking for a change of ownership or of live rows
# Deadline for engines that were taking memory when the learner acquired it; one that starts may need minutes
TAKING_S = 600.0


class AcceleratorLease:
    """The ownership of one run. All but ``wait_until_available`` raise BusUnavailable."""

    def __init__(self, bus: Bus) -> None:
        self._rows, self._view = bus.rows("weights"), LiveView(bus)

    async def acquire(self, epoch: int) -> None:
        """Give the accelerator to the learner."""
        await self._write(_LEARNER, epoch)

    async def release(self, epoch: int) -> None:
        """Give the accelerator to the engines."""
        await self._write(_ENGINES, epoch)

    async def available(self) -> bool:
        """Return whether engines may take memory: the learner has released it, or its live row says that it is dead."""
        row, _ = await self._rows.read(_KEY)
        if row is None:
            return False
        return bool(row["whose"] == _ENGINES) or not await self._view.alive("learner")

    async def wait_until_free(self) -> None:
        """Wait for the engines that are taking memory, which they can release afterwards; log each that needs
        ``TAKING_S``.
        """
        deadline = time.monotonic() + TAKING_S
        while taking := [row.id for row in await self._view.alive("engine") if row.taking_memory]:
            if time.monotonic() >= deadline:
                _log.error(
                    "engines have taken memory for %.0f s, the learner goes on beside them engines=%s",
                    TAKING_S,
                    ",".join(taking),
                )
                return
            await asyncio.sleep(_POLL_S / 2)

    async def wait_until_available(self, stop: asyncio.Event | None = None) -> None:
        """Wait until ``available``, through any outage of the bus, or until ``stop`` is set."""
        while stop is None or not stop.is_set():
            try:
                if await self.available():
                    return
            except BusError as error:
                _log.warning("ownership of the accelerator is not known error=%s", error)
            await asyncio.sleep(_POLL_S)  # a learner that dies writes no row

    async def _write(self, whose: str, epoch: int) -> None:
        def changed(row: Value | None) -> Value | None:
            replaced = row is not None and int(row.get("epoch", 0)) > epoch
            return None if replaced else {"whose": whose, "epoch": epoch}

        await self._rows.change(_KEY, changed, replace_unreadable=True)
