"""Errors of each client of an engine's API when the engine is unreachable, is silent, breaks off, or answers without
JSON.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.refusals import refusal
from tests.router_kit import Faulty, faulty
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.errors import EngineError, EngineFailed, EngineGone, EngineUnavailable
from tidemill.actors.serving.sglang.server_process import Api
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.wire.messages import Sampling
from tidemill.weightstore.errors import ReceiverFailed
from tidemill.weightstore.transport.http_receiver import HttpReceiver
from tidemill.weightstore.transport.port import Deadlines

DEADLINE_S = 2.0
"""For an engine that is silent; the others answer in time."""


class Clients:
    """The three clients of one URL."""

    def __init__(self, url: str, session: aiohttp.ClientSession, deadline_s: float) -> None:
        self.http, self.api, self._deadline_s = HttpEngine(url, command_timeout_s=deadline_s), Api(url), deadline_s
        self.receiver = HttpReceiver(session, url, epoch=1, deadlines=Deadlines(deadline_s))

    async def errors(self) -> list[Exception]:
        """Return the errors that a command of each client raises."""
        raised: list[Exception] = []
        for call in (
            self.http.pause(),
            self.api.call("POST", "/pause_generation", {}, timeout_s=self._deadline_s),
            self.receiver.begin(1),
        ):
            with pytest.raises((EngineError, ReceiverFailed)) as caught:
                await call
            raised.append(caught.value)
        return raised


@asynccontextmanager
async def clients(url: str, deadline_s: float = 60.0) -> AsyncIterator[Clients]:
    async with aiohttp.ClientSession() as session:
        them = Clients(url, session, deadline_s)
        try:
            yield them
        finally:
            await them.http.close()
            await them.api.close()


@asynccontextmanager
async def of_faulty(does: str) -> AsyncIterator[tuple[Faulty, Clients]]:
    async with faulty() as engine, clients(engine.url, DEADLINE_S if does == "hang" else 60.0) as them:
        engine.does = does
        yield engine, them


async def test_a_connection_that_is_refused() -> None:
    with KeptPort() as port:
        async with clients(f"http://127.0.0.1:{port.number}") as them:
            errors = await them.errors()
    assert [type(error) for error in errors] == [EngineUnavailable, EngineUnavailable, ReceiverFailed]
    assert all("Connect" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("does", "kinds", "why"),
    [
        ("hang", (EngineUnavailable, EngineUnavailable, ReceiverFailed), f"no answer within {DEADLINE_S:g} s"),
        ("break", (EngineGone, EngineUnavailable, ReceiverFailed), "ServerDisconnectedError"),
        ("503", (EngineUnavailable, EngineUnavailable, ReceiverFailed), "full"),
        ("500", (EngineFailed, EngineFailed, ReceiverFailed), "broken"),
    ],
)
async def test_an_engine_that_does_not_answer_well(does: str, kinds: Any, why: str) -> None:
    async with of_faulty(does) as (_, them):
        errors = await them.errors()
    assert tuple(type(error) for error in errors) == kinds
    assert all(why in str(error) for error in errors), errors
    assert isinstance(errors[2], ReceiverFailed) and errors[2].answered == does.isdecimal()


async def test_an_answer_that_is_labelled_json_and_is_none() -> None:
    async with of_faulty("no json") as (_, them):
        for call in (them.http.pause(), them.api.call("POST", "/pause_generation", {})):
            with refusal(EngineFailed, place="/pause_generation"):
                await call
        await them.receiver.begin(1)  # its commands need only the status of the answer


def state(**changes: Any) -> bytes:
    """Return a whole response of one token, with its tokens or fields of its meta information changed."""
    ids = changes.pop("output_ids", [5])
    meta = {"id": "x", "finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 5, None]], **changes}
    meta.setdefault("weight_versions", [{"version": "0", "start": 0, "end": 1}])
    return json.dumps({"text": "a", "output_ids": ids, "meta_info": meta}).encode()


UNREADABLE = {
    "no JSON": b"{",
    "no UTF-8": b'"\xff"',
    "too deep": b"[" * 100_000,
    "another value": b"3",
    "a token beyond 32 bits": state(output_ids=[2**40]),
    "tokens in lists": state(output_ids=[[5]]),
    "no log-prob in an entry": state(output_token_logprobs=[[]]),
    "a count that is none": state(prompt_tokens="many"),
    "a span that is none": state(weight_versions=[{"version": "0", "start": None, "end": 1}]),
    "an infinite count": state(cached_tokens=float("inf")),
}


async def test_the_response_of_a_stream() -> None:
    async with of_faulty("events") as (engine, them):
        engine.events = b"data: " + state() + b"\n\ndata: [DONE]\n\n"
        assert [made.tokens.tolist() async for made in them.http.stream([1], Sampling())] == [[5]]


@pytest.mark.parametrize("name", UNREADABLE)
async def test_an_event_that_is_no_response_is_a_failure_of_the_engine(name: str) -> None:
    async with of_faulty("events") as (engine, them):
        engine.events = b"data: " + UNREADABLE[name] + b"\n\ndata: [DONE]\n\n"
        with pytest.raises(EngineFailed):
            async for _ in them.http.stream([1], Sampling()):
                pass
