"""Late engines take their weights from engines that are there: bodies of processes on a real bus, and their
failures.
"""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from yarl import URL

from tests.engine_push import joined
from tests.engine_serving import serving
from tests.integration.test_weightstore_publisher import catch_up, look, publishing
from tests.refusals import refusal
from tests.tiny_models import tiny_model, write_tiny_model
from tests.waits import LIMIT_S, until
from tidemill.actors.config import EngineConfig
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.actors.serving.builtin.peer_snapshots import PeerSnapshotServer
from tidemill.actors.serving.builtin.weight_updates import BuiltinUpdates
from tidemill.actors.serving.engine_process import EngineLimits, EnginePlaces, run_engine
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import HeartbeatPublisher, LiveView
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.rows import Capabilities, LiveRow
from tidemill.weightstore.catch_up import fetch
from tidemill.weightstore.errors import SnapshotUnavailable
from tidemill.weightstore.format.checksums import ChecksumReport, differences, sum_of
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.store import snapshot_files
from tidemill.weightstore.store.registry import VersionRegistry


class Loader:
    """An engine that loads any snapshot it is given."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.said: list[str] = []
        self.loaded: list[str] = []

    async def load(self, directory: Path, version: int, epoch: int) -> None:
        self.loaded.append(directory.name)
        self.version = version


def weights(seed: int, **changes: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in tiny_model(seed=seed, **changes).state_dict().items()}


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    return Manifest.of(tensors.items()).digest


async def same(served: Any, sent: dict[str, torch.Tensor]) -> bool:
    _, told = await served.updates.checksum_report(of="served")
    return differences(ChecksumReport.parse(told.to_json()), sent, lambda part: sum_of("sum64", part, sent)) == []


@asynccontextmanager
async def engine(
    bus_url: str, run: str, model_dir: Path, id: str, dtype: str = "float32", kind: type[BuiltinEngine] = BuiltinEngine
) -> AsyncIterator[list[BuiltinEngine]]:
    """Run the body of an engine process in this loop. Yields a list with the engine, once it is made."""
    made: list[BuiltinEngine] = []

    def factory(*args: Any, **settings: Any) -> BuiltinEngine:
        made.append(kind(*args, **settings))
        return made[0]

    draining = asyncio.Event()
    places, limits = EnginePlaces(run=run, bus_url=bus_url, model_dir=model_dir, id=id), EngineLimits(grace_s=1.0)
    body = asyncio.create_task(run_engine(places, EngineConfig(dtype=dtype), draining, factory=factory, limits=limits))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        draining.set()
        await body


async def rows(bus_url: str, run: str) -> dict[str, LiveRow]:
    async with connect(bus_url, run, BusConfig(), name="look", wait_s=60) as bus:
        return {row.id: row for row in await LiveView(bus).alive("engine")}


async def test_a_late_engine_asks_another_engine_and_not_the_learner(bus_url: str, run_id: str, tmp_path: Path) -> None:
    model_dir, shelf = write_tiny_model(tmp_path / "model"), tmp_path / "shelf"

    async def serves(id: str, version: int) -> bool:
        row = (await rows(bus_url, run_id)).get(id)
        return row is not None and (row.phase, row.version) == ("serving", version)

    with publishing(bus_url, run_id, shelf, model_dir=model_dir) as publisher:
        await asyncio.to_thread(publisher.publish_initial, model_dir)
        async with engine(bus_url, run_id, model_dir, "first"):
            await until(lambda: serves("first", 0))
            handle = publisher.publish(1, weights(1).items(), wait=False)
            report = await asyncio.to_thread(handle.result, LIMIT_S)
            assert (report.engines, report.verified) == (("first",), ("first",))
            await until(lambda: serves("first", 1))
            async with engine(bus_url, run_id, model_dir, "second") as second:
                await until(lambda: serves("second", 1))
                assert await same(second[0], weights(1))
            assert (
                list(shelf.iterdir()) == []
                and (await asyncio.to_thread(look, bus_url, run_id, "row", 1)).snapshot == ""
            )
            # An engine with other dtypes lacks the learner's exact weights, so none fetches them from it.
            async with engine(bus_url, run_id, model_dir, "rounded", dtype="bfloat16") as rounded:
                await until(lambda: serves("rounded", 1))
                assert list(shelf.iterdir()) == []
                with refusal(SnapshotUnavailable, reason=re.compile(r"\b404$")):
                    await fetch(f"{rounded[0].url}/snapshots/v1-{digest_of(weights(1))}", tmp_path / "x")
        # Without an engine, the weights come from the learner.
        async with engine(bus_url, run_id, model_dir, "third") as third:
            await until(lambda: serves("third", 1))
            assert await same(third[0], weights(1))
        assert [path.name for path in shelf.iterdir()] == ["v1"]


async def test_an_engine_with_weights_that_were_never_published_is_not_asked(
    bus_url: str, run_id: str, tmp_path: Path
) -> None:
    model_dir = write_tiny_model(tmp_path / "model")
    with publishing(bus_url, run_id, tmp_path / "shelf", model_dir=model_dir) as publisher:
        await asyncio.to_thread(lambda: publisher.publish(1, weights(1).items(), wait=True).result(0))
        row = {
            "host": "test",
            "pid": 1,
            "phase": "serving",
            "capabilities": Capabilities(peer_snapshots=True),
            "address": "http://127.0.0.1:9",
        }
        async with connect(bus_url, run_id, BusConfig(), name="torn", wait_s=60) as bus:
            assert (await VersionRegistry(bus).reserve(2, 1, digest="0" * 64)).state == "pushing"
            async with HeartbeatPublisher(bus, LiveRow(role="engine", id="torn", version=2, **row), every_s=0.1):  # type: ignore[arg-type]
                await until(lambda: there(bus_url, run_id, "torn"))
                loader = Loader(-1)
                await asyncio.to_thread(catch_up, bus_url, run_id, tmp_path / "late", loader)
    assert loader.version == 1 and not any("127.0.0.1:9" in text for text in loader.said), loader.said


async def there(bus_url: str, run: str, id: str) -> bool:
    return id in await rows(bus_url, run)


class LossyUpdates(BuiltinUpdates):
    """Updates that lose a bit of the first push."""

    lost = False

    async def checksum_report(self, *, of: str) -> tuple[int | None, ChecksumReport]:
        if of == "update" and not self.lost:
            self.lost = True
            assert self.standby is not None
            self.standby.named["model.norm.weight"].view(torch.uint8)[2] ^= 8
        return await super().checksum_report(of=of)


class Lossy(BuiltinEngine):
    """An engine with such updates, which takes no snapshot of a version before ``rejoins`` is set."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.rejoins = asyncio.Event()

    async def load_snapshot(self, directory: Path, version: int, epoch: int = 0) -> float:
        if version:
            await self.rejoins.wait()
        return await super().load_snapshot(directory, version, epoch)

    def load(self) -> None:
        super().load()
        self._updates = LossyUpdates(self.updates.weights, self.scheduler, on_update=self._updated)


