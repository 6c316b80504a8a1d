"""An engine is killed or frozen in each phase of a push: the learner goes on, and the engine comes back with the newest version."""

import asyncio
import contextlib
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from bus.connection import Bus
from bus.live import LiveView
from bus.messages import LiveRow
from tests.chaos.auditor import judge
from tests.chaos.dying import PHASES
from tests.chaos.parts import PATIENCE_S, Part, Parts, parts, thaw
from tests.chaos.test_instants import new_steps

SETTINGS = ("learner.steps=1000000", "learner.checkpoint_every=20", "weights.phase_deadline_s=2", "bus.lease_s=5")
HOWS = ("KILL", "STOP")
SLOW_ROUNDS = 100


def test_an_engine_that_dies_or_freezes_in_the_middle_of_a_push_holds_up_nobody(tmp_path: Path) -> None:
    _rounds(tmp_path, [("writing", "STOP")])


@pytest.mark.slow
def test_a_hundred_rounds_over_every_phase(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    chance = random.Random(pytestconfig.getoption("--storm-seed") or 1)
    every = [(phase, how) for phase in PHASES for how in HOWS]
    _rounds(tmp_path, every + [chance.choice(every) for _ in range(SLOW_ROUNDS - len(every))])


def _rounds(tmp_path: Path, rounds: Sequence[tuple[str, str]]) -> None:
    with parts(tmp_path, *SETTINGS) as run:
        asyncio.run(_all(run, rounds))


async def _all(run: Parts, rounds: Sequence[tuple[str, str]]) -> None:
    await run.begin("engine", "actor", "learner")
    async with run.bus() as bus:
        await new_steps(bus, 2)
        for number, (phase, how) in enumerate(rounds):
            await _round(run, bus, f"engine-{number}", phase, how)
        rows = await LiveView(bus).refresh()
        assert sum(row.load.get("requests_aborted_by_pushes", 0) for row, _ in rows) == 0
    (learner,) = [part for part in run.started if part.name == "learner"]
    learner.process.send_signal(signal.SIGTERM)
    assert await learner.code() == 0, learner.log[-3000:]
    verdict = await judge(run.url, "smoke", run.root / "checkpoints", {})
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict


async def _round(run: Parts, bus: Bus, name: str, phase: str, how: str) -> None:
    victim = run.start("engine", name=name, instant=phase, how=how)
    async with asyncio.timeout(PATIENCE_S):
        while not (run.directory / f"{name}.died").exists():
            assert victim.process.poll() is None, f"{phase}, {how}: {victim.log[-3000:]}"
            await asyncio.sleep(0.02)
    await new_steps(bus, 3)
    if how == "STOP":
        thaw(await victim.frozen())
    else:
        assert await victim.code() == -signal.SIGKILL
        victim = run.start("engine", name=name)
    head = int((await bus.rows("weights").get("head") or ({}, 0))[0]["version"])
    await _serving(bus, victim, head, f"{phase}, {how}")
    victim.kill()


async def _serving(bus: Bus, engine: Part, version: int, what: str) -> LiveRow:
    """Wait until it serves this version or a newer one."""
    view = LiveView(bus)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for row in await view.alive("engine"):
                    if row.id == engine.name and row.pid == engine.process.pid and row.phase == "serving" and row.version >= version:
                        return row
                await asyncio.sleep(0.05)
    raise AssertionError(f"{what}: {engine.name} does not serve version {version}:\n{engine.log[-3000:]}")
