"""The JavaScript actor on a bus with a real engine: tasks that it cannot process become dead letters that can be
requeued.
"""

import asyncio
from pathlib import Path

import pytest

from tests.actor_kit import complete, engine, issue, model_dir, prompt_tokens, samples_until, settled, take_over
from tests.bus_fixtures import BusOpener
from tests.js_kit import installed, js_actor
from tests.waits import LIMIT_S
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.wire.messages import Dead, Sampling


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    """Make the model here, where it blocks no event loop."""
    model_dir()
    prompt_tokens()


async def test_a_request_no_engine_can_serve_is_dead_with_the_place_of_its_prompt(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    directory = tmp_path / "js"
    directory.mkdir()
    await asyncio.to_thread(installed, directory)
    async with open_bus(max_attempts=2) as bus, engine(bus):
        config = {
            "bus": {"lease_s": bus.config.lease_s, "max_attempts": 2},
            "actor": {"reward": "exact", "max_samples_in_flight": 8, "generate_timeout_s": LIMIT_S, "retries": 3},
        }
        await bus.rows("run").put("config", config)
        epoch = await take_over(bus)
        bad, *_ = await issue(bus, epoch, sampling=Sampling(max_new_tokens=8, top_p=7.0), reissue_of=1, reissues=2)
        good = await issue(bus, epoch)
        async with js_actor(directory, nats_server.url, bus.run, "js"):
            await samples_until(bus, complete(good))
            await settled(bus)
        dead = [letter async for _, letter in bus.dead.scan()]
        task = await bus.tasks.fetch(bad)
        place = {"root": 1, "reissues": 2, "prompt_epoch": task.prompt_epoch, "offset": task.offset}
        assert dead == [Dead(task=bad, reason=dead[0].reason, attempts=2, actor="js", prompt=task.prompt, **place)]
        assert "top_p" in dead[0].reason