async def test_an_engine_that_differs_goes_on_with_what_it_served_and_rejoins_by_snapshot(
    bus_url: str, run_id: str, tmp_path: Path
) -> None:
    model_dir = write_tiny_model(tmp_path / "model")

    async def serves(version: int) -> bool:
        row = (await rows(bus_url, run_id)).get("lossy")
        return row is not None and (row.phase, row.version) == ("serving", version)

    with publishing(bus_url, run_id, tmp_path / "shelf", model_dir=model_dir) as publisher:
        await asyncio.to_thread(publisher.publish_initial, model_dir)
        async with engine(bus_url, run_id, model_dir, "lossy", kind=Lossy) as lossy:
            await until(lambda: serves(0))
            handle = publisher.publish(1, weights(1).items(), wait=False)
            report = await asyncio.to_thread(handle.result, LIMIT_S)
            assert report.engines == () and "in 1 tensors: model.norm.weight" in report.evicted["lossy"]
            assert await same(lossy[0], weights(0))
            lossy[0].rejoins.set()
            await until(lambda: serves(1))
            assert await same(lossy[0], weights(1))
            assert [path.name for path in (tmp_path / "shelf").iterdir()] == ["v1"]
            handle = publisher.publish(2, weights(2).items(), wait=False)
            report = await asyncio.to_thread(handle.result, LIMIT_S)
            assert (report.engines, report.verified) == (("lossy",), ("lossy",))


@pytest.mark.parametrize("tied", [False, True])
async def test_a_lent_snapshot_is_a_model_directory_of_its_version_alone(tmp_path: Path, tied: bool) -> None:
    directory = write_tiny_model(tmp_path / "model", tied=tied)
    async with serving(directory, version=7) as served:
        sent = weights(0, tied=tied)
        assert ("lm_head.weight" in sent) and ("lm_head.weight" in served.engine.updates.weights.named) != tied
        url = f"{served.engine.url}/snapshots"
        info = await fetch(f"{url}/v7-{digest_of(sent)}", tmp_path / "got")
        assert (info.version, info.digest) == (7, digest_of(sent))
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(info.files)
        await served.engine.load_snapshot(tmp_path / "got", 8)
        assert await same(served.engine, sent)
        async with served.session.get(
            f"{url}/v8-{digest_of(sent)}/model.safetensors", headers={"Range": "bytes=100-199"}
        ) as part:
            whole = (tmp_path / "got" / "model.safetensors").read_bytes()
            assert (part.status, await part.read()) == (206, whole[100:200])
        name = f"v8-{digest_of(sent)}"
        for path in (
            f"v6-{digest_of(sent)}/manifest.json",
            f"v8-{'0' * 64}/manifest.json",
            f"{name}/..%2f{name}%2fmanifest.json",
        ):
            async with served.session.get(URL(f"{url}/{path}", encoded=True)) as refused:
                assert refused.status == 404, path


