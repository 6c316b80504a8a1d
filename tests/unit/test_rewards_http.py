"""Rewards over HTTP against real servers: one that misbehaves in every way, and the reward server itself."""

import asyncio
import gzip
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web

from tests.refusals import refusal
from tests.waits import LIMIT_S, until
from tests.web_server import web_server
from tidemill.actors.http_api import decode
from tidemill.actors.scoring import RewardServer, ScoreBody, serving
from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.messages import Status
from tidemill.rewards import remote as calls
from tidemill.rewards.errors import BadRewardOption, RewardFailed
from tidemill.rewards.judge import Judge, fill
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import bind, load
from tidemill.rewards.remote import Remote
from tidemill.rewards.scorers import opened

Answer = Callable[[int, Any], web.StreamResponse]


def request(response: str = "r", **more: Any) -> RewardRequest:
    return RewardRequest(
        **{"prompt": "p", "response": response, "label": {"gold": 1}, "status": Status.COMPLETED, **more}
    )


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[tuple[str, list[Any]]]:
    """Serve ``answer(number of the request, its JSON)``; yields the URL and the requests."""
    asked: list[Any] = []

    async def handle(http: web.Request) -> web.StreamResponse:
        asked.append(await http.json())
        return answer(len(asked), asked[-1])

    application = web.Application()
    application.router.add_post("/{path:.*}", handle)
    async with web_server(application) as url:
        yield f"{url}/v1", asked


@asynccontextmanager
async def asking(made: Any) -> AsyncIterator[Any]:
    try:
        yield made
    finally:
        await made._calls.close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FIRST_PAUSE_S", 0.001)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (0.5, 0.5),
        (1, 1),
        ({"score": 1.0, "form": 0.0}, {"score": 1.0, "form": 0.0}),
        ({"reward": 0.25}, {"reward": 0.25}),
        ({"reward": {"score": 1.0}, "log": "text"}, {"score": 1.0}),
        ({"reward": 2.0, "log": "text"}, 2.0),
    ],
)
async def test_an_answer_is_a_reward(answer: Any, reward: Any) -> None:
    async with (
        answering(lambda number, asked: web.json_response(answer)) as (url, asked),
        asking(Remote(url)) as remote,
    ):
        assert await remote(request(tokens=np.array([1, 70_000], np.int32), metadata={"a": 1})) == reward
    assert asked[0]["prompt"] == "p" and asked[0]["label"] == {"gold": 1} and asked[0]["metadata"] == {"a": 1}
    assert decode(asked[0], ScoreBody).request().tokens.tolist() == [1, 70_000]


