"""Requests aborted by a client or by a weight push. Only the second breaks a guarantee, so it has a counter of its
own.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine_serving import Served, serving
from tests.tiny_models import write_tiny_model

LONG = {"max_new_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


@asynccontextmanager
async def held(model_dir: Path) -> AsyncIterator[Served]:
    """Serve with an engine that decodes no more than a few steps: no response ends by itself."""
    async with serving(model_dir) as served:
        served.hold(after=10)
        yield served


async def running(served: Served, rid: str) -> "asyncio.Task[tuple[int, Any]]":
    before = len(served.engine.scheduler.running)
    body = {"input_ids": [5, 6], "sampling_params": LONG, "rid": rid}
    task = asyncio.create_task(served.post("/generate", body))
    await served.until(lambda: len(served.engine.scheduler.running) > before)
    return task


def counted(served: Served) -> tuple[float, float]:
    stats = served.engine.stats()
    return stats["requests_aborted"], stats["requests_aborted_by_pushes"]


async def test_an_abort_outside_of_a_push_is_not_the_pushs(model_dir: Path) -> None:
    async with held(model_dir) as served:
        task = await running(served, "a")
        await served.post("/abort_request", {"rid": "a"})
        await task
        assert counted(served) == (1, 0)


async def test_an_abort_while_an_update_is_open_is_the_pushs(model_dir: Path) -> None:
    async with held(model_dir) as served:
        task = await running(served, "a")
        assert (await served.post("/begin_weight_update", {"weight_version": "1"}))[0] == 200
        await served.post("/abort_request", {"abort_all": True})
        await task
        assert counted(served) == (1, 1)


async def test_a_pause_that_aborts_is_the_pushs(model_dir: Path) -> None:
    """A pushing method that aborts requests first: pause (abort), update, continue."""
    async with held(model_dir) as served:
        tasks = [await running(served, rid) for rid in ("a", "b")]
        assert (await served.post("/pause_generation", {"mode": "abort"}))[0] == 200
        await asyncio.gather(*tasks)
        assert counted(served) == (2, 2)


async def test_a_push_from_a_directory_aborts_nobody(model_dir: Path) -> None:
    async with held(model_dir) as served:
        task = await running(served, "a")
        status, _ = await served.post(
            "/update_weights_from_disk", {"model_path": str(model_dir), "weight_version": "1"}
        )
        assert status == 200
        assert counted(served) == (0, 0)
        await served.post("/abort_request", {"rid": "a"})
        await task
        assert counted(served) == (1, 0), "the update is over"
