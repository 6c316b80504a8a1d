"""Copies of checkpoints between nodes: made, counted, replaced after the loss of a disk; and a learner on two nodes
that loses one.
"""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.bus_fixtures import BusOpener
from tests.examples import rarely
from tests.integration import test_megatron_rank
from tests.integration.test_megatron_rank import Learner, OpenLearner
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import beside
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.disk import kept_names
from tidemill.learner.checkpoints.manifest import METADATA, CheckpointManifest, FileEntry
from tidemill.learner.checkpoints.node_copies import Keeper, Ring, holders
from tidemill.learner.errors import NoCheckpoint
from tidemill.learner.feed.copies import Copies
from tidemill.learner.settings.config import CheckpointConfig

open_learner = test_megatron_rank.open_learner
NEWEST = "step-4-epoch-1"
ROW = {"directory": f"/elsewhere/{NEWEST}", "step": 4}


def write(roots: list[Path], step: int, *, epoch: int = 1) -> None:
    """Write a checkpoint as ranks do: one file on each node, and the metadata on all."""
    staged = [disk.staging(root, step=step, epoch=epoch) for root in roots]
    files: dict[str, FileEntry] = {}
    for node, tmp in enumerate(staged):
        (tmp / f"__{node}_0.distcp").write_bytes(b"%d of step %d" % (node, step) * 1000)
        for name in METADATA:
            (tmp / name).write_bytes(b"metadata of step %d" % step)
        files |= {name: entry.written_by([node]) for name, entry in disk.digest(tmp, [f"__{node}_0.distcp"]).items()}
    files |= {
        name: entry.written_by(range(len(roots))) for name, entry in disk.digest(staged[0], sorted(METADATA)).items()
    }
    manifest = CheckpointManifest(files=files, extra={"step": step}).encode()
    for tmp in staged:
        disk.write_manifest(tmp, manifest)
        disk.publish(tmp)


def ring(node: int, num_nodes: int = 2, copies: int = 2) -> Ring:
    return Ring(node=node, num_nodes=num_nodes, copies=copies, keep=2)


@asynccontextmanager
async def keepers(bus: Bus, roots: list[Path], **settings: Any) -> AsyncIterator[list[Keeper]]:
    """Give the opened keepers of all nodes; a test calls ``look`` when it wants one to look."""
    async with AsyncExitStack() as stack:
        opened = [Keeper(bus, root, ring(node, len(roots), **settings)) for node, root in enumerate(roots)]
        for keeper in opened:
            await stack.enter_async_context(keeper.opened())
        yield opened


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"node-{node}" for node in range(2)]


async def test_a_checkpoint_counts_when_both_nodes_have_it(open_bus: BusOpener, roots: list[Path]) -> None:
    async with open_bus() as bus, keepers(bus, roots) as (first, second):
        write(roots, 4)
        copies = Copies(bus, roots[0], num_nodes=2, copies=2)
        waiting = asyncio.create_task(copies.wait(lambda: [roots[0] / NEWEST]))
        await second.look()
        disk.verify(roots[1] / NEWEST)
        assert "files of step-4-epoch-1 to be copied, the first is" in await copies.lacks(roots[0] / NEWEST)
        assert not waiting.done()
        await first.look()
        await asyncio.wait_for(waiting, LIMIT_S)
        disk.verify(roots[0] / NEWEST)
        assert copies.waits_for == ""
        assert (await holders(bus))[1].held[NEWEST] == sorted(
            [*METADATA, "__0_0.distcp", "__1_0.distcp", "manifest.json"]
        )


