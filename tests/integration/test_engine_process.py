"""The engine's process on the bus: it waits for version 0, catches up with the head, serves, keeps up, and drains."""

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from tests.actor_kit import row_until
from tests.bus_fixtures import BusOpener
from tests.garbage import freeze_again
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S
from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.actors.serving.engine_process import EngineLimits, EnginePlaces, run_engine
from tidemill.bus.keys import make_keys
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import cancellable
from tidemill.bus.wire.messages import Sampling
from tidemill.bus.wire.rows import Capabilities
from tidemill.weightstore.store.registry import VersionRegistry


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make two sets of weights of one shape."""
    one, two = (write_tiny_model(tmp_path_factory.mktemp(name), seed=seed) for name, seed in (("one", 1), ("two", 2)))
    return one, two


HELD = Capabilities(devices=("GPU-a",), visible_devices=("GPU-a", "GPU-b"), nccl="2.29.7", device_memory_bytes=80)
"""Devices of the engine, for its live row; it runs on the CPU here."""


@asynccontextmanager
async def process(
    bus: Bus, server: EmbeddedServer, model: Path, id: str = "e1", *, grace_s: float = 0.1, catch_up_s: float = 60.0
) -> AsyncIterator[asyncio.Event]:
    draining, limits = asyncio.Event(), EngineLimits(grace_s=grace_s, catch_up_s=catch_up_s)
    places = EnginePlaces(run=bus.run, bus_url=server.url, bus=bus.config, model_dir=model, id=id, devices=HELD)
    running = run_engine(places, EngineConfig(max_running=4), draining, factory=BuiltinEngine, limits=limits)
    work = asyncio.create_task(cancellable(running))
    try:
        yield draining
    except BaseException:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        raise
    draining.set()
    await work


async def greedy(url: str) -> list[int]:
    client = HttpEngine(url)
    try:
        answer = await client.generate(
            np.array([5, 6, 7], np.int32), Sampling(temperature=0, max_new_tokens=6), request_id="x", timeout_s=LIMIT_S
        )
    finally:
        await client.close()
    return answer.tokens.tolist()


async def test_from_waiting_to_serving_to_the_next_version_to_gone(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path]
) -> None:
    async with open_bus() as bus:
        rows, registry = bus.rows("live"), VersionRegistry(bus)
        async with process(bus, nats_server, models[0]):
            waiting = await row_until(rows, "engine.e1", lambda row: "version 0" in row["waits_for"])
            assert waiting["phase"] == "catching up"
            gc.unfreeze()
            await registry.publish_initial(str(models[0]), 1)
            first = await row_until(rows, "engine.e1", lambda row: row["phase"] == "serving")
            assert first["version"] == 0
            stated = {
                "devices": ["GPU-a"],
                "visible_devices": ["GPU-a", "GPU-b"],
                "nccl": "2.29.7",
                "device_memory_bytes": 80,
            }
            assert first["capabilities"].items() >= {**stated, "single_request_push": True}.items()
            assert gc.get_freeze_count() > 10 * len(gc.get_objects()), "a full collection would hold up decoding"
            freeze_again()  # the engine runs in the tests' process here
            before = await greedy(first["address"])
            # a version that no push brings: the engine misses the push, and fetches it
            row = await registry.reserve(4, 1)
            await registry.publish(row)
            await registry.set_snapshot(row.version, str(models[1]))
            second = await row_until(rows, "engine.e1", lambda row: row["phase"] == "serving" and row["version"] == 1)
            after = await greedy(second["address"])
        assert before != after
        assert await rows.get("engine.e1") is None, "a clean exit takes its row along"


async def test_an_engine_serves_the_weights_of_the_head_and_not_those_of_its_start(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path]
) -> None:
    async with open_bus() as bus:
        await VersionRegistry(bus).publish_initial(str(models[1]), 1)
        answers = []
        for id, model in zip(("e1", "e2"), models, strict=True):
            async with process(bus, nats_server, model, id=id):
                row = await row_until(bus.rows("live"), f"engine.{id}", lambda row: row["phase"] == "serving")
                answers.append(await greedy(row["address"]))
        assert answers[0] == answers[1]


async def test_an_engine_waits_for_its_first_weights_without_a_limit(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path]
) -> None:
    async with open_bus() as bus, process(bus, nats_server, models[0], catch_up_s=0.5):
        rows, registry = bus.rows("live"), VersionRegistry(bus)
        await registry.publish(await registry.reserve(4, 1))  # a version without a snapshot
        await row_until(rows, "engine.e1", lambda row: "not done within 0.5 s" in row["waits_for"])
        await registry.set_snapshot(1, str(models[1]))
        row = await row_until(rows, "engine.e1", lambda row: row["phase"] == "serving")
        assert row["version"] == 1


async def test_an_engine_obeys_the_learner_and_shows_refused_commands(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path]
) -> None:
    """This includes an engine that is started again, and a learner that starts later."""
    async with open_bus() as bus, aiohttp.ClientSession() as session:
        rows, registry = bus.rows("live"), VersionRegistry(bus)
        await registry.fence(1)
        await registry.publish_initial(str(models[0]), 1)
        for _ in range(2):
            keys = await make_keys(bus)
            async with process(bus, nats_server, models[0]):
                url = (await row_until(rows, "engine.e1", lambda row: row["phase"] == "serving"))["address"]

                async def asked(epoch: int, headers: dict[str, str], url: str = url) -> int:
                    async with session.post(
                        f"{url}/continue_generation", json={"epoch": epoch}, headers=headers
                    ) as answer:
                        return answer.status

                newest = await registry.newest_epoch()
                assert [await asked(10**30, {}), await asked(newest, {}), await asked(newest + 1, keys.headers)] == [
                    401,
                    401,
                    400,
                ]
                await registry.fence(newest + 1)
                assert [await asked(newest + 1, keys.headers), await asked(newest, keys.headers)] == [200, 409]
                head = await registry.publish(
                    await registry.reserve(4, newest + 1)
                )  # pushes would bring it, but the engine refuses them
                row = await row_until(rows, "engine.e1", lambda row: "refused" in row["waits_for"])
                assert f"epoch {newest} is stale, epoch {newest + 1} was seen" in row["waits_for"]
                await registry.set_snapshot(head.version, str(models[1]))


async def test_an_engine_without_weights_can_be_drained(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path]
) -> None:
    async with open_bus() as bus, process(bus, nats_server, models[0]):
        await row_until(bus.rows("live"), "engine.e1", lambda row: bool(row["waits_for"]))


async def test_a_model_that_cannot_be_loaded_ends_the_engine_with_the_reason(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    async with open_bus() as bus:
        with refusal(Exception, where=re.compile(r"config\.json$")):
            places = EnginePlaces(run=bus.run, bus_url=nats_server.url, bus=bus.config, model_dir=tmp_path, id="e1")
            await run_engine(places, EngineConfig(), asyncio.Event(), factory=BuiltinEngine, limits=EngineLimits())
