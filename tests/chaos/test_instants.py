"""The learner is killed -9 at each critical instant of a step, and reaches the same bits as an undisturbed one."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.chaos.auditor import Verdict, judge
from tests.chaos.dying import INSTANTS
from tests.chaos.parts import PATIENCE_S, Parts, parts
from tests.unhurried import UNHURRIED
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Done
from tidemill.learner.feed.restart import CHECKPOINT_KEY

SETTINGS = (
    "learner.steps=1000000",
    "learner.checkpoint_every=3",
    "learner.weights_digest=true",
    "bus.lease_s=5",
    "bus.history_samples=1000000",
    UNHURRIED,
)
"""Settings without trimming, so that every step can be trained again."""


CRITIC = (
    "learner.algorithm.advantage=gae",
    "learner.critic.optimizer.lr=1e-3",
    "learner.algorithm.kl.coef=0.1",
    "learner.algorithm.kl.reference_ema=0.9",
)
TELLING = ("stepped", "committed")
"""Instants between step and report, and between the commit of a checkpoint and the trimming behind it."""


def test_killed_at_the_telling_instants(tmp_path: Path) -> None:
    _killed_at(tmp_path, TELLING)


@pytest.mark.slow
def test_killed_at_every_instant(tmp_path: Path) -> None:
    _killed_at(tmp_path, tuple(INSTANTS))


@pytest.mark.slow
def test_killed_with_a_critic_and_a_moving_reference(tmp_path: Path) -> None:
    """Both are part of the state after a step, and of the checkpoint."""
    _killed_at(tmp_path, TELLING, *CRITIC)


@pytest.mark.slow
def test_killed_where_fsdp_trains(tmp_path: Path) -> None:
    _killed_at(tmp_path, tuple(INSTANTS), "learner.backend=fsdp")


def _killed_at(tmp_path: Path, instants: tuple[str, ...], *settings: str) -> None:
    with parts(tmp_path, *SETTINGS, *settings) as run:
        asyncio.run(_killed_and_resumed(run, instants))
        disturbed = asyncio.run(_judged(run))
        assert disturbed.steps_taken_again > 0 and not disturbed.steps_without_digest, disturbed
        asyncio.run(_trained_again(run, disturbed.steps))
        again = asyncio.run(_judged(run))
        assert again.steps_taken_again == disturbed.steps_taken_again + disturbed.steps_done, (disturbed, again)


async def _killed_and_resumed(run: Parts, instants: tuple[str, ...]) -> None:
    await run.begin("engine", "actor")
    for instant in instants:
        dying = run.start("learner", name=f"learner {instant}", instant=instant)
        assert await dying.code() == -signal.SIGKILL, f"{instant}: {dying.log[-3000:]}"
        assert (run.directory / f"{instant}.died").exists(), f"{instant}: killed by somebody else"
    async with run.bus() as bus:
        last = run.start("learner")
        await new_steps(bus, 7)
        last.process.send_signal(signal.SIGTERM)
        assert await last.code() == 0, last.log[-3000:]
    for part in run.started:
        if part.name in ("actor", "engine"):
            part.kill()


async def new_steps(bus: Bus, count: int) -> None:
    """Wait until ``count`` further steps are done."""
    newest = max([record.step async for _, record in bus.plans.scan() if isinstance(record, Done)], default=0)
    async with asyncio.timeout(PATIENCE_S):
        async for _, record in bus.plans.follow():
            if isinstance(record, Done) and record.step >= newest + count:
                return


async def _trained_again(run: Parts, steps: int) -> None:
    """Check that a learner without a checkpoint executes every recorded step, undisturbed."""
    (run.root / "checkpoints").rename(run.root / "checkpoints of the killed")
    async with run.bus() as bus:
        await bus.rows("run").delete(CHECKPOINT_KEY)
    undisturbed = run.start("learner", f"learner.steps={steps}", "learner.checkpoint_every=1000000", name="undisturbed")
    assert await undisturbed.code() == 0, undisturbed.log[-3000:]


async def _judged(run: Parts) -> Verdict:
    verdict = await judge(run.url, "smoke", run.root / "checkpoints", {})
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
    return verdict
