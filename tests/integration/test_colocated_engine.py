"""A colocated engine between a publisher and the accelerator's turns on a real bus: ownership of memory, also after
deaths.
"""

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors.torch import load_file

from tests.actor_kit import row_until
from tests.bus_fixtures import BusOpener
from tests.integration.test_engine_process import greedy
from tests.tiny_models import write_tiny_model
from tests.waits import until
from tidemill.actors.config import EngineConfig
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.actors.serving.engine_process import WHOLE, EngineLimits, EnginePlaces, Factory, run_engine
from tidemill.bus.keys import make_keys
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import cancellable
from tidemill.bus.wire.rows import Capabilities, LiveRow
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.push.publisher import Publisher
from tidemill.weightstore.store.registry import VersionRegistry
from tidemill.weightstore.transport.parts import Division

LEARNER = LiveRow(role="learner", id="learner", host="here", pid=1, phase="working")
DEADLINE_S = 60.0


class Died(Exception):
    """Ends an engine like kill -9: the row is left behind."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make two sets of weights of one shape."""
    one, two = (write_tiny_model(tmp_path_factory.mktemp(name), seed=seed) for name, seed in (("one", 1), ("two", 2)))
    return one, two


def tensors_of(model: Path) -> list[tuple[str, Any]]:
    return list(load_file(model / "model.safetensors").items())


@asynccontextmanager
async def engine(
    bus: Bus, url: str, model: Path, *, colocated: bool = True, grace_s: float = 0.1, factory: Factory = BuiltinEngine
) -> AsyncIterator[None]:
    """Run an engine process e1, which ends with the block.

    ``grace_s``: time that it leaves the publisher to bring the head to it; then it takes memory and loads the head by
    itself.
    """
    draining = asyncio.Event()
    config = EngineConfig(max_running=4, colocated=colocated)
    places = EnginePlaces(run=bus.run, bus_url=url, bus=bus.config, model_dir=model, id="e1")
    running = run_engine(places, config, draining, factory=factory, limits=EngineLimits(grace_s=grace_s))
    work = asyncio.create_task(cancellable(running))
    try:
        yield
    finally:
        draining.set()
        await work


@asynccontextmanager
async def publishing(
    bus: Bus, url: str, model: Path, directory: Path, *, deadline_s: float = DEADLINE_S
) -> AsyncIterator[Publisher]:
    publisher = Publisher(
        WeightsConfig(phase_deadline_s=deadline_s, overlap=False),
        bus_url=url,
        run=bus.run,
        epoch=1,
        directory=directory,
        model_dir=model,
        division=Division(Manifest.of(tensors_of(model))),
    )
    await asyncio.to_thread(publisher.start)
    try:
        yield publisher
    finally:
        await asyncio.to_thread(publisher.close)


async def served(bus: Bus) -> dict[str, Any]:
    """Wait until the engine serves with all its memory. Returns its row."""
    row: dict[str, Any] = await row_until(
        bus.rows("live"), "engine.e1", lambda row: row["phase"] == "serving" and not row["waits_for"]
    )
    return row


