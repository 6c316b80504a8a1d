"""`tidemill up` on written answers alone: no engine, no actor, no reward; the learner is killed once."""

import asyncio
from collections import Counter
from pathlib import Path

from bus.streams.bus import connect
from tests.chaos.auditor import judge
from tests.chaos.storm import standing_bus
from tests.whole.running import ROOT, assert_books_balance, kill, live, records, until_step, up

SFT = ROOT / "launch/configs/sft.yaml"
ROWS, STEPS = 512, 32


async def test_one_pass_over_written_answers_with_the_learner_killed(tmp_path: Path) -> None:
    """Every row is trained once, the loss falls, and no step is lost or taken twice with other rows."""
    settings = (
        f"prepare.count={ROWS}",
        "learner.num_epochs=1",
        "learner.groups_per_step=16",
        "learner.checkpoint_every=8",
        "bus.lease_s=3",
    )
    with up(tmp_path, *settings, "learner.weights_digest=true", config=SFT, flags=("--fresh",)) as run:
        run.run = "sft"
        async with run.bus() as bus:
            await until_step(bus, 11)
            kill((await live(bus, "feeder")).pid)
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    summary = run.summary
    assert_books_balance(summary, max_lag=2)
    assert (summary["steps"], summary["samples_trained"], summary["tasks_given_up"]) == (STEPS, ROWS, {})
    assert summary["restarts"], "the learner was started again"
    losses = [line["train/sft_loss"] for line in run.metrics]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    assert not [log for log in (run.directory / "logs").iterdir() if log.name.startswith(("engine", "actor"))]
    async with standing_bus(run.directory) as url:
        verdict = await judge(url, run.run, run.directory / "checkpoints", {})
        async with connect(url, run.run, name="test") as bus:
            offsets = {task.id: task.offset async for task in bus.tasks.scan()}
            plans, _ = await records(bus)
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
    assert (verdict.steps, verdict.steps_without_digest) == (STEPS, 0), verdict
    assert Counter(offsets[int(task)] for plan in plans for task in plan.tasks) == Counter(range(ROWS))
