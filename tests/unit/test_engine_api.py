"""The table of an engine's statuses, and the error that each of its three clients makes of them."""

import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import psutil
import pytest
from aiohttp import web

from tests.web_server import web_server
from tidemill.actors.engines import engine_client
from tidemill.actors.errors import (
    BadRequest,
    EngineFailed,
    EngineGone,
    EngineUnavailable,
    StaleEpoch,
    VersionUnavailable,
)
from tidemill.actors.serving.sglang import server_process
from tidemill.bus.errors import Fenced
from tidemill.bus.http.client import ApiClient, CallFailed, Failure, refusal
from tidemill.weightstore.errors import ReceiverFailed
from tidemill.weightstore.transport.http_receiver import HttpReceiver, _NotSupported
from tidemill.weightstore.transport.port import Deadlines

WHY = {"error": {"message": "why", "code": 400}}
URL, PATH = "http://x", "/begin_weight_update"


def of_receiver(failed: CallFailed) -> Exception:
    session = cast(aiohttp.ClientSession, None)
    return HttpReceiver(session, URL, epoch=3, deadlines=Deadlines(1.0))._error(failed)


@pytest.mark.parametrize(
    ("status", "body", "failure", "client", "sglang", "receiver"),
    [
        (400, WHY, Failure.REFUSED, BadRequest, BadRequest, ReceiverFailed),
        (401, WHY, Failure.UNAUTHORIZED, EngineUnavailable, BadRequest, ReceiverFailed),
        (404, WHY, Failure.REFUSED, BadRequest, BadRequest, _NotSupported),
        (405, WHY, Failure.REFUSED, BadRequest, BadRequest, _NotSupported),
        (408, WHY, Failure.UNAVAILABLE, EngineUnavailable, EngineUnavailable, ReceiverFailed),
        (409, {"message": "why", "epoch": 7}, Failure.STALE, StaleEpoch, BadRequest, Fenced),
        (409, {"message": "why", "epoch": 3}, Failure.STALE, StaleEpoch, BadRequest, ReceiverFailed),
        (409, {"message": "why", "epoch": None}, Failure.STALE, StaleEpoch, BadRequest, ReceiverFailed),
        (422, WHY, Failure.REFUSED, BadRequest, BadRequest, ReceiverFailed),
        (429, {"message": "why"}, Failure.UNAVAILABLE, EngineUnavailable, EngineUnavailable, ReceiverFailed),
        (499, WHY, Failure.ABORTED, BadRequest, server_process.Aborted, ReceiverFailed),
        (500, WHY, Failure.FAILED, EngineFailed, EngineFailed, ReceiverFailed),
        (501, WHY, Failure.FAILED, EngineFailed, EngineFailed, _NotSupported),
        (502, {"error": "why"}, Failure.UNAVAILABLE, EngineUnavailable, EngineUnavailable, ReceiverFailed),
        (503, WHY, Failure.UNAVAILABLE, EngineUnavailable, EngineUnavailable, ReceiverFailed),
        (
            503,
            {**WHY, "unavailable": "VersionUnavailable"},
            Failure.UNAVAILABLE,
            VersionUnavailable,
            EngineUnavailable,
            ReceiverFailed,
        ),
        (504, WHY, Failure.UNAVAILABLE, EngineUnavailable, EngineUnavailable, ReceiverFailed),
        (302, WHY, Failure.FAILED, EngineFailed, EngineFailed, ReceiverFailed),
    ],
)
def test_a_status_becomes_the_error_of_each_client(
    status: int, body: Any, failure: Failure, client: type, sglang: type, receiver: type
) -> None:
    failed = refusal(URL, PATH, status, json.dumps(body).encode())
    assert (failed.failure, failed.status, failed.reason) == (failure, status, "why")
    for error, kind in (
        (engine_client.error_of_call(failed), client),
        (server_process.error_of_call(failed), sglang),
        (of_receiver(failed), receiver),
    ):
        assert type(error) is kind
        assert "why" in str(error) or kind is Fenced


@pytest.mark.parametrize("status", [400, 409, 500, 503])
@pytest.mark.parametrize(
    ("raw", "reason"),
    [(b"<html>", "<html>"), (b"[1]", "[1]"), (b"", ""), (b'{"error": null}', '{"error": null}'), (b"\xe9", "\ufffd")],
)
def test_a_body_that_names_no_reason_is_the_reason(status: int, raw: bytes, reason: str) -> None:
    failed = refusal(URL, PATH, status, raw)
    assert failed.reason == (reason or f"HTTP {status}")
    known = refusal(URL, PATH, status, json.dumps(WHY).encode())
    assert type(engine_client.error_of_call(failed)) is type(engine_client.error_of_call(known))


@pytest.mark.parametrize(
    ("failure", "client", "sglang"),
    [
        (Failure.NOT_CONNECTED, EngineUnavailable, EngineUnavailable),
        (Failure.NO_ANSWER, EngineUnavailable, EngineUnavailable),
        (Failure.BROKEN, EngineGone, EngineUnavailable),
        (Failure.UNREADABLE, EngineFailed, EngineFailed),
    ],
)
def test_no_answer_becomes_the_error_of_each_client(failure: Failure, client: type, sglang: type) -> None:
    failed = CallFailed(URL, PATH, failure, "why")
    assert (type(engine_client.error_of_call(failed)), type(server_process.error_of_call(failed))) == (client, sglang)
    error = of_receiver(failed)
    assert isinstance(error, ReceiverFailed) and (error.phase, error.answered) == ("begin_weight_update", False)


@asynccontextmanager
async def client_of(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[ApiClient]:
    """Yield a client of a server with this answer at ``PATH``."""
    app = web.Application()
    app.router.add_post(PATH, answer)
    async with web_server(app) as url:
        client = ApiClient(url, lambda failed: failed)
        try:
            yield client
        finally:
            await client.close()


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": [1, -0.0, 1e-320, 0.1], "a": 12345678901234567890123, "b": "\xc3\xa4"}',
        b'{"log_prob": [NaN, -Infinity]}',
        b'"half \\ud800"',
        '{"text": "\u00e4"}'.encode("utf-16"),
    ],
)
async def test_an_answer_has_the_values_that_pythons_reader_gives(raw: bytes) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=raw, content_type="application/json")

    async with client_of(answer) as client:
        assert repr(await client.call("POST", PATH, {})) == repr(json.loads(raw))


@pytest.mark.parametrize(
    ("status", "failure"), [(200, Failure.UNREADABLE), (400, Failure.REFUSED), (503, Failure.UNAVAILABLE)]
)
async def test_a_compressed_answer_takes_no_memory(status: int, failure: Failure) -> None:
    """A teacher elsewhere may send half a gigabyte in 500 kB."""
    pack = zlib.compressobj(9, zlib.DEFLATED, 31)
    begin, again = (pack.compress(b" " * (1 << 20)) + pack.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb, asked = begin + again * 512, list[str]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Accept-Encoding"])
        return web.Response(
            status=status, body=bomb, headers={"Content-Encoding": "gzip"}, content_type="application/json"
        )

    async with client_of(answer) as client:
        before = psutil.Process().memory_info().rss
        with pytest.raises(CallFailed) as failed:
            await client.call("POST", PATH, {})
        assert (failed.value.failure, asked) == (failure, ["identity"])
        assert psutil.Process().memory_info().rss - before < 64 << 20
