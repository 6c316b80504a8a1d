"""Search for samples in the stream: first sequence and filter. Headers are read first if they can exclude a sample."""

import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import datetime

from tidemill.bus.errors import NotFound, WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.history import History, StoredSample
from tidemill.bus.streams.samples import Glimpse
from tidemill.bus.wire.codec import decode_sample
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Sample
from tidemill.launch.samples.episode import turns_in
from tidemill.launch.samples.filters import Filter, Headline, headline, headline_of
from tidemill.launch.samples.lags import Lags

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SEQUENCE = re.compile(r"#?(\d+)")
_CHUNK = (256, 4096)
"""Sequences read at once in a backward search: at first, and at most."""


def seconds(where: str, text: str) -> float:
    """Return ``90s``, ``10m``, ``2h`` or ``1d`` in seconds. Raises ValueError."""
    ago = _AGO.fullmatch(text.strip())
    if ago is None:
        raise ValueError(f"{where}: want a time such as 30s, 10m, 2h or 1d, got {text!r}")
    return float(ago[1]) * _SECONDS[ago[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A sample that fits."""

    line: Headline
    stored: StoredSample | None = None
    sample: Sample | WireError | None = None
    """None, as ``stored``, if payloads were not requested."""


class Search:
    """Samples of a run that fit a filter."""

    def __init__(self, bus: Bus, filter: Filter) -> None:
        self.history, self.lags, self._filter = History(bus.jet), Lags(bus), filter

    async def begin(self, since: str, version: int | None) -> int:
        """Return the sequence at which ``since`` (``10m``, ``2026-11-20T10:00``, ``#123``) or a version begins. Raises ValueError."""
        if version is not None:
            return await self.history.at_version(version)
        if found := _SEQUENCE.fullmatch(since):
            return int(found[1])
        if _AGO.fullmatch(since):
            return await self.history.at_time(await self.history.now_s() - seconds("--since", since))
        try:
            return await self.history.at_time(datetime.fromisoformat(since).timestamp())
        except ValueError:
            raise ValueError(f"--since: want a time ago (10m, 2h), an ISO time, or a sequence (#123), got {since!r}") from None

    async def forward(self, first: int, last: int | None = None, *, payloads: bool = True) -> AsyncIterator[Found]:
        """Yield the samples from ``first`` to ``last`` that fit, in stream order; without ``last`` wait for new ones until cancelled."""
        if payloads and not self._filter.of_headers:
            async for stored in self.history.payloads(first, last):
                if (found := await self._open(stored)) is not None:
                    yield found
            return
        async for glimpse in self.history.glimpses(first, last):
            if (found := await self._look(glimpse, payloads)) is not None:
                yield found

    async def newest(self, count: int, *, first: int = 1, limit: int, payloads: bool = True) -> tuple[list[Found], int, int]:
        """Return the last ``count`` samples from ``first`` on, oldest first; the last sequence of the stream; the number of sequences read.

        At most ``limit`` sequences are read.
        """
        state = await self.history.state()
        found: list[Found] = []
        high, size = state.last_seq, max(_CHUNK[0], 2 * count)
        first = max(first, state.first_seq, state.last_seq - limit + 1)
        while high >= first and len(found) < count:
            low = max(first, high - size + 1)
            chunk = [glimpse async for glimpse in self.history.glimpses(low, high)]
            for glimpse in reversed(chunk):
                if len(found) == count:
                    break
                if (one := await self._look(glimpse, payloads)) is not None:
                    found.append(one)
            high, size = low - 1, min(2 * size, max(_CHUNK[1], 2 * count))
        return found[::-1], state.last_seq, state.last_seq - high

    async def _look(self, glimpse: Glimpse, payloads: bool) -> Found | None:
        line = headline(glimpse)
        if replace(self._filter, lag=None).of(line) is False:  # before the registry is read for its lag
            return None
        line = await self.lags.of(line)
        fits = self._filter.of(line)
        if fits is False:
            return None
        if fits and not payloads and self._filter.text is None:
            return Found(line=line)
        try:
            return await self._open(await self.history.payload(glimpse.seq))
        except NotFound:  # trimmed meanwhile
            return None

    async def _open(self, stored: StoredSample) -> Found | None:
        sample = opened(stored)
        if isinstance(sample, WireError) and self._filter != Filter():
            return None
        found = await self.found(stored, sample)
        if isinstance(sample, WireError):
            return found
        return found if self._filter.of(found.line) and self._filter.matches_text(sample) else None

    async def found(self, stored: StoredSample, sample: Sample | WireError) -> Found:
        """Return a sample with its metadata and lag, whether it fits or not."""
        if isinstance(sample, WireError):
            line = Headline(seq=stored.seq, stored_s=stored.stored_s, kind="", actor="")
        else:
            line = await self.lags.of(headline_of(stored.seq, stored.stored_s, stored.subject, sample))
        return Found(line=line, stored=stored, sample=sample)


def opened(stored: StoredSample) -> Sample | WireError:
    """Return the decoded sample, unchecked, or the error that prevents it."""
    try:
        return stored.data if isinstance(stored.data, WireError) else decode_sample(stored.data)
    except WireError as error:
        return error


def clock(unix_s: float) -> str:
    """Return a time for display, in local time: the time of day, with the date unless it is today."""
    moment = datetime.fromtimestamp(unix_s)
    today = datetime.fromtimestamp(time.time()).date() == moment.date()
    return moment.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def as_map(seq: int, sample: Sample | WireError) -> JsonObject:
    """Return a sample as a map for JSON."""
    if isinstance(sample, WireError):
        return {"seq": seq, "error": str(sample)}
    return {
        "seq": seq,
        "task": sample.task,
        "index": sample.index,
        "attempt": sample.attempt,
        "kind": sample.kind.value,
        "status": sample.status.value,
        "reward": sample.reward,
        "score": sample.score,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "tokens": sample.tokens.tolist(),
        "response_length": sample.response_length,
        "rollout_log_probs": [round(float(value), 6) for value in sample.rollout_log_probs],
        "spans": [[span.version, span.num_tokens] for span in sample.spans],
        **({"rollout": sample.rollout} if sample.rollout else {}),
        **({"sequences": [list(size) for size in sample.sequences]} if len(sample.sequences) > 1 else {}),
        **({"turns": turns_in(sample.turns)} if sample.turns is not None else {}),
        **({"transcript": list(sample.transcript)} if sample.transcript else {}),
        "actor": sample.actor,
        "engine": sample.engine,
        "finish_reason": sample.finish_reason,
        "generating_s": sample.timings.generating_s,
        "created_s": sample.created_s,
        "metadata": sample.metadata,
    }
