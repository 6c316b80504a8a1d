"""Checkpoints of two nodes that share no directory: saved, copied, served, and loaded after the loss of a disk."""

import asyncio
import math
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration import checkpoint_ranks
from tests.integration.checkpoint_ranks import STEP, VOCAB
from tests.learner_steps import run_ranks
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tidemill.bus.http.access import RunAccess
from tidemill.bus.http.listener import Listener
from tidemill.learner.checkpoints import disk, remote_files
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.node_copies import CheckpointServer
from tidemill.learner.checkpoints.remote_files import Peer, PeerClient
from tidemill.learner.errors import CheckpointCorrupt

NAME = f"step-{STEP}-epoch-1"


@asynccontextmanager
async def served(roots: list[Path]) -> AsyncIterator[list[str]]:
    """Serve each root as a node does. Gives their URLs."""
    async with AsyncExitStack() as stack:
        urls = []
        for node, root in enumerate(roots):
            listener = Listener(CheckpointServer(root, node=node).routes, RunAccess(None))
            stack.push_async_callback(listener.close)
            urls.append(await listener.start("127.0.0.1", 0))
        yield urls


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[dict[str, Any]]]:
    """Return a model, the two nodes' roots, and the ranks' results of the saving run."""
    directory = tmp_path_factory.mktemp("nodes")
    model_dir = write_tiny_model(directory / "model", vocab_size=VOCAB)
    roots = [directory / "node-0", directory / "node-1"]
    return model_dir, roots, run_ranks(checkpoint_ranks.save, (model_dir, roots, "local"), world=2, out=directory)


@pytest.fixture
def roots(saved: tuple[Path, list[Path], list[dict[str, Any]]], tmp_path: Path) -> list[Path]:
    """Return copies of the nodes' roots, for a test to damage."""
    copies = [tmp_path / root.name for root in saved[1]]
    for root, copy in zip(saved[1], copies, strict=True):
        shutil.copytree(root, copy)
    return copies


async def load(saved: Any, roots: list[Path], tmp_path: Path, layouts: list[int]) -> list[dict[str, Any]]:
    async with served(roots) as urls:
        out = tmp_path / "out"
        out.mkdir()
        return await asyncio.to_thread(
            run_ranks, checkpoint_ranks.load, (saved[0], roots, urls, layouts), world=2, out=out
        )


def test_each_node_has_its_ranks_files_and_the_metadata(saved: Any) -> None:
    _, roots, results = saved
    manifest = manifests.read(roots[0] / NAME)
    assert manifests.read(roots[1] / NAME) == manifest
    held = [disk.held(root / NAME).keys() for root in roots]
    assert held[0] & held[1] == manifests.METADATA
    assert held[0] | held[1] == manifest.files.keys()
    for name, entry in manifest.files.items():
        assert entry.holders == tuple(node for node in (0, 1) if name in held[node]), name
    assert [result["reported"] for result in results] == [[[STEP, str(roots[0] / NAME)]], []]
    assert disk.read_state(roots[1] / NAME) == b"data state"


async def test_loaded_in_both_layouts_from_both_nodes(saved: Any, roots: list[Path], tmp_path: Path) -> None:
    """With unchanged tensor parallelism to the same bits, as data parallel ranks to the same numbers."""
    results = await load(saved, roots, tmp_path, [2, 1])
    for rank, result in enumerate(results):
        assert result["tp2"]["digest"] == saved[2][rank]["digest"]
        assert math.isclose(result["tp1"]["grad_norm"], saved[2][rank]["grad_norm"], rel_tol=1e-5)
        assert result["tp1"]["fetched"] > 0, "each node has half of the tensors"
    assert results[0]["tp1"]["digest"] == results[1]["tp1"]["digest"]


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_node_that_lost_its_disk_loads_from_the_copy(
    saved: Any, roots: list[Path], tmp_path: Path, lost: int
) -> None:
    """The other node has copied its files before; afterwards it has an empty disk."""
    kept = 1 - lost
    async with served(roots) as urls:
        client = PeerClient([Peer(node=lost, url=urls[lost])])
        fetched = await asyncio.to_thread(remote_files.complete, roots[kept] / NAME, client, lambda files: list(files))
        client.close()
    assert len(fetched) == 1, fetched
    disk.verify(roots[kept] / NAME)
    shutil.rmtree(roots[lost])
    results = await load(saved, roots, tmp_path, [2])
    assert [result["tp2"]["digest"] for result in results] == [result["digest"] for result in saved[2]]
    assert disk.held(roots[lost] / NAME).keys() == manifests.METADATA, "the node has what every node needs"


async def test_a_damaged_range_names_file_and_node(saved: Any, roots: list[Path], tmp_path: Path) -> None:
    """Without a copy there is no way round it: all ranks end with the same error."""
    (file,) = disk.held(roots[1] / NAME).keys() - manifests.METADATA
    content = bytearray((roots[1] / NAME / file).read_bytes())
    content[len(content) // 2] ^= 1
    (roots[1] / NAME / file).write_bytes(content)
    for result in await load(saved, roots, tmp_path, [2]):
        error = result["tp2"]["error"]
        assert error.startswith("CheckpointCorrupt: ") and file in error and "has a damaged block" in error, error
        assert "node 1 has a damaged block" in error or "this node has a damaged block" in error


async def test_a_damaged_local_range_is_read_from_another_node(saved: Any, roots: list[Path], tmp_path: Path) -> None:
    async with served(roots) as urls:
        client = PeerClient([Peer(node=1, url=urls[1])])
        await asyncio.to_thread(remote_files.complete, roots[0] / NAME, client, lambda files: list(files))
        client.close()
    for file in disk.held(roots[1] / NAME).keys() - manifests.METADATA:
        content = bytearray((roots[1] / NAME / file).read_bytes())
        content[7] ^= 1
        (roots[1] / NAME / file).write_bytes(content)
    results = await load(saved, roots, tmp_path, [2])
    assert [result["tp2"]["digest"] for result in results] == [result["digest"] for result in saved[2]]


async def test_no_copy_is_made_of_a_damaged_file(roots: list[Path]) -> None:
    (file,) = disk.held(roots[1] / NAME).keys() - manifests.METADATA
    with (roots[1] / NAME / file).open("r+b") as damaged:
        damaged.write(b"?")
    async with served(roots) as urls:
        client = PeerClient([Peer(node=1, url=urls[1])])
        with refusal(CheckpointCorrupt, directory=re.compile(r"step-3-epoch-1$"), file="__1_0.distcp"):
            await asyncio.to_thread(remote_files.complete, roots[0] / NAME, client, lambda files: list(files))
        client.close()
    assert file not in disk.held(roots[0] / NAME)
    assert {path.name for path in roots[0].iterdir()} == {NAME}, "nothing is left over"
