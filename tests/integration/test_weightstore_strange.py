"""Engines, and rows, with invalid content for the publisher: they are named and left out, and the learner goes on."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.integration.test_weightstore_publisher import Loader, catch_up, publishing
from tests.receiver_app import digest, tiny_tensors, write_tiny_companions
from tests.refusals import refusal
from tests.web_server import web_server
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import Fenced
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.rows import Capabilities, LiveRow
from tidemill.weightstore.errors import PartLost, ReceiverFailed
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.push.member import Member, Updated
from tidemill.weightstore.transport.http_receiver import HttpReceiver
from tidemill.weightstore.transport.port import Deadlines, WeightReceiver

LATIN = {
    "status": 200,
    "body": b"Passerelle d\xe9faillante",
    "headers": {"Content-Type": "text/html; charset=none-such"},
}
PART: dict[str, Any] = {"names": ["w"], "dtype": "float32", "sum": "0"}


def told(**strange: Any) -> bytes:
    return json.dumps({"scheme": "sum64", "parts": [PART | strange]}).encode()


@asynccontextmanager
async def member_of(path: str, answer: dict[str, Any]) -> AsyncIterator[Member]:
    """Yield an engine with this answer at one path, and valid ones at the others."""

    async def handle(request: web.Request) -> web.Response:
        well = {"body": told() if request.path == "/weights_checksums" else b'{"success": true}'}
        return web.Response(**(answer if request.path == path else well))

    app = web.Application()
    app.router.add_post("/{path}", handle)
    async with web_server(app) as url, aiohttp.ClientSession() as session:
        yield Member(row_of(url), HttpReceiver(session, url, epoch=3, deadlines=Deadlines(20)), deadlines=Deadlines(20))


def row_of(url: str) -> LiveRow:
    return LiveRow(
        role="engine",
        id="strange",
        host="test",
        pid=1,
        phase="serving",
        address=url,
        capabilities=Capabilities(single_request_push=True),
    )


async def pushed(member: Member) -> Updated:
    await member.begin(1)

    async def nothing_differs(told: ChecksumReport) -> list[str]:
        return []

    return await member.finish(1, nothing_differs)


async def test_a_rank_that_is_lost_while_checksums_are_compared_is_no_failure_of_the_engine() -> None:
    async def lost(told: ChecksumReport) -> list[str]:
        raise PartLost("/differences", "asking", "rank 7 of the learner")

    async with member_of("", {}) as member:
        await member.begin(1)
        with refusal(PartLost, group="/differences", reason=re.compile(r"\brank 7\b")):
            await member.finish(1, lost)


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("/begin_weight_update", LATIN | {"status": 502}, "begin: HTTP 502: Passerelle d"),
        ("/begin_weight_update", {"status": 409, "text": "somebody else's"}, "begin: HTTP 409: somebody else's"),
        ("/begin_weight_update", {"status": 409, "body": b'{"epoch": null}'}, "begin: HTTP 409"),
        ("/begin_weight_update", {"status": 409, "body": b'{"epoch": 3}'}, "begin: HTTP 409"),
        ("/weights_checksums", {"body": told(dtype=["x"])}, "verify: checksums: want"),
        ("/weights_checksums", {"body": told(zeros=-1)}, "verify: checksums: want"),
        ("/weights_checksums", {"body": told(zeros=[])}, "verify: checksums: want"),
        ("/weights_checksums", {"body": b'{"scheme": [], "parts": []}'}, "verify: checksums: want"),
        ("/weights_checksums", {"body": b'{"scheme": "sum64", "parts": ["w"]}'}, "verify: checksums: want"),
        ("/end_weight_update", {"body": b'{"stall_s": "long"}'}, "end: stall_s: want seconds, got 'long'"),
        ("/end_weight_update", {"body": b'{"stall_s": NaN}'}, "end: stall_s: want seconds, got nan"),
    ],
)
async def test_a_strange_answer_is_a_failure_of_its_engine_alone(path: str, answer: dict[str, Any], why: str) -> None:
    async with member_of(path, answer) as member:
        with pytest.raises(ReceiverFailed, match=why):
            await pushed(member)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (LATIN | {"status": 502}, "transfer: HTTP 502: Passerelle d"),
        ({"status": 404}, "transfer: HTTP 404"),
        ({"body": b'{"success": false, "message": "no"}'}, "transfer: HTTP 200: no"),
        ({"body": b'{"stall_s": "long"}'}, "transfer: stall_s: want seconds, got 'long'"),
    ],
)
async def test_a_strange_answer_to_a_single_request_push_is_a_failure_of_its_engine(
    answer: dict[str, Any], why: str
) -> None:
    async with member_of("/receive_push", answer) as member:
        with pytest.raises(ReceiverFailed, match=why):
            await member.receive(1, [], serve=True)
    async with member_of("/receive_push", {"body": b"[]"}) as member:
        assert member.single_request and await member.receive(1, [], serve=True) == 0


async def test_strange_but_harmless_answers_are_passed_over() -> None:
    for path, answer in (("/end_weight_update", {"body": b'{"stall_s": null}'}), ("/begin_weight_update", LATIN)):
        async with member_of(path, answer) as member:
            assert (await pushed(member)).stall_s == 0


async def test_only_a_higher_epoch_fences() -> None:
    async with member_of("/end_weight_update", {"status": 409, "body": b'{"epoch": 4}'}) as member:
        with refusal(Fenced, mine=3, seen=4):
            await pushed(member)


async def test_loading_from_a_disk_may_take_longer_than_a_phase() -> None:
    """The engine answers a load only when it has missed the deadline of a phase."""
    missed = asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        await missed.wait()
        return web.json_response({"success": True, "stall_s": 2.0})

    app = web.Application()
    app.router.add_post("/{path}", handle)
    short, patient = Deadlines(0.05, load_s=60.0), Deadlines(60.0, load_s=60.0)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        member = Member(row_of(url), HttpReceiver(session, url, epoch=3, deadlines=patient), deadlines=short)
        load = asyncio.create_task(member.load("/model", 0))
        with refusal(ReceiverFailed, phase="begin", reason=re.compile(r"\b0\.05 s$"), answered=False):
            await member.begin(1)
        assert not load.done()
        missed.set()
        await load


async def test_the_learners_own_comparison_has_no_deadline_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as the weights are large, after the engine has answered."""
    open_s: list[float | None] = []

    class Limit(asyncio.Timeout):  # type: ignore[misc]
        async def __aenter__(self) -> Any:
            open_s.append(self.when())
            return await super().__aenter__()

        async def __aexit__(self, *error: Any) -> Any:
            open_s.pop()
            return await super().__aexit__(*error)

    monkeypatch.setattr(
        asyncio, "timeout", lambda delay_s: Limit(delay_s and asyncio.get_running_loop().time() + delay_s)
    )
    limits: dict[str, list[float | None]] = {}

    class Whole:
        url, carries = "whole", False

        async def checksums(self, of: str = "update") -> ChecksumReport:
            limits["report"] = list(open_s)
            return ChecksumReport(scheme="sum64", parts=())

        async def end(self) -> float:
            return 0.0

    async def check(report: ChecksumReport) -> list[str]:
        limits["comparison"] = list(open_s)
        return []

    updated = await Member(row_of("whole"), cast(WeightReceiver, Whole()), deadlines=Deadlines(20)).finish(1, check)
    assert updated.verify_s is not None
    assert len(limits["report"]) == 1 and limits["report"][0] is not None and limits["comparison"] == [None]


