"""The live row of a process that cannot begin: an actor and an engine without the run's configuration, an engine
without its model.
"""

import asyncio
import dataclasses
import re
from pathlib import Path

from tests.actor_kit import row_until
from tests.bus_fixtures import BusOpener
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.wire.rows import VersionRow
from tidemill.launch.run import workers
from tidemill.launch.settings.run_config import ModelConfig, RunConfig

NOTHING_LISTENS = "http://127.0.0.1:9/v0"


async def test_a_process_without_the_configuration_says_what_it_waits_for(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    draining = asyncio.Event()
    async with open_bus() as bus, asyncio.TaskGroup() as tasks:
        own = workers.LocalSettings()
        tasks.create_task(workers.run_actor(None, bus.run, nats_server.url, "a", draining, own))
        tasks.create_task(workers.run_engine(None, bus.run, nats_server.url, "e", draining, own))
        want = re.compile(rf"the config of run {bus.run}, which its learner writes \(row run/config\), for [1-9]\d* s")
        for key in ("actor.a", "engine.e"):
            row = await row_until(bus.rows("live"), key, lambda row: want.fullmatch(row["waits_for"]) is not None)
            assert row["phase"] == "waiting"
        draining.set()
    async with open_bus() as bus:
        assert await bus.rows("live").all() == {}, "they leave no rows behind"


async def test_an_engine_without_its_model_names_the_address_and_the_cure(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    draining = asyncio.Event()
    async with open_bus() as bus, asyncio.TaskGroup() as tasks:
        config = RunConfig(run=bus.run, model=ModelConfig(path=str(tmp_path / "nowhere")))
        fetching = tasks.create_task(workers.model_here(config, nats_server.url, "e", tmp_path / "model", draining))
        await row_until(
            bus.rows("live"), "engine.e", lambda row: row["waits_for"].startswith("version 0 from the learner")
        )
        published = VersionRow(version=0, step=0, epoch=1, state="published", digest="d", snapshot=NOTHING_LISTENS)
        for key in ("v.0", "head", "snapshot"):
            await bus.rows("weights").put(key, dataclasses.asdict(published))
        cure = "cure: learner: --set weights.advertise=ADDRESS that this machine reaches"
        row = await row_until(bus.rows("live"), "engine.e", lambda row: cure in row["waits_for"])
        assert "127.0.0.1:9" in row["waits_for"]
        assert row["phase"] == "waiting"
        draining.set()
        assert await fetching is None
