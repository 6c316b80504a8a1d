"""Poisoned prompts: given up with the reason, never a stall, trained with the samples left, and issued again on an
operator's decision.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chaos.auditor import judge
from tests.chaos.storm import drained_and_judged, standing_bus
from tests.launched import run_tidemill
from tests.waits import until
from tests.whole.running import assert_books_balance, up
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire.messages import Dead, Plan, Requeue


async def dead_tasks(bus: Bus, count: int) -> list[Dead]:
    """Wait for that many dead tasks. Returns them."""
    found: list[Dead] = []
    async for _, told in bus.dead.follow():
        if isinstance(told, Dead):
            found.append(told)
        if len(found) == count:
            return found
    raise AssertionError("unreachable")


async def dead(run_dir: Path, *words: str) -> str:
    return (await asyncio.to_thread(run_tidemill, "dead", "--run-dir", str(run_dir), *words)).output


async def test_poisoned_prompts(tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    reward = (
        "actor.reward=tests.poison:ones",
        f"actor.reward_options.mended={mended}",
        "actor.reward_options.wait_s=1",
    )
    poison = (*reward, "bus.max_attempts=2")
    with up(tmp_path, *poison, "learner.steps=1000000") as run:
        async with run.bus() as bus:
            first, second, *_ = await dead_tasks(bus, 3)
            listed = [json.loads(line) for line in (await dead(run.directory, "--json")).splitlines()]
            by_id: dict[int, Any] = {one["task"]: one for one in listed}
            assert by_id[first.task]["attempts"] == 2
            assert "no judge for a one" in by_id[first.task]["reason"]
            assert "task 1000000 is not dead" in await dead(run.directory, "requeue", "1000000")
            assert "requeue: want ids of tasks, --all or --reason TEXT" in await dead(run.directory, "requeue")
            assert f"task {second.task}: drop\n" in await dead(run.directory, "drop", str(second.task))
            mended.touch()
            said = await dead(run.directory, "requeue", str(first.task))
            assert re.search(f"task {first.task}: requeue\n(recorded by the learner|not recorded yet)", said), said
            assert "already decided: requeue" in await dead(run.directory, "drop", str(first.task))
            left = await dead(run.directory, "--json")
            assert not {first.task, second.task} & {json.loads(line)["task"] for line in left.splitlines()}
            assert f"task {second.task} [drop]: 2 attempts" in await dead(run.directory, "--all")

            async def issued_again() -> list[int]:
                return [task.id async for task in bus.tasks.scan() if task.reissue_of == first.root and task.reissues]

            again = await until(issued_again)
            async for _, record in bus.plans.follow():
                if isinstance(record, Plan) and again[0] in record.tasks.tolist():
                    break
            assert [one.task async for _, one in bus.plans.scan() if isinstance(one, Requeue)] == [first.task]
        verdict = await drained_and_judged(run)
        assert verdict.dropped["failed"] > 0


@pytest.mark.slow
def test_a_run_in_which_every_task_fails_ends_with_the_reason(tmp_path: Path) -> None:
    """The dead tasks can be listed afterwards, and so can an evaluation's."""
    failing = (
        "actor.reward=tests.poison:none",
        "learner.failing_tasks=4",
        "learner.failing_s=0.5",
        "actor.max_samples_in_flight=8",
    )
    with up(tmp_path, *failing, "learner.steps=1000000") as run:
        assert run.wait() == 78, run.log[-3000:]
    reason = r"RuntimeError\('no judge at all'\) \(.*/tests/poison\.py, line \d+\)"
    assert re.search(
        rf"^ *learner: every task fails: .*, got \d+ tasks in a row .*the last: .*{reason}", run.log, re.MULTILINE
    ), run.log[-3000:]
    listed = run_tidemill("dead", "--run-dir", str(run.directory))
    assert listed.returncode == 0 and re.search(reason, listed.output), listed.output
    words = (
        "--limit",
        "6",
        "--reward",
        "tests.poison:none",
        "--set",
        "learner.failing_tasks=3",
        "--set",
        "learner.failing_s=0",
        "--set",
        "sampling.max_new_tokens=8",
    )
    config = yaml.safe_load((run.directory / "config.yaml").read_text())
    held = run_tidemill("eval", config["model"]["path"], config["data"]["path"], *words)
    assert held.returncode == 78 and re.search(f"evaluation prompt given up task=.*{reason}", held.output), held.output


@pytest.mark.slow
async def test_a_dead_task_is_trained_with_the_samples_that_it_has(tmp_path: Path) -> None:
    with up(
        tmp_path, "actor.reward=tests.poison:some", "bus.max_attempts=2", "learner.min_group_size=2", "learner.steps=3"
    ) as run:
        assert await asyncio.to_thread(run.wait) == 0, run.log[-3000:]
    assert_books_balance(run.summary, max_lag=2)
    async with standing_bus(run.directory) as url, connect(url, run.run, name="test") as bus:
        plans = [record async for _, record in bus.plans.scan() if isinstance(record, Plan)]
        sizes = {
            task: size
            for plan in plans
            for task, size in zip(plan.tasks.tolist(), plan.group_sizes.tolist(), strict=True)
        }
        dead = {told.task async for _, told in bus.dead.scan()}
        verdict = await judge(url, run.run, run.directory / "checkpoints", {})
    assert {2, 4} <= set(sizes.values()) <= {2, 3, 4}
    assert {task for task, size in sizes.items() if size < 4} <= dead
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
