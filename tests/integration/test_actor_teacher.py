"""The actor with a teacher, against the real bus and the real built-in engine: scores in its samples, and failures that
end nothing.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from tests.actor_kit import complete, engine, issue, model_dir, prompt_tokens, row_until, samples_until, take_over
from tests.bus_fixtures import BusOpener
from tests.web_server import web_server
from tidemill.actors.actor.process import run_actor
from tidemill.actors.config import ActorConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Kind, Status


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    """Make the model here, where it blocks no event loop."""
    model_dir()
    prompt_tokens()


@asynccontextmanager
async def acting(bus: Bus, server: EmbeddedServer, **settings: Any) -> AsyncIterator[None]:
    draining = asyncio.Event()
    config = ActorConfig(**{"reward": "digits", "generate_timeout_s": 60.0, **settings})
    work = asyncio.create_task(run_actor(server.url, bus.run, config, bus.config, draining, "a1"))
    try:
        yield
    except BaseException:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        raise
    draining.set()
    await work


async def test_training_samples_have_scores_and_evaluations_none(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """The teacher is the engine itself, so that its scores are the log-probs of the samples."""
    async with open_bus() as bus, engine(bus) as built:
        epoch = await take_over(bus)
        tasks = await issue(bus, epoch, 2)
        (evaluation,) = await issue(bus, epoch, kind=Kind.EVAL)
        async with acting(bus, nats_server, teachers={"same": {"url": built.url}}):
            found = await samples_until(bus, complete([*tasks, evaluation]))
    for sample in found:
        if sample.kind is Kind.EVAL:
            assert sample.teacher_log_probs is None
        else:
            assert sample.teacher_log_probs is not None
            np.testing.assert_allclose(sample.teacher_log_probs, sample.rollout_log_probs, atol=1e-4)


async def test_a_broken_teacher_makes_failed_samples_with_the_reason_and_ends_nothing(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    broken = asyncio.Event()
    broken.set()
    async with open_bus() as bus, engine(bus) as built, teacher_of(built.url, broken) as url:
        epoch = await take_over(bus)
        await issue(bus, epoch, 1)
        async with acting(bus, nats_server, teachers={"big": {"url": url}}, teacher_attempts=1):
            found = await samples_until(bus, lambda samples: len(samples) >= 4)
            row = await row_until(bus.rows("live"), "actor.a1", lambda row: row["load"].get("failures", 0) >= 4)
            broken.clear()
            later = await issue(bus, epoch, 1)  # the first task may have had its last attempt by now
            found = await samples_until(bus, complete(later))
    first = [sample for sample in found if sample.status is Status.FAILED]
    assert len(first) >= 4
    assert all(
        "teacher 'big': " in sample.metadata["error"] and "HTTP 500" in sample.metadata["error"] for sample in first
    )
    assert all(sample.response_length and sample.teacher_log_probs is None for sample in first), "their tokens stay"
    assert "samples failed, the last: teacher 'big'" in row["trouble"]


@asynccontextmanager
async def teacher_of(engine_url: str, broken: asyncio.Event) -> AsyncIterator[str]:
    """Serve the engine's scores, or errors while ``broken`` is set."""

    async def answer(request: web.Request) -> web.Response:
        if broken.is_set():
            return web.json_response({"error": {"message": "broken"}}, status=500)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{engine_url}/generate", json=await request.json()) as passed,
        ):
            return web.json_response(await passed.json(), status=passed.status)

    application = web.Application()
    application.router.add_post("/generate", answer)
    async with web_server(application, shutdown_timeout=0.1) as url:
        yield url