async def test_the_engine_has_memory_in_its_turn_only_and_every_step_gives_it_back(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    do = asyncio.to_thread
    async with (
        open_bus() as bus,
        HeartbeatPublisher(bus, LEARNER),
        publishing(bus, nats_server.url, models[0], tmp_path) as publisher,
    ):
        async with engine(bus, nats_server.url, models[0], grace_s=math.inf):
            waiting = await row_until(bus.rows("live"), "engine.e1", lambda row: "memory" in row["waits_for"])
            assert waiting["phase"] == "starting" and not waiting["address"], "the learner builds first"
            assert await do(publisher.release) == ()
            await do(publisher.publish_initial, models[0])
            assert set(await do(publisher.resume)) <= {"e1"}, "it builds now, and may have an address already"
            url = (await served(bus))["address"]
            first = await greedy(url)
            # a step that makes no version, while the head is a model directory
            assert await do(publisher.release) == ("e1",)
            asked = asyncio.create_task(greedy(url))
            await row_until(
                bus.rows("live"), "engine.e1", lambda row: row["load"]["released"] == 2 and "memory" in row["waits_for"]
            )
            assert not asked.done()
            assert await do(publisher.resume) == ("e1",)
            assert await asked == first
            # a step that makes a version: staged while the learner has its memory, pushed when it has none
            assert await do(publisher.release) == ("e1",)
            staged = await do(publisher.stage, 1, tensors_of(models[1]))
            asked = asyncio.create_task(greedy(url))
            report = await do((await do(publisher.push, staged)).result, DEADLINE_S)
            staged.release()
            assert (report.version, report.engines, report.evicted) == (1, ("e1",), {})
            second = await asked
            assert second != first
            # a step that makes none, while the head is a copy that the publisher has
            assert await do(publisher.release) == ("e1",)
            asked = asyncio.create_task(greedy(url))
            assert await do(publisher.resume) == ("e1",)
            assert await asked == second
            assert (await served(bus))["version"] == 1


async def test_an_engine_that_does_not_answer_is_evicted_and_the_step_goes_on(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other side gives up
        writer.close()

    silent = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    colocated = Capabilities(colocated=True)
    hung = LiveRow(
        role="engine",
        id="hung",
        host="here",
        pid=2,
        phase="serving",
        address=f"http://127.0.0.1:{port}",
        capabilities=colocated,
    )
    gone = LiveRow(
        role="engine",
        id="gone",
        host="here",
        pid=3,
        phase="serving",
        address="http://127.0.0.1:9",
        capabilities=colocated,
    )
    elsewhere = LiveRow(
        role="engine", id="elsewhere", host="there", pid=4, phase="serving", address="http://127.0.0.1:9"
    )
    do = asyncio.to_thread
    async with open_bus() as bus, publishing(bus, nats_server.url, models[0], tmp_path, deadline_s=6.0) as publisher:
        await do(publisher.publish_initial, models[0])
        await do(publisher.release)
        await do(publisher.resume)
        async with engine(bus, nats_server.url, models[0], grace_s=math.inf):
            await served(bus)
            async with HeartbeatPublisher(bus, hung), HeartbeatPublisher(bus, gone), HeartbeatPublisher(bus, elsewhere):
                await row_until(bus.rows("live"), "engine.elsewhere", bool)
                for _ in range(2):
                    assert await do(publisher.release) == ("e1",), (
                        "nobody asks an engine elsewhere, nobody waits for these"
                    )
                    assert await do(publisher.resume) == ("e1",)
    silent.close()
    await silent.wait_closed()


async def test_when_the_learner_dies_in_its_turn_the_engine_serves_again_and_not_before(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    do = asyncio.to_thread
    async with open_bus() as bus, engine(bus, nats_server.url, models[0]):
        with pytest.raises(Died):
            async with HeartbeatPublisher(bus, LEARNER):
                async with publishing(bus, nats_server.url, models[0], tmp_path) as publisher:
                    await do(publisher.publish_initial, models[0])
                    await do(publisher.release)
                    await do(publisher.resume)
                    url = (await served(bus))["address"]
                    first = await greedy(url)
                    assert await do(publisher.release) == ("e1",)
                    asked = asyncio.create_task(greedy(url))
                beats: set[int] = set()

                async def several_heartbeats() -> bool:  # of the engine, each many times the grace
                    found = await bus.rows("live").get("engine.e1")
                    assert found is not None and not asked.done()
                    beats.add(found[1])
                    return len(beats) >= 4

                await until(several_heartbeats)
                raise Died
        assert await asked == first
        assert (await served(bus))["version"] == 0
        async with aiohttp.ClientSession() as session, session.get(f"{url}/server_info") as answer:
            told = await answer.json()
        assert told["released"] == [] and told["internal_states"][0]["requests_aborted"] == 0


async def release_by_a_client(bus: Bus, url: str) -> None:
    release, headers = {"tags": None}, (await make_keys(bus)).headers
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url + "/release_memory_occupation", json=release) as answer,
    ):
        assert answer.status == 200


async def test_an_engine_that_shares_nothing_names_the_memory_that_a_client_released(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path]
) -> None:
    """It leaves a push the time of its grace, here without end, before it fetches the weights."""
    async with open_bus() as bus, engine(bus, nats_server.url, models[0], colocated=False, grace_s=math.inf):
        await VersionRegistry(bus).publish_initial(str(models[0]), 1)
        await release_by_a_client(bus, (await served(bus))["address"])
        await row_until(bus.rows("live"), "engine.e1", lambda row: row["waits_for"] == WHOLE)


async def test_an_engine_that_shares_nothing_waits_for_no_turn(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path]
) -> None:
    """A client makes it release its weights: it fetches them when no push brings any."""
    may_load = asyncio.Event()
    may_load.set()

    class Held(BuiltinEngine):
        async def load_snapshot(self, directory: Path | str, version: int, epoch: int | None = None) -> float:
            await may_load.wait()
            return await super().load_snapshot(directory, version, epoch)

    async with open_bus() as bus, engine(bus, nats_server.url, models[0], colocated=False, factory=Held):
        await VersionRegistry(bus).publish_initial(str(models[0]), 1)
        url = (await served(bus))["address"]
        first = await greedy(url)
        may_load.clear()
        await release_by_a_client(bus, url)
        await row_until(
            bus.rows("live"), "engine.e1", lambda row: bool(row["waits_for"])
        )  # so that the row below is a later one
        may_load.set()
        await served(bus)
        assert await greedy(url) == first


