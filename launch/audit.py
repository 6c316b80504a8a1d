"""The books of a run, from what is written down: the streams, the registry and the last checkpoint. Asks no process and trusts no counter.

SAMPLES  what was published            TASKS  what was handed out         DEAD  what was given up by actors
PLAN     what was trained or dropped   checkpoint's cursor  what the model claims to have behind it
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bus.connection import Bus
from bus.errors import WireError
from bus.messages import Done, Kind, Plan, Sample, Settle, Status

EVERYTHING = 1 << 62


@dataclass(slots=True)
class Books:
    """What the streams say."""

    published: int = 0
    """Logical training samples in SAMPLES (still there); parts of large ones count once."""
    trained: int = 0
    """Samples named by plans."""
    trained_twice: int = 0
    """Samples, or places (task, index), that more than one plan names."""
    lost: int = 0
    """Sequences that are gone from the middle of the stream, named by a plan and not there, or behind the cursor without any record."""
    dropped: Counter[str] = field(default_factory=Counter)
    """By reason: stale, filtered, dead, lost, failed, aborted."""
    duplicates: int = 0
    invalid: int = 0
    buffered: int = 0
    """Neither trained nor given up yet, and not claimed by the cursor."""
    eval: int = 0
    trimmed: int = 0
    """Sequences before the first one that is still there; what they held is not counted."""
    tasks_issued: int = 0
    tasks_open: int = 0
    aborted: int = 0
    multi_version: int = 0
    """Trained samples whose tokens come from more than one version."""
    max_lag_trained: int = 0
    lag_tokens: Counter[int] = field(default_factory=Counter)
    """Trained tokens by lag."""
    tokens_generated: int = 0
    tokens_trained: int = 0
    generated_s: float = 0.0
    """Sum of the time samples spent in generation."""
    problems: list[str] = field(default_factory=list)
    """What is wrong, in words, the first few."""

    def balance(self) -> bool:
        """published = trained + dropped + duplicates + invalid + buffered + lost."""
        return (
            self.published
            == self.trained_here + sum(self.dropped.values()) + self.duplicates + self.invalid + self.buffered + self.unrecorded
        )

    trained_here: int = 0
    """Of the trained ones, those still in the stream."""
    unrecorded: int = 0
    """Of the lost ones, those still in the stream."""

    def complain(self, text: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(text)


@dataclass(frozen=True, slots=True)
class Claims:
    """What the last checkpoint's cursor claims to be settled; None = there is no checkpoint."""

    floor: int
    settled: frozenset[int]

    def __contains__(self, seq: int) -> bool:
        return seq <= self.floor or seq in self.settled


@dataclass(slots=True)
class _Records:
    plans: dict[int, Plan] = field(default_factory=dict)
    step_of_seq: dict[int, int] = field(default_factory=dict)
    step_of_task: dict[int, int] = field(default_factory=dict)
    dropped_seq: dict[int, str] = field(default_factory=dict)
    dropped_task: dict[int, str] = field(default_factory=dict)
    outcomes: list[Done] = field(default_factory=list)


async def audit(bus: Bus, claims: Claims | None = None) -> tuple[Books, list[Done]]:
    """Read everything there is; the books, and the outcomes of the steps in the order they were recorded."""
    books = Books()
    records = await _records(bus, books)
    issued = [task async for task in bus.tasks.scan() if task.kind is Kind.TRAIN]
    books.tasks_issued = len(issued)
    books.tasks_open = sum(task.id not in records.step_of_task and task.id not in records.dropped_task for task in issued)
    await _samples(bus, records, books, claims)
    return books, records.outcomes


async def _records(bus: Bus, books: Books) -> _Records:
    records = _Records()
    async for _, record in bus.plans.scan():
        if isinstance(record, Plan):
            _take_plan(record, records, books)
        elif isinstance(record, Settle):
            for task in record.tasks.tolist():
                records.dropped_task[task] = record.reason
            for seq in record.seqs.tolist():
                if seq in records.step_of_seq:
                    books.trained_twice += 1
                    books.complain(f"sample {seq} is given up ({record.reason}) and trained in step {records.step_of_seq[seq]}")
                records.dropped_seq[seq] = record.reason
        elif isinstance(record, Done):
            records.outcomes.append(record)
    return records