async def test_whatever_an_adapter_raises_is_a_failure_of_its_engine() -> None:
    class Odd:
        url = "odd"
        carries = False

        async def begin(self, version: int, adapter: None) -> None:
            raise LookupError("not foreseen")

    with refusal(ReceiverFailed, url="odd", phase="begin", reason=re.compile("^LookupError")):
        await Member(row_of("odd"), cast(WeightReceiver, Odd()), deadlines=Deadlines(20)).begin(1)


def test_a_want_without_a_version_is_passed_over_and_the_next_one_answered(
    bus_url: str, run_id: str, tmp_path: Path
) -> None:
    async def want(**row: Any) -> None:
        async with connect(bus_url, run_id, BusConfig(), name="odd", wait_s=60) as bus:
            await bus.rows("weights").put("want", row)

    asyncio.run(want(by="odd"))  # stored before the start
    model, loader = write_tiny_companions(tmp_path / "model"), Loader()
    with publishing(bus_url, run_id, tmp_path / "snapshots", model_dir=model) as publisher:
        publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0)
        asyncio.run(want(by="odd", version="newest"))
        catch_up(bus_url, run_id, tmp_path / "late", loader)
        assert (loader.version, loader.loaded) == (1, digest(tiny_tensors(1)))
        publisher.publish(2, tiny_tensors(2).items(), wait=True).result(0)
