"""Whose turn it is, where learner and engines share an accelerator: a row in the bucket ``weights``.

The learner takes the turn before each step and gives it back behind it. An engine takes its memory by itself only in the engines' turn, or
when no learner lives: so one that starts, or has missed a push, never does it in the middle of a step. It says in its live row that it
does, and looks again then; the learner takes the turn, and looks at the rows then: so one of the two sees the other, and waits.
"""

import asyncio
import logging
import time

from bus.connection import Bus
from bus.errors import BusError, RowConflict
from bus.live import LiveView

_log = logging.getLogger(__name__)

_KEY = "turn"
_LEARNER, _ENGINES = "learner", "engines"
_LOOK_S = 0.5
TAKING_S = 600.0
"""The learner waits so long for engines that began to take memory before its turn; one that starts may need minutes."""


class Turns:
    """The turn of one run. Every method but ``until_engines`` raises BusUnavailable when the bus stays away."""

    def __init__(self, bus: Bus) -> None:
        self._rows, self._view = bus.rows("weights"), LiveView(bus)

    async def take(self, epoch: int) -> None:
        """It is the learner's."""
        await self._say(_LEARNER, epoch)

    async def give(self, epoch: int) -> None:
        """It is the engines'."""
        await self._say(_ENGINES, epoch)

    async def engines(self) -> bool:
        """Whether engines may take memory now; False before the first learner has given its turn for the first time.

        A learner counts as dead when its live row has been silent since an earlier call, for as long as ``LiveView`` says.
        """
        found, _ = await self._rows.standing(_KEY)
        if found is None:
            return False
        return bool(found["whose"] == _ENGINES) or not await self._view.alive("learner")

    async def until_nobody_takes(self) -> None:
        """Wait for the engines that take memory by themselves: they can be asked to give it up then. After ``TAKING_S`` they are named."""
        deadline = time.monotonic() + TAKING_S
        while taking := [row.id for row in await self._view.alive("engine") if row.taking_memory]:
            if time.monotonic() >= deadline:
                _log.error("engines have taken memory for %.0f s, the learner goes on beside them engines=%s", TAKING_S, ",".join(taking))
                return
            await asyncio.sleep(_LOOK_S / 2)

    async def until_engines(self, ended: asyncio.Event | None = None) -> None:
        """Wait for ``engines``, over any outage of the bus, or until ``ended`` is set."""
        while ended is None or not ended.is_set():
            try:
                if await self.engines():
                    return
            except BusError as error:
                _log.warning("whose turn it is is not known error=%s", error)
            await asyncio.sleep(_LOOK_S)  # a learner that dies writes no row

    async def _say(self, whose: str, epoch: int) -> None:
        while True:
            found, revision = await self._rows.standing(_KEY)
            if found is not None and int(found.get("epoch", 0)) > epoch:
                return  # a learner that was replaced has no say
            try:
                await self._rows.update(_KEY, {"whose": whose, "epoch": epoch}, revision)
                return
            except RowConflict:  # another learner: maybe a newer one
                continue
