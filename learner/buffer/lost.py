"""Detection of lost tasks: acknowledged, but still incomplete after all samples that were stored before the ack have
been read.

    acks of TASKS --+
                    +--> read SAMPLES to its current end --> still incomplete, not dead --> lost(): issue it again
    ack floor ------+

An actor acknowledges a task when all its samples are stored. If some of them are invalid, or were never sent, the task
is not delivered again, and would count against the admission limit until the end of the run.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.learner.buffer.datasource import DataSource

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""Interval of reading the ack floor, which also covers acks that were missed while the connection was down."""
GRACE_S = 0.05
"""Grace period between an ack and the check, by which the samples are nearly always read; it also limits requests."""


class LostTasks:
    """Consumes acks; produces ``DataSource.lost``; waits for the reader of SAMPLES and for the bus."""

    def __init__(self, bus: Bus, source: DataSource, on_lost: Callable[[], None]) -> None:
        self._bus, self._source, self._on_lost = bus, source, on_lost
        self._acked: set[int] = set()
        self._acks, self._read_on = Waiter(), Waiter()
        self._read_to = source.cursor().floor
        self._wanted = 0
        self._looked_s = float("-inf")

    def passed(self, seq: int) -> None:
        """Register that the reader of SAMPLES has passed a sequence."""
        self._read_to = seq
        if seq >= self._wanted:
            self._read_on.wake()

    async def run(self) -> None:
        """Find lost tasks until cancelled. Start it when all recorded steps are replayed."""
        async with self._bus.tasks.acks(self._note_ack):
            while True:
                await self._look()
                await self._acks.wait(LOOK_EVERY_S)
                await asyncio.sleep(GRACE_S)

    def _note_ack(self, task_id: int) -> None:
        if self._source.lacks_samples(task_id):
            self._acked.add(task_id)
            self._acks.wake()

    async def _look(self) -> None:
        if time.monotonic() - self._looked_s >= LOOK_EVERY_S and (incomplete := self._source.incomplete()):
            by_rollout: dict[str, list[int]] = {}
            for task_id in incomplete:
                by_rollout.setdefault(self._source.group(task_id).task.rollout, []).append(task_id)
            for rollout, ids in by_rollout.items():
                floor = await self._bus.retry(partial(self._bus.tasks.acked_to, rollout))
                # All tasks of a queue up to its floor are acknowledged, so it finds the acks that were missed. It is
                # not enough alone: one task that is leased for long holds it back
                # (docs/decisions/015-an-acknowledged-task-without-its-samples-is-lost.md).
                self._acked.update(task_id for task_id in ids if task_id <= floor)
            self._looked_s = time.monotonic()
        acked, self._acked = sorted(task_id for task_id in self._acked if self._source.lacks_samples(task_id)), set()
        if acked:
            await self._read_everything()
        for task_id in acked:
            await self._check(task_id)

    async def _read_everything(self) -> None:
        """Wait until the reader has passed the current end of SAMPLES, and so all that was stored before these acks."""
        self._wanted = (await self._bus.retry(self._bus.samples.info)).last_seq
        while self._read_to < self._wanted:
            await self._read_on.wait(LOOK_EVERY_S)

    async def _check(self, task_id: int) -> None:
        # An actor that stores a death acknowledges the task as well, and the feeder may not have read it yet.
        dead = await self._bus.retry(partial(self._bus.dead.of, task_id))
        if dead is not None or not self._source.lacks_samples(task_id):
            return
        group = self._source.group(task_id)
        log.warning(
            "task lost, its prompt is issued again task=%d: acknowledged, %d of its %d samples are missing or invalid",
            task_id,
            group.task.group_size - len(group.samples),
            group.task.group_size,
        )
        self._source.lost(task_id)
        self._on_lost()
