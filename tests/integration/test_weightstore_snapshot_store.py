"""Snapshots on the learner's disk: those of another run are neither served nor counted."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.bus_fixtures import BusOpener
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.push.snapshots import SnapshotServer
from tidemill.weightstore.store import snapshot_files
from tidemill.weightstore.store.registry import VersionRegistry
from tidemill.weightstore.transport.port import Deadlines
from tidemill.weightstore.transport.staging import StagedModel, StagingPool

THEIRS, OURS = ({"w": torch.full((4,), value)} for value in (9.0, 1.0))


def staged(tensors: Mapping[str, torch.Tensor], *, version: int, step: int) -> StagedModel:
    staging = StagingPool(Manifest.of(tensors.items()), 1 << 20).take(1)
    staging.fill(tensors.items())
    copy = StagedModel(staging, (), Deadlines(1.0), step=step)
    copy.version = version
    return copy


def write(directory: Path, version: int, step: int) -> None:
    snapshot_files.write(directory / f"v{version}", THEIRS, version=version, step=step, durable=False)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


async def test_directories_of_another_run_are_not_taken_for_ours(open_bus: BusOpener, directory: Path) -> None:
    """They have the same names, and higher ones: the new snapshot is written, and stays."""
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        for version, step in ((1, 1), (90, 90), (91, 91)):
            write(directory, version, step)
        store = SnapshotServer(directory, registry, keep=2, model_dir=None)
        await store.open()
        try:
            assert not names(directory)
            for step in (1, 2, 3):
                row = await registry.reserve(step, 1)
                write(directory, row.version, step)  # by any other process while this store is open
                assert await store.put(staged(OURS, version=row.version, step=step)) == f"{store.url}/v{row.version}"
                assert torch.equal(load_file(directory / f"v{row.version}" / "model.safetensors")["w"], OURS["w"])
            assert names(directory) == ["v2", "v3"]
            newest, first = await registry.snapshot(), await registry.row(1)
            assert (
                newest is not None
                and newest.snapshot == f"{store.url}/v3"
                and first is not None
                and first.snapshot == ""
            )
        finally:
            await store.close()


async def test_what_has_just_been_put_is_never_removed(open_bus: BusOpener, directory: Path) -> None:
    """A failed version may be stored after a later one."""
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        rows = [await registry.reserve(step, 1) for step in range(3)]
        store = SnapshotServer(directory, registry, keep=1, model_dir=None)
        await store.open()
        try:
            for row in reversed(rows):
                assert await store.put(staged(OURS, version=row.version, step=row.step))
                assert names(directory) == [f"v{row.version}"]
        finally:
            await store.close()


async def test_only_the_newest_snapshot_of_this_registry_is_put_up_again(open_bus: BusOpener, directory: Path) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        digest = Manifest.of(OURS.items()).digest
        row = await registry.reserve(5, 1, digest=digest)
        await registry.set_snapshot(row.version, f"http://127.0.0.1:1/v{row.version}")
        for step, found in ((5, True), (6, False)):  # the same version of another step: another run
            write(directory, row.version, step)
            write(directory, row.version + 7, step)
            store = SnapshotServer(directory, registry, keep=2, model_dir=None)
            await store.open()
            await store.close()
            assert names(directory) == [f"v{row.version}"] * found
            told = await registry.row(row.version)
            assert told is not None and told.snapshot == store.where(row.version) and bool(told.snapshot) is found
