"""kill -9 of every kind of process once in the middle of a run: `up` starts it again, and every guarantee still holds."""

import asyncio
from pathlib import Path

from tests.chaos.auditor import judge
from tests.chaos.storm import standing_bus
from tests.whole.running import assert_books_balance, kill, live, until_step, up

VICTIMS = ("actor", "engine", "scorer", "learner", "bus")
STEPS = 60


async def test_every_kind_of_process_is_killed_once_and_nothing_is_lost(tmp_path: Path) -> None:
    """There is one run; many more steps must be completed after each kill before the next. Steps taken again end in the same bits."""
    settings = (f"learner.steps={STEPS}", "learner.checkpoint_every=20", "learner.weights_digest=true", "bus.lease_s=3")
    with up(tmp_path, *settings, "actor.scorers.enabled=true", "up.scorers=1") as run:
        async with run.bus() as bus:
            for place, victim in enumerate(VICTIMS):
                await until_step(bus, 4 + place * STEPS // 6)
                kill((await live(bus, victim)).pid)
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
        assert_books_balance(run.summary, max_lag=2)
        assert run.summary["steps"] == STEPS
    async with standing_bus(run.directory) as url:
        verdict = await judge(url, run.run, run.directory / "checkpoints", {})
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
    assert (verdict.steps, verdict.steps_without_digest) == (STEPS, 0), verdict
    assert verdict.steps_taken_again > 0, "the learner was killed between checkpoints, so at least one step was taken twice"
