"""The end of a run before ``learner.steps``: the feeder on a real nats-server, with scripted actors and ranks that
train nothing.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data_kit import sample
from tests.examples import rarely
from tests.feeder_kit import World
from tests.integration.test_evaluation import plan
from tests.integration.test_feeder import OpenWorld, check_history, finish, open_world
from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.bus.wire.messages import Evaluated, Kind, Plan, Sample, Task
from tidemill.bus.wire.subjects import BEST_KEY, END_KEY
from tidemill.learner.buffer.ledger import read_state
from tidemill.learner.checkpoints import disk
from tidemill.learner.data import DataConfig
from tidemill.learner.errors import FeederFailed, NothingTrained
from tidemill.learner.feed.restart import CHECKPOINT_KEY

__all__ = ["open_world"]

PROMPTS = 7
"""Prompts of the file of ``World``."""


async def places(world: World) -> list[tuple[int, int]]:
    """Return the position of every trained task, sorted."""
    tasks = {task.id: task async for task in world.bus.tasks.scan()}
    trained = [int(id) for record in await world.plans() for id in record.tasks]
    return sorted((tasks[id].prompt_epoch, tasks[id].offset) for id in trained)


def every(*epochs: int) -> list[tuple[int, int]]:
    return [(epoch, offset) for epoch in epochs for offset in range(PROMPTS)]


async def check_end(world: World, *, steps: int, reason: str) -> list[Plan]:
    """Assert that the run has ended after ``steps`` with a checkpoint of that step, and its row has the reason."""
    end, checkpoint = await world.bus.rows("run").get(END_KEY), await world.bus.rows("run").get(CHECKPOINT_KEY)
    assert end is not None
    assert checkpoint is not None
    assert end[0]["step"] == checkpoint[0]["step"] == steps
    assert reason in end[0]["reason"]
    state = read_state(disk.read_state(Path(checkpoint[0]["directory"])))
    plans = await check_history(world, steps=steps)
    assert state["chain"] == plans[-1].chain
    return plans


@pytest.mark.parametrize("checkpoint_every", [1, 0])
@pytest.mark.parametrize("data_parallel", [1, 2])
async def test_a_run_ends_after_its_passes(open_world: OpenWorld, checkpoint_every: int, data_parallel: int) -> None:
    """Two prompts are left for the last of four steps; its checkpoint is ordered with its batch, or when it is known to
    be the last.
    """
    async with open_world(
        steps=100, groups_per_step=4, num_epochs=2, checkpoint_every=checkpoint_every, data_parallel=data_parallel
    ) as world:
        async with world.actors():
            await finish(world)
        plans = await check_end(world, steps=4, reason="2 passes")
        assert [len(plan.tasks) for plan in plans] == [4, 4, 4, 2]
        assert await places(world) == every(0, 1)
        assert await world.bus.tasks.last_id() == 1 + 2 * PROMPTS, "the fence, and no more tasks than prompts"


@pytest.mark.parametrize("what", ["batch", "done", "last"])
async def test_a_killed_learner_ends_where_it_would_have_ended(open_world: OpenWorld, what: str) -> None:
    async with open_world(steps=100, num_epochs=1, checkpoint_every=3) as world:
        async with world.actors():
            async with world.feeder() as (url, _):
                await world.train(url, stop=lambda did, at: (did, at) == (what, 4))
            for _ in range(2):  # the second one finds a run that is over
                await finish(world)
        await check_end(world, steps=4, reason="1 pass")
        assert await places(world) == every(0)


async def test_a_run_that_has_ended_goes_on_with_more_passes(open_world: OpenWorld) -> None:
    async with open_world(steps=100, num_epochs=1) as world:
        async with world.actors():
            await finish(world)
            before = await check_end(world, steps=4, reason="1 pass")
            world.learner = replace(world.learner, num_epochs=2)
            await finish(world)
            plans = await check_end(world, steps=8, reason="2 passes")
            assert [plan.chain for plan in plans[:4]] == [plan.chain for plan in before]
            world.learner = replace(world.learner, num_epochs=3, steps=9)
            await finish(world)
        await check_end(world, steps=9, reason="learner.steps")
        assert (await places(world))[: 2 * PROMPTS] == every(0, 1)
        await check_history(world)


async def test_passes_without_a_group_to_train_are_an_error(open_world: OpenWorld) -> None:
    async with open_world(steps=100, num_epochs=1, filter_zero_variance=True) as world:
        async with (
            world.actors(lambda task, index: replace(world.respond(task, index), reward=1.0)),
            world.feeder() as (url, feeding),
        ):
            with refusal(FeederFailed, place="learner.num_epochs", got="none (tasks: 7 filtered)"):
                await world.train(url)
            with pytest.raises(NothingTrained):
                await feeding


SCORES = {0: 0.1, 2: 0.9, 4: 0.3, 6: 0.9}
"""Score of each version that is evaluated; later ones have 0."""


def score_of(task: Task, index: int) -> Sample:
    score = SCORES.get(task.min_version, 0.0)
    return sample(task, index, ((task.min_version, 2),), reward=score, metadata=dict(task.metadata))


class Scored:
    """The versions that have their scores in PLAN."""

    def __init__(self) -> None:
        self._known: dict[int, threading.Event] = defaultdict(threading.Event)

    async def follow(self, world: World) -> None:
        async for _, record in world.bus.plans.follow():
            if isinstance(record, Evaluated) and record.dataset == "held":
                self._known[record.version].set()

    def wait(self, did: str, step: int) -> bool:
        """Act as ``stop`` of a rank that waits for the scores of every second version."""
        if did == "publish" and step in SCORES:
            assert self._known[step].wait(LIMIT_S), step
        return False


@asynccontextmanager
async def scored(world: World) -> AsyncIterator[Scored]:
    """Run actors for both kinds of tasks, and follow the scores."""
    scores = Scored()
    following = asyncio.create_task(scores.follow(world))
    async with world.actors(), world.actors(score_of, kind=Kind.EVAL):
        try:
            yield scores
        finally:
            following.cancel()


async def test_a_run_whose_scores_stop_to_rise_ends_and_keeps_the_best_checkpoint(
    open_world: OpenWorld, tmp_path: Path
) -> None:
    """Versions 4 and 6 are no better than 2, so the run ends after the step that is planned by then."""
    evaluation = plan(tmp_path, rows=2, best="held/mean", stop_after=2, last_step=100)
    async with open_world(steps=100, checkpoint_every=0) as world:
        async with scored(world) as scores, world.feeder(evaluation=evaluation) as (url, feeding):
            await world.train(url, stop=scores.wait)
            await feeding
        steps = len(await world.plans())
        assert steps in (6, 7, 8)
        await check_end(
            world, steps=steps, reason="no held/mean above 0.9 (version 2, step 2) in the 2 evaluations after it"
        )
        best = await world.bus.rows("run").get(BEST_KEY)
        assert best is not None
        wanted = {"step": 2, "version": 2, "set": "held", "metric": "mean", "value": 0.9, "epoch": 1}
        assert best[0] == wanted | {"directory": str(world.root / "step-2-epoch-1")}
        kept = [one.step for one in disk.listed(world.root)]
        assert kept[0] == steps
        assert kept[-1] == 2
        assert (4 in kept) == (steps == 6), "its score is no better: it is kept only as the one before the last"
        latest = await world.bus.rows("run").get(CHECKPOINT_KEY)
        assert latest is not None
        assert "step-2-epoch-1" in latest[0]["kept"]
        versions = {record.version async for _, record in world.bus.plans.scan() if isinstance(record, Evaluated)}
        assert versions == {0, 2, 4, 6, steps}, "the last one, too"


@pytest.mark.parametrize("what", ["batch", "last"])
async def test_a_killed_learner_knows_the_best_checkpoint_and_the_end(
    open_world: OpenWorld, tmp_path: Path, what: str
) -> None:
    """It is killed while it takes step 7, or before the checkpoint of the last step is the latest."""
    evaluation = plan(tmp_path, rows=2, best="held/mean", stop_after=2, last_step=100)
    async with open_world(steps=100, checkpoint_every=3) as world:
        async with scored(world) as scores:
            async with world.feeder(evaluation=evaluation) as (url, _):
                await world.train(url, stop=lambda did, step: scores.wait(did, step) or (did == what and step >= 7))
            planned = len(await world.plans())
            async with world.feeder(evaluation=evaluation) as (url, feeding):
                await world.train(url, stop=scores.wait)
                await feeding
        await check_end(world, steps=planned, reason="no held/mean above 0.9 (version 2, step 2)")
        best = await world.bus.rows("run").get(BEST_KEY)
        assert best is not None
        assert (best[0]["step"], best[0]["directory"]) == (2, str(world.root / "step-2-epoch-1"))
        assert disk.verify(world.root / "step-2-epoch-1") is not None


async def test_a_run_that_has_ended_goes_on_without_early_stop(open_world: OpenWorld, tmp_path: Path) -> None:
    evaluation = plan(tmp_path, rows=2, best="held/mean", stop_after=2, last_step=100)
    async with open_world(steps=100) as world:
        async with scored(world) as scores:
            async with world.feeder(evaluation=evaluation) as (url, feeding):
                await world.train(url, stop=scores.wait)
                await feeding
            world.learner = replace(world.learner, steps=12)
            async with world.feeder(evaluation=plan(tmp_path, rows=2, last_step=12)) as (
                url,
                feeding,
            ):
                await world.train(url)
                await feeding
        await check_end(world, steps=12, reason="learner.steps")
        assert await world.bus.rows("run").get(BEST_KEY) is None
        assert 2 not in [one.step for one in disk.listed(world.root)], "nothing keeps it"


CURRICULUM = DataConfig(skip_easy=1.0, skip_hard=0.0, skip_passes=2)


@pytest.mark.parametrize("killed_at", [4, 17, *rarely([None, 12])])
async def test_prompts_that_were_too_easy_or_too_hard_are_left_out_and_a_killed_learner_knows_them(
    open_world: OpenWorld, killed_at: int | None
) -> None:
    """Prompts 0 and 1 of seven always pass, and 2 never does. With lag 0 and a group a step, a task is issued after the
    last is trained.
    """

    def respond(task: Task, index: int) -> Sample:
        assert isinstance(task.label, int)
        reward = 1.0 if task.label < 2 else 0.0 if task.label == 2 else float(index)
        return sample(task, index, ((task.min_version, 2),), reward=reward)

    async with open_world(steps=100, num_epochs=5, groups_per_step=1, max_lag=0, checkpoint_every=5) as world:
        async with world.actors(respond):
            if killed_at is not None:
                async with world.feeder(data=CURRICULUM) as (url, _):
                    await world.train(url, stop=lambda did, step: (did, step) == ("done", killed_at))
            async with world.feeder(data=CURRICULUM) as (url, feeding):
                await world.train(url)
                await feeding
        await check_end(world, steps=26, reason="5 passes")
        labels: dict[int, list[int]] = {}
        async for task in world.bus.tasks.scan():
            labels.setdefault(task.prompt_epoch, []).append(int(str(task.label)))
        assert {epoch: sorted(found) for epoch, found in labels.items()} == {
            epoch: list(range(7)) if epoch in (0, 3) else [3, 4, 5, 6] for epoch in range(5)
        }
