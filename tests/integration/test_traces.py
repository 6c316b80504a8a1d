"""`tidemill metrics traces`: the way of samples in OTLP, taken by a receiver with OpenTelemetry's own messages."""

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.bus_fixtures import BusOpener
from tests.bus_kit import make_episode, make_sample
from tests.launched import run_tidemill
from tests.refusals import refusal
from tests.web_server import web_server
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Done, Plan, Sample, Settle, Timings
from tidemill.launch.cli import main as cli
from tidemill.launch.metrics.traces import MOST_TRIES, Sent, Tracer, headers_in

BEGAN_S = 1_800_000_000.0
TIMES = Timings(queued_s=1.0, generating_s=2.0, tools_s=0.5, reward_s=0.25)
IDS = ("traceId", "spanId", "parentSpanId")


class Collector:
    """A collector that takes what OpenTelemetry's messages can hold, and refuses the rest with 400."""

    def __init__(self, *statuses: int, location: str = "") -> None:
        self.spans: list[Any] = []
        self.runs: set[str] = set()
        self.headers: list[str] = []
        self.requests = 0
        self._statuses, self._location = list(statuses), location

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        async with web_server(app) as url:
            yield url

    async def _take(self, request: web.Request) -> web.Response:
        self.requests += 1
        self.headers.append(request.headers.get("x-team", ""))
        if self._statuses and (status := self._statuses.pop(0)) != 200:
            return web.Response(status=status, headers={"Location": self._location} if self._location else None)
        try:
            message = json_format.Parse(json.dumps(_with_base64(await request.json())), ExportTraceServiceRequest())
        except (json_format.ParseError, ValueError) as error:
            return web.Response(status=400, text=str(error))
        for resource in message.resource_spans:
            self.runs |= {one.value.string_value for one in resource.resource.attributes if one.key == "tidemill.run"}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.json_response({})


def _with_base64(value: Any) -> Any:
    """Return OTLP's JSON as protobuf's, which has base64 in the place of hexadecimal ids. Raises ValueError."""
    if isinstance(value, dict):
        return {
            name: base64.b64encode(bytes.fromhex(part)).decode() if name in IDS else _with_base64(part)
            for name, part in value.items()
        }
    return [_with_base64(part) for part in value] if isinstance(value, list) else value


async def written(bus: Bus, *samples: Sample, step: int = 1) -> list[int]:
    """Store the samples, and the plan and outcome of a step with all but the last, which is dropped."""
    await bus.plans.fence(1)
    seqs = [await bus.samples.publish(sample) for sample in samples]
    trained = np.array(seqs[:-1], np.int64)
    await bus.plans.append(
        Plan(
            epoch=1,
            step=step,
            tasks=np.array([1], np.int64),
            seqs=trained,
            group_sizes=np.array([len(trained)], np.int32),
            ranks=np.zeros(len(trained), np.int32),
            micro_batches=np.zeros(len(trained), np.int32),
            version_steps={3: 0},
            oldest_step=None,
            data_parallel=1,
            num_micro_batches=1,
            config_digest="",
            chain="",
        )
    )
    await bus.plans.append(Done(epoch=1, step=step, metrics={}))
    dropped = np.array(seqs[-1:], np.int64)
    await bus.plans.append(Settle(epoch=1, reason="stale", tasks=np.array([2], np.int64), seqs=dropped, step=step + 1))
    return seqs


def one(bus: Bus, index: int, **changes: Any) -> Sample:
    return make_sample(bus.run, index=index, timings=TIMES, created_s=BEGAN_S, attempt=f"a{index}", **changes)


async def traced(bus: Bus, url: str, *, every: int = 1, from_step: int = 1, **headers: str) -> Sent:
    async with aiohttp.ClientSession() as session:
        tracer = Tracer(bus, session, f"{url}/v1/traces", every, headers, first_pause_s=0.0)
        await tracer.run(from_step, until=(await bus.plans.state()).last_seq)
    return tracer.sent


