"""Issue of training tasks: the prompt that the DataSource demands, as a task in TASKS; and the curriculum, by which
prompts that were too easy or too hard when they were last asked are left out of the next passes.

    DataSource.wanted() --> prompts, long ones tokenized in a thread --> TASKS --> DataSource.issued()

Tasks of short prompts are stored many at once: a round trip to the bus for each would bound the samples of a run.
Waits for places, which settled groups and new versions give back (``waiter``).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from tidemill.bus.errors import WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.messages import Kind, Task
from tidemill.learner.buffer.arrivals import EARLY_IDS, EARLY_SAMPLES
from tidemill.learner.buffer.task_admission import TaskDemand
from tidemill.learner.data import DataConfig
from tidemill.learner.errors import PromptError
from tidemill.learner.feed.feeder_settings import FeederSettings
from tidemill.learner.feed.restart import Restored
from tidemill.learner.prompts.prompt_file import Drawn, PromptFile, sampler_seed

LOOK_AGAIN_S = 5.0
"""Longest sleep of the loop, which is normally woken."""


class Curriculum:
    """The prompts that are left out. A pure state machine.

    Its state changes by the records of PLAN and their samples alone, and is part of every checkpoint; so a start that
    repeats the records skips the same prompts. Prompts are known by their row number: files do not change in a run.
    """

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._left_out: dict[int, int] = {}
        """Pass in which a prompt was last asked, by its row; only of prompts that are left out."""

    def __len__(self) -> int:
        """Return the number of prompts that were too easy or too hard when they were last asked."""
        return len(self._left_out)

    @property
    def active(self) -> bool:
        """True if any prompt may be left out."""
        return self._config.skip_easy > 0 or self._config.skip_hard >= 0

    def note(self, row: int, epoch: int, scores: Sequence[float]) -> None:
        """Register the scores of a complete group of the prompt ``row``, which was issued in pass ``epoch``."""
        if not scores or not self.active:
            return
        rate = float(np.mean([score >= self._config.passes_at for score in scores]))
        if (self._config.skip_easy > 0 and rate >= self._config.skip_easy) or rate <= self._config.skip_hard:
            self._left_out[row] = epoch
        else:
            self._left_out.pop(row, None)

    def skips(self, row: int, epoch: int) -> bool:
        """Return whether the prompt ``row`` is left out of pass ``epoch``."""
        last = self._left_out.get(row)
        return last is not None and last < epoch <= last + self._config.skip_passes

    # ---- persist

    def dump(self) -> list[tuple[int, int]]:
        """Return the state for a snapshot, in types of msgpack."""
        return sorted(self._left_out.items())

    def load(self, state: Sequence[Sequence[int]]) -> None:
        """Replace the state by one that ``dump`` has returned."""
        self._left_out = {int(row): int(epoch) for row, epoch in state}


class Pace:
    """At most ``per_s`` tasks a second, evenly; 0 = no limit. In any time of T seconds ``per_s * T + 1`` pass."""

    def __init__(self, per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = 1 / per_s if per_s else 0.0, clock
        self._next_s = float("-inf")

    @property
    def wait_s(self) -> float:
        """Seconds until the next task may pass."""
        return max(0.0, self._next_s - self._clock())

    def note(self) -> None:
        """Count a task that passes now."""
        self._next_s = max(self._next_s, self._clock()) + self._every_s


class TaskIssuer:
    """The loop that issues training tasks, and the store of all tasks."""

    def __init__(
        self, bus: Bus, settings: FeederSettings, prompts: PromptFile, restored: Restored, curriculum: Curriculum
    ) -> None:
        self._bus, self._settings, self._prompts, self._curriculum = bus, settings, prompts, curriculum
        self._source = restored.resumed.source
        self._planned, self._senders, self._epoch = restored.planned, restored.senders, restored.epoch
        self.lock = asyncio.Lock()
        """Held from the issue of a task until it is registered: ids are registered in their order."""
        self.waiter = Waiter()
        """Woken when another task may be admitted."""
        self._pace = Pace(settings.places.bus.tasks_per_s)
        most, bus_config = min(EARLY_IDS, EARLY_SAMPLES // settings.learner.group_size) // 2, settings.places.bus
        self._most_at_once = 1 if bus_config.tasks_per_s or bus_config.copies > 1 else max(1, most)
        """Half as many as the DataSource keeps samples of before they are registered; 1 where each is a round trip."""
        self.stopped = False
        """True once the last step is known: no further task is issued."""

    async def run(self, decide: Waiter) -> None:
        """Background loop: issue tasks. ``decide``: woken after each."""
        num_epochs = self._source.rules.num_epochs
        while True:
            # Before the task is chosen: a pause after it would issue a task at a version that may have changed
            # meanwhile.
            await asyncio.sleep(max(self._senders.pause_s, self._pace.wait_s))
            demand = self._demand()
            if demand is None:
                await self.waiter.wait(LOOK_AGAIN_S)
                continue
            first = await prompt_for(demand, self._prompts, self._curriculum, num_epochs=num_epochs)
            if first is None:
                self._source.passed(num_epochs)
            else:
                await self._issue([first, *await self._short_prompts(first)], demand)
            decide.wake()

    def _demand(self, drawn: Sequence[Drawn] = ()) -> TaskDemand | None:
        return None if self.stopped else self._source.wanted([(prompt.epoch, prompt.offset) for prompt in drawn])

    async def _short_prompts(self, first: Drawn) -> list[Drawn]:
        """Return the prompts behind ``first`` whose tasks are admitted, up to one that is long or is left out; none
        while tasks are issued slowly.
        """
        drawn, prompts, most = [first], self._prompts, 1 if self._senders.pause_s else self._most_at_once
        while len(drawn) < most and (demand := self._demand(drawn)) is not None:
            place = (demand.prompt_epoch, demand.offset)
            if not prompts.is_short(*place) or self._curriculum.skips(int(prompts.order(place[0])[place[1]]), place[0]):
                break
            try:
                drawn.append(prompts.at(*place))
            except PromptError:
                break
            await asyncio.sleep(0)  # the other loops of the feeder go on between two prompts
        return drawn[1:]

    async def _issue(self, drawn: Sequence[Drawn], demand: TaskDemand) -> None:
        """Issue the tasks of prompts, the first drawn for ``demand``, unless others are to be issued by now."""
        # Asked again, because a version may have been published while a prompt was tokenized, or a prompt requeued.
        newest = self._demand()
        if newest is None or replace(newest, min_version=demand.min_version, issue_step=demand.issue_step) != demand:
            return
        if self._demand(drawn[:-1]) is None:  # fewer are admitted now
            drawn = drawn[:1]
        seed, epoch = self._prompts.seed, self._epoch
        try:
            await self._store([task_of(newest, prompt, self._settings, seed=seed, epoch=epoch) for prompt in drawn])
        except WireError as error:  # one is larger than a message, which no try can change
            if len(drawn) > 1:
                await self._issue(drawn[:1], demand)
            else:
                self._prompts.leave_out(drawn[0].epoch, drawn[0].offset, error)

    async def store(self, task: Task) -> Task:
        """Store and register a task. Returns it with its id."""
        return (await self._store([task]))[0]

    async def _store(self, tasks: Sequence[Task]) -> list[Task]:
        async with self.lock:
            await asyncio.sleep(self._pace.wait_s)  # evaluations issue tasks, too, and count for the pace
            self._pace.note()
            ids = await self._bus.tasks.issue_all(tasks)
            issued = [replace(task, id=task_id) for task, task_id in zip(tasks, ids, strict=True)]
            for task in issued:
                self._source.issued(task, time.monotonic())
                if task.kind is Kind.TRAIN:
                    self._planned.note(task)
        return issued


async def prompt_for(
    demand: TaskDemand, prompts: PromptFile, curriculum: Curriculum, *, num_epochs: int
) -> Drawn | None:
    """Return the prompt of a task; None for a new prompt when all passes of the run are issued. Raises PromptError."""
    # In a thread: a row may have megabytes, which are tokenized for seconds, and the loops of the feeder share this
    # one. Most rows are short, and a thread costs more than they do. The order of a pass is made with its first row.
    epoch, offset = demand.prompt_epoch, demand.offset
    if demand.reissue_of is not None:
        return await asyncio.to_thread(prompts.at, epoch, offset)
    if prompts.is_short(epoch, offset) and not curriculum.skips(int(prompts.order(epoch)[offset]), epoch):
        with suppress(PromptError):
            return prompts.at(epoch, offset)
    return await asyncio.to_thread(next_prompt, prompts, epoch, offset, curriculum, num_epochs=num_epochs)


def next_prompt(
    prompts: PromptFile, epoch: int, offset: int, curriculum: Curriculum, *, num_epochs: int = 0
) -> Drawn | None:
    """Return the first prompt at or after a position that is usable and not left out; None behind the last pass.

    Raises PromptError when no row can be used. It ends, because no prompt is left out for ever.
    """
    while True:
        if offset >= len(prompts):
            epoch, offset = epoch + 1, 0
        if 0 < num_epochs <= epoch:
            return None
        if curriculum.skips(int(prompts.order(epoch)[offset]), epoch):  # before it is tokenized
            offset += 1
            continue
        drawn = prompts.after(epoch, offset)
        if (drawn.epoch, drawn.offset) == (epoch, offset):
            return drawn
        epoch, offset = drawn.epoch, drawn.offset  # those before cannot be used


def task_of(demand: TaskDemand, drawn: Drawn, settings: FeederSettings, *, seed: int, epoch: int) -> Task:
    """Return the task of a prompt, without an id. ``seed``: of the order of prompts."""
    group_seed = sampler_seed(seed, drawn.epoch, drawn.offset, demand.reissues)
    return Task(
        run=settings.places.run,
        epoch=epoch,
        prompt=drawn.row.prompt,
        prompt_tokens=drawn.tokens,
        label=drawn.row.label,
        metadata=drawn.row.metadata,
        group_size=len(drawn.recorded) or settings.learner.group_size,
        sampling=replace(drawn.row.sampling.of(settings.sampling), seed=group_seed),
        prompt_epoch=drawn.epoch,
        offset=drawn.offset,
        reissue_of=demand.reissue_of,
        reissues=demand.reissues,
        min_version=demand.min_version,
        issue_step=demand.issue_step,
        rollout=drawn.row.rollout,
        budget=settings.budgets.get(drawn.row.rollout),
        chat_template_args=dict(drawn.chat_template_args) or None,
        row_digest=drawn.digest,
    )
