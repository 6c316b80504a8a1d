"""Tasks that are over without their samples: acknowledged, everything read that was stored before, and the group is incomplete.

    acks of TASKS --+
                    +--> read SAMPLES to the end there is now --> still incomplete, and not dead --> lost(): the prompt is issued again
    ack floor ------+

An actor acknowledges a task when all its samples are stored. If some of them are invalid, or were never sent, the task is delivered to no
actor again, and would keep its place for ever.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from bus.connection import Bus
from bus.waiter import Waiter
from learner.datasource import DataSource

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""How often the ack floor is asked for: acks are received as they are sent, and one that was missed is found there."""
GRACE_S = 0.05
"""After an ack, before anything is asked: nearly always the samples are read by then. Also bounds how often the server is asked."""


class LostTasks:
    """Finds lost tasks for a DataSource. Consumes acks; produces ``DataSource.lost``; waits for the reader of SAMPLES and for the bus."""

    def __init__(self, bus: Bus, source: DataSource, on_lost: Callable[[], None]) -> None:
        self._bus, self._source, self._on_lost = bus, source, on_lost
        self._acked: set[int] = set()
        self._heard, self._read_on = Waiter(), Waiter()
        self._read_to = source.cursor().floor
        self._wanted = 0
        self._looked_s = float("-inf")

    def passed(self, seq: int) -> None:
        """The reader of SAMPLES has passed this sequence."""
        self._read_to = seq
        if seq >= self._wanted:
            self._read_on.wake()

    async def run(self) -> None:
        """For ever, from the time on at which nothing recorded is left to be replayed."""
        async with self._bus.tasks.acks(self._hear):
            while True:
                await self._look()
                await self._heard.wait(LOOK_EVERY_S)
                await asyncio.sleep(GRACE_S)

    def _hear(self, id: int) -> None:
        if self._source.lacks_samples(id):
            self._acked.add(id)
            self._heard.wake()

    async def _look(self) -> None:
        if time.monotonic() - self._looked_s >= LOOK_EVERY_S and (incomplete := self._source.incomplete()):
            floor = await self._bus.retry(self._bus.tasks.acked_to)
            self._acked.update(id for id in incomplete if id <= floor)
            self._looked_s = time.monotonic()
        acked, self._acked = sorted(id for id in self._acked if self._source.lacks_samples(id)), set()
        if acked:
            await self._read_everything()
        for id in acked:
            await self._judge(id)

    async def _read_everything(self) -> None:
        """Until what SAMPLES holds now has been read: what was stored before these acks is part of it."""
        self._wanted = (await self._bus.retry(self._bus.samples.info)).last_seq
        while self._read_to < self._wanted:
            await self._read_on.wait(LOOK_EVERY_S)

    async def _judge(self, id: int) -> None:
        dead = await self._bus.retry(partial(self._bus.dead.of, id))
        if dead is not None or not self._source.lacks_samples(id):
            return
        log.warning("task lost, its prompt is issued again task=%d: acknowledged, and %s", id, self._source.lack(id))
        self._source.lost(id)
        self._on_lost()
