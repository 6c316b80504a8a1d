"""Whole runs over two streams of samples, one reader of which is killed in the middle: with filters, partial groups, an
evaluation set, or a curriculum. The accounting balances.
"""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.data_kit import sample
from tests.feeder_kit import World
from tests.integration.test_bus_shards import forked_readers, of_shard, started
from tests.integration.test_evaluation import EXPECTED, evaluated, plan, respond, summary
from tests.integration.test_feeder import OpenWorld, check_history, open_world
from tests.integration.test_filters import filtered_by
from tests.refusals import refusal
from tidemill.bus.streams.bus import connect
from tidemill.bus.system.processes import Child
from tidemill.bus.wire.messages import Dead, Kind, Plan, Sample, Settle, Task
from tidemill.launch.run.audit import audit
from tidemill.launch.run.checkpoint_cursor import read_cursor
from tidemill.learner.data import DataConfig
from tidemill.learner.errors import FeederFailed
from tidemill.learner.feed.shard_readers import ReaderEnded

__all__ = ["forked_readers", "open_world", "started"]
HARD, SHORT = 0, 5  # Labels of prompts: no sample of it scores, and one sample of its group is missing
RUN = {"sample_shards": 2, "steps": 8, "group_size": 3, "max_tokens_per_micro_batch": 32, "min_group_size": 2}


def scored(task: Task, index: int) -> Sample:
    return sample(task, index, ((task.min_version, 3),), reward=float(index % 2 if int(task.label) != HARD else 0))


@asynccontextmanager
async def actors(world: World, short: list[Task]) -> AsyncIterator[None]:
    """Run two actors, which give up ``SHORT`` prompts with two of three samples. ``short``: gets their tasks."""

    async def act() -> None:
        async with connect(world.url, world.run, world.config, name="actor") as bus:
            while True:
                lease = await bus.tasks.lease(5)
                if lease is None:
                    continue
                task, is_short = lease.task, int(lease.task.label) == SHORT
                for index in range(task.group_size - is_short):
                    await bus.samples.publish(scored(task, index))
                if is_short:
                    await bus.dead.store(Dead(task=task.id, reason="r", attempts=3, actor="a", prompt=task.prompt))
                    short.append(task)
                await lease.ack()

    acting = [asyncio.create_task(act()) for _ in range(2)]
    try:
        yield
    finally:
        for one in acting:
            one.cancel()
        await asyncio.gather(*acting, return_exceptions=True)


async def train_with_a_killed_reader(world: World, started: list[Child], **settings: Any) -> None:
    """Train until a reader is killed after step 3, then from there to the end."""

    def kill(did: str, step: int) -> bool:
        if (did, step) == ("done", 3):
            of_shard(started, 1).send(signal.SIGKILL)
        return False

    async with world.feeder(**settings) as (url, feeding):
        with refusal(FeederFailed, reason=re.compile(r"\bshard 1\b")):
            await world.train(url, stop=kill)
        with pytest.raises(ReaderEnded):
            await feeding
    async with world.feeder(**settings) as (url, feeding):
        await world.train(url)
        await feeding


async def check_books(world: World) -> list[Plan]:
    plans = await check_history(world)
    assert {int(seq) % 2 for plan in plans for seq in plan.seqs} == {0, 1}
    accounting, _ = await audit(world.bus, read_cursor(world.root))
    assert (accounting.lost, accounting.trained_twice, accounting.problems) == (0, 0, [])
    assert accounting.balance()
    assert accounting.trained == sum(len(plan.seqs) for plan in plans)
    settled = [record for record in await world.records() if isinstance(record, Settle)]
    assert accounting.dropped.total() == sum(len(record.seqs) for record in settled)
    return plans


async def test_filters_partial_groups_and_an_evaluation(
    open_world: OpenWorld,
    started: list[Child],
    tmp_path: Path,
) -> None:
    short: list[Task] = []
    data = filtered_by({"same": "equal_rewards"})
    async with open_world(**RUN) as world:
        evaluation = plan(tmp_path, last_step=8)
        async with actors(world, short), world.actors(respond, kind=Kind.EVAL):
            await train_with_a_killed_reader(world, started, data=data, evaluation=evaluation)
        scores = summary(await evaluated(world))
        assert {version for version, _ in scores} >= {0, max(world.versions)}
        assert scores == {(version, name): EXPECTED[name] for version, name in scores}
        plans = await check_books(world)
        trained = {
            int(task): int(size) for plan in plans for task, size in zip(plan.tasks, plan.group_sizes, strict=True)
        }
        labels = {task.id: int(task.label) async for task in world.bus.tasks.scan() if task.kind is Kind.TRAIN}
        assert HARD not in {labels[task] for task in trained}
        assert {trained[task] for task in trained if labels[task] != SHORT} == {3}
        reasons = {record.reason for record in await world.records() if isinstance(record, Settle)}
        assert any(reason.startswith("filtered:same") for reason in reasons)
        trained_short = [task for task in short if task.id in trained]
        assert trained_short and {trained[task.id] for task in trained_short} == {2}
        await world.bus.samples.publish(scored(trained_short[-1], 2))
        accounting, _ = await audit(world.bus, read_cursor(world.root))
        assert (accounting.lost, accounting.duplicates) == (0, 1) and accounting.balance()


async def test_a_curriculum(open_world: OpenWorld, started: list[Child]) -> None:
    """A prompt without a score is left out of later passes, also by the start that repeats the first steps.

    Without filters the feeder reads no tokens: ranks fetch them from the readers, of the second start, too.
    """
    async with open_world(**RUN) as world:
        async with actors(world, []):
            await train_with_a_killed_reader(world, started, data=DataConfig(skip_hard=0.0, skip_passes=9))
        await check_books(world)
        passes: dict[int, list[int]] = {}
        async for task in world.bus.tasks.scan():
            passes.setdefault(int(task.label), []).append(task.prompt_epoch)
        most = max(map(max, passes.values()))
        assert most >= 2
        assert passes[HARD][0] == 0 and most not in passes[HARD]
