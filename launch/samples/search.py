"""Search for samples in the stream: first sequence and filter. Headers are read first if they can exclude a sample.

A sample's lag here is its lag when it was stored: the steps between its oldest version and the head. The lag that
counts is the lag at the step that trains it (``sample_history``); this one is known as soon as a sample is stored.
"""

import asyncio
import re
import time
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import datetime

from tidemill.bus.client.jetstream import Message, unix_time
from tidemill.bus.errors import NotFound, WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.readers import History, StoredSample
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import check_sample, decode_sample
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Done, Kind, Plan, Sample, Settle
from tidemill.launch.samples.filters import Filter, Headline, headline, headline_of
from tidemill.launch.samples.text import turns_in

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SEQUENCE = re.compile(r"#?(\d+)")
_CHUNK = (256, 4096)  # Sequences read at once in a backward search: at first, and at most

_PAUSE_S = 0.05  # Seconds between two reads of the registry: samples stored meanwhile share the next one


def seconds(where: str, text: str) -> float:
    """Return ``90s``, ``10m``, ``2h`` or ``1d`` in seconds. Raises ValueError."""
    ago = _AGO.fullmatch(text.strip())
    if ago is None:
        raise ValueError(f"{where}: want a time such as 30s, 10m, 2h or 1d, got {text!r}")
    return float(ago[1]) * _SECONDS[ago[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSample:
    """A sample that fits."""

    line: Headline
    stored: StoredSample
    sample: Sample | WireError


class SampleSearch:
    """Samples of a run that fit a filter."""

    def __init__(self, bus: Bus, filter: Filter) -> None:
        self.history, self.lags, self._filter = History(bus.jet), Lags(bus), filter

    async def begin(self, since: str, version: int | None) -> int:
        """Return the first sequence of ``since`` (a time ago, ISO, ``#123``) or a version. Raises ValueError."""
        if version is not None:
            return await self.history.at_version(version)
        if sequence := _SEQUENCE.fullmatch(since):
            return int(sequence[1])
        if _AGO.fullmatch(since):
            return await self.history.at_time(await self.history.now_s() - seconds("--since", since))
        try:
            return await self.history.at_time(datetime.fromisoformat(since).timestamp())
        except ValueError:
            want = "a time ago (10m, 2h), an ISO time, or a sequence (#123)"
            raise ValueError(f"--since: want {want}, got {since!r}") from None

    async def forward(self, first: int, last: int | None = None) -> AsyncIterator[FoundSample]:
        """Yield the samples from ``first`` to ``last`` that fit; without ``last`` wait for new ones."""
        if not self._filter.of_headers:
            async for stored in self.history.payloads(first, last):
                if (match := await self._open(stored)) is not None:
                    yield match
            return
        async for glimpse in self.history.glimpses(first, last):
            if (match := await self._look(glimpse)) is not None:
                yield match

    async def newest(self, count: int, *, first: int = 1, limit: int) -> tuple[list[FoundSample], int, int]:
        """Return the last ``count`` samples of ``limit`` sequences, the last sequence, the number read."""
        state = await self.history.state()
        matches: list[FoundSample] = []
        high, size = state.last_seq, max(_CHUNK[0], 2 * count)
        first = max(first, state.first_seq, state.last_seq - limit + 1)
        while high >= first and len(matches) < count:
            low = max(first, high - size + 1)
            chunk = [glimpse async for glimpse in self.history.glimpses(low, high)]
            for glimpse in reversed(chunk):
                if len(matches) == count:
                    break
                if (match := await self._look(glimpse)) is not None:
                    matches.append(match)
            high, size = low - 1, min(2 * size, max(_CHUNK[1], 2 * count))
        return matches[::-1], state.last_seq, state.last_seq - high

    async def _look(self, glimpse: Message) -> FoundSample | None:
        line = headline(glimpse)
        if replace(self._filter, lag=None).of(line) is False:  # before the registry is read for its lag
            return None
        if self._filter.of(await self.lags.of(line)) is False:
            return None
        try:
            return await self._open(await self.history.payload(glimpse.seq))
        except NotFound:  # trimmed meanwhile
            return None

    async def _open(self, stored: StoredSample) -> FoundSample | None:
        sample = opened(stored)
        if isinstance(sample, WireError) and self._filter != Filter():
            return None
        match = await self.found(stored, sample)
        if isinstance(sample, WireError):
            return match
        return match if self._filter.of(match.line) and self._filter.matches_text(sample) else None

    async def found(self, stored: StoredSample, sample: Sample | WireError) -> FoundSample:
        """Return a sample with its metadata and lag, whether it fits or not."""
        if isinstance(sample, WireError):
            line = Headline(seq=stored.seq, stored_s=stored.stored_s, kind="", actor="")
        else:
            line = await self.lags.of(headline_of(stored.seq, stored.stored_s, stored.subject, sample))
        return FoundSample(line=line, stored=stored, sample=sample)


def opened(stored: StoredSample) -> Sample | WireError:
    """Return the decoded sample, unchecked, or the error that prevents it."""
    try:
        return stored.data if isinstance(stored.data, WireError) else decode_sample(stored.data)
    except WireError as error:
        return error


def as_map(seq: int, sample: Sample | WireError) -> JsonObject:
    """Return a sample as a map for JSON."""
    if isinstance(sample, WireError):
        return {"seq": seq, "error": str(sample)}
    return {
        "seq": seq,
        **{name: getattr(sample, name) for name in ("task", "index", "group_size", "attempt")},
        "kind": sample.kind.value,
        "status": sample.status.value,
        **{name: getattr(sample, name) for name in ("reward", "score", "prompt", "response", "label")},
        "tokens": sample.tokens.tolist(),
        "response_length": sample.response_length,
        "rollout_log_probs": [round(float(value), 6) for value in sample.rollout_log_probs],
        "spans": [[span.version, span.num_tokens] for span in sample.spans],
        **({"rollout": sample.rollout} if sample.rollout else {}),
        **({"sequences": [list(size) for size in sample.sequences]} if len(sample.sequences) > 1 else {}),
        **({"turns": turns_in(sample.turns)} if sample.turns is not None else {}),
        **({"transcript": list(sample.transcript)} if sample.transcript else {}),
        **{name: getattr(sample, name) for name in ("actor", "engine", "finish_reason")},
        "generating_s": sample.timings.generating_s,
        "created_s": sample.created_s,
        "metadata": sample.metadata,
    }


class Lags:
    """The versions of a run by the time at which each became the head."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._stream = subjects.bucket_stream(bus.run, "weights")
        self._read = 0
        self._known_until_s = float("-inf")  # Time up to which all rows are read, by the server's clock
        self._looked_s = float("-inf")
        self._steps: dict[int, int] = {}  # Step of every version
        self._published: dict[int, float] = {}  # Time at which the row of a published version was last written
        self._times: list[float] = []
        self._heads: list[int] = []  # Step of the head from the time at the same place of `_times` on

    async def of(self, line: Headline) -> Headline:
        """Return the metadata with its lag; unchanged if empty or of versions that the registry lacks."""
        if line.versions is None or line.versions[0] < 0:
            return line
        if line.stored_s > self._known_until_s:
            await self._look()
        step, place = self._steps.get(line.versions[0]), bisect_right(self._times, line.stored_s)
        return line if step is None or place == 0 else replace(line, lag=max(0, self._heads[place - 1] - step))

    async def _look(self) -> None:
        await asyncio.sleep(self._looked_s + _PAUSE_S - time.monotonic())
        self._looked_s = time.monotonic()
        info = await self._bus.jet.call(f"STREAM.INFO.{self._stream}")
        last = int(info["state"]["last_seq"])
        if last > self._read:
            async for row, written in self._bus.rows("weights").written("v.*", self._read + 1):
                self._steps[row["version"]] = row["step"]
                if row.get("state") == "published":
                    self._published[row["version"]] = written.stored_s
            self._read = last
            self._order()
        self._known_until_s = unix_time(info["ts"])

    def _order(self) -> None:
        """Sort the heads by time: a snapshot rewrites a version's row, but versions rise."""
        heads: list[tuple[float, int]] = []
        earliest_s = float("inf")
        for version in sorted(self._published, reverse=True):
            earliest_s = min(earliest_s, self._published[version])
            heads.append((earliest_s, self._steps[version]))
        self._times, self._heads = [stored_s for stored_s, _ in heads[::-1]], [step for _, step in heads[::-1]]


# Metric of a step: mean of |log-prob when trained - log-prob when sampled| over its tokens.
DIFFERENCE = "offpolicy/logprob_diff_abs"


@dataclass(slots=True, kw_only=True)
class SampleHistory:
    """The disposition of one sample; fields below ``reason`` describe the step that trained it."""

    state: str  # trained | dropped | duplicate | invalid | unplanned | unknown | evaluation
    reason: str = ""
    step: int = 0
    rank: int = 0
    micro_batch: int = 0
    lags: tuple[int, int] | None = None  # Smallest and largest lag of its tokens, masked ones included
    masked_tokens: int = 0
    masked_by_filter: bool = False  # Tokens older than the bound, which were not trained
    done: Done | None = None  # Outcome of the step; None while it is not recorded

    def as_map(self) -> dict[str, object]:
        """Return the disposition for JSON; without the fields of a step unless it is ``trained``."""
        if self.state != "trained":
            return {"state": self.state, "reason": self.reason}
        names = ("state", "step", "rank", "micro_batch", "lags", "masked_tokens", "masked_by_filter")
        difference = None if self.done is None else self.done.metrics.get(DIFFERENCE)
        return {name: getattr(self, name) for name in names} | {"step_logprob_diff_abs": difference}

    def __str__(self) -> str:
        if self.state != "trained":
            return f"{self.state}: {self.reason}" if self.reason else self.state
        smallest, largest = self.lags or (0, 0)
        lags = "" if self.lags is None else f", lag {smallest}" + (f" to {largest}" if largest > smallest else "")
        masked = f", {self.masked_tokens} tokens masked as too old" if self.masked_tokens else ""
        if self.masked_by_filter:
            masked = ", all its tokens masked by a filter"
        difference = "the step is not done yet"
        if self.done is not None:
            mean = self.done.metrics.get(DIFFERENCE)
            difference = "no log-prob difference recorded"
            if mean is not None:
                difference = f"mean |log-prob difference| of the whole step {mean:.4g}"
        place = f"step {self.step} on rank {self.rank}, micro-batch {self.micro_batch}"
        return f"trained in {place}{lags}{masked}; {difference}"


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
        if history is not None and history.state == "trained":
            if isinstance(record, Done) and record.step == history.step:
                history.done = record
                break
        elif isinstance(record, Plan):
            history = planned(record, seq, sample) or history
        elif isinstance(record, Settle):
            history = _settled(record, seq, sample.task) or history
    return history or await _unplanned(bus, sample, start)


def planned(plan: Plan, seq: int, sample: Sample) -> SampleHistory | None:
    """Return the disposition of a sample by a plan; None if the plan does not name its task."""
    places = (plan.seqs == seq).nonzero()[0]
    if not len(places):
        reason = f"step {plan.step} trained another sample of this task and index"
        return SampleHistory(state="duplicate", reason=reason) if sample.task in plan.tasks else None
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
    reason = f"{record.reason}: its task was given up"
    return SampleHistory(state="dropped", reason=reason) if task in record.tasks else None


async def _unplanned(bus: Bus, sample: Sample, start: int) -> SampleHistory:
    async with aclosing(bus.plans.scan()) as records:  # type: ignore[type-var]
        first = await anext(((seq, record.step) async for seq, record in records if isinstance(record, Plan)), None)
    if first is not None and start <= first[0] and first[1] > 1:
        return SampleHistory(state="unknown", reason=f"no plan before step {first[1]} is kept")
    return SampleHistory(state="unplanned", reason="in no plan yet: it waits in the stream or in the learner's buffer")