@pytest.mark.parametrize(("way", "pushes"), [("load", 1), ("load", 2), ("push", 2)])
async def test_pushes_are_not_delayed_and_torn_snapshots_are_not_lent(tmp_path: Path, way: str, pushes: int) -> None:
    directories = [write_tiny_model(tmp_path / str(seed), seed=seed) for seed in range(3)]
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*args: Any, **settings: Any) -> snapshot_files.SnapshotInfo:
        begun.set()
        assert go_on.wait(LIMIT_S)
        return snapshot_files.write(*args, **settings)

    async with serving(directories[0], version=0) as served, joined(served) as push:
        if way == "push":  # until both copies are laid out like a push
            for _ in range(3):
                await push.whole(tiny_model(seed=0), 0)
        served.engine.peer_snapshots = PeerSnapshotServer(served.engine.updates.served, directories[0], write=slowly)
        asked = asyncio.create_task(
            fetch(f"{served.engine.url}/snapshots/v0-{digest_of(weights(0))}", tmp_path / "got")
        )
        await asyncio.to_thread(begun.wait, LIMIT_S)
        for version in range(1, pushes + 1):
            if way == "load":
                await served.engine.load_snapshot(directories[version], version)
            else:
                await push.whole(tiny_model(seed=version), version)
            assert served.engine.version == version
        go_on.set()
        if pushes == 1:  # into the standby copy; the one that is read is not touched
            info = await asked
            assert info.version == 0
            await served.engine.load_snapshot(tmp_path / "got", 9)
            assert await same(served.engine, weights(0))
        else:
            with refusal(SnapshotUnavailable, reason=re.compile(r"\b404$")):
                await asked


async def test_unread_snapshots_are_removed_and_their_number_is_bounded(tmp_path: Path) -> None:
    directory, digest = write_tiny_model(tmp_path / "model"), digest_of(weights(0))
    async with serving(directory, version=0) as served:
        lending: PeerSnapshotServer = served.engine.peer_snapshots
        kept = []
        for version in (1, 2, 3):
            served.engine.scheduler.batch.flip(version)
            try:
                kept.append((await lending.file(f"v{version}-{digest}", "manifest.json")).parent)
            except Exception as error:
                assert version == 3 and "2 others are being read" in str(error)
        assert len(kept) == 2
        lending.last_use_s[kept[0].name] -= 1000.0
        assert (await lending.file(f"v3-{digest}", "manifest.json")).exists()
        assert [path.exists() for path in kept] == [False, True]
    assert not kept[1].parent.exists()


async def test_a_file_that_is_being_sent_is_in_use_however_long_that_takes(tmp_path: Path) -> None:
    """Otherwise the next file of the same snapshot would be gone after a push in between."""
    directory, name = write_tiny_model(tmp_path / "model"), f"v0-{digest_of(weights(0))}"
    size = 64 << 20

    def unused(lending: PeerSnapshotServer) -> None:
        lending.last_use_s[name] -= 1000.0
        lending.prune()

    async with serving(directory, version=0) as served:
        lending: PeerSnapshotServer = served.engine.peer_snapshots
        there = (await lending.file(name, "manifest.json")).parent
        with (there / "large").open("wb") as large:
            large.truncate(size)
        async with served.session.get(f"{served.engine.url}/snapshots/{name}/large") as answer:
            await answer.content.readexactly(1)  # and then nothing for long
            unused(lending)
            assert there.exists()
            async with served.session.get(f"{served.engine.url}/snapshots/{name}/manifest.json") as other:
                assert other.status == 200
            unused(lending)
            assert there.exists(), "one of two readers has gone"
            await answer.content.readexactly(size - 1)

        def removed() -> bool:
            unused(lending)
            return not there.exists()

        await until(removed)


async def test_a_colocated_engine_lends_nothing(tmp_path: Path) -> None:
    """A snapshot that is being written would keep the memory that the learner's turn needs."""
    directory = write_tiny_model(tmp_path / "model")
    for colocated in (False, True):
        async with serving(directory, colocated=colocated) as served:
            assert served.engine.capabilities.peer_snapshots is not colocated
            assert served.engine.capabilities.colocated is colocated
