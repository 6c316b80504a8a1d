"""A learner on two nodes, as two agents on one machine: after a death the next attempt follows, and the bits are those
of one node.
"""

import asyncio
import re
import signal
from pathlib import Path

import psutil

from tests.chaos.auditor import Verdict, judge
from tests.chaos.parts import PATIENCE_S, Part, Parts, parts
from tests.chaos.test_instants import new_steps
from tests.unhurried import UNHURRIED
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Done
from tidemill.bus.wire.rows import Attempt, State
from tidemill.learner.feed.restart import CHECKPOINT_KEY
from tidemill.learner.nodes.rows import ATTEMPT_KEY, attempt_of

SETTINGS = (
    "learner.steps=1000000",
    "learner.checkpoint_every=3",
    "learner.weights_digest=true",
    "learner.data_parallel=2",
    "learner.checkpoint.store=shared",
    "bus.lease_s=5",
    "bus.history_samples=1000000",
    UNHURRIED,
)
"""Settings without trimming, so that every step can be trained again."""


def test_a_rank_and_an_agent_die_and_the_bits_are_those_of_one_node(tmp_path: Path) -> None:
    with parts(tmp_path, *SETTINGS) as run:
        asyncio.run(_killed_and_drained(run))
        disturbed = asyncio.run(_judged(run))
        assert disturbed.steps_taken_again > 0 and not disturbed.steps_without_digest, disturbed
        asyncio.run(_trained_again_on_one_node(run, disturbed.steps))
        again = asyncio.run(_judged(run))
        assert again.steps_taken_again == disturbed.steps_taken_again + disturbed.steps_done, (disturbed, again)


async def _killed_and_drained(run: Parts) -> None:
    await run.begin("engine", "actor")
    async with run.bus() as bus:
        leader, other = (_agent(run, node) for node in range(2))
        await new_steps(bus, 4)
        second = _agent(run, 1, name="second agent of node 1")
        first = await _running(bus, 0)

        _rank(other, 1).kill()
        killed = await _running(bus, first.epoch)
        await new_steps(bus, 2)
        assert await second.code() == 78, second.log[-3000:]
        assert f"pid {other.process.pid}" in second.log.splitlines()[-1]

        other.kill()
        other = _agent(run, 1, name="node 1 again")
        await _running(bus, killed.epoch)
        await new_steps(bus, 2)
        assert leader.process.returncode is None
        for agent in (leader, other):
            agent.process.send_signal(signal.SIGTERM)
        for agent in (leader, other):
            assert await agent.code() == 0, agent.log[-3000:]
        assert await bus.rows("run").keys("node") == []
        checkpoint = await bus.rows("run").get(CHECKPOINT_KEY)
        done = max([record.step async for _, record in bus.plans.scan() if isinstance(record, Done)])
        assert checkpoint is not None and checkpoint[0]["step"] == done, (
            "the drain has checkpointed the last step of all ranks"
        )
    for part in run.started:
        if part.name in ("actor", "engine"):
            part.kill()


def _agent(run: Parts, node: int, name: str = "") -> Part:
    return run.start("learner", name=name or f"node {node}", words=("--nodes", "2", "--node-rank", str(node)))


def _rank(agent: Part, rank: int) -> psutil.Process:
    """Return the process of a rank, the last that the agent has started."""
    return psutil.Process(int(re.findall(rf"started child=rank {rank} pid=(\d+)", agent.log)[-1]))


async def _running(bus: Bus, after: int) -> Attempt:
    """Wait until an attempt of a later epoch runs on both nodes, and return it."""
    async with asyncio.timeout(PATIENCE_S):
        async for row in bus.rows("run").watch(ATTEMPT_KEY):
            if row is not None and (attempt := attempt_of(row[0])).epoch > after and attempt.state is State.RUNNING:
                return attempt
    raise AssertionError("the row is watched for ever")


async def _trained_again_on_one_node(run: Parts, steps: int) -> None:
    """Check that a learner on one node without a checkpoint executes every recorded step."""
    (run.root / "checkpoints").rename(run.root / "checkpoints of two nodes")
    async with run.bus() as bus:
        await bus.rows("run").delete(CHECKPOINT_KEY)
    one = run.start("learner", f"learner.steps={steps}", "learner.checkpoint_every=1000000", name="one node")
    assert await one.code() == 0, one.log[-3000:]


async def _judged(run: Parts) -> Verdict:
    verdict = await judge(run.url, "smoke", run.root / "checkpoints", {})
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
    return verdict
