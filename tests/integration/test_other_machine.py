"""An engine on another machine, here a network namespace: it joins over the bus, gets pushes, and is reached by the
first one's actors.
"""

import asyncio
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.actor_kit import row_until
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tests.unit.test_ground import ROOT
from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.errors import EngineUnavailable
from tidemill.bus.config import BusConfig
from tidemill.bus.keys import api_keys
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.messages import Sampling
from tidemill.launch.settings.config_loader import to_map
from tidemill.launch.settings.run_config import ModelConfig, RunConfig
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.push.publisher import Publisher


@dataclass(frozen=True)
class Machine:
    """A namespace, and the two ends of its one cable."""

    name: str
    here: str
    there: str


@pytest.fixture
def machine() -> Iterator[Machine]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("want root and iproute2, to make a network namespace")
    for _ in range(5):  # another test may have chosen the same network
        net = f"10.{random.randrange(200, 250)}.{random.randrange(256)}"
        made = Machine(f"tm-{os.getpid()}-{random.randrange(10_000)}", f"{net}.1", f"{net}.2")
        with ExitStack() as stack:
            try:
                stack.enter_context(_cabled(made))
            except subprocess.CalledProcessError as error:
                reason = error.stderr.decode().strip()
                continue
            yield made
            return
    pytest.skip(f"no network namespace can be made here: {reason}")


@contextmanager
def _cabled(machine: Machine) -> Iterator[None]:
    outer, inner = f"o{machine.name[3:]}"[:15], "eth0"
    _ip("netns", "add", machine.name)
    try:
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", machine.name)
        _ip("addr", "add", f"{machine.here}/30", "dev", outer)
        _ip("link", "set", outer, "up")
        _ip("-n", machine.name, "addr", "add", f"{machine.there}/30", "dev", inner)
        _ip("-n", machine.name, "link", "set", inner, "up")
        _ip("-n", machine.name, "link", "set", "lo", "up")
        yield
    finally:
        subprocess.run(["ip", "link", "del", outer], capture_output=True)
        subprocess.run(["ip", "netns", "del", machine.name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def engine_on(machine: Machine, bus_url: str, log: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "tidemill", "engine", "--bus", bus_url, "--id", "far"]
    with log.open("w") as output:
        process = subprocess.Popen(
            ["ip", "netns", "exec", machine.name, *command], cwd=ROOT, stdout=output, stderr=output
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


async def test_an_engine_elsewhere_is_reached(machine: Machine, run_id: str, tmp_path: Path) -> None:
    models = [write_tiny_model(tmp_path / str(seed), seed=seed) for seed in range(2)]
    bus_config = BusConfig(host=machine.here, insecure=True)
    with EmbeddedServer(tmp_path / "nats", bus_config) as server:
        async with connect(server.url, run_id, bus_config, name="test", wait_s=60) as bus:
            await bus.create_layout()
            of_run = RunConfig(
                run=run_id, model=ModelConfig(path=str(models[0])), engine=EngineConfig(host="127.0.0.1")
            )
            await bus.rows("run").put(
                "config", to_map(of_run)
            )  # an address of the learner's machine is none of this one
            publisher = Publisher(
                WeightsConfig(), bus_url=server.url, run=run_id, epoch=1, directory=tmp_path / "snapshots"
            )
            with engine_on(machine, server.url, tmp_path / "engine.log"):
                try:
                    await asyncio.to_thread(publisher.start)
                    await asyncio.to_thread(publisher.publish_initial, models[0])
                    row = await row_until(bus.rows("live"), "engine.far", lambda row: row["phase"] == "serving")
                    assert row["address"].startswith(f"http://{machine.there}:"), (tmp_path / "engine.log").read_text()
                    weights = load_file(models[1] / "model.safetensors")
                    handle = await asyncio.to_thread(publisher.publish, 1, weights.items(), wait=True)
                    assert handle.result(0).engines == ("far",)
                finally:
                    await asyncio.to_thread(publisher.close)
                await _ask(row["address"], HttpEngine(row["address"], keys=api_keys(bus)))


async def _ask(url: str, actor: HttpEngine) -> None:
    stranger = HttpEngine(url)
    try:
        assert len((await actor.generate([5], Sampling(max_new_tokens=2, temperature=0.0))).tokens)
        with refusal(EngineUnavailable, place="/generate", got="none"):
            await stranger.generate([5], Sampling(max_new_tokens=2))
    finally:
        await actor.close()
        await stranger.close()
