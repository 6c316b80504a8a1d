"""A learner on two nodes with a disk each: both are killed, disks are lost, and the run goes on from the latest
checkpoint.
"""

import asyncio
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.auditor import judge
from tests.chaos.parts import PATIENCE_S, Part, Parts, parts
from tests.chaos.test_instants import new_steps
from tests.unhurried import UNHURRIED
from tests.whole.prepared import put_prepared
from tests.whole.running import SMOKE
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import State
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.disk import CHECKPOINT_KEY
from tidemill.learner.checkpoints.manifest import METADATA
from tidemill.learner.nodes.rows import ATTEMPT_KEY, attempt_of

SETTINGS = (
    "learner.steps=1000000",
    "learner.checkpoint_every=3",
    "learner.checkpoint.store=local",
    "learner.weights_digest=true",
    "learner.data_parallel=2",
    "bus.lease_s=5",
    "bus.history_samples=1000000",
    UNHURRIED,
)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1], ids=["leader", "other"])
def test_a_node_comes_back_with_an_empty_disk(tmp_path: Path, lost: int) -> None:
    with parts(tmp_path, *SETTINGS) as run:
        asyncio.run(_lost(run, [lost]))
        verdict = asyncio.run(judge(run.url, "smoke", run.root / "checkpoints", {}))
        assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
        assert verdict.steps_taken_again > 0, verdict


@pytest.mark.slow
def test_both_nodes_come_back_with_empty_disks_and_go_on_from_the_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with parts(tmp_path, *SETTINGS, f"learner.checkpoint.store=file://{tmp_path}/store") as run:
        asyncio.run(_lost(run, [0, 1], partly=True))
        verdict = asyncio.run(judge(run.url, "smoke", run.root / "checkpoints", {}))
        assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
        assert verdict.steps_taken_again > 0, verdict


async def _lost(run: Parts, lost: Sequence[int], *, partly: bool = False) -> None:
    """Kill both agents and remove the disks of the lost nodes. ``partly``: a node's disk has no copies of the other's
    files.
    """
    await run.begin("engine", "actor")
    other = run.directory / "other node"
    put_prepared(SMOKE, other)
    assert await run.start("prepare", f"directory={other}", name="prepare other").code() == 0
    roots = [run.root / "checkpoints", other / "checkpoints"]
    async with run.bus() as bus:
        agents = _agents(run, other, "first")
        step = await _latest(bus, 3)
        await new_steps(bus, 1)
        for agent in agents:
            agent.kill()
        for node in lost:
            shutil.rmtree(roots[node])
        agents = _agents(run, other, "again")
        await _running(bus)
        assert await _latest(bus, step + 3) > step
        for node in lost:
            assert f"begins rank={node} epoch=2 step={step}" in agents[node].log, agents[node].log[-3000:]
        for agent in agents:
            agent.process.send_signal(signal.SIGTERM)
        for agent in agents:
            assert await agent.code() == 0, agent.log[-3000:]
        row, _ = await bus.rows("run").get(CHECKPOINT_KEY) or ({}, 0)
        for node, root in enumerate(roots):
            path = root / Path(row["directory"]).name
            assert disk.held(path).keys() >= METADATA | {f"__{node}_0.distcp"} and not disk.damaged(path)
            if not partly:
                disk.verify(path)
    for part in run.started:
        if part.name in ("actor", "engine"):
            part.kill()


def _agents(run: Parts, other: Path, when: str) -> list[Part]:
    return [
        run.start(
            "learner", f"directory={root}", name=f"{when} node {node}", words=("--nodes", "2", "--node-rank", str(node))
        )
        for node, root in enumerate((run.root, other))
    ]


async def _running(bus: Bus) -> None:
    """Wait until the second attempt runs."""
    async with asyncio.timeout(PATIENCE_S):
        async for row in bus.rows("run").watch(ATTEMPT_KEY):
            if row is not None and (attempt := attempt_of(row[0])).epoch > 1 and attempt.state is State.RUNNING:
                return


async def _latest(bus: Bus, step: int) -> int:
    """Wait until a checkpoint of this step or a later one is the latest, and return its step."""
    async with asyncio.timeout(PATIENCE_S):
        async for row in bus.rows("run").watch(CHECKPOINT_KEY):
            if row is not None and row[0]["step"] >= step:
                return int(row[0]["step"])
    raise AssertionError("the row is watched for ever")