async def test_the_learner_waits_for_an_engine_that_has_begun_to_load(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The engine has no address yet, and takes memory."""
    do, loading, may_load, order = asyncio.to_thread, threading.Event(), threading.Event(), list[str]()

    class Slow(BuiltinEngine):
        def load(self) -> None:
            loading.set()
            may_load.wait(DEADLINE_S)
            super().load()
            order.append("loaded")

    async with (
        open_bus() as bus,
        HeartbeatPublisher(bus, LEARNER),
        publishing(bus, nats_server.url, models[0], tmp_path) as publisher,
    ):
        await do(publisher.publish_initial, models[0])
        await do(publisher.release)
        await do(publisher.resume)
        async with engine(bus, nats_server.url, models[0], factory=Slow):
            try:
                assert await do(loading.wait, DEADLINE_S)
                release = asyncio.create_task(do(publisher.release))
                release.add_done_callback(lambda _: order.append("released"))
                await row_until(bus.rows("weights"), "turn", lambda row: row["whose"] == "learner")
            finally:
                may_load.set()
            assert await release == ("e1",)
            assert order == ["loaded", "released"]
            await row_until(
                bus.rows("live"), "engine.e1", lambda row: row["load"].get("released") == 2 and not row["taking_memory"]
            )
            # The engine may be taking the version by itself at this moment; then it refuses the publisher's.
            assert set(await do(publisher.resume)) <= {"e1"}
            await greedy((await served(bus))["address"])


async def test_a_turn_of_the_learner_in_the_middle_of_the_probe_is_waited_for(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    do, probing, may_probe = asyncio.to_thread, asyncio.Event(), asyncio.Event()

    class Probed(BuiltinEngine):
        async def probe(self, timeout_s: float = DEADLINE_S) -> None:
            probing.set()
            await may_probe.wait()
            await super().probe(timeout_s)

    async with (
        open_bus() as bus,
        HeartbeatPublisher(bus, LEARNER),
        publishing(bus, nats_server.url, models[0], tmp_path) as publisher,
    ):
        await do(publisher.publish_initial, models[0])
        await do(publisher.release)
        await do(publisher.resume)
        async with engine(bus, nats_server.url, models[0], factory=Probed):
            await asyncio.wait_for(probing.wait(), DEADLINE_S)
            assert await do(publisher.release) == ("e1",)
            may_probe.set()
            await row_until(
                bus.rows("live"), "engine.e1", lambda row: row["phase"] == "catching up" and bool(row["waits_for"])
            )
            assert set(await do(publisher.resume)) <= {"e1"}, "it may be taking the version by itself already, as above"
            await greedy((await served(bus))["address"])


async def test_a_load_that_outlasts_its_deadline_keeps_the_memory_until_it_ends(
    open_bus: BusOpener, nats_server: EmbeddedServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    do, loading, may_load, draining = asyncio.to_thread, asyncio.Event(), asyncio.Event(), asyncio.Event()
    catch_up_s, begun = 0.5, list[int]()

    class Slow(BuiltinEngine):
        async def load_snapshot(self, directory: Path | str, version: int, epoch: int | None = None) -> float:
            begun.append(version)
            loading.set()
            await may_load.wait()
            return await super().load_snapshot(directory, version, epoch)

    async with (
        open_bus() as bus,
        HeartbeatPublisher(bus, LEARNER),
        publishing(bus, nats_server.url, models[0], tmp_path) as publisher,
    ):
        await do(publisher.publish_initial, models[0])
        await do(publisher.release)
        await do(publisher.resume)
        places = EnginePlaces(run=bus.run, bus_url=nats_server.url, bus=bus.config, model_dir=models[0], id="e1")
        limits, config = EngineLimits(grace_s=0.1, catch_up_s=catch_up_s), EngineConfig(max_running=4, colocated=True)
        work = asyncio.create_task(cancellable(run_engine(places, config, draining, factory=Slow, limits=limits)))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await loading.wait()
            await row_until(bus.rows("live"), "engine.e1", lambda row: row["taking_memory"])
            await asyncio.sleep(3 * catch_up_s)
            found = await bus.rows("live").get("engine.e1")
            assert found is not None and found[0]["taking_memory"] and begun == [0], (
                "the learner would take the memory under the load"
            )
            may_load.set()
            await row_until(
                bus.rows("live"), "engine.e1", lambda row: not row["taking_memory"] and row["phase"] == "serving"
            )
        finally:
            may_load.set()
            draining.set()
            await work
