"""Deltas on a real bus: a chain brings an engine to the head, whatever is missing or wrong is made good by a whole snapshot."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bus.config import BusConfig
from bus.connection import connect
from bus.server import EmbeddedServer
from tests.engine_serving import Served, serving
from tests.integration.test_weightstore_publisher import catch_up, look, publishing
from tests.receiver_app import write_tiny_companions
from tests.tiny_models import tiny_model, write_tiny_model
from weightstore import delta, joining
from weightstore.checksums import Told, differences, sum_of
from weightstore.publisher import Publisher

LIMIT_S = 60.0
SIZES = {"hidden_size": 64, "num_hidden_layers": 1}


@pytest.fixture
def bus_url(nats_server: EmbeddedServer, run_id: str) -> str:
    async def layout() -> None:
        async with connect(nats_server.url, run_id, BusConfig(), name="layout", wait_s=10) as bus:
            await bus.create_layout()

    asyncio.run(layout())
    return nats_server.url


def stepped(seed: int, versions: int) -> list[dict[str, torch.Tensor]]:
    """A model in bfloat16, and what small steps make of it."""
    model = {name: tensor.to(torch.bfloat16) for name, tensor in tiny_model(seed=seed, **SIZES).state_dict().items()}
    found, generator = [model], torch.Generator().manual_seed(seed)
    for _ in range(versions):
        model = changed(model, 0.02, generator)
        found.append(model)
    return found


def changed(model: dict[str, torch.Tensor], share: float, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
    found = {name: tensor.clone() for name, tensor in model.items()}
    for tensor in found.values():
        tensor[torch.rand(tensor.shape, generator=generator) < share] *= 1.01
    return found


def eventually(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def publish(publisher: Publisher, bus_url: str, run_id: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
    """Also until its delta is there, if it has one."""
    version = publisher.publish(step, tensors.items(), wait=True).result(0).version
    if version > 1:
        eventually(lambda: look(bus_url, run_id, "row", version).delta != "")


class Late:
    """A real built-in engine that pushes have passed by."""

    def __init__(self, served: Served) -> None:
        self.engine = served.engine
        self.loaded: list[str] = []
        self.said: list[str] = []

    @property
    def version(self) -> int:
        return self.engine.version

    async def load(self, directory: Path, version: int, epoch: int) -> None:
        self.loaded.append(directory.name)
        await self.engine.load_snapshot(directory, version, epoch)


async def test_a_chain_of_deltas_or_a_whole_snapshot(bus_url: str, run_id: str, tmp_path: Path) -> None:
    models = stepped(1, 6)
    model_dir = write_tiny_model(tmp_path / "model", **SIZES)
    settings = {"model_dir": model_dir, "deltas": 2, "bucket_bytes": 20_000}

    async def caught_up(late: Late, served: Served, step: int) -> None:
        async with connect(bus_url, run_id, BusConfig(), name="late", wait_s=10) as bus:
            await joining.catch_up(
                bus,
                engine="late",
                version=lambda: late.version,
                load=late.load,
                directory=tmp_path / "late",
                deadline_s=LIMIT_S,
                say=late.said.append,
                deltas=True,
            )
        answer = (await served.post("/weights_checksums", {}))[1]
        sent = models[step]
        assert answer["weight_version"] == str(step)
        assert differences(Told.parse(answer), sent, lambda part: sum_of("sum64", part, sent)) == []

    def bring(step: int) -> None:
        publish(publisher, bus_url, run_id, step, models[step])

    async with serving(model_dir, dtype="bfloat16", version=-1) as served:
        late = Late(served)
        with publishing(bus_url, run_id, tmp_path / "shelf", **settings) as publisher:
            await asyncio.to_thread(bring, 1)
            await caught_up(late, served, 1)
            assert late.loaded == ["v1"]  # it had nothing
            for step in (2, 3):
                await asyncio.to_thread(bring, step)
            assert (await asyncio.to_thread(look, bus_url, run_id, "row", 3)).base == 2
            await caught_up(late, served, 3)
            assert late.loaded == ["v1", "v2-delta", "v3-delta"]
            # One flipped bit in what it serves: the delta is refused, and whole weights come.
            served.engine.updates._served.named["model.norm.weight"].view(torch.uint8)[0] ^= 1
            await asyncio.to_thread(bring, 4)
            await caught_up(late, served, 4)
            assert late.loaded[3:] == ["v4-delta", "v4"]
            # Further behind than deltas are kept.
            served.engine.scheduler.version = 2
            await asyncio.to_thread(bring, 5)
            assert await asyncio.to_thread(lambda: [look(bus_url, run_id, "row", version).delta == "" for version in range(1, 6)]) == [
                True,
                True,
                True,
                False,
                False,
            ]
            assert sorted(path.name for path in (tmp_path / "shelf").glob("*-delta")) == ["v4-delta", "v5-delta"]
            await caught_up(late, served, 5)
            assert late.loaded[5:] == ["v5"]
        assert not list((tmp_path / "late").iterdir())


def test_a_learner_that_starts_again_leaves_no_delta_on_a_version_of_before(bus_url: str, run_id: str, tmp_path: Path) -> None:
    """Its first version has no base: what it publishes next has."""
    models, model = stepped(2, 3), write_tiny_companions(tmp_path / "model")
    with publishing(bus_url, run_id, tmp_path / "shelf", model_dir=model, deltas=3) as publisher:
        for step in (1, 2):
            publish(publisher, bus_url, run_id, step, models[step])
    with publishing(bus_url, run_id, tmp_path / "shelf", model_dir=model, deltas=3, epoch=2) as publisher:
        assert not list((tmp_path / "shelf").glob("*-delta"))
        assert publisher.publish(2, models[2].items(), wait=True).result(0).version == 3
        assert publisher.publish(3, models[3].items(), wait=True).result(0).version == 4
        eventually(lambda: look(bus_url, run_id, "row", 4).delta != "")
        assert (look(bus_url, run_id, "row", 3).delta, look(bus_url, run_id, "row", 4).base) == ("", 3)
        info = delta.read(tmp_path / "shelf" / "v4-delta")
        assert info is not None and info.versions == (4, 3)

        loader = Loader(1)
        catch_up(bus_url, run_id, tmp_path / "late", loader, deltas=True)
        assert loader.loaded == ["v4"]  # v2's delta was on the disk of a learner that is gone; v3 has none
        # A number that was used for nothing is no hole in the chain.
        assert look(bus_url, run_id, "reserve", 4, 2).version == 5
        assert publisher.publish(4, models[1].items(), wait=True).result(0).version == 6
        eventually(lambda: look(bus_url, run_id, "row", 6).delta != "")
        loader = Loader(3)
        catch_up(bus_url, run_id, tmp_path / "late", loader, deltas=True)
        assert loader.loaded == ["v4-delta", "v6-delta"]
        # Where everything has changed, nothing is kept of it.
        other = {name: torch.randn(tensor.shape).to(torch.bfloat16) for name, tensor in models[1].items()}
        assert publisher.publish(5, other.items(), wait=True).result(0).version == 7
        publish(publisher, bus_url, run_id, 6, changed(other, 0.02))
        assert (look(bus_url, run_id, "row", 7).delta, look(bus_url, run_id, "row", 8).base) == ("", 7)
        assert sorted(path.name for path in (tmp_path / "shelf").glob("*-delta")) == ["v4-delta", "v6-delta", "v8-delta"]


class Loader:
    """An engine that takes whatever comes."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.said: list[str] = []
        self.loaded: list[str] = []

    async def load(self, directory: Path, version: int, epoch: int) -> None:
        self.loaded.append(directory.name)
        self.version = version