async def test_a_samples_way_is_a_trace_that_opentelemetry_can_read(open_bus: BusOpener) -> None:
    collector = Collector()
    async with open_bus() as bus, collector.listening() as url:
        seqs = await written(bus, one(bus, 0), one(bus, 1))
        sent = await traced(bus, url)
        stored_s = [(await bus.jet.message(f"TM_{bus.run}_SAMPLES", seq)).stored_s for seq in seqs]
    assert sent == Sent(samples=2, spans=13) and collector.runs == {bus.run}
    traces: dict[bytes, list[Any]] = {}
    for span in collector.spans:
        traces.setdefault(span.trace_id, []).append(span)
    trained, dropped = traces.values()
    assert [span.name for span in trained] == [
        *("sample", "queued", "generating", "tools", "reward", "buffered", "trained")
    ]
    root, *phases = trained
    assert root.parent_span_id == b"" and {span.parent_span_id for span in phases} == {root.span_id}
    assert len(root.trace_id) == 16 and len({span.span_id for span in trained}) == 7
    begins = [(span.start_time_unix_nano / 1e9 - BEGAN_S) for span in phases[:4]]
    assert begins == pytest.approx([-3.75, -2.75, -0.75, -0.25], abs=1e-5)
    assert all(before.end_time_unix_nano <= after.start_time_unix_nano for before, after in itertools.pairwise(phases))
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in trained)
    assert root.end_time_unix_nano == phases[-1].end_time_unix_nano
    facts = {one.key: one.value for one in root.attributes}
    assert facts["tidemill.sequence"].int_value == seqs[0] and facts["tidemill.step"].int_value == 1
    assert dropped[0].status.message == "dropped: stale" and [span.name for span in dropped][-1] == "buffered"
    assert stored_s[0] < BEGAN_S, "the actor's clock is ahead of the bus, and no phase ends before it begins"


async def test_one_in_n_is_chosen_and_a_second_command_sends_the_same(open_bus: BusOpener) -> None:
    first, second = Collector(), Collector()
    async with open_bus() as bus, first.listening() as url, second.listening() as other:
        await written(bus, *(one(bus, index) for index in range(8)))
        sent = await traced(bus, url, every=3)
        await traced(bus, other, every=3)
        assert sent.samples == 2 and first.spans == second.spans
        assert (await traced(bus, other, from_step=3)).samples == 0


async def test_an_episodes_turns_are_events(open_bus: BusOpener) -> None:
    collector = Collector()
    async with open_bus(rollouts=("calc",)) as bus, collector.listening() as url:
        episode = replace(make_episode(bus.run), timings=TIMES, created_s=BEGAN_S)
        await written(bus, episode, one(bus, 1))
        await traced(bus, url)
    events = next(span for span in collector.spans if span.name == "generating").events
    assert len(events) == len(episode.turns.at) and {event.name for event in events} == {"turn"}  # type: ignore[union-attr]


async def test_a_collector_that_is_busy_is_asked_again_and_one_that_refuses_is_not(open_bus: BusOpener) -> None:
    busy, refusing, away = Collector(503, 429), Collector(400), Collector(*[503] * 99)
    async with open_bus() as bus, busy.listening() as first, refusing.listening() as second, away.listening() as third:
        await written(bus, one(bus, 0), one(bus, 1))
        sent = await traced(bus, first, **headers_in("x-team=tide, x-other=b=c"))
        assert (sent.dropped, sent.spans, busy.requests, busy.headers[0]) == (0, 13, 4, "tide")
        assert (await traced(bus, second)).dropped == 7 and refusing.requests == 2
        assert (await traced(bus, third)).dropped == 13 and away.requests == 2 * MOST_TRIES


async def test_a_redirect_gets_no_headers_and_is_no_delivery(open_bus: BusOpener) -> None:
    other = Collector()
    async with open_bus() as bus, other.listening() as elsewhere:
        redirecting = Collector(*[307] * 9, location=f"{elsewhere}/v1/traces")
        async with redirecting.listening() as url:
            await written(bus, one(bus, 0), one(bus, 1))
            sent = await traced(bus, url, **headers_in("x-team=s3cret"))
    assert (sent.spans, sent.dropped, other.requests) == (0, 13, 0)


def test_values_of_headers_are_percent_encoded() -> None:
    headers = headers_in("authorization=Basic%20dTpwJTIw%3D, x-team=a%2Cb=c")
    assert headers == {"authorization": "Basic dTpwJTIw=", "x-team": "a,b=c"}


async def test_the_command_traces_to_the_present_end(open_bus: BusOpener) -> None:
    collector = Collector()
    async with open_bus() as bus, collector.listening() as url:
        await written(bus, one(bus, 0), one(bus, 1))
        where = ["--bus", bus.connected_url, "--run", bus.run, "--until-end"]
        words = ["metrics", "traces", *where, "--option", f"endpoint={url}", "--option", "every=1"]
        done = await asyncio.to_thread(run_tidemill, *words)
    assert done.returncode == 0, done.errors
    assert "2 samples traced in 13 spans" in done.out and len(collector.spans) == 13


@pytest.mark.parametrize("option", ["every=0", "every=x", "endpoint=collector:4318", "sample=1"])
def test_a_wrong_option_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", "traces", "--bus", "nats://127.0.0.1:1", "--option", option]) == 2
    assert "--option" in capsys.readouterr().err


def test_wrong_headers_are_refused_without_naming_them() -> None:
    with refusal(ValueError, place="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        headers_in("s3cret")
    assert "s3cret" not in str(caught.value)