def _take_plan(plan: Plan, records: _Records, books: Books) -> None:
    if plan.step in records.plans:
        books.complain(f"step {plan.step} was planned twice")
    records.plans[plan.step] = plan
    for task in plan.tasks.tolist():
        if task in records.step_of_task or task in records.dropped_task:
            books.complain(f"task {task} is in step {plan.step} and was settled before")
        records.step_of_task[task] = plan.step
    for seq in plan.seqs.tolist():
        if seq in records.step_of_seq or seq in records.dropped_seq:
            books.trained_twice += 1
            books.complain(f"sample {seq} is in step {plan.step} and was settled before")
        records.step_of_seq[seq] = plan.step
    books.trained += len(plan.seqs)


async def _samples(bus: Bus, records: _Records, books: Books, claims: Claims | None) -> None:
    state = await bus.samples.info()
    books.trimmed = max(0, state.first_seq - 1)
    if state.messages != state.last_seq - state.first_seq + 1 and state.messages:
        gone = state.last_seq - state.first_seq + 1 - state.messages
        books.lost += gone
        books.complain(f"{gone} sequences are gone from the middle of the stream")
    found: set[int] = set()
    places: dict[tuple[int, int], int] = {}
    async for received in bus.samples.tail(last=EVERYTHING, follow=False):
        found.add(received.seq)
        if isinstance(received.sample, WireError):
            books.published += 1
            books.invalid += 1
        elif received.sample.kind is Kind.EVAL:
            books.eval += 1
        else:
            _count(received.seq, received.sample, records, books, claims, places)
    for seq, step in records.step_of_seq.items():
        if seq > books.trimmed and seq not in found:
            books.lost += 1
            books.complain(f"sample {seq} was trained in step {step} and is not in the stream")


def _count(seq: int, sample: Sample, records: _Records, books: Books, claims: Claims | None, places: dict[tuple[int, int], int]) -> None:
    """Find what became of one sample."""
    books.published += 1
    books.tokens_generated += sample.response_length
    books.generated_s += sample.timings.generating_s
    if sample.status is Status.ABORTED:
        books.aborted += 1
    if seq in records.step_of_seq:
        books.trained_here += 1
        place = (sample.task, sample.index)
        if place in places:
            books.trained_twice += 1
            books.complain(f"samples {places[place]} and {seq} are both trained for task {sample.task}, index {sample.index}")
        places[place] = seq
        _count_trained(sample, records.plans[records.step_of_seq[seq]], books)
    elif seq in records.dropped_seq:
        books.dropped[records.dropped_seq[seq]] += 1
    elif sample.status in (Status.FAILED, Status.ABORTED):
        books.dropped[sample.status.value] += 1
    elif sample.task in records.step_of_task or sample.task in records.dropped_task:
        books.duplicates += 1
    elif claims is not None and seq in claims:
        books.lost += 1
        books.unrecorded += 1
        books.complain(f"sample {seq} (task {sample.task}) is behind the cursor of the checkpoint and no record names it")
    else:
        books.buffered += 1


def _count_trained(sample: Sample, plan: Plan, books: Books) -> None:
    books.multi_version += len({span.version for span in sample.spans}) > 1
    start = 0
    for span in sample.spans:
        tokens = int(sample.loss_mask[start : start + span.num_tokens].sum())
        start += span.num_tokens
        step = plan.version_steps.get(span.version)
        if step is None:
            books.complain(f"step {plan.step} trains tokens of version {span.version}, whose step its plan does not know")
            continue
        if not tokens or (plan.oldest_step is not None and step < plan.oldest_step):
            continue
        lag = plan.step - 1 - step
        books.lag_tokens[lag] += tokens
        books.tokens_trained += tokens
        books.max_lag_trained = max(books.max_lag_trained, lag)


def read_claims(checkpoints: Path) -> Claims | None:
    """The cursor in the newest checkpoint of a directory."""
    from learner import checkpoints as kept
    from learner.datasource import read_state

    path = kept.latest_valid(one.path for one in kept.listed(checkpoints))
    if path is None:
        return None
    cursor = read_state(kept.read_state(path))["samples"]
    return Claims(int(cursor["floor"]), frozenset(cursor["settled"]))


def mean(values: list[float]) -> float:
    """0 for none."""
    return math.fsum(values) / len(values) if values else 0.0
