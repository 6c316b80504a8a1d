"""``tidemill metrics traces``: the way of 1 in N samples, as traces in OTLP over HTTP, in JSON.

    PLAN (done, settled) --which samples--> SAMPLES (payload) --spans--> POST ENDPOINT/v1/traces

    sample                    queued | generating | tools | reward | buffered | trained

A trace is sent when the step of its sample is done, or its task was given up: then all times are known. Ids follow
from run and sequence, so a reader that begins again sends the same traces. Times of actors and of the bus are of two
clocks; a phase never ends before it begins. Phases of an episode are sums, one behind the other; its turns are events.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

import aiohttp

from tidemill.bus.errors import NotFound, WireError
from tidemill.bus.http.client import open_session
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.streams.readers import History
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.wire.codec import decode_sample
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Done, Plan, Sample, Settle

log = logging.getLogger(__name__)

CONNECT_S = 60.0
ENDPOINT_VARIABLE, HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"
ENDPOINT = "http://127.0.0.1:4318"
EVERY = 100
MOST_SPANS = 512  # Most spans of a request
MOST_TURNS = 128  # Most events of a span: collectors drop further ones
MOST_TRIES = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S, TIMEOUT_S = 1.0, 30.0, 10.0
_INTERNAL, _ERROR = 1, 2  # SpanKind and StatusCode
_BY_ACTOR = ("queued", "generating", "tools", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A sample with the times of its way."""

    run: str
    seq: int
    stored_s: float
    sample: Sample
    ended_s: float
    """Time of its step's outcome, or at which its task was given up."""
    planned_s: float | None = None
    """None = it was dropped."""
    step: int = 0
    reason: str = ""
    """Why it was dropped."""


def spans_of(way: Way) -> list[JsonObject]:
    """Return the spans of a sample: the whole way, then its phases."""
    sample = way.sample
    bounds = list(_phases(way))
    begin_s, end_s = bounds[0][1], max(way.ended_s, bounds[-1][2])
    facts: dict[str, str | int | float] = {
        "tidemill.sequence": way.seq,
        "tidemill.task": sample.task,
        "tidemill.index": sample.index,
        "tidemill.tokens": sample.response_length,
        "tidemill.reward": float(sample.score),
        "tidemill.status": sample.status.value,
        "tidemill.actor": sample.actor[:256],
        "tidemill.engine": sample.engine[:256],
        **({"tidemill.step": way.step} if way.planned_s is not None else {"tidemill.dropped": way.reason[:256]}),
    }
    status: JsonObject = (
        {} if way.planned_s is not None else {"code": _ERROR, "message": f"dropped: {way.reason}"[:256]}
    )
    root = _span(way, "sample", begin_s, end_s) | {"attributes": attributes(facts), "status": status}
    spans = [root]
    for name, from_s, to_s in bounds:
        span = _span(way, name, from_s, to_s) | {"parentSpanId": root["spanId"]}
        if name == "generating":
            span["events"] = list(_turns(sample, begin_s + sample.timings.queued_s))
        spans.append(span)
    return spans


def _phases(way: Way) -> Iterator[tuple[str, float, float]]:
    """Yield name, begin and end (Unix time) of each phase."""
    times = way.sample.timings
    seconds = [max(0.0, float(getattr(times, f"{name}_s"))) for name in _BY_ACTOR]
    at_s = (way.sample.created_s or way.stored_s) - sum(seconds)
    for name, lasted_s in zip(_BY_ACTOR, seconds, strict=True):
        yield name, at_s, at_s + lasted_s
        at_s += lasted_s
    stored_s = max(at_s, way.stored_s)
    planned_s = max(stored_s, way.ended_s if way.planned_s is None else way.planned_s)
    yield "buffered", stored_s, planned_s
    if way.planned_s is not None:
        yield "trained", planned_s, max(planned_s, way.ended_s)


def _turns(sample: Sample, began_s: float) -> Iterator[JsonObject]:
    if sample.turns is None:
        return
    turns = sample.turns
    for number, begin_s in enumerate(turns.begin_s[:MOST_TURNS].tolist()):
        facts = {"tidemill.turn": number, "tidemill.tokens": int(turns.tokens[number])}
        yield {"name": "turn", "timeUnixNano": _nanoseconds(began_s + begin_s), "attributes": attributes(facts)}


def _span(way: Way, name: str, begin_s: float, end_s: float) -> JsonObject:
    trace = hashlib.sha256(f"{way.run} {way.seq} {way.sample.task} {way.sample.index}".encode()).hexdigest()
    return {
        "traceId": trace[:32],
        "spanId": hashlib.sha256(f"{trace} {name}".encode()).hexdigest()[:16],
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": _nanoseconds(begin_s),
        "endTimeUnixNano": _nanoseconds(end_s),
    }


def _nanoseconds(unix_s: float) -> str:
    return str(max(0, round(unix_s * 1e6)) * 1000)  # 64-bit numbers are text in OTLP's JSON


