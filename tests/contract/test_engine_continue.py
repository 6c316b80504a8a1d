"""A response that is begun in one request and continued in another equals the response of one undisturbed request."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine_serving import Served, serving
from tests.refusals import refusal
from tests.tiny_models import tiny_tokenizer, write_tiny_model
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.engines.port import Generation
from tidemill.actors.errors import BadRequest, EngineFailed
from tidemill.actors.serving.sglang.proxy import OURS
from tidemill.bus.wire.messages import Sampling, Span

PROMPT = (5, 70, 9, 31)
LENGTH = 24
SEEDED = Sampling(seed=11, max_new_tokens=LENGTH)
WAYS = {
    "greedy": Sampling(temperature=0.0, max_new_tokens=LENGTH),
    "seeded": SEEDED,
    "filtered": Sampling(temperature=0.7, top_k=9, top_p=0.8, seed=2**63, max_new_tokens=LENGTH),
}


class AsToSglang(HttpEngine):
    """A client with requests in the form in which the proxy passes them on to SGLang."""

    async def _call(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        known = {name: value for name, value in json.loads(body).items() if name not in OURS}
        return await super()._call(method, path, known, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the directories of versions 0 and 1."""
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), "qwen3", seed=seed) for seed in (3, 4)]


@asynccontextmanager
async def served(directories: list[Path]) -> AsyncIterator[Served]:
    async with serving(directories[0]) as one:
        yield one


def cut(whole: Generation, length: int) -> Generation:
    """Return the beginning of a response, made under one version."""
    text = tiny_tokenizer().decode(whole.tokens[:length].tolist())
    spans = (Span(version=whole.spans[0].version, num_tokens=length),)
    return replace(
        whole, tokens=whole.tokens[:length], log_probs=whole.log_probs[:length], spans=spans, finish="abort", text=text
    )


def assert_same(again: Generation, whole: Generation) -> None:
    assert again.tokens.tolist() == whole.tokens.tolist()
    np.testing.assert_allclose(again.log_probs, whole.log_probs, atol=1e-4)
    assert (again.spans, again.finish, again.matched, again.text) == (
        whole.spans,
        whole.finish,
        whole.matched,
        whole.text,
    )
    assert again.prompt_tokens == whole.prompt_tokens


@pytest.mark.parametrize("way", WAYS)
async def test_it_is_the_undisturbed_response_wherever_it_was_cut(directories: list[Path], way: str) -> None:
    async with served(directories) as one:
        whole = await one.client.generate(PROMPT, WAYS[way])
        assert len(whole.tokens) > 8, "too short to be cut in many places"
        for length in range(1, len(whole.tokens)):
            made = one.engine.scheduler.counters.tokens_generated
            begun = cut(whole, length)
            assert_same(await one.client.generate(PROMPT, WAYS[way], begun=begun), whole)
            assert one.engine.scheduler.counters.tokens_generated - made == len(whole.tokens) - length, (
                "only what is missing is made"
            )
        *_, last = [state async for state in one.client.stream(PROMPT, WAYS[way], begun=cut(whole, 5))]
        assert_same(last, whole)


async def test_a_stop_string_may_cross_the_seam(directories: list[Path]) -> None:
    async with served(directories) as one:
        # The text of two neighbouring tokens is the stop string: half of it before, half behind the seam.
        for seed in range(50):
            free = await one.client.generate(PROMPT, replace(SEEDED, seed=seed))
            texts = [tiny_tokenizer().decode([token]) for token in free.tokens[8:12].tolist()]
            if len(free.tokens) > 12 and all(text.isascii() and text for text in texts):
                break
        stop = "".join(texts)
        sampling = replace(SEEDED, seed=seed, stop=("never said", stop))
        whole = await one.client.generate(PROMPT, sampling)
        assert (whole.finish, whole.matched) == ("stop", stop)
        assert len(whole.tokens) == 12
        for length in range(1, 12):
            assert_same(await one.client.generate(PROMPT, sampling, begun=cut(whole, length)), whole)


async def test_an_aborted_request_gives_what_the_next_one_goes_on_from(directories: list[Path]) -> None:
    long = replace(SEEDED, max_new_tokens=200, stop_token_ids=())
    async with served(directories) as one:
        whole = await one.client.generate(PROMPT, long)
        gate = one.hold(after=0)
        pieces = 0
        begun = None
        while begun is None or begun.finish == "abort":
            asking = asyncio.create_task(one.client.generate(PROMPT, long, request_id=f"piece-{pieces}", begun=begun))
            have = 0 if begun is None else len(begun.tokens)
            enough = one.engine.scheduler.counters.tokens_generated + min(11, len(whole.tokens) - have)
            gate.let(10)
            await one.until(lambda enough=enough: one.engine.scheduler.counters.tokens_generated >= enough)
            await one.client.abort(f"piece-{pieces}")
            begun = await asking
            pieces += 1
            assert len(begun.tokens) > have, "no token is lost"
        assert pieces > 2
        assert_same(begun, whole)


async def test_tokens_of_another_version_are_a_span_of_their_own(directories: list[Path]) -> None:
    async with served(directories) as one:
        whole = await one.client.generate(PROMPT, SEEDED)
        await one.engine.load_snapshot(directories[1], 1)
        again = await one.client.generate(PROMPT, SEEDED, begun=cut(whole, 7))
        assert again.spans == (Span(version=0, num_tokens=7), Span(version=1, num_tokens=len(again.tokens) - 7))
        assert again.tokens[:7].tolist() == whole.tokens[:7].tolist()
        assert again.tokens.tolist() != whole.tokens.tolist(), "the new weights say something else"
        begun = replace(cut(again, 12), spans=(again.spans[0], Span(version=1, num_tokens=5)))
        assert_same(await one.client.generate(PROMPT, SEEDED, begun=begun), again)


async def test_what_cannot_be_continued_is_refused(directories: list[Path]) -> None:
    async with served(directories) as one:
        whole = await one.client.generate(PROMPT, SEEDED)
        with refusal(BadRequest, place=re.compile(r"sampling_params\.max_new_tokens$"), got="0"):
            await one.client.generate(PROMPT, replace(SEEDED, max_new_tokens=5), begun=cut(whole, 5))
        for count in (4, -1, True):
            status, answer = await one.post("/generate", {"input_ids": list(PROMPT), "continued_tokens": count})
            assert status == 400
            assert "continued_tokens: want" in answer["error"]["message"]


async def test_an_engine_that_takes_it_all_for_the_prompt_continues_too(directories: list[Path]) -> None:
    """SGLang does this: its text is only the rest, and it does not see a stop string that crosses the seam."""
    async with served(directories) as one:
        whole = await one.client.generate(PROMPT, WAYS["greedy"])
        begun = cut(whole, 9)
        client = AsToSglang(one.engine.url)
        try:
            assert_same(await client.generate(PROMPT, WAYS["greedy"], begun=begun), whole)
            crossing = begun.text[-1] + whole.text[len(begun.text)]
            with refusal(EngineFailed, reason=re.compile(re.escape(repr(crossing)))):
                await client.generate(PROMPT, replace(WAYS["greedy"], stop=(crossing,)), begun=begun)
        finally:
            await client.close()
