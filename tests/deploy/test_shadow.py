"""A shadow learner beside a run: the run's own steps with the same settings, others with others, and nothing of the run
changes.
"""

from pathlib import Path

import pytest

from tests.deploy.processes import Processes, step_after
from tests.page_kit import page_of
from tests.whole.running import until_step
from tidemill.bus.streams.bus import Bus, connect, runs_of
from tidemill.bus.wire.messages import Done

STEPS = 8


@pytest.mark.slow
async def test_a_shadow_takes_the_steps_of_the_run_with_its_own_settings_and_changes_nothing(tmp_path: Path) -> None:
    with Processes(tmp_path / "run", "learner.weights_digest=true") as run:
        learner = run.start("learner")
        for role in ("bus", "engine", "actor"):
            run.start(role)
        own = ("--set", f"learner.steps={STEPS}")
        async with run.bus() as bus:
            await step_after(run, bus, 1)
            consumers, cursors = await _consumers(bus), await bus.rows("run").keys("cursor")
            shadows = [
                run.start("learner", "--shadow", "same", *own),
                run.start("learner", "--shadow", "slow", *own, "--set", "learner.optimizer.lr=1e-5"),
            ]
            for name in shadows:
                await run.ended(name)
            await until_step(bus, STEPS)
            names = ["smoke", "smoke-same", "smoke-slow"]
            expected, same, slow = [await _digests(run, name) for name in names]
            assert len(same) == len(slow) == STEPS
            assert {step: expected[step] for step in same} == same, "the same settings give the same bits"
            assert not {expected[step] for step in slow} & set(slow.values())
            assert (await _consumers(bus), await bus.rows("run").keys("cursor")) == (consumers, cursors)
            assert await runs_of(run.url, name="test", wait_s=60) == ["smoke"], "an actor finds the one run"
            async with page_of(bus) as page:
                assert [other["name"] for other in (await page.get("runs"))["runs"]] == names
                curves = [
                    (await page.get("series", run=name, names="train/lr", to=STEPS))["series"]["train/lr"]
                    for name in names
                ]
            assert [len(points) for points in curves] == [STEPS] * 3
            assert curves[0] == curves[1] and all(rate == pytest.approx(1e-5) for _, rate in curves[2])
            await run.drain(learner)
            await run.audited(bus)


async def _consumers(bus: Bus) -> int:
    return int((await bus.jet.call(f"STREAM.INFO.TM_{bus.run}_TASKS"))["state"]["consumer_count"])


async def _digests(run: Processes, name: str) -> dict[int, str | None]:
    """Return the digest of the weights after each step of a run on the bus."""
    async with connect(run.url, name, name="test") as bus:
        return {record.step: record.weights_digest async for _, record in bus.plans.scan() if isinstance(record, Done)}