def attributes(facts: Mapping[str, str | int | float]) -> list[JsonObject]:
    """Return facts as OTLP's attributes."""
    kinds = {int: "intValue", float: "doubleValue", str: "stringValue"}
    values = {name: {kinds[type(value)]: str(value) if type(value) is int else value} for name, value in facts.items()}
    return [{"key": name, "value": value} for name, value in values.items()]


def request_of(run: str, spans: Sequence[JsonObject]) -> JsonObject:
    """Return the body of an ExportTraceServiceRequest."""
    resource = {"attributes": attributes({"service.name": "tidemill", "tidemill.run": run})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "tidemill"}, "spans": spans}]}]}


@dataclass(slots=True)
class Sent:
    """Counts of one command."""

    samples: int = 0
    spans: int = 0
    dropped: int = 0
    """Spans that the collector did not take."""
    gone: int = 0
    """Samples that were trimmed, or cannot be read."""


@dataclass(slots=True)
class Tracer:
    """Sends the traces of a run."""

    bus: Bus
    session: aiohttp.ClientSession
    url: str
    every: int
    headers: Mapping[str, str] = field(default_factory=dict)
    first_pause_s: float = FIRST_PAUSE_S
    sent: Sent = field(default_factory=Sent)

    async def run(self, from_step: int, *, until: int | None = None) -> None:
        """Follow PLAN, up to sequence ``until`` if it is given."""
        plans: dict[int, tuple[float, Plan]] = {}
        if until == 0:
            return
        async for seq, stored_s, record in self.bus.plans.stamped():
            if isinstance(record, Plan):
                plans[record.step] = (stored_s, record)
            elif isinstance(record, Done) and record.step >= from_step and record.step in plans:
                planned_s, plan = plans.pop(record.step)
                await self._send(plan.seqs.tolist(), stored_s, planned_s=planned_s, step=record.step)
            elif isinstance(record, Settle) and record.step >= from_step:
                await self._send(record.seqs.tolist(), stored_s, reason=record.reason)
            if until is not None and seq >= until:
                return

    async def _send(
        self, seqs: Sequence[int], ended_s: float, *, planned_s: float | None = None, step: int = 0, reason: str = ""
    ) -> None:
        history, spans = History(self.bus.jet), list[JsonObject]()
        for seq in (seq for seq in seqs if seq % self.every == 0):
            try:
                stored = await history.payload(seq)
                if isinstance(stored.data, WireError):
                    raise stored.data
                sample = decode_sample(stored.data)
            except (NotFound, ValueError):  # a WireError is a ValueError
                self.sent.gone += 1
                continue
            way = Way(
                run=self.bus.run,
                seq=seq,
                stored_s=stored.stored_s,
                sample=sample,
                ended_s=ended_s,
                planned_s=planned_s,
                step=step,
                reason=reason,
            )
            self.sent.samples += 1
            spans += spans_of(way)
        for begin in range(0, len(spans), MOST_SPANS):
            await self._post(spans[begin : begin + MOST_SPANS])

    async def _post(self, spans: Sequence[JsonObject]) -> None:
        """Send spans, in several tries. Spans that the collector refuses, or does not take, are dropped."""
        body, pause_s, reason = request_of(self.bus.run, spans), self.first_pause_s, ""
        for attempt in range(MOST_TRIES):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            try:
                # The headers may have a secret, which is not of the host that a redirect names.
                async with self.session.post(
                    self.url, json=body, headers=self.headers, allow_redirects=False
                ) as answer:
                    if answer.status < 300:
                        self.sent.spans += len(spans)
                        return
                    reason = f"status {answer.status}"
                    if answer.status not in (429, 502, 503, 504):  # OTLP retries these alone
                        break
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = type(error).__name__
        self.sent.dropped += len(spans)
        log.warning("traces: spans dropped count=%d of the start=%d reason=%s", len(spans), self.sent.dropped, reason)


def headers_in(text: str) -> dict[str, str]:
    """Return the headers of ``OTEL_EXPORTER_OTLP_HEADERS``, ``name=value,name=value``. Raises ValueError.

    Values are percent-encoded. Source: OpenTelemetry, Protocol Exporter: the format of W3C Baggage, section 3.2.
    """
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if any(not equals or not name.strip() for name, equals, _ in pairs):
        raise ValueError(f"{HEADERS_VARIABLE}: want name=value, with commas between them, got another text")
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}


async def export_traces(
    url: str, run: str, draining: asyncio.Event, *, endpoint: str, every: int, from_step: int, until_end: bool
) -> Sent:
    """Send the traces of a run until drained, or up to its present end. Raises BusError."""
    headers = headers_in(os.environ.get(HEADERS_VARIABLE, ""))
    async with (
        connect(url, run, name="traces", wait_s=CONNECT_S) as bus,
        open_session(total_s=TIMEOUT_S, proxied=True) as session,
    ):
        tracer = Tracer(bus, session, f"{endpoint.rstrip('/')}/v1/traces", every, headers)
        until = (await bus.plans.state()).last_seq if until_end else None
        await first_of(tracer.run(from_step, until=until), draining.wait())
    return tracer.sent
