"""OpenAI's paths in front of a real SGLang server: the guarantees of the proxy for /generate hold for them too."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine_kinds import Brake
from tests.engine_push import joined, named
from tests.engine_serving import Served, log_probs_of, scores_across
from tests.sglang.server import serving
from tests.waits import LIMIT_S, until

TOLERANCE = 1e-3
CHAT = [{"role": "user", "content": "What is three plus four, and the digits from zero to nine?"}]
PATHS = ["/v1/chat/completions", "/v1/completions"]
LENGTH = 1500
"""Length of a response in tokens; some seconds."""


class Chat:
    """A streamed chat request, and its tokens so far."""

    def __init__(self, served: Served, **more: Any) -> None:
        self.text, self.finish, self.ended = "", "", False
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[Any] = []
        self.errors: list[Any] = []
        body = {
            "messages": CHAT,
            "max_tokens": LENGTH,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **more,
        }
        self.task = asyncio.create_task(self._read(served, body))

    async def _read(self, served: Served, body: dict[str, Any]) -> None:
        async with served.session.post(served.engine.url + PATHS[0], json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
                self.ended |= line == b"data: [DONE]\n"

    def _take(self, told: Any) -> None:
        if "error" in told:
            self.errors.append(told)
            return
        (choice,) = told["choices"]
        self.text += choice["delta"].get("content", "")
        self.tokens += choice.get("token_ids", [])
        self.log_probs += choice.get("token_logprobs", [])
        self.versions = choice.get("weight_versions") or self.versions
        self.finish = choice["finish_reason"] or self.finish

    async def beyond(self, tokens: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.tokens) <= tokens:
                assert not self.task.done(), (
                    f"{len(self.tokens)} tokens, wanted > {tokens}: {self.finish} {self.errors} {self.text!r}"
                )
                await asyncio.sleep(0.01)


async def wanted_of(models: Sequence[Any], prompt: list[int], chat: Chat) -> np.ndarray:
    """Return log-probs by the weights that the spans name."""
    spans = [(int(span["version"]), span["start"], span["end"]) for span in chat.versions]
    assert [version for version, _, _ in spans] == [0, 1, 2, 3], chat.versions
    made = [(models[version], end - start) for version, start, end in spans]
    return log_probs_of(await scores_across(made, prompt, chat.tokens), chat.tokens)


async def test_a_chat_goes_on_through_three_pushes(
    python: str, server: str, brake: Brake, directories: list[Path], models: list[Any]
) -> None:
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        text = served.engine.text
        assert text is not None
        chat = Chat(served)
        for version in (1, 2, 3):
            await chat.beyond(len(chat.tokens) + 10)
            await push.whole(models[version], version)
        brake.open()
        async with asyncio.timeout(LIMIT_S):
            await chat.task
        assert (chat.finish, chat.ended, chat.errors, len(chat.tokens)) == ("length", True, [], LENGTH)
        assert chat.text == text.decode(chat.tokens)
        prompt = text.encode(
            f"<|im_start|>user\n{CHAT[0]['content']}<|im_end|>\n<|im_start|>assistant\n", add_special=False
        )
        wanted = await wanted_of(models, prompt, chat)
        assert np.abs(np.array(chat.log_probs) - wanted).max() < TOLERANCE
        stats = served.engine.stats()
        assert (
            stats["requests"],
            stats["requests_aborted"],
            stats["requests_aborted_by_pushes"],
            stats["running"],
        ) == (1, 0, 0, 0)


async def test_a_chat_that_comes_in_an_update_waits_and_finds_nothing_of_older_weights(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    body = {"messages": CHAT, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}

    async def cached(served: Served) -> tuple[int, Any]:
        status, answer = await served.post(PATHS[0], body)
        assert status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["weight_versions"][0][
            "version"
        ]

    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        assert (await cached(served))[0] == 0
        assert (await cached(served))[0] > 0
        assert (await push.begin(1))[0] == 200
        asked = asyncio.create_task(cached(served))
        async with asyncio.timeout(LIMIT_S):
            await until(lambda: served.engine.stats()["running"])
        assert (await push.bucket(named(models[1])))[0] == 200
        assert (await push.end(1))[0] == 200
        assert await asked == (0, "1")


async def test_what_would_end_the_server_is_refused(python: str, server: str, directories: list[Path]) -> None:
    async with serving(python, server, directories[0]) as served:
        for stream in (False, True):
            for prompt in ([999999], [-1], [[5], [299]]):
                status, answer = await served.post(PATHS[1], {"prompt": prompt, "stream": stream})
                assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
                assert answer["error"]["param"].startswith("prompt")
            status, answer = await served.post(
                PATHS[0], {"messages": CHAT, "stream": stream, "stop_token_ids": [2**40]}
            )
            assert status == 400, answer
            status, answer = await served.post(PATHS[0], {"messages": CHAT, "stream": stream, "regex": "("})
            assert status == 400 and answer["error"]["type"] == "invalid_request_error", answer
        assert served.engine.stats()["refused"] == 8
        assert len((await served.generate([5, 6], max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2


async def test_a_schema_holds_an_answer(python: str, server: str, directories: list[Path]) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "truth", "schema": {"type": "boolean"}}}
    async with serving(python, server, directories[0]) as served:
        for form, pattern in ((schema, ("true", "false")), ({"type": "text"}, None)):
            status, answer = await served.post(PATHS[0], {"messages": CHAT, "max_tokens": 12, "response_format": form})
            assert status == 200, answer
            said = answer["choices"][0]["message"]["content"].strip()
            assert pattern is None or said in pattern


async def test_a_drain_waits_for_a_chat(python: str, server: str, brake: Brake, directories: list[Path]) -> None:
    async with serving(python, server, directories[0]) as served:
        chat = Chat(served)
        await chat.beyond(5)
        await served.client.pause("in_place")
        brake.open()
        assert not await served.engine.drain(0.5), "it does not end before its requests have"
        await served.client.resume()
        assert await served.engine.drain(120)
        async with asyncio.timeout(LIMIT_S):
            await chat.task
        assert (chat.finish, len(chat.tokens), chat.ended) == ("length", LENGTH, True)
        status, answer = await served.post(PATHS[0], {"messages": CHAT})
        assert (status, answer["error"]["type"], answer["unavailable"]) == (503, "server_error", "EngineUnavailable")


async def test_who_aborts_a_chat_or_goes_is_heard(
    python: str, server: str, brake: Brake, directories: list[Path]
) -> None:
    async with serving(python, server, directories[0]) as served:
        left, aborted = Chat(served, max_tokens=3000), Chat(served, max_tokens=3000, rid="abortme")
        await asyncio.gather(left.beyond(5), aborted.beyond(5))
        left.task.cancel()
        await served.client.abort("abortme")
        brake.open()
        async with asyncio.timeout(LIMIT_S):
            await aborted.task
            await until(lambda: not served.engine.stats()["running"])
        assert (aborted.finish, aborted.ended) == ("abort", True)
        stats = served.engine.stats()
        assert (stats["requests_aborted"], stats["requests_aborted_by_pushes"]) == (1, 0)
