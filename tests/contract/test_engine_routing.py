"""The experts that the built-in engine returns are those of transformers: prompts and responses, shared prompts,
pushes, continuations.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engine_push import joined
from tests.engine_serving import Served, serving
from tests.engine_watch import watching
from tests.episode_kit import Client, stage, task
from tests.refusals import refusal
from tests.router_kit import routing
from tests.tiny_models import tiny_model, write_tiny_model
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.engines.port import Generation
from tidemill.actors.errors import BadRequest, EngineFailed
from tidemill.bus.wire.invariants import check_sample
from tidemill.bus.wire.messages import Kind, Sampling
from tidemill.bus.wire.routed_experts import RoutedShape, unknown_rows

MODELS: dict[str, dict[str, Any]] = {
    "every layer": {},
    "every second layer": {
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "num_experts": 6,
        "num_experts_per_tok": 3,
    },
}
PROMPT = (5, 70, 9, 31)
SAMPLED = Sampling(max_new_tokens=24, seed=3)


@pytest.fixture(scope="module", params=MODELS)
def changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def models(changes: dict[str, Any]) -> list[Any]:
    return [tiny_model("qwen3_moe", seed=seed, max_position_embeddings=2048, **changes) for seed in (0, 1)]


@pytest.fixture(scope="module")
def directory(changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("moe"), "qwen3_moe", seed=0, max_position_embeddings=2048, **changes
    )


@asynccontextmanager
async def served(directory: Path, **config: Any) -> AsyncIterator[tuple[Served, HttpEngine]]:
    """Serve the model; yield it with a client that wants experts."""
    async with serving(directory, **config) as one:
        client = HttpEngine(one.engine.url, routed_experts=True)
        try:
            yield one, client
        finally:
            await client.close()


@torch.no_grad()
def chosen(model: Any, tokens: Sequence[int], cache: Any = None) -> NDArray[np.int64]:
    """Return the experts of transformers' routers, sorted, [T, layers with experts, top_k]; ``cache`` is continued."""
    made = model(
        torch.tensor([list(tokens)]), output_router_logits=True, past_key_values=cache, use_cache=cache is not None
    )
    top_k = model.config.num_experts_per_tok
    found = torch.stack([logits.topk(top_k, -1).indices for logits in made.router_logits], dim=1)
    return np.sort(found.numpy(), axis=-1)


def assert_chosen(made: Generation, prompt: Sequence[int], wanted: NDArray[np.int64], *, ties: int = 0) -> None:
    """Assert that the experts of all tokens but the last are ``wanted``, and those of the last unknown.

    ``ties``: tokens that may differ, where other tokens are made in every run: two experts' scores may be equal but for
    rounding.
    """
    assert made.routed_experts is not None
    assert len(made.routed_experts) == len(prompt) + len(made.tokens)
    assert unknown_rows(made.routed_experts).tolist() == [False] * (len(prompt) + len(made.tokens) - 1) + [True]
    assert (np.sort(made.routed_experts[:-1], axis=-1) != wanted).any(axis=(1, 2)).sum() <= ties


async def test_the_experts_of_prompt_and_response_are_those_of_transformers(directory: Path, models: list[Any]) -> None:
    prompts = [PROMPT, (8, 9), tuple(range(40, 90)), (7,)]
    async with served(directory) as (_, client):
        made = await asyncio.gather(*(client.generate(prompt, SAMPLED) for prompt in prompts))
    for prompt, one in zip(prompts, made, strict=True):
        assert_chosen(one, prompt, chosen(models[0], [*prompt, *one.tokens.tolist()[:-1]]))


@pytest.mark.parametrize("join", [False, True])
async def test_prompts_that_are_shared_have_them_too(directory: Path, models: list[Any], join: bool) -> None:
    """With one request, in one prefill; with a request beside a running one, by its blocks; beside one that has none,
    by another prefill.
    """
    prompt = tuple(range(40, 80))
    async with (
        served(directory) as (one, client),
        watching(one, list(prompt), max_new_tokens=400, ignore_eos=True) as other,
    ):
        await other.beyond(3)
        joining = HttpEngine(one.engine.url, routed_experts=True)
        first = asyncio.create_task(joining.generate(prompt, replace(SAMPLED, max_new_tokens=300, stop_token_ids=())))
        made = [await client.generate(prompt, replace(SAMPLED, seed=seed)) for seed in (1, 2)]
        if join:
            made += await joining.generate_group(prompt, replace(SAMPLED, seed=5), ["5", "6", "7"])
        else:
            each = (joining.generate(prompt, replace(SAMPLED, seed=seed)) for seed in (5, 6, 7))
            made += await asyncio.gather(*each)
        made.append(await first)
        await joining.close()
        counters = one.engine.scheduler.counters
        assert counters.prompt_tokens > counters.prefill_tokens, "some of them were not computed"
    assert all(each.cached_tokens in (0, 32, len(prompt)) for each in made)
    for each in made:
        assert_chosen(each, prompt, chosen(models[0], [*prompt, *each.tokens.tolist()[:-1]]))


