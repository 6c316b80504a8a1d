"""Request batching, on both kinds of engine: each request gets its own answer, the same as alone, and none delays
another.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.engine_kinds import Kind
from tests.engine_serving import Served, serving
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S, until
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.errors import BadRequest
from tidemill.bus.wire.messages import Sampling

PROMPT = np.array([5, 6, 7], np.int32)


@pytest.fixture(scope="module")
def dtype() -> str:
    return "float32"


@pytest.fixture(scope="module")
def first_model(model_dir: Path) -> Path:
    return model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


def sampling(seed: int, tokens: int = 8) -> Sampling:
    return Sampling(max_new_tokens=tokens, seed=seed)


async def until_unfinished(served: Served, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: served.engine.unfinished == count)


async def test_the_same_answers_as_alone_in_one_request(kind: Kind, model_dir: Path) -> None:
    def repeatable(seed: int) -> Sampling:
        return sampling(seed) if kind.seeds else Sampling(max_new_tokens=8, temperature=0.0)

    async with kind.serving(model_dir) as served:
        alone, joined = HttpEngine(served.engine.url), HttpEngine(served.engine.url, join=True)
        try:
            one_by_one = [await alone.generate(PROMPT, repeatable(seed), request_id=f"a{seed}") for seed in range(6)]
            together = await asyncio.gather(
                *(joined.generate(PROMPT, repeatable(seed), request_id=f"j{seed}") for seed in range(6))
            )
            other = await asyncio.gather(joined.generate(PROMPT, sampling(1)), joined.generate(PROMPT[:2], sampling(1)))
        finally:
            await alone.close()
            await joined.close()
    assert [g.tokens.tolist() for g in together] == [g.tokens.tolist() for g in one_by_one]
    assert [g.id for g in together] == [f"j{seed}" for seed in range(6)]
    for got, want in zip(together, one_by_one, strict=True):
        assert np.allclose(got.log_probs, want.log_probs, atol=1e-5)
    assert [g.prompt_tokens for g in other] == [3, 2], "another prompt is another request"


async def test_who_leaves_takes_nothing_from_the_others(kind: Kind, model_dir: Path) -> None:
    async with kind.serving(model_dir) as served:
        client = HttpEngine(served.engine.url, join=True)
        try:
            await client.pause()
            staying, leaving = (asyncio.create_task(client.generate(PROMPT, sampling(seed))) for seed in (1, 2))
            await until_unfinished(served, 2)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await client.resume()
            assert len((await staying).tokens) > 0
            await until_unfinished(served, 0)
        finally:
            await client.close()


async def test_when_all_have_left_the_engine_stops(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        client = HttpEngine(served.engine.url, join=True)
        try:
            await client.pause()
            tasks = [asyncio.create_task(client.generate(PROMPT, sampling(seed, 4000))) for seed in (1, 2)]
            await served.until(lambda: served.engine.stats()["waiting"] == 2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until_unfinished(
                served, 0
            )  # the server notices it later than the client, and a response could end by itself
            await client.resume()
            await served.until(lambda: served.engine.stats()["requests_aborted"] == 2)
            assert served.engine.stats()["waiting"] + served.engine.stats()["running"] == 0
        finally:
            await client.close()


async def test_a_refusal_is_everyones(kind: Kind, model_dir: Path) -> None:
    async with kind.serving(model_dir) as served:
        client = HttpEngine(served.engine.url, join=True)
        bad = Sampling(max_new_tokens=4, top_p=7.0)
        try:
            found = await asyncio.gather(*(client.generate(PROMPT, bad) for _ in range(2)), return_exceptions=True)
        finally:
            await client.close()
    assert [type(error) for error in found] == [BadRequest, BadRequest]