async def test_one_copy_is_none_at_all(
    open_bus: BusOpener, roots: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bus() as bus, keepers(bus, roots, copies=1) as both:
        write(roots, 4)
        for keeper in both * 2:
            await keeper.look()
        assert [len(disk.held(root / NEWEST)) for root in roots] == [len(METADATA) + 1] * 2
        await asyncio.wait_for(Copies(bus, roots[0], num_nodes=2, copies=1).wait(lambda: [roots[0] / NEWEST]), 60)
        assert "a node lost with its disk loses the run's newest states" in caplog.text


async def test_a_replaced_node_becomes_a_holder_again(open_bus: BusOpener, roots: list[Path]) -> None:
    """An empty disk, either node: it gets the latest and the one before."""
    async with open_bus() as bus:
        async with keepers(bus, roots) as both:
            write(roots, 2)
            write(roots, 4)
            for keeper in both * 2:
                await keeper.look()
        await bus.rows("run").put("checkpoint", ROW | {"epoch": 1})
        for lost in (0, 1):
            shutil.rmtree(roots[lost])
            async with keepers(bus, roots) as both:
                assert (await holders(bus))[lost].held == {}
                await both[lost].look()
                for step in (2, 4):
                    disk.verify(roots[lost] / f"step-{step}-epoch-1")
                await asyncio.wait_for(
                    Copies(bus, roots[0], num_nodes=2, copies=2).wait(lambda: [roots[0] / NEWEST]), 60
                )


async def test_a_damaged_file_is_set_aside_and_copied_again(
    open_bus: BusOpener, roots: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bus() as bus:
        async with keepers(bus, roots) as both:
            write(roots, 4)
            for keeper in both * 2:
                await keeper.look()
        damaged = roots[1] / NEWEST / "__1_0.distcp"
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        async with keepers(bus, roots) as (_, second):
            assert "__1_0.distcp" not in (await holders(bus))[1].held[NEWEST]
            assert "CORRUPT" in caplog.text and (roots[1] / "step-4-epoch-1.corrupt" / "__1_0.distcp").exists()
            await second.look()
            disk.verify(roots[1] / NEWEST)


async def test_the_newest_whole_one_is_chosen(
    open_bus: BusOpener, roots: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Node 1 is lost. It had copies of step 2, and the only one of its file of step 4."""
    async with open_bus() as bus:
        write(roots, 2)
        async with keepers(bus, roots) as both:
            for keeper in both * 2:
                await keeper.look()
            write(roots, 4)
            await both[1].look()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(Keeper(bus, roots[0], ring(0)).opened())
            found = await Copies(bus, roots[0], num_nodes=2, copies=2, ask_s=0.0).whole(ROW)
        assert found == roots[0] / "step-2-epoch-1"
        assert (
            "NOT WHOLE" in caplog.text
            and "step-4-epoch-1: no living node has __1_0.distcp (last seen on node 1)" in caplog.text
        )
        shutil.rmtree(roots[0])
        async with Keeper(bus, roots[0], ring(0)).opened():
            with refusal(
                NoCheckpoint,
                directory=str(roots[0]),
                reason=re.compile(r"\bstep-4-epoch-1: .*\bmanifest\.json\b.*\bnode 1\b"),
            ):
                await Copies(bus, roots[0], num_nodes=2, copies=2, ask_s=0.0).whole(ROW)


async def test_the_feeders_node_may_be_the_replaced_one(open_bus: BusOpener, roots: list[Path]) -> None:
    """The disk of node 0 is empty, and its keeper has copied nothing yet: the metadata comes from the other node."""
    async with open_bus() as bus:
        async with keepers(bus, roots) as both:
            write(roots, 4)
            for keeper in both * 2:
                await keeper.look()
        shutil.rmtree(roots[0])
        async with keepers(bus, roots):
            path = await Copies(bus, roots[0], num_nodes=2, copies=2, ask_s=0.0).whole(ROW)
            assert disk.held(path).keys() == METADATA


async def test_a_node_removes_what_the_run_does_not_keep(open_bus: BusOpener, roots: list[Path]) -> None:
    async with open_bus() as bus, keepers(bus, roots) as both:
        for step in (1, 2, 3, 4):
            write(roots, step)
        await bus.rows("run").put("checkpoint", ROW | {"epoch": 1})
        await both[1].look()
        assert [one.step for one in disk.listed(roots[1])] == [4, 3]
        await both[1].look()
        assert [one.step for one in disk.listed(roots[1])] == [4, 3], "those of the other node are not copied again"


async def test_a_node_keeps_what_the_run_keeps_for_its_score(open_bus: BusOpener, roots: list[Path]) -> None:
    async with open_bus() as bus, keepers(bus, roots) as both:
        for step in (1, 2, 3, 4):
            write(roots, step)
        await bus.rows("run").put("checkpoint", ROW | {"epoch": 1, "kept": ["step-1-epoch-1"]})
        await both[1].look()
        assert [one.step for one in disk.listed(roots[1])] == [4, 3, 1]


def test_kept_are_those_that_pruning_keeps(tmp_path: Path) -> None:
    names = [f"step-{step}-epoch-{epoch}" for step in range(1, 7) for epoch in (1, 2)]
    for name in names:
        (tmp_path / name).mkdir()
    latest = disk.named(tmp_path / "step-4-epoch-2")
    spared = ["step-1-epoch-2", "step-4-epoch-2", "step-6-epoch-1"]
    wanted = kept_names([*names, "strange", "../step-1-epoch-1/x"], latest, keep=3, spared=spared)
    disk.prune(tmp_path, keep=3, latest=latest, spared=spared)
    assert "step-1-epoch-2" in wanted
    assert wanted == [one.path.name for one in disk.listed(tmp_path)]


def test_those_of_a_newer_epoch_are_kept(tmp_path: Path) -> None:
    """A start found the latest damaged and fell back to step 10: its checkpoints have lower steps, and none is the
    latest yet.
    """
    names = ["step-20-epoch-1", "step-10-epoch-1", "step-12-epoch-2", "step-15-epoch-2", "step-8-epoch-1"]
    for name in names:
        (tmp_path / name).mkdir()
    latest = disk.named(tmp_path / names[0])
    assert set(kept_names(names, latest, keep=2)) == set(names[:4])
    kept = disk.prune(tmp_path, keep=2, latest=latest)
    assert [one.path.name for one in kept] == names[:2]
    assert {one.path.name for one in disk.listed(tmp_path)} == set(names[:4])


def running(opened: list[Keeper]) -> AbstractAsyncContextManager[None]:
    """Let the opened keepers of the nodes copy and remove, as their agents do."""
    return beside(*(keeper.run() for keeper in opened))


async def latest(learner: Learner, step: int) -> None:
    """Wait until a checkpoint of this step or a later one is the latest."""
    async for row in learner.world.bus.rows("run").watch("checkpoint"):
        if row is not None and row[0]["step"] >= step:
            return


@pytest.mark.parametrize("lost", [0, *rarely([1])])
async def test_a_learner_on_two_nodes_goes_on_after_the_loss_of_a_disk(open_learner: OpenLearner, lost: int) -> None:
    """Tensor parallel over two directories, killed after step 5: one directory is gone, the steps behind the latest are
    repeated.

    The keeper of the node with the empty disk has copied nothing yet when its rank begins, which gets its files from
    the other node.
    """
    checkpoint = CheckpointConfig(store="local", copies=2)
    async with open_learner(tensor_parallel=2, steps=8, checkpoint_every=2, checkpoint=checkpoint) as learner:
        write_tiny_model(learner.directory / "model", vocab_size=300)  # even, for two ranks
        learner.world.num_nodes = 2
        learner.roots = [learner.world.root, learner.directory / "node-1"]
        async with keepers(learner.world.bus, learner.roots) as both, running(both), learner.started(steps=5):
            await learner.until(5)
            async with asyncio.timeout(LIMIT_S):
                await latest(learner, 4)
            for rank in learner.ranks:
                rank.kill()
            await learner.ended()
        done = await learner.digests()
        saved = await learner.world.bus.rows("run").get("checkpoint")
        assert saved is not None
        behind = [step for step in sorted(done) if step > saved[0]["step"]]
        shutil.rmtree(learner.roots[lost])
        learner.roots[lost].mkdir()
        async with keepers(learner.world.bus, learner.roots) as both, learner.started():
            begun = asyncio.create_task(learner.until(max(done) + 1))
            ended = asyncio.create_task(learner.ended())
            await asyncio.wait((begun, ended), return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            assert not ended.done(), "a rank has ended before its first step"
            async with running(both):
                assert await ended == [0, 0]
                await learner.feeding
        digests = await learner.digests()
        assert sorted(digests) == list(range(1, 9))
        assert [step for step, same in sorted(digests.items()) if len(same) == 2] == behind, (
            f"those behind the checkpoint: {digests}"
        )
        assert all(len(set(same)) == 1 for same in digests.values()), digests
        found = await learner.world.bus.rows("run").get("checkpoint")
        assert found is not None
        row = found[0]
        assert row["step"] == 8
        for root in learner.roots:
            disk.verify(root / Path(row["directory"]).name)
