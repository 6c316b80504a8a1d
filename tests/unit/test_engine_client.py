"""Client results for answers of an engine in which nothing was generated."""

import asyncio
import json
from typing import Any

import numpy as np

from tests.waits import until
from tidemill.actors.engines.engine_answers import read_answer
from tidemill.actors.engines.engine_client import RequestBatcher
from tidemill.actors.engines.port import Generation
from tidemill.actors.openai import openai_api
from tidemill.actors.openai.openai_answers import ResponseBuilder
from tidemill.bus.wire.messages import Sampling, Span

NOT_BEGUN = {
    "text": "",
    "output_ids": [],
    "meta_info": {
        "id": "one",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "0",
        "e2e_latency": 0.2,
        "input_token_logprobs": [],
        "output_token_logprobs": [],
        "output_token_logprobs_length": 0,
        "completion_tokens": 0,
    },
}
"""Answer of SGLang (0.5.23) to a request that was aborted while it waited there."""


def test_a_request_aborted_before_its_start_is_aborted() -> None:
    made = read_answer("http://e", NOT_BEGUN, Sampling(), None)
    assert (made.finish, len(made.tokens), made.prompt_tokens) == ("abort", 0, 0)


def test_a_partial_is_kept_when_its_continuation_does_not_start() -> None:
    begun = Generation(
        id="0",
        tokens=np.array([4, 5], np.int32),
        log_probs=np.array([-1.0, -2.0], np.float32),
        spans=(Span(version=3, num_tokens=2),),
        finish="abort",
        text="ab",
        prompt_tokens=7,
    )
    made = read_answer("http://e", NOT_BEGUN, Sampling(), begun)
    assert (made.finish, made.tokens.tolist(), made.spans) == ("abort", [4, 5], begun.spans)


def test_the_openai_answer_to_a_request_that_did_not_start() -> None:
    parsed = openai_api.parse({"messages": [{"role": "user", "content": "x"}]}, chat=True)
    answer = ResponseBuilder(parsed, chat_id="i", model="m", created=0, piece=None).whole([NOT_BEGUN])
    assert answer["usage"]["total_tokens"] == 0


async def test_a_request_is_cancelled_when_the_batcher_is_closed() -> None:
    """The task that carries the request is cancelled before it has run at all."""

    async def send(body: Any) -> Any:
        await asyncio.Event().wait()

    batcher = RequestBatcher()
    asking = asyncio.create_task(batcher.request(np.array([1]), {"rid": "a"}, send))
    await until(lambda: batcher._sending, every_s=0)
    await batcher.close()
    async with asyncio.timeout(60):
        await asyncio.wait({asking})
    assert asking.cancelled()


async def test_requests_for_one_prompt_are_one_body_and_each_gets_its_own_answer() -> None:
    sent: list[dict[str, Any]] = []

    async def send(body: bytes) -> Any:
        sent.append(json.loads(body))
        rid = sent[-1]["rid"]
        return [f"answer to {name}" for name in rid] if isinstance(rid, list) else f"answer to {rid}"

    def body(rid: str, version: int) -> dict[str, Any]:
        return {
            "rid": rid,
            "sampling_params": {"sampling_seed": rid},
            "return_logprob": True,
            "min_version": version,
        }

    batcher, prompt = RequestBatcher(), np.array([7, 2**31 - 1], np.int32)
    asked = [(prompt, "a", 1), (prompt.copy(), "b", 1), (prompt, "c", 2), (prompt[:1], "d", 1)]
    answers = await asyncio.gather(*(batcher.request(ids, body(rid, version), send) for ids, rid, version in asked))
    assert answers == [f"answer to {rid}" for _, rid, _ in asked]
    joined = body("a", 1) | {"rid": ["a", "b"], "sampling_params": [{"sampling_seed": "a"}, {"sampling_seed": "b"}]}
    assert sent == [
        joined | {"input_ids": [[7, 2**31 - 1]] * 2},
        body("c", 2) | {"input_ids": [7, 2**31 - 1]},
        body("d", 1) | {"input_ids": [7]},
    ]
