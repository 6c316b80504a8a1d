"""The environment ``openenv``: episodes over OpenEnv's WebSocket messages, and servers that are full, broken, silent or
gone.

``tests/env`` has the same against OpenEnv itself (``make test-env``).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.refusals import refusal
from tests.web_server import web_server
from tidemill.actors.episodes.programs import environments
from tidemill.actors.episodes.programs.environments import OpenEnv
from tidemill.actors.episodes.programs.multi_turn import MultiTurn

Answer = Callable[[web.WebSocketResponse, dict[str, Any]], Awaitable[None]]


class Counter:
    """A session: the sum of all numbers so far, over at 10."""

    def __init__(self) -> None:
        self.total = 0

    async def __call__(self, socket: web.WebSocketResponse, message: dict[str, Any]) -> None:
        if message["type"] == "reset":
            self.total = int(message["data"].get("start", 0))
            await socket.send_json(seen(f"at {self.total}"))
        elif message["type"] == "step" and not str(message["data"].get("message")).isdigit():
            await socket.send_json(error("VALIDATION_ERROR", "want a number"))
        else:
            self.total += int(message["data"]["message"])
            await socket.send_json(seen(f"at {self.total}", float(self.total), self.total >= 10))


def seen(text: Any, reward: Any = None, done: bool = False) -> dict[str, Any]:
    return {
        "type": "observation",
        "data": {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done},
    }


def error(code: str, message: str = "no") -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


@asynccontextmanager
async def server(session: Callable[[], Answer]) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Serve sessions at /ws; give the address and all messages so far."""
    messages: list[dict[str, Any]] = []

    async def serve(http: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(http)
        answer = session()
        async for received in socket:
            messages.append(json.loads(received.data))
            if messages[-1]["type"] == "close":
                await socket.close()
            else:
                await answer(socket, messages[-1])
        return socket

    application = web.Application()
    application.router.add_get("/ws", serve)
    async with web_server(application, shutdown_timeout=0.1) as url:
        yield url, messages


async def always(message: dict[str, Any], socket: web.WebSocketResponse) -> None:
    await socket.send_json(message)


async def test_an_episode_is_reset_stepped_and_closed() -> None:
    async with server(Counter) as (url, messages):
        game = OpenEnv(
            url, observation="text", first="{prompt}: {observation}", fields={"by": "me"}, reset={"seed": 1, "start": 2}
        )
        assert await game.reset({"prompt": "Count", "metadata": {"reset": {"start": 3}}}) == "Count: at 3"
        assert await game.step("4") == ("at 7", 7.0, False)
        assert await game.step("four") == ("Error: want a number", 0.0, False)
        assert await game.step("5") == ("at 12", 12.0, True)
        await game.close()
    assert messages[0] == {"type": "reset", "data": {"seed": 1, "start": 3}}
    assert messages[1] == {"type": "step", "data": {"by": "me", "message": "4"}}
    assert messages[-1] == {"type": "close"}


async def test_the_answer_may_be_the_action_and_the_observation_a_map() -> None:
    async with server(Counter) as (url, _):
        game = OpenEnv(url, action="", invalid_reward=-1.0)
        assert json.loads((await game.reset({"prompt": "p"})).removeprefix("p\n\n")) == {"text": "at 0", "metadata": {}}
        assert (await game.step('{"message": "4"}'))[1:] == (4.0, False)
        for text in ("4", "[", "null", '["a"]'):
            told, reward, done = await game.step(text)
            assert told.startswith("Error: want an action as a JSON map") and (reward, done) == (-1.0, False)
        await game.close()


async def test_multi_turn_plays_it() -> None:
    async def answer(http: web.Request) -> web.Response:
        asked.append(await http.json())
        return web.json_response(
            {"id": f"turn-{len(asked)}", "choices": [{"message": {"role": "assistant", "content": "5"}}]}
        )

    asked: list[Any] = []
    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with server(Counter) as (url, messages):
        rollout = MultiTurn(environment="openenv", environment_options={"url": url, "observation": "text"})
        model = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        assert await rollout.run({"prompt": "Count to 10."}, model, "key") == {"turn-1": 5.0, "turn-2": 10.0}
        assert not hasattr(rollout, "resume"), "its sessions tell no state that they could be given"
    await runner.cleanup()
    assert [message["content"] for message in asked[-1]["messages"]] == ["Count to 10.\n\nat 0", "5", "at 5"]
    assert messages[-1] == {"type": "close"}


async def test_a_full_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "RETRY_S", 0.01)
    tries: list[int] = []

    def session() -> Answer:
        tries.append(1)
        return (
            (lambda socket, _: always(error("CAPACITY_REACHED", "all taken"), socket)) if len(tries) < 3 else Counter()
        )

    async with server(session) as (url, _):
        game = OpenEnv(url, observation="text")
        assert (await game.reset({"prompt": "p"})).endswith("at 0") and len(tries) == 3
        await game.close()
        full = OpenEnv(url, wait_seconds=0.05)
        tries.clear()
        monkeypatch.setattr(environments, "RETRY_S", 0.1)
        with pytest.raises(RuntimeError, match=r"no session of the environment within 0\.05 s: all taken"):
            await full.reset({"prompt": "p"})
        await full.close()


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (error("FACTORY_ERROR", "no display"), "refused to reset: no display"),
        ({"type": "observation"}, "want an observation"),
        ({"type": "state", "data": {}}, "want an observation"),
        ([], "want a JSON map"),
        (seen({"b": 1}), "want 'text.a' in the observation, got b"),
        ({"type": "observation", "data": {"observation": 5}}, "want 'text.a' in the observation, got int"),
    ],
)
async def test_what_is_wrong_with_an_answer_is_named(answer: Any, complaint: str) -> None:
    async with server(lambda: lambda socket, _: always(answer, socket)) as (url, _):
        game = OpenEnv(url, observation="text.a")
        with pytest.raises(RuntimeError, match=complaint):
            await game.reset({"prompt": "p"})
        await game.close()