async def test_the_sequences_of_an_episode_have_them(directory: Path, models: list[Any]) -> None:
    """A turn behind another, with a result of a tool between, and one that goes another way: of all tokens but the last
    of a sequence.
    """

    async def program(client: Client) -> float:
        prompt = list(range(20, 34))
        for more in ([41, 42, 43], [44]):
            status, answer = await client.post("/generate", {"input_ids": prompt})
            assert status == 200, answer
            prompt = [*prompt, *answer["output_ids"], *more]
        await client.post("/generate", {"input_ids": [*prompt[:16], 45, 46]})
        return 1.0

    async with stage(directory, program, client=partial(HttpEngine, routed_experts=True)) as scene:
        sample = (await scene.rollout.sample(task(), 2, "n0")).sample
        held_out = (await scene.rollout.sample(replace(task(), kind=Kind.EVAL), 2, "n1")).sample
    check_sample(sample, routed=RoutedShape.of(models[0].config.to_dict()))
    assert held_out.routed_experts is None
    assert len(sample.sizes) == 2 and sample.routed_experts is not None
    left = 0
    for length, _ in sample.sizes:
        tokens, experts = sample.tokens[left : left + length].tolist(), sample.routed_experts[left : left + length]
        assert unknown_rows(experts).tolist() == [False] * (length - 1) + [True]
        assert (np.sort(experts[:-1], axis=-1) == chosen(models[0], tokens[:-1])).all()
        left += length


async def test_each_span_has_the_experts_of_its_weights(directory: Path, models: list[Any]) -> None:
    """The push comes in the middle: the keys and values before it stay, and the last token before it is an input of the
    new weights.
    """
    async with served(directory) as (one, client), joined(one) as push:
        gate = one.hold(after=10)
        sampling = Sampling(max_new_tokens=1500, seed=9, temperature=2.0)
        stream, states = client.stream(PROMPT, sampling), []
        async for state in stream:
            states.append(state)
            if len(states) == 1:
                pushed = asyncio.create_task(push.whole(models[1], 1))
                pushed.add_done_callback(lambda _: gate.open())
        await pushed
    made = states[-1]
    assert [span.version for span in made.spans] == [0, 1], "the push came too late"
    assert all(state.routed_experts is None for state in states[:-1])
    from transformers import DynamicCache

    cache, tokens, before = DynamicCache(), [*PROMPT, *made.tokens.tolist()], len(PROMPT) + made.spans[0].num_tokens - 1
    by_first = chosen(models[0], tokens[:before], cache)
    by_second = np.concatenate([chosen(models[1], [token], cache) for token in tokens[before:-1]])
    assert (by_second != chosen(models[0], tokens[:-1])[before:]).any()
    assert_chosen(made, PROMPT, np.concatenate([by_first, by_second]), ties=2)


async def test_a_retracted_response_keeps_those_that_its_tokens_were_sampled_from(
    directory: Path, models: list[Any]
) -> None:
    async with served(directory) as (one, client):
        gate = one.hold(after=10)
        sampling = Sampling(max_new_tokens=600, seed=9, temperature=2.0)
        stream = client.stream(PROMPT, sampling)
        await anext(stream)
        await client.pause("retract")
        gate.open()
        await client.resume()
        *_, made = [state async for state in stream]
    assert made.retractions == 1
    assert_chosen(made, PROMPT, chosen(models[0], [*PROMPT, *made.tokens.tolist()[:-1]]))


@pytest.mark.parametrize("kept", [True, False])
async def test_a_continued_response_has_its_first_experts_or_none(
    directory: Path, models: list[Any], kept: bool
) -> None:
    async with served(directory) as (_, client):
        whole = await client.generate(PROMPT, SAMPLED)
        assert whole.routed_experts is not None
        at, marked = 7, np.array(whole.routed_experts[: len(PROMPT) + 7])
        marked[3:5] = marked[5:7]  # as if other weights had chosen them
        marked[-1] = np.iinfo(marked.dtype).max
        begun = replace(
            whole,
            tokens=whole.tokens[:at],
            log_probs=whole.log_probs[:at],
            spans=(whole.spans[0]._replace(num_tokens=at),),
        )
        again = await client.generate(PROMPT, SAMPLED, begun=replace(begun, routed_experts=marked if kept else None))
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert again.routed_experts is not None
    seam = len(PROMPT) + at - 1
    assert (again.routed_experts[seam:] == whole.routed_experts[seam:]).all()
    if kept:
        assert (again.routed_experts[:seam] == marked[:seam]).all()
    else:
        assert unknown_rows(again.routed_experts[:seam]).all()


async def test_an_aborted_response_has_the_experts_of_its_tokens(directory: Path, models: list[Any]) -> None:
    async with served(directory) as (one, client):
        one.hold(after=10)
        stream = client.stream(PROMPT, Sampling(max_new_tokens=1500, seed=9, temperature=2.0), request_id="one")
        await anext(stream)
        await client.abort("one")
        *_, made = [state async for state in stream]
    assert made.finish == "abort"
    assert_chosen(made, PROMPT, chosen(models[0], [*PROMPT, *made.tokens.tolist()[:-1]]))


async def test_they_pass_through_a_router(directory: Path, models: list[Any]) -> None:
    async with served(directory) as (one, _), routing(one.engine.url) as door:
        client = HttpEngine(door.url, routed_experts=True)
        made = await client.generate(PROMPT, SAMPLED)
        *_, last = [state async for state in client.stream(PROMPT, SAMPLED)]
        await client.close()
    for each in (made, last):
        assert_chosen(each, PROMPT, chosen(models[0], [*PROMPT, *each.tokens.tolist()[:-1]]))


async def test_a_response_without_the_request_has_none(directory: Path) -> None:
    async with served(directory) as (one, _):
        assert (await one.client.generate(PROMPT, SAMPLED)).routed_experts is None


async def test_a_dense_model_has_none_to_return(tmp_path: Path) -> None:
    async with served(write_tiny_model(tmp_path)) as (_, client):
        with refusal(EngineFailed, reason=re.compile(r"\blearner\.routing_replay: rollout\b")):
            await client.generate(PROMPT, SAMPLED)
        client._routed = RoutedShape(num_layers=2, layers=(0, 1), top_k=2, num_experts=8)
        with refusal(BadRequest, place=re.compile(r"return_routed_experts$"), got="True"):
            await client.generate(PROMPT, SAMPLED)
