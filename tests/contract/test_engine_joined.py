"""Requests for groups, on both kinds of engine: each response is the same as alone."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.engine_kinds import Kind
from tests.engine_serving import Served, serving
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S, until
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.engines.port import FINISHED
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
        client, names = HttpEngine(served.engine.url), [f"j{seed}" for seed in range(6)]
        try:
            one_by_one = [await client.generate(PROMPT, repeatable(seed), request_id=f"a{seed}") for seed in range(6)]
            together = await client.generate_group(PROMPT, repeatable(0), names)
        finally:
            await client.close()
    assert [g.tokens.tolist() for g in together] == [g.tokens.tolist() for g in one_by_one]
    assert [g.id for g in together] == names
    assert [g.prompt_tokens for g in together] == [3] * 6
    for got, want in zip(together, one_by_one, strict=True):
        assert np.allclose(got.log_probs, want.log_probs, atol=1e-5)


async def test_one_that_is_aborted_takes_nothing_from_the_others(kind: Kind, model_dir: Path) -> None:
    async with kind.serving(model_dir) as served:
        client = HttpEngine(served.engine.url)
        try:
            await client.pause()
            # SGLang begins both at the end of the pause, and hears of the abort behind that: greedy, they are long.
            greedy = Sampling(max_new_tokens=1000, temperature=0.0)
            asking = asyncio.create_task(client.generate_group(PROMPT, greedy, ["stays", "leaves"]))
            await until_unfinished(served, 2)
            await client.abort("leaves")
            await client.resume()
            staying, leaving = await asking
        finally:
            await client.close()
    assert (staying.finish in FINISHED, len(staying.tokens) > 0, leaving.finish) == (True, True, "abort")


async def test_a_group_that_is_cancelled_is_aborted(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        client = HttpEngine(served.engine.url)
        try:
            await client.pause()
            asking = asyncio.create_task(client.generate_group(PROMPT, sampling(1, 4000), ["a", "b"]))
            await served.until(lambda: served.engine.stats()["waiting"] == 2)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until_unfinished(
                served, 0
            )  # the server notices it later than the client, and a response could end by itself
            await client.resume()
            await served.until(lambda: served.engine.stats()["requests_aborted"] == 2)
            assert served.engine.stats()["waiting"] + served.engine.stats()["running"] == 0
        finally:
            await client.close()


async def test_a_group_is_refused_as_a_whole(kind: Kind, model_dir: Path) -> None:
    async with kind.serving(model_dir) as served:
        client = HttpEngine(served.engine.url)
        try:
            with pytest.raises(BadRequest):
                await client.generate_group(PROMPT, Sampling(max_new_tokens=4, top_p=7.0), ["a", "b"])
        finally:
            await client.close()
