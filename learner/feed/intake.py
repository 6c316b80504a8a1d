"""Reader of the bus for the DataSource: samples, the rows of their versions, dead tasks and the decisions on them.

    SAMPLES --- read ----------> add(), version(); evaluations
    DEAD ------ follow_dead ---> dead(), requeue(); evaluations

Waits for the bus. Wakes the loop that decides after each change.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.dead import REQUEUE
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Dead, Plan, Requeue
from tidemill.learner.buffer.arrivals import Disposition
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.failures import FailingTasks, Senders, describe_invalid
from tidemill.learner.buffer.sample_index import SampleIndex, Unusable
from tidemill.learner.errors import PromptError
from tidemill.learner.evaluation.evaluations import Evaluations
from tidemill.learner.feed.restart import RecordAt
from tidemill.learner.feed.shard_readers import SampleReaders
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.weightstore.store.registry import VersionRegistry

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""Interval of reading the ack floor, which also covers acks that were missed while the connection was down."""
GRACE_S = 0.1
"""Grace period between an ack and the check, by which the samples are nearly always read; it also limits requests."""


class LostTasks:
    """Consumes acks; produces ``DataSource.lost``; waits for the reader of SAMPLES and for the bus."""

    def __init__(self, bus: Bus, source: DataSource, on_lost: Callable[[], None]) -> None:
        self._bus, self._source, self._on_lost = bus, source, on_lost
        self._acked: set[int] = set()
        self._acks, self._read_on = Waiter(), Waiter()
        self._read_to = list(source.cursor().position)
        self.num_waiting = 0  # Calls of ``read_everything`` that wait
        self._looked_s = float("-inf")

    def passed(self, seq: int) -> None:
        """Register that the reader of SAMPLES has passed a sequence."""
        self._read_to[seq % len(self._read_to)] = seq
        if self.num_waiting:
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
            await self.read_everything()
        for task_id in acked:
            await self._check(task_id)

    async def read_everything(self) -> None:
        """Wait until the reader has passed the current end of SAMPLES, and so all that was stored before this call."""
        ends = await self._bus.retry(self._bus.samples.ends)
        self.num_waiting += 1
        try:
            while any(read < end for read, end in zip(self._read_to, ends, strict=True)):
                await self._read_on.wait(LOOK_EVERY_S)
        finally:
            self.num_waiting -= 1

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


class Intake:
    """The loops that read, and the numbers of what they have read."""

    def __init__(
        self,
        bus: Bus,
        source: DataSource,
        prompts: PromptFile,
        recorded: Sequence[RecordAt],
        *,
        evaluations: Evaluations,
        senders: Senders,
        lost: LostTasks,
        wake: Callable[[], None],
        readers: SampleReaders,
    ) -> None:
        """``recorded``: the records that are to be repeated; the feeder removes each when it has been."""
        self._bus, self._source, self._prompts, self._recorded = bus, source, prompts, recorded
        self._evaluations, self._senders, self._lost, self._wake = evaluations, senders, lost, wake
        self._readers, self._registry = readers, VersionRegistry(bus)
        plans = [record for _, record in recorded if isinstance(record, Plan)]
        self._recorded_steps = {version: step for plan in plans for version, step in plan.version_steps.items()}
        self.failing = FailingTasks()
        """Tasks that have died since the last complete group."""
        self.behind = 0
        """Samples of the stream that are not read yet."""

    async def read(self) -> None:
        """Background loop: read SAMPLES."""
        recorded = frozenset(
            seq for _, record in self._recorded if not isinstance(record, Requeue) for seq in record.seqs.tolist()
        )
        reading = self._readers.read(self._source.cursor(), checked_before=recorded, on_passed=self._lost.passed)
        async with aclosing(reading) as messages:
            async for rows in messages:
                may_decide, now = False, time.monotonic()
                for entry in rows.entries:
                    may_decide |= await self._add(entry, now)
                self.behind, self._evaluations.sampled = rows.pending, True
                # While recorded steps are repeated, the next one may lack exactly these samples.
                if may_decide or self._recorded:
                    self._wake()

    async def _add(self, entry: SampleIndex | Unusable, now: float) -> bool:
        """Classify one message of SAMPLES. Returns whether the next record may be another one than before."""
        if isinstance(entry, Unusable):
            arrival = self._source.refuse(entry.seq, entry.error, entry.actor)
        else:
            if unread := self._source.unread_versions(entry):
                await self._look_up(unread, entry.seq)
            arrival = self._source.add(entry, now)
            if arrival.name is Disposition.BUFFERED:
                self._senders.usable(entry.actor)
            elif arrival.name is Disposition.EVAL:
                self._evaluations.arrived(entry.content)
        if arrival.fills_group:
            self.failing.completed()
        if arrival.name is Disposition.INVALID:
            self._senders.invalid(entry.actor, describe_invalid(entry, arrival.reason))
        return arrival.may_decide

    async def _look_up(self, unread: set[int], seq: int) -> None:
        """Read the rows of versions that are not known. A row is written before engines get the weights."""
        # The newest first, because it is the likeliest to have no row, and one such version is enough.
        for version in sorted(unread, reverse=True):
            row = await self._bus.retry(partial(self._registry.row_for, version, seq))
            if row is not None:
                self._source.version(version, row.step, row.position)
            elif version in self._recorded_steps:
                # The registry has lost its row, and a recorded plan with it must be repeated.
                self._source.version(version, self._recorded_steps[version])
            else:  # no such version
                return

    async def follow_dead(self) -> None:
        """Background loop: read dead tasks, and the decisions on them."""
        letters: dict[int, Dead] = {}
        async for seq, message in self._bus.dead.follow():
            if isinstance(message, Dead):
                # Without its texts, because all dead letters of the run are kept here.
                letters[message.task] = replace(message, prompt="", reason="")
                # Its actor has stored the samples of the group before it, with which it may be trained.
                if self._source.lacks_samples(message.task):
                    await self._lost.read_everything()
                if self._source.dead(message.task):
                    self.failing.died(message)
                self._evaluations.gone(message)
            elif message.word == REQUEUE:
                letter = letters.get(message.task)
                if letter is not None and await self._has_prompt(letter, seq):
                    self._source.requeue(letter)
            self._wake()

    async def _has_prompt(self, dead: Dead, seq: int) -> bool:
        """Return whether the position in a dead letter has a prompt: later starts must be able to repeat a requeue."""
        try:  # in a thread, because the prompt may have megabytes
            await asyncio.to_thread(self._prompts.at, dead.prompt_epoch, dead.offset)
        except (PromptError, IndexError) as error:
            self._bus.refusals.refuse(subjects.DEAD, f"{seq} (requeue of task {dead.task})", error)
            return False
        return True
