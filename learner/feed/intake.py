"""Reader of the bus for the DataSource: samples, the rows of their versions, dead tasks and the decisions on them.

    SAMPLES --- read ----------> add(), version(); evaluations
    DEAD ------ follow_dead ---> dead(), requeue(); evaluations

Waits for the bus. Wakes the loop that decides after each change.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.dead import REQUEUE
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Dead, Plan, Requeue, Sample, Settle
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.learner.buffer.arrivals import Disposition, SampleStore
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.lost import LostTasks
from tidemill.learner.buffer.senders import Senders, invalid_words
from tidemill.learner.errors import PromptError
from tidemill.learner.evaluation.evaluations import Evaluations
from tidemill.learner.feed.failing_tasks import FailingTasks
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.weightstore.store.registry import VersionRegistry

Recorded = Sequence[tuple[int, Plan | Settle | Requeue]]


class Intake:
    """The loops that read, and the numbers of what they have read."""

    def __init__(
        self,
        bus: Bus,
        source: DataSource,
        prompts: PromptFile,
        recorded: Recorded,
        *,
        evaluations: Evaluations,
        senders: Senders,
        lost: LostTasks,
        buffered: SampleStore,
        wake: Callable[[], None],
    ) -> None:
        """``recorded``: the records that are to be repeated; a record disappears when it is."""
        self._bus, self._source, self._prompts, self._recorded = bus, source, prompts, recorded
        self._evaluations, self._senders, self._lost, self._buffered, self._wake = (
            evaluations,
            senders,
            lost,
            buffered,
            wake,
        )
        plans = [record for _, record in recorded if isinstance(record, Plan)]
        self._recorded_steps = {version: step for plan in plans for version, step in plan.version_steps.items()}
        self.failing = FailingTasks()
        """Tasks that have died since the last complete group."""
        self.behind = 0
        """Samples of the stream that are not read yet."""

    async def read(self, vocab_size: int | None, routed: RoutedShape | None = None) -> None:
        """Background loop: read SAMPLES. ``vocab_size``: as that of the model, ``routed``: sizes of its routing; None =
        not known.
        """
        cursor, registry = self._source.cursor(), VersionRegistry(self._bus)
        recorded = {
            seq for _, record in self._recorded if not isinstance(record, Requeue) for seq in record.seqs.tolist()
        }
        reading = self._bus.samples.read(
            cursor, vocab_size=vocab_size, routed=routed, checked_before=recorded, on_passed=self._lost.passed
        )
        async for received in reading:
            if isinstance(received.sample, Sample):
                await self._look_up(registry, received.seq, received.sample)
            before, complete = self._source.changes, self._source.complete
            arrival = self._source.add(received.seq, received.sample, time.monotonic(), received.actor)
            self.behind, self._evaluations.sampled = received.pending, True
            if self._source.complete != complete:
                self.failing.completed()
            if arrival.name is Disposition.EVAL and isinstance(received.sample, Sample):
                self._evaluations.arrived(received.sample)
            if arrival.name is Disposition.BUFFERED and isinstance(received.sample, Sample):
                self._buffered.add(received.seq, received.sample)
                self._senders.usable(received.actor)
            elif arrival.name is Disposition.INVALID:
                self._senders.invalid(received.actor, invalid_words(received, arrival.reason))
            # While recorded steps are repeated, any sample may be the one that is lacking.
            if self._source.changes != before or self._recorded:
                self._wake()

    async def _look_up(self, registry: VersionRegistry, seq: int, sample: Sample) -> None:
        """Read the rows of versions that are new here. A row is written before engines get the weights: no row means no
        such version.
        """
        # The newest first, because it is the likeliest to have no row, and one such version is enough.
        for version in sorted(self._source.unread_versions(sample), reverse=True):
            row = await self._bus.retry(partial(registry.row_for, version, seq))
            if row is not None:
                self._source.version(version, row.step, max(0, row.after))
            elif (
                version in self._recorded_steps
            ):  # the registry has lost its row, and a recorded plan with it must be repeated
                self._source.version(version, self._recorded_steps[version])
            else:
                return

    async def follow_dead(self) -> None:
        """Background loop: read dead tasks, and the decisions on them."""
        letters: dict[int, Dead] = {}
        async for seq, told in self._bus.dead.follow():
            if isinstance(told, Dead):
                letters[told.task] = replace(
                    told, prompt="", reason=""
                )  # without its texts: all dead letters of the run are kept here
                if self._source.dead(told.task):
                    self.failing.died(told)
                self._evaluations.gone(told)
            elif (
                told.word == REQUEUE
                and (letter := letters.get(told.task)) is not None
                and await self._has_prompt(letter, seq)
            ):
                self._source.requeue(letter)
            self._wake()

    async def _has_prompt(self, dead: Dead, seq: int) -> bool:
        """Return whether the position in a dead letter has a prompt, because later starts must be able to repeat a
        recorded requeue.
        """
        try:
            await asyncio.to_thread(
                self._prompts.at, dead.prompt_epoch, dead.offset
            )  # in a thread: it may have megabytes
        except (PromptError, IndexError) as error:
            self._bus.refusals.refuse(subjects.DEAD, f"{seq} (requeue of task {dead.task})", error)
            return False
        return True