async def test_rewards_are_numbers_and_failures_of_the_environment_fail_the_episode() -> None:
    answers = [seen("a"), seen("b", None), seen("c", "much"), error("EXECUTION_ERROR", "boom")]
    async with server(lambda: lambda socket, _: always(answers.pop(0), socket)) as (url, _):
        game = OpenEnv(url, observation="text")
        await game.reset({"prompt": "p"})
        assert await game.step("x") == ("b", 0.0, False)
        with refusal(RuntimeError, got="'much'"):
            await game.step("x")
        with pytest.raises(RuntimeError, match=r"the environment failed: boom \(EXECUTION_ERROR\)"):
            await game.step("x")
        await game.close()


async def test_a_server_that_is_silent_gone_or_hangs_up_ends_the_wait() -> None:
    over = asyncio.Event()

    async def silent(socket: web.WebSocketResponse, message: dict[str, Any]) -> None:
        await over.wait()

    async def leaves(socket: web.WebSocketResponse, message: dict[str, Any]) -> None:
        await socket.close()

    for answer, seconds, complaint in ((silent, 0.2, "did not answer within 0.2 s"), (leaves, 60.0, "hung up")):
        async with server(lambda answer=answer: answer) as (url, _):  # type: ignore[misc]
            game = OpenEnv(url, seconds=seconds)
            with pytest.raises(RuntimeError, match=complaint):
                await game.reset({"prompt": "p"})
            await game.close()
            over.set()
    gone = OpenEnv(url, wait_seconds=0)
    with pytest.raises(RuntimeError, match="no session of the environment within 0 s"):
        await gone.reset({"prompt": "p"})
    await gone.close()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"url": "localhost:8000"}, {"place": "environment_options.url", "got": "'localhost:8000'"}),
        ({"url": "http://h", "first": "x"}, {"place": "environment_options.first", "got": "'x'"}),
        ({"url": "http://h", "seconds": 0}, {"place": "environment_options", "got": "0 and 300.0"}),
        ({"url": "http://h", "fields": ["a"]}, {"place": "environment_options.fields", "got": "['a']"}),
        ({"url": "http://h", "reset": 3}, {"place": "environment_options.reset", "got": "3"}),
    ],
)
def test_bad_options_are_refused_at_the_start(options: dict[str, Any], complaint: dict[str, Any]) -> None:
    with refusal(ValueError, **complaint):
        MultiTurn(environment="openenv", environment_options=options)
    with pytest.raises(TypeError):
        MultiTurn(environment="openenv")
