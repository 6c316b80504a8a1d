"""The disposition of a sample, read from PLAN: trained, dropped, duplicate, invalid, or in no plan yet."""

from contextlib import aclosing
from dataclasses import dataclass

from tidemill.bus.errors import WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.history import History
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Done, Kind, Plan, Sample, Settle

DIFFERENCE = "offpolicy/logprob_diff_abs"
"""Metric of a step: mean of |log-prob when trained - log-prob when sampled| over its tokens."""


@dataclass(slots=True, kw_only=True)
class SampleHistory:
    """The disposition of one sample; fields below ``reason`` describe the step that trained it."""

    state: str
    """trained | dropped | duplicate | invalid | unplanned | unknown | evaluation."""
    reason: str = ""
    step: int = 0
    rank: int = 0
    micro_batch: int = 0
    lags: tuple[int, int] | None = None
    """Smallest and largest lag of its tokens, masked ones included."""
    masked_tokens: int = 0
    masked_by_filter: bool = False
    """Tokens older than the bound, which were not trained."""
    done: Done | None = None
    """Outcome of the step; None while it is not recorded."""

    def as_map(self) -> dict[str, object]:
        """Return the disposition for JSON; without the fields of a step unless it is ``trained``."""
        if self.state != "trained":
            return {"state": self.state, "reason": self.reason}
        return {
            "state": self.state,
            "step": self.step,
            "rank": self.rank,
            "micro_batch": self.micro_batch,
            "lags": self.lags,
            "masked_tokens": self.masked_tokens,
            "masked_by_filter": self.masked_by_filter,
            "step_logprob_diff_abs": None if self.done is None else self.done.metrics.get(DIFFERENCE),
        }

    def __str__(self) -> str:
        if self.state != "trained":
            return f"{self.state}: {self.reason}" if self.reason else self.state
        lags = (
            ""
            if self.lags is None
            else f", lag {self.lags[0]}" + (f" to {self.lags[1]}" if self.lags[1] > self.lags[0] else "")
        )
        masked = f", {self.masked_tokens} tokens masked as too old" if self.masked_tokens else ""
        if self.masked_by_filter:
            masked = ", all its tokens masked by a filter"
        return (
            f"trained in step {self.step} on rank {self.rank}, micro-batch {self.micro_batch}{lags}{masked}; "
            f"{self._difference()}"
        )

    def _difference(self) -> str:
        if self.done is None:
            return "the step is not done yet"
        mean = self.done.metrics.get(DIFFERENCE)
        return (
            "no log-prob difference recorded"
            if mean is None
            else f"mean |log-prob difference| of the whole step {mean:.4g}"
        )


async def history_of(bus: Bus, seq: int, sample: Sample) -> SampleHistory:
    """Return the disposition of a sample, by reading PLAN from the time at which its task was issued."""
    if sample.kind is not Kind.TRAIN:
        return SampleHistory(state="evaluation", reason="not for training")
    try:
        check_sample(sample)
    except WireError as error:
        return SampleHistory(state="invalid", reason=str(error))
    history: SampleHistory | None = None
    start = await History(bus.jet).at_task(sample.task, name=subjects.PLAN)
    async for _, record in bus.plans.scan(start):
        if isinstance(record, Plan | Settle) and (history is None or history.state != "trained"):
            history = (
                _planned(record, seq, sample) if isinstance(record, Plan) else _settled(record, seq, sample.task)
            ) or history
        elif (
            isinstance(record, Done)
            and history is not None
            and record.step == history.step
            and history.state == "trained"
        ):
            history.done = record
            break
    return history or await _unplanned(bus, sample, start)


def _planned(plan: Plan, seq: int, sample: Sample) -> SampleHistory | None:
    places = (plan.seqs == seq).nonzero()[0]
    if not len(places):
        return (
            SampleHistory(state="duplicate", reason=f"step {plan.step} trained another sample of this task and index")
            if sample.task in plan.tasks
            else None
        )
    row = int(places[0] if plan.rows is None else plan.rows[: places[0]].sum())  # of several sequences, the first
    steps = [plan.version_steps[span.version] for span in sample.spans if span.version in plan.version_steps]
    old = [
        plan.oldest_step is not None and plan.version_steps.get(span.version, 0) < plan.oldest_step
        for span in sample.spans
    ]
    return SampleHistory(
        state="trained",
        step=plan.step,
        rank=int(plan.ranks[row]),
        micro_batch=int(plan.micro_batches[row]),
        lags=(plan.step - 1 - max(steps), plan.step - 1 - min(steps)) if steps else None,
        masked_tokens=sum(span.num_tokens for span, too_old in zip(sample.spans, old, strict=True) if too_old),
        masked_by_filter=plan.masked is not None and bool((plan.masked == seq).any()),
    )


def _settled(record: Settle, seq: int, task: int) -> SampleHistory | None:
    if seq in record.seqs:
        return SampleHistory(state="dropped", reason=f"{record.reason}, when step {record.step} was planned")
    return (
        SampleHistory(state="dropped", reason=f"{record.reason}: its task was given up")
        if task in record.tasks
        else None
    )


async def _unplanned(bus: Bus, sample: Sample, start: int) -> SampleHistory:
    async with aclosing(bus.plans.scan()) as records:  # type: ignore[type-var]
        first = await anext(((seq, record.step) async for seq, record in records if isinstance(record, Plan)), None)
    if first is not None and start <= first[0] and first[1] > 1:
        return SampleHistory(state="unknown", reason=f"no plan before step {first[1]} is kept")
    return SampleHistory(state="unplanned", reason="in no plan yet: it waits in the stream or in the learner's buffer")
