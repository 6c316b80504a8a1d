"""Evaluation beside training: the feeder on a real nats-server, with scripted actors and ranks that train nothing."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data_kit import sample
from tests.feeder_kit import World
from tests.integration.test_feeder import OpenWorld, check_history, open_world
from tests.waits import LIMIT_S
from tidemill.bus.section import ShortNamed
from tidemill.bus.wire.messages import Dead, Evaluated, Kind, Plan, Sample, Sampling, Status, Task
from tidemill.learner.evaluation.config import EvalConfig, EvalSet
from tidemill.learner.evaluation.evaluations import EvalPlan, EvalPrompts
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.weightstore.store.registry import VersionRegistry

__all__ = ["open_world"]


def plan(directory: Path, *, rows: int = 5, samples: int = 2, **changes: Any) -> EvalPlan:
    file = directory / "held.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"h{number}", "label": number}) + "\n" for number in range(rows)))
    prompts = PromptFile(file, tokenize=lambda prompt: [ord(letter) for letter in prompt], max_tokens=8, shuffle=False)
    sampling = Sampling(max_new_tokens=8, temperature=0.5)
    held = EvalPrompts(name="held", prompts=prompts, sampling=sampling, samples=samples, passes_at=1.0)
    first = EvalPrompts(name="first", prompts=prompts, sampling=sampling, samples=1, passes_at=1.0, limit=2)
    values: dict[str, Any] = {"every": 2, "last_step": 5, "max_open_tasks": 2} | changes
    last_step = values.pop("last_step")
    sets = ShortNamed({"held": EvalSet(path=str(file), samples=samples), "first": EvalSet(path=str(file))})
    return EvalPlan(config=EvalConfig(sets=sets, **values), sets=[held, first], last_step=last_step)


def respond(task: Task, index: int) -> Sample:
    return sample(
        task, index, ((task.min_version, 2),), reward=float((task.offset + index) % 2), metadata=dict(task.metadata)
    )


async def tasks_of(world: World, kind: Kind) -> AsyncIterator[Task]:
    """Yield the tasks of a kind as they are issued."""
    first = 1
    while True:
        async for task in world.bus.tasks.scan(first):
            first = task.id + 1
            if task.kind is kind:
                yield task
        await asyncio.sleep(0.02)


async def evaluated(world: World) -> list[Evaluated]:
    return [record async for _, record in world.bus.plans.scan() if isinstance(record, Evaluated)]


async def eval_tasks(world: World) -> list[Task]:
    return [task async for task in world.bus.tasks.scan() if task.kind is Kind.EVAL]


EXPECTED = {"held": (5.0, 10.0, 0.5), "first": (2.0, 2.0, 0.5)}
"""Prompts, samples and mean of each set at each version."""


def summary(records: list[Evaluated]) -> dict[tuple[int, str], tuple[float, float, float]]:
    return {
        (one.version, one.dataset): (one.metrics["prompts"], one.metrics["samples"], one.metrics["mean"])
        for one in records
    }


async def test_versions_are_evaluated_while_training_goes_on(open_world: OpenWorld, tmp_path: Path) -> None:
    async with open_world() as world:
        async with world.actors(), world.actors(respond, kind=Kind.EVAL):
            async with world.feeder(evaluation=plan(tmp_path)) as (url, feeding):
                await world.train(url)
                await feeding
        await check_history(world)
        records = await evaluated(world)
        assert {version for version, _ in summary(records)} >= {0, 5}, (
            "the first version and the last; those between when there was time"
        )
        assert summary(records) == {(one.version, one.dataset): EXPECTED[one.dataset] for one in records}
        tasks = await eval_tasks(world)
        placed = [(task.min_version, task.metadata["evaluation"]["set"], task.offset) for task in tasks]
        assert len(placed) == len(set(placed)) == 7 * len({task.min_version for task in tasks})
        assert {task.sampling.temperature for task in tasks} == {0.5}
        seeds = {(task.offset, task.sampling.seed) for task in tasks}
        assert len(seeds) == 5, "a prompt has the same seed at every version"


@pytest.mark.parametrize("exact", [False, True])
async def test_no_step_is_planned_before_an_exact_evaluation_is_over(
    open_world: OpenWorld, tmp_path: Path, exact: bool
) -> None:
    """That of version 0 always is one. Its prompts are answered when there are samples for steps; prompts that fail
    hold up no step.
    """

    async def buried() -> None:
        async for task in tasks_of(world, Kind.EVAL):
            if task.offset == 1:
                await world.bus.dead.store(
                    Dead(task=task.id, reason="it fails", attempts=3, actor="a", prompt=task.prompt)
                )

    async with open_world(steps=6, max_lag=2) as world:
        evaluation = plan(tmp_path, every=1, last_step=6, exact=exact)
        async with world.actors(), world.feeder(evaluation=evaluation) as (url, feeding):
            training = asyncio.create_task(world.train(url))
            seen = 0
            async for _ in world.bus.samples.read(await world.bus.samples.cursor()):
                if (seen := seen + 1) == 4:  # those of a step
                    break
            burying = asyncio.create_task(buried())
            async with world.actors(respond, kind=Kind.EVAL):
                await training
                await feeding
            burying.cancel()
        records = [record async for _, record in world.bus.plans.scan() if isinstance(record, Evaluated | Plan)]
        planned = 0
        for record in records:
            if isinstance(record, Plan):
                planned = record.step
            elif exact or record.step == 0:
                assert planned == record.step, f"version {record.version} is evaluated behind step {planned}"
        assert {record.step for record in records if isinstance(record, Evaluated)} >= (
            set(range(7)) if exact else {0, 6}
        )


async def test_a_feeder_that_is_killed_in_the_evaluation_of_version_0_goes_on_with_it(
    open_world: OpenWorld, tmp_path: Path
) -> None:
    """The next start publishes the weights of step 0 again, as version 1: the scores are those of one set of
    weights.
    """
    begun = asyncio.Event()

    def first_five(task: Task, index: int) -> Sample:
        answered.append(task)
        if len(answered) == 5:
            begun.set()
        if len(answered) > 5:
            raise RuntimeError("no more, however late the feeder is killed")
        return respond(task, index)

    def by_version_1(task: Task, index: int) -> Sample:
        return sample(
            task,
            index,
            ((max(1, task.min_version), 2),),
            reward=float((task.offset + index) % 2),
            metadata=dict(task.metadata),
        )

    answered: list[Task] = []
    evaluation = plan(tmp_path, every=100)
    async with open_world() as world:
        async with (
            world.actors(),
            world.actors(first_five, kind=Kind.EVAL),
            world.feeder(evaluation=evaluation) as (url, _),
        ):
            training = asyncio.create_task(world.train(url, stop=lambda did, step: True))
            await begun.wait()
        await asyncio.gather(training, return_exceptions=True)
        assert await world.plans() == [] and await evaluated(world) == []
        async with (
            world.actors(),
            world.actors(by_version_1, kind=Kind.EVAL),
            world.feeder(evaluation=evaluation) as (url, feeding),
        ):
            await world.train(url)
            await feeding
        records = await evaluated(world)
        assert [(record.version, record.step) for record in records] == [(0, 0), (0, 0), (6, 5), (6, 5)]
        assert {record.metrics["versions_later"] for record in records} == {0.0}
        tasks = await eval_tasks(world)
        assert len(tasks) == 14, "no prompt is issued twice"


async def test_a_killed_feeder_asks_no_prompt_twice(open_world: OpenWorld, tmp_path: Path) -> None:
    """It is killed in the evaluation of version 2, of which the checkpoint has a part, and goes on with it."""
    begun = threading.Event()
    answered: list[Task] = []

    def first_five(task: Task, index: int) -> Sample:
        if task.min_version == 2:
            if begun.is_set():
                raise RuntimeError("no more, however late the feeder is killed")
            answered.append(task)
            if len(answered) >= 5:
                begun.set()
        return respond(task, index)

    def stop(did: str, step: int) -> bool:
        if (did, step) == ("batch", 3):
            assert begun.wait(LIMIT_S), "five responses"
        return (did, step) == ("publish", 4)

    evaluation = plan(tmp_path, rows=12, every=2)
    async with open_world() as world:
        async with world.actors(), world.feeder(evaluation=evaluation) as (url, _):
            training = asyncio.create_task(world.train(url, stop=stop))
            async with world.actors(first_five, kind=Kind.EVAL):
                await asyncio.to_thread(begun.wait, LIMIT_S)
            await training
        assert {record.version for record in await evaluated(world)} == {0}, "the evaluation of version 2 is not over"
        async with (
            world.actors(),
            world.actors(respond, kind=Kind.EVAL),
            world.feeder(evaluation=evaluation) as (url, feeding),
        ):
            await world.train(url)
            await feeding
        await check_history(world)
        tasks = await eval_tasks(world)
        placed = [(task.min_version, task.metadata["evaluation"]["set"], task.offset) for task in tasks]
        assert len(placed) == len(set(placed))
        wanted = {"held": (12.0, 24.0, 0.5), "first": (2.0, 2.0, 0.5)}
        head = await VersionRegistry(world.bus).head()
        assert head is not None and head.step == 5
        found = summary(await evaluated(world))
        assert found.keys() >= {(version, name) for version in (0, 2, head.version) for name in wanted}
        assert all(numbers == wanted[name] for (_, name), numbers in found.items())


async def test_failed_foreign_and_dead_responses(open_world: OpenWorld, tmp_path: Path) -> None:
    """FAILED and foreign samples count for nothing; a dead prompt is missing and the evaluation ends."""

    def strange(task: Task, index: int) -> Sample:
        if task.metadata["evaluation"]["set"] == "held" and task.offset == 1:
            return replace(respond(task, index), status=Status.FAILED)
        if task.metadata["evaluation"]["set"] == "held" and task.offset == 2:
            return replace(respond(task, index), sampling=Sampling(max_new_tokens=8, temperature=0.9))
        return respond(task, index)

    async with open_world() as world:

        async def bury() -> None:
            """Declare the two prompts dead once they are out."""
            while True:
                for task in await eval_tasks(world):
                    if task.metadata["evaluation"]["set"] == "held" and task.offset in (1, 2):
                        await world.bus.dead.store(
                            Dead(task=task.id, reason="it fails", attempts=3, actor="a", prompt=task.prompt)
                        )
                await asyncio.sleep(0.05)

        burying = asyncio.create_task(bury())
        async with (
            world.actors(),
            world.actors(strange, kind=Kind.EVAL),
            world.feeder(evaluation=plan(tmp_path)) as (url, feeding),
        ):
            await world.train(url)
            await feeding
        burying.cancel()
        records = {(one.version, one.dataset): one.metrics for one in await evaluated(world)}
        assert records[0, "held"]["missing"] == 4.0 and records[0, "held"]["samples"] == 6.0
        assert records[0, "first"]["missing"] == 0.0
        await check_history(world)


async def test_an_evaluation_that_stands_still_ends_with_what_it_has(open_world: OpenWorld, tmp_path: Path) -> None:
    """No actor takes evaluation tasks: the run ends all the same."""
    async with open_world() as world:
        evaluation = plan(tmp_path, every=100, stall_s=0.2)
        async with world.actors(), world.feeder(evaluation=evaluation) as (url, feeding):
            await world.train(url)
            await feeding
        records = await evaluated(world)
        assert {(one.version, one.dataset) for one in records} == {(0, "held"), (0, "first"), (5, "held"), (5, "first")}
        assert all(
            one.metrics == {"prompts": 0.0, "samples": 0.0, "missing": 10.0 if one.dataset == "held" else 2.0}
            for one in records
        )
        await check_history(world)


@pytest.mark.parametrize("at_start", [False, True])
async def test_a_drained_feeder_does_not_wait_for_an_evaluation(
    open_world: OpenWorld, tmp_path: Path, at_start: bool
) -> None:
    """Of the last version, for which the run waits, or of version 0, for which the first step does."""
    async with open_world() as world:
        draining = asyncio.Event()
        async with (
            world.actors(),
            world.feeder(evaluation=plan(tmp_path, at_start=at_start), draining=draining) as (url, feeding),
        ):
            training = asyncio.create_task(world.train(url))
            async for _ in tasks_of(world, Kind.EVAL):
                break
            if not at_start:
                await training
            draining.set()
            await training
            await feeding
        assert await evaluated(world) == []
        assert len(await world.plans()) == (0 if at_start else 5)
