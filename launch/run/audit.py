"""The accounting of a run's samples, from the streams, the registry and the last checkpoint.

SAMPLES  published samples             TASKS  issued tasks                registry            step of each version
PLAN     trained or dropped samples    checkpoint's cursor  samples settled before the checkpoint

Every sequence from 1 to the last of SAMPLES is accounted for; the trimmed ones (kept checkpoints are past them) by PLAN
and the cursor alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.bus.errors import WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Done, Kind, Plan, Sample, Settle, Status, Task
from tidemill.bus.wire.rows import HistoryRow, PlanMark
from tidemill.bus.wire.subjects import Position, Shards, is_behind
from tidemill.launch.run.checkpoint_cursor import CheckpointCursor
from tidemill.learner.buffer.groups import mismatch
from tidemill.learner.buffer.ledger import count_of, field_of
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.feed.history import largest_lag, read_with_summary

EVERYTHING = 1 << 62  # Number of newest samples to read; more than any stream has
_MAX_PROBLEMS = 20  # Most descriptions of problems that are kept

Place = tuple[int, int]  # (task, index): at most one of the samples of a place is trained


@dataclass(slots=True)
class RunAccounting:
    """The count of every sample of a run, and the problems found."""

    # Logical training samples, the trimmed ones that PLAN names or that were invalid included; parts of large ones
    # count once.
    published: int = 0
    trained: int = 0  # Samples named by plans
    # Samples or places that are trained twice, trained and given up, or trained and not behind the checkpoint's cursor.
    trained_twice: int = 0
    # Samples that are gone, or behind the cursor, or of a trained task, and without any record of their place.
    lost: int = 0
    # Samples by drop reason: stale, filtered (or filtered:NAME), empty, dead, lost, failed, aborted. A late sample of a
    # task given up has its reason.
    dropped: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0  # Samples of a place in a group, where another sample of the place was trained
    # Samples that are undecodable, violate the invariants, or have no task or version of this run; trimmed ones as the
    # learner counted.
    invalid: int = 0
    invalid_by_field: Counter[str] = field(default_factory=Counter)
    invalid_by_actor: Counter[str] = field(default_factory=Counter)
    buffered: int = 0  # Samples neither trained nor given up yet, and not behind the cursor
    eval: int = 0
    trimmed: int = 0  # Sequences before the first one in the stream; counts of tokens do not include trimmed samples
    tasks_issued: int = 0
    tasks_open: int = 0
    # Tasks by reason: stale, filtered, filtered:NAME, empty, dead, lost.
    tasks_given_up: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    multi_version: int = 0  # Trained samples with tokens of more than one version
    max_lag_trained: int = 0
    lag_tokens: Counter[int] = field(default_factory=Counter)  # Trained tokens by lag
    tokens_generated: int = 0
    tokens_trained: int = 0
    trained_here: int = 0  # Trained samples that were published: in the stream, or trimmed from it
    unrecorded: int = 0  # Lost samples that are still in the stream
    removed_steps: int = 0  # Last step whose records are gone from PLAN, behind their summary
    problems: list[str] = field(default_factory=list)  # Descriptions of the first `_MAX_PROBLEMS` problems

    def balance(self) -> bool:
        """Return whether every published sample has one disposition: trained, dropped, duplicate, ... or lost."""
        unused = self.dropped.total() + self.duplicates + self.invalid + self.buffered
        return self.published == self.trained_here + unused + self.unrecorded

    def refuse(self, wrong: str, actor: str) -> None:
        """Count an invalid sample, by its wrong field and by the actor of its subject."""
        self.invalid += 1
        count_of(self.invalid_by_field, wrong)
        count_of(self.invalid_by_actor, actor)

    def refuse_trimmed(self, by_field: Counter[str], by_actor: Counter[str]) -> None:
        """Count invalid samples that are gone from the stream."""
        self.published += by_field.total()
        self.invalid += by_field.total()
        self.invalid_by_field += by_field
        self.invalid_by_actor += by_actor

    def add_problem(self, text: str) -> None:
        """Record the description of a problem; those after the first ``_MAX_PROBLEMS`` are not kept."""
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(text)


Progress = Callable[[int, int], None]  # Callback with (messages of SAMPLES read, their total number)


async def audit(
    bus: Bus,
    cursor: CheckpointCursor | None = None,
    *,
    versions: Mapping[int, int] | None = None,
    after: Mapping[int, Position] | None = None,
    vocab_size: int | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[RunAccounting, list[Done]]:
    """Read the streams; return the accounting, and the outcomes of the steps in the order of their records.

    ``cursor`` None = there is no checkpoint; ``versions``: step of every version in the registry, None = not compared;
    ``after``: version -> position that its samples come after (0 if it is missing).
    """

    async def read_records(history: HistoryRow) -> "_Audit":
        reading = _Audit(cursor, versions, after or {}, vocab_size, history)
        async for _, record in bus.plans.scan(history.removed.seq + 1 if history.removed else 1):
            reading.record(record)
        async for _, dead in bus.dead.scan():  # behind PLAN: a letter is stored before a plan has its short group
            reading.dead.add(dead.task)
        return reading

    reading = await read_with_summary(bus, read_records)
    async for task in bus.tasks.scan():
        if task.kind is Kind.TRAIN:
            reading.task(task)
    await reading.samples(bus, progress)
    reading.close()
    return reading.accounting, reading.outcomes


class _Audit:
    """One audit of a run, in this order: records, tasks, samples, close."""

    def __init__(
        self,
        cursor: CheckpointCursor | None,
        versions: Mapping[int, int] | None,
        after: Mapping[int, Position],
        vocab_size: int | None,
        history: HistoryRow,
    ) -> None:
        self._cursor, self._versions, self._after, self._vocab_size = cursor, versions, after, vocab_size
        self.accounting = RunAccounting(
            published=history.trained + sum(history.dropped.values()),
            trained=history.trained,
            trained_here=history.trained,
            dropped=Counter(history.dropped),
            tasks_given_up=Counter(history.given_up),
            max_lag_trained=history.max_lag,
            removed_steps=0 if history.removed is None else history.removed.step,
        )
        # Samples that were settled by records that are gone
        self._removed = _cursor_at(history.removed)
        self._letters_to = history.letters_to  # Dead letters of tasks up to here are removed
        self.outcomes: list[Done] = []
        self._plans: dict[int, Plan] = {}
        self._step_of_seq: dict[int, int] = {}
        self._step_of_task: dict[int, int] = {}
        self._dropped_seq: dict[int, str] = {}
        self._dropped_task: dict[int, str] = {}
        self._planned: dict[int, Place] = {}
        """Place of each trained sequence by its plan: samples of a group are in the order of their index."""
        self.dead: set[int] = set()  # Tasks that actors gave up
        self._sizes: dict[int, int] = {}  # Samples of a trained task in its plan
        self._asked: dict[int, int] = {}  # Samples that a trained task asked for, by its samples that are still there
        self._found: dict[int, Place] = {}  # Place of each trained sequence by the sample itself
        self._late: dict[int, Place] = {}  # Samples of trained tasks that no record names
        self._refused: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        """Invalid samples in the stream that the cursor is past, by field and by actor."""
        self._tasks: dict[int, Task] = {}

    # ---- PLAN and TASKS

    def record(self, record: object) -> None:
        """Count one record of PLAN, in the order of the stream."""
        if isinstance(record, Plan):
            self._plan(record)
        elif isinstance(record, Settle):
            self.accounting.tasks_given_up[record.reason] += len(record.tasks)
            for task in record.tasks.tolist():
                self._dropped_task[task] = record.reason
            for seq in record.seqs.tolist():
                if self._was_settled(seq):
                    self._twice(f"sample {seq} is given up ({record.reason}) and was settled before")
                if step := self._step_of_seq.get(seq):
                    self._twice(f"sample {seq} is given up ({record.reason}) and trained in step {step}")
                self._dropped_seq[seq] = record.reason
        elif isinstance(record, Done):
            self.outcomes.append(record)

    def _plan(self, plan: Plan) -> None:
        if plan.step in self._plans:
            self.accounting.add_problem(f"step {plan.step} was planned twice")
        self._plans[plan.step] = plan
        for version, step in plan.version_steps.items():
            # Rows of versions are removed behind the records of their steps, and a plan may name an older one.
            forgotten = version not in (self._versions or {}) and step < self.accounting.removed_steps
            if self._versions is not None and self._versions.get(version) != step and not forgotten:
                recorded = f"the registry has {self._versions.get(version, 'none')}"
                text = f"step {plan.step} takes version {version} for weights of step {step}; {recorded}"
                self.accounting.add_problem(text)
        for task in plan.tasks.tolist():
            if task in self._step_of_task or task in self._dropped_task:
                self.accounting.add_problem(f"task {task} is in step {plan.step} and was settled before")
            self._step_of_task[task] = plan.step
        sizes = dict(zip(plan.tasks.tolist(), plan.group_sizes.tolist(), strict=True))
        places = [(task, index) for task, size in sizes.items() for index in range(size)]
        self._sizes.update(sizes)
        for seq, place in zip(plan.seqs.tolist(), places, strict=True):
            if seq in self._step_of_seq or seq in self._dropped_seq or self._was_settled(seq):
                self._twice(f"sample {seq} is in step {plan.step} and was settled before")
            self._step_of_seq[seq], self._planned[seq] = plan.step, place
        self.accounting.trained += len(plan.seqs)

    def _was_settled(self, seq: int) -> bool:
        """Return whether a record that is gone has settled the sample."""
        return self._removed is not None and seq in self._removed

    def task(self, task: Task) -> None:
        """Count one training task, after all records."""
        self._tasks[task.id] = task
        self.accounting.tasks_issued += 1
        self.accounting.tasks_open += task.id not in self._step_of_task and task.id not in self._dropped_task

    # ---- SAMPLES

    async def samples(self, bus: Bus, progress: Progress) -> None:
        """Count every sequence of SAMPLES, after all tasks."""
        states, read = await bus.samples.states(), 0
        shards = Shards(len(states))
        self._trimmed(
            [shards.seq(shard, local) for shard, state in enumerate(states) for local in range(1, state.first_seq)]
        )
        for state in states:
            if state.messages and (gone := state.last_seq - state.first_seq + 1 - state.messages):
                self._lost(f"{gone} sequences are gone from the middle of the stream", gone)
        total = sum(state.last_seq - state.first_seq + 1 for state in states)
        async for received in bus.samples.tail(last=EVERYTHING, follow=False):
            read += 1
            progress(min(read, total), total)
            if isinstance(received.sample, WireError):
                self.accounting.published += 1
                self._refuse(received.seq, field_of(received.sample), received.actor)
            elif received.sample.kind is Kind.EVAL:
                self.accounting.eval += 1
            else:
                self._sample(received.seq, received.sample, received.actor)

    def _trimmed(self, seqs: Sequence[int]) -> None:
        """Count the trimmed sequences: PLAN must name them, or the cursor be past them."""
        self.accounting.trimmed = len(seqs)
        unclaimed = 0
        for seq in seqs:
            if seq in self._step_of_seq:
                self.accounting.published += 1
                self.accounting.trained_here += 1
                self._found[seq] = self._planned[seq]
            elif seq in self._dropped_seq:
                self.accounting.published += 1
                self.accounting.dropped[self._dropped_seq[seq]] += 1
            else:
                unclaimed += not self._was_settled(seq) and (self._cursor is None or seq not in self._cursor)
        for plan in {self._step_of_seq[seq]: self._plans[self._step_of_seq[seq]] for seq in self._found}.values():
            self.accounting.max_lag_trained = max(self.accounting.max_lag_trained, largest_lag(plan))
        if unclaimed:
            text = f"{unclaimed} trimmed sequences are in no record and not behind the checkpoint's cursor"
            self._lost(text, unclaimed)

    def _sample(self, seq: int, sample: Sample, actor: str) -> None:
        accounting = self.accounting
        accounting.published += 1
        if seq in self._step_of_seq:
            accounting.trained_here += 1
            self._found[seq] = (sample.task, sample.index)
            self._asked[sample.task] = sample.group_size
            self._count_trained(seq, sample, self._plans[self._step_of_seq[seq]])
        elif seq in self._dropped_seq:
            accounting.dropped[self._dropped_seq[seq]] += 1
        elif sample.status in (Status.FAILED, Status.ABORTED):
            accounting.dropped[sample.status.value] += 1
            if self._wrong(seq, sample):
                return
        elif wrong := self._wrong(seq, sample):
            self._refuse(seq, wrong, actor)
            return
        elif sample.task in self._dropped_task:
            accounting.dropped[self._dropped_task[sample.task]] += 1
        elif sample.task in self._step_of_task:
            self._late[seq] = (sample.task, sample.index)
        elif self._cursor is not None and seq in self._cursor:
            text = f"sample {seq} (task {sample.task}) is behind the cursor of the checkpoint and in no record"
            self._unrecorded(text)
        else:
            accounting.buffered += 1
        # Behind the checks: an invalid sample may name any number of tokens.
        accounting.tokens_generated += sample.response_length
        accounting.aborted += sample.status is Status.ABORTED

    def _refuse(self, seq: int, wrong: str, actor: str) -> None:
        self.accounting.refuse(wrong, actor)
        if self._cursor is not None and seq in self._cursor:
            count_of(self._refused[0], wrong)
            count_of(self._refused[1], actor)

    def _wrong(self, seq: int, sample: Sample) -> str:
        """Return the invalid field of a sample; empty if it is valid, or if its task is gone (its record decides)."""
        task = self._tasks.get(sample.task)
        if task is None:
            return "" if sample.task in self._step_of_task or sample.task in self._dropped_task else "task"
        try:
            check_sample(sample, vocab_size=self._vocab_size)
        except WireError as error:
            return field_of(error)
        if sample.status is Status.PENDING:
            return "status"
        return "version" if self._names_no_version(seq, sample) else mismatch(task, index_of(seq, sample), 0)

    def _names_no_version(self, seq: int, sample: Sample) -> bool:
        if self._versions is None:
            return False
        names = {span.version for span in sample.spans}
        return any(name not in self._versions or is_behind(seq, self._after.get(name, (0,))) for name in names)

    def _count_trained(self, seq: int, sample: Sample, plan: Plan) -> None:
        accounting = self.accounting
        accounting.multi_version += len({span.version for span in sample.spans}) > 1
        if plan.masked is not None and seq in plan.masked:
            return
        start = 0
        for span in sample.spans:
            tokens = int(sample.loss_mask[start : start + span.num_tokens].sum())
            start += span.num_tokens
            step = plan.version_steps.get(span.version)
            if step is None:
                text = f"step {plan.step} trains tokens of version {span.version}, whose step is not in its plan"
                accounting.add_problem(text)
                continue
            if not tokens or (plan.oldest_step is not None and step < plan.oldest_step):
                continue
            lag = plan.step - 1 - step
            accounting.lag_tokens[lag] += tokens
            accounting.tokens_trained += tokens
            accounting.max_lag_trained = max(accounting.max_lag_trained, lag)

    # ---- plans, samples and cursor against each other

    def close(self) -> None:
        """Compare plans, samples and cursor with each other, after all samples."""
        trained: dict[Place, int] = {}
        for seq, step in self._step_of_seq.items():
            place = self._found.get(seq)
            if place is None:
                self._lost(f"sample {seq} was trained in step {step} and is not in the stream")
                continue
            name = f"task {place[0]}, index {place[1]}"
            if place in trained:
                self._twice(f"samples {trained[place]} and {seq} are both trained for {name}")
            elif not self._is_planned(place, self._planned[seq]):
                self.accounting.add_problem(f"sample {seq} is {name}; its plan lists it as {self._planned[seq]}")
            trained[place] = seq
            if self._cursor is not None and step <= self._cursor.step and seq not in self._cursor:
                again = "is not behind the checkpoint's cursor: it would be trained again"
                self._twice(f"sample {seq} was trained in step {step} and {again}")
        for seq, place in self._late.items():
            if place in trained or self._short(place[0]):
                self.accounting.duplicates += 1
            else:
                name = f"task {place[0]}, index {place[1]}"
                self._unrecorded(f"sample {seq} is the only one of {name}, and was left out when it was trained")
        if self.accounting.trimmed and self._cursor is not None:
            counted = (Counter(self._cursor.invalid_by_field), Counter(self._cursor.invalid_by_actor))
            self.accounting.refuse_trimmed(counted[0] - self._refused[0], counted[1] - self._refused[1])

    def _short(self, task: int) -> bool:
        """Return whether a dead task was trained with fewer samples than its size (``learner.min_group_size``)."""
        size = self._sizes.get(task, 0)
        return (task in self.dead or task <= self._letters_to) and size < self._asked.get(task, size)

    def _is_planned(self, place: Place, planned: Place) -> bool:
        """Return whether a sample fits its place in the plan. A plan has no indexes, and a short group has gaps."""
        return place == planned or (place[0] == planned[0] and place[1] > planned[1] and self._short(place[0]))

    def _twice(self, text: str) -> None:
        self.accounting.trained_twice += 1
        self.accounting.add_problem(text)

    def _lost(self, text: str, count: int = 1) -> None:
        self.accounting.lost += count
        self.accounting.add_problem(text)

    def _unrecorded(self, text: str) -> None:
        self.accounting.unrecorded += 1
        self._lost(text)


def _cursor_at(mark: PlanMark | None) -> CheckpointCursor | None:
    return None if mark is None else CheckpointCursor(0, frozenset(mark.settled), floors=mark.floors)


def mean(values: list[float]) -> float:
    """Return the mean of ``values``, 0 for none."""
    return math.fsum(values) / len(values) if values else 0.0