@pytest.mark.parametrize("first", [500, 503, 429, "rubbish", "list", "text", "empty", "endless", "packed"])
async def test_what_may_be_better_the_next_time_is_asked_again(first: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ANSWER_BYTES", 1000)

    def answer(number: int, asked: Any) -> web.StreamResponse:
        if number == 3:
            return web.json_response(1.0)
        if isinstance(first, int):
            return web.Response(status=first, text="later")
        if first == "packed":
            return web.Response(body=gzip.compress(b" " * (1 << 24)), headers={"Content-Encoding": "gzip"})
        bodies = {"rubbish": "{", "list": "[1]", "text": '"1"', "empty": "", "endless": "1" * 100_000}
        return web.Response(text=bodies[str(first)])

    async with answering(answer) as (url, asked), asking(Remote(url, retries=3)) as remote:
        assert await remote(request()) == 1.0
    assert len(asked) == 3


async def test_attempts_are_bounded_and_the_last_reason_is_told() -> None:
    async with answering(lambda number, asked: web.Response(status=502, text=f"no {number}")) as (url, asked):
        async with asking(Remote(url, retries=2)) as remote:
            with refusal(RewardFailed, reason=re.compile(r"\b502\b.*b'no 3' \(3 ")):
                await remote(request())
    assert len(asked) == 3


async def test_a_server_that_does_not_answer_is_a_reason_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections wait in its queue
        async with asking(Remote(f"http://127.0.0.1:{silent.getsockname()[1]}", retries=0, timeout_s=0.05)) as remote:
            with refusal(RewardFailed, reason=re.compile(r"\b0\.05 s \(1 ")):
                await remote(request())


@pytest.mark.parametrize("status", [400, 401, 404, 302])
async def test_a_call_that_is_wrong_is_not_repeated(status: int) -> None:
    async with (
        answering(lambda number, asked: web.Response(status=status, text="no")) as (url, asked),
        asking(Remote(url)) as remote,
    ):
        with refusal(RewardFailed, reason=re.compile(rf"\b{status}\b")):
            await remote(request())
    assert len(asked) == 1


async def test_a_failure_there_is_a_failure_here() -> None:
    async with (
        answering(lambda number, asked: web.json_response({"failed": "no label"})) as (url, asked),
        asking(Remote(url)) as remote,
    ):
        with refusal(RewardFailed, reason=re.compile("no label$")):
            await remote(request())
    assert len(asked) == 1


async def test_a_server_that_does_not_answer_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "OPEN_S", 0.3)
    up = asyncio.Event()
    async with answering(lambda number, asked: web.json_response(1.0) if up.is_set() else web.Response(status=500)) as (
        url,
        asked,
    ):
        async with asking(Remote(url, retries=calls.OPEN_AFTER - 1)) as remote:
            with refusal(RewardFailed, reason=re.compile(r"\b500\b")):
                await remote(request())
            begin = time.monotonic()
            many = [asyncio.ensure_future(remote(request())) for _ in range(20)]
            async with asyncio.timeout(LIMIT_S):
                await until(lambda: len(asked) >= calls.OPEN_AFTER + 3)
            assert time.monotonic() - begin > 2 * calls.OPEN_S, "one call at a time tries it"
            assert not any(one.done() for one in many)
            up.set()
            assert await asyncio.gather(*many) == [1.0] * 20
            assert await remote(request()) == 1.0


async def test_a_server_that_is_not_there_fails_in_time() -> None:
    async with asking(Remote("http://127.0.0.1:9/score", retries=1, timeout_s=60.0)) as remote:
        with refusal(RewardFailed, reason=re.compile(r"127\.0\.0\.1:9\b.*\(2 ")):
            await remote(request())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "ftp://x"}, "url: want http://"),
        ({"url": "http://x", "retries": -1}, "retries 0..100"),
        ({"url": "http://x", "timeout_s": 0.0}, "timeout_s > 0"),
        ({"url": "http://x", "token_env": "NO_SUCH_VARIABLE"}, "want the variable NO_SUCH_VARIABLE set"),
        ({}, "url: missing, and it has no default"),
        ({"url": "http://x", "retires": 1}, "nearest: 'retries'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRewardOption, match=words):
        bind("remote", options)


# ---- the judge


def said(text: object) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


async def test_the_judge_grades() -> None:
    async with answering(lambda number, asked: said("Score: 3\nNo, better.\nScore: 7.5")) as (url, asked):
        async with asking(Judge(url, model="m")) as judge:
            assert await judge(request("my {label} answer")) == {"score": 0.75, "grade": 7.5}
    text = asked[0]["messages"][0]["content"]
    assert "my {label} answer" in text and '{"gold": 1}' in text and "from 0 to 10" in text
    assert asked[0]["model"] == "m" and asked[0]["temperature"] == 0.0


async def test_a_judge_without_a_grade_in_bounds_is_asked_again() -> None:
    answers = ["I cannot say", "Score: 11", None, "Score: 5"]
    async with (
        answering(lambda number, asked: said(answers[number - 1])) as (url, asked),
        asking(Judge(url, model="m")) as judge,
    ):
        assert (await judge(request()))["score"] == 0.5
    assert len(asked) == 4
    async with (
        answering(lambda number, asked: web.json_response({"choices": []})) as (url, asked),
        asking(Judge(url, model="m")) as judge,
    ):
        with refusal(RewardFailed, reward="judge", outside=True, reason=re.compile(r"choices\[0\]\.message\.content")):
            await judge(request())


def test_a_template_is_filled_without_reading_braces_elsewhere() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "{low}"}]
    found = fill('{"a": {prompt}} {response} {label} {x}', request("{prompt}", prompt=messages, label=None), low=0.0)
    assert found == '{"a": user: q\n\nassistant: {low}} {prompt} null {x}'


def test_a_judge_reads_parts_and_calls_of_messages_as_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"ü": 1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, said]
    found = fill("{prompt} {label}", request("x", prompt=messages, label=[{"x": 1}]))
    assert found == 'user: ab\n\nassistant: {"name": "add", "arguments": {"ü": 1}} [{"x": 1}]'


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"low": 1.0, "high": 1.0}, "low < high"),
        ({"template": "no"}, "want {response}"),
        ({"pattern": "("}, "pattern: "),
        ({"pattern": "x"}, "want a group"),
    ],
)
def test_bad_options_of_the_judge_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRewardOption, match=words):
        bind("judge", {"url": "http://x", "model": "m", **options})


# ---- the server


async def test_the_server_scores_what_the_client_asks() -> None:
    async with (
        serving(RewardServer("exact", load("exact"), token="t"), "127.0.0.1", 0) as url,
        ClientSession() as session,
    ):
        for token, status in (("", 401), ("x", 401), ("t", 200)):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with session.post(
                f"{url}/score", json={"prompt": "p", "response": "4", "label": "4"}, headers=headers
            ) as response:
                assert response.status == status
                found = await response.json()
        assert found == {"reward": 1.0}
        async with session.get(f"{url}/health") as response:
            assert await response.json() == {"reward": "exact", "running": 0, "scored": 1, "refused": 2}


async def test_client_and_server_in_their_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_SERVER_TOKEN", "secret")
    limits = ProcessLimits(timeout_s=LIMIT_S, workers=2)
    async with opened("tests.child_rewards:echo", {}, limits) as there:
        async with serving(RewardServer("echo", there, token="secret"), "127.0.0.1", 0) as url:
            options = {"url": f"{url}/score", "token_env": "REWARD_SERVER_TOKEN"}
            async with opened("remote", options, limits) as score:
                asked = request("abc", tokens=np.array([1, 2], np.int32), metadata={"n": 7}, label={"gold": 4})
                found = await score(asked)
                assert found == {
                    "response": 3.0,
                    "tokens": 3.0,
                    "metadata": 7.0,
                    "prompt": 1.0,
                    "label": 4.0,
                    "truncated": 0.0,
                }
                with refusal(RewardFailed, reason=re.compile("KeyError")):
                    await score(request("abc", label={"gold": 4}))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"prompt": "p"}',
        b'{"prompt": 3, "response": "r"}',
        b'{"prompt": "p", "response": "r", "status": "x"}',
        b'{"prompt": "p", "response": "r", "tokens": "?"}',
        b'{"prompt": "p", "response": "r", "metadata": []}',
        b"[" * 100_000,
        b"\xff",
    ],
)
async def test_bad_requests_are_refused_with_the_reason(body: bytes) -> None:
    async with serving(RewardServer("exact", load("exact")), "127.0.0.1", 0) as url, ClientSession() as session:
        async with session.post(f"{url}/score", data=body) as response:
            assert response.status == 400
            assert json.loads(await response.text())["failed"]


def broken(request: RewardRequest) -> float:
    raise KeyError("gold")


async def test_a_reward_that_fails_is_an_answer() -> None:
    async with (
        serving(RewardServer("broken", load(f"{__name__}:broken")), "127.0.0.1", 0) as url,
        ClientSession() as session,
    ):
        async with session.post(f"{url}/score", json={"prompt": "p", "response": "r"}) as response:
            answer = await response.json()
            assert (
                response.status == 200
                and answer["failed"].startswith("KeyError('gold') (")
                and "test_rewards_http.py, line " in answer["failed"]
            )
