"""Filters by import path in a feeder: their processes, failures and records, and starts that repeat recorded
decisions.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.actor_kit import row_until
from tests.examples import rarely
from tests.feeder_kit import World
from tests.integration.test_feeder import check_history, finish, open_world  # noqa: F401 - a fixture
from tests.waits import LIMIT_S
from tidemill.bus.section import read
from tidemill.bus.wire.messages import Settle
from tidemill.learner.buffer.step_plan import is_filtered
from tidemill.learner.data import DataConfig, Filters
from tidemill.rewards.errors import BadRewardOption, UnknownReward

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]
HERE = "tests.child_filters"


def filtered_by(filters: object) -> DataConfig:
    return DataConfig(filters=read(Filters, filters, "filters"))


async def tasks_of(world: World) -> dict[int, int]:
    """Return the prompt's number, its label, of every task."""
    return {task.id: int(task.label) async for task in world.bus.tasks.scan()}


@pytest.mark.parametrize("step", [1, *rarely([3])])
async def test_a_filter_by_import_path_drops_and_masks_and_a_restart_repeats_it(
    open_world: OpenWorld,  # noqa: F811
    step: int,
) -> None:
    data = filtered_by({"labels": {"use": f"{HERE}:by_label", "options": {"dropped": [1, 4]}}})
    async with open_world(max_lag=1) as world:
        async with world.actors():
            async with world.feeder(data=data) as (url, _):
                await world.train(url, stop=lambda did, at: (did, at) == ("done", step))
            before = await world.plans()
            async with world.feeder(data=data) as (url, feeding):
                await world.train(url)
                await feeding
        plans = await check_history(world)
        assert [plan.chain for plan in plans[: len(before)]] == [plan.chain for plan in before]
        labels = await tasks_of(world)
        assert {labels[int(id)] for plan in plans for id in plan.tasks} <= {0, 2, 3, 5, 6}
        for plan in plans:
            assert plan.masked is not None
            assert plan.masked.tolist() == plan.seqs[::2].tolist(), "the first of every group of two"
        settled = [
            record for record in await world.records() if isinstance(record, Settle) and is_filtered(record.reason)
        ]
        assert {record.reason for record in settled} <= {"filtered:labels:label_1", "filtered:labels:label_4"}
        assert all(labels[int(id)] == int(record.reason[-1]) for record in settled for id in record.tasks)
        assert settled


@pytest.mark.parametrize("step", [3, *rarely([1])])
async def test_a_buffer_filter_drops_and_orders_and_a_restart_repeats_it(open_world: OpenWorld, step: int) -> None:  # noqa: F811
    use = {"use": f"{HERE}:largest_labels_first", "options": {"dropped": [1, 4]}, "scope": "buffer"}
    data = filtered_by({"all": use})
    async with open_world(max_lag=2) as world:
        async with world.actors():
            async with world.feeder(data=data) as (url, _):
                await world.train(url, stop=lambda did, at: (did, at) == ("done", step))
            before = await world.plans()
            async with world.feeder(data=data) as (url, feeding):
                await world.train(url)
                await feeding
        plans = await check_history(world)
        assert [plan.chain for plan in plans[: len(before)]] == [plan.chain for plan in before]
        labels = await tasks_of(world)
        assert {labels[int(id)] for plan in plans for id in plan.tasks} <= {0, 2, 3, 5, 6}
        first = [labels[int(id)] for id in plans[0].tasks]
        assert first == sorted(first, reverse=True), "none is too old before the first step: the filter's order alone"
        settled = [
            record for record in await world.records() if isinstance(record, Settle) and is_filtered(record.reason)
        ]
        assert {record.reason for record in settled} <= {"filtered:all:label_1", "filtered:all:label_4"}
        assert settled


async def test_a_buffer_filter_that_fails_drops_what_it_was_called_with(open_world: OpenWorld) -> None:  # noqa: F811
    """It fails before odd steps while a group of three of the seven prompts is there."""
    data = filtered_by({"mine": {"use": f"{HERE}:fails_before_odd_steps", "scope": "buffer", "workers": 1}})
    async with open_world(max_lag=1, max_refill=100.0) as world:
        async with world.actors(), world.feeder(data=data) as (url, feeding):
            await world.train(url)
            await feeding
        plans = await check_history(world)
        labels = await tasks_of(world)
        for plan in plans[::2]:
            assert all(labels[int(id)] % 3 != 1 for id in plan.tasks), plan.step
        assert {record.reason for record in await world.records() if isinstance(record, Settle)} >= {
            "filtered:mine:failed"
        }


async def test_filters_that_fail_drop_the_group_and_end_neither_run_nor_feeder(open_world: OpenWorld) -> None:  # noqa: F811
    data = filtered_by({"mine": {"use": f"{HERE}:misbehaves", "timeout_s": 1.0, "workers": 2}})
    async with open_world(max_lag=1, max_refill=100.0) as world:
        async with world.actors(), world.feeder(data=data) as (url, feeding):
            await world.train(url)
            await feeding
        plans = await check_history(world)
        labels = await tasks_of(world)
        assert {labels[int(id)] for plan in plans for id in plan.tasks} == {0, 3, 6}
        reasons = Counter(record.reason for record in await world.records() if isinstance(record, Settle))
        assert reasons["filtered:mine:failed"]


async def test_a_filter_that_cannot_be_loaded_ends_the_start(open_world: OpenWorld) -> None:  # noqa: F811
    async with open_world() as world:
        for use, error, words in (
            (
                {"use": f"{HERE}:longer", "scope": "buffer"},
                UnknownReward,
                f"buffer filter '{HERE}:longer': {HERE} has no 'longer'",
            ),
            (f"{HERE}:nothing", UnknownReward, f"filter '{HERE}:nothing': {HERE} has no 'nothing'"),
            (f"{HERE}:by_label", BadRewardOption, r"options.dropped: missing, and it has no default \(filter "),
        ):
            async with world.feeder(data=filtered_by({"f": use})) as (_, feeding):
                with pytest.raises(error, match=words):
                    async with asyncio.timeout(LIMIT_S):
                        await feeding


async def test_count_only_changes_nothing(open_world: OpenWorld) -> None:  # noqa: F811
    data = filtered_by(
        {
            "easy": {"use": "mean_reward", "options": {"at_most": -1.0}, "count_only": True},
            "all": {
                "use": f"{HERE}:largest_labels_first",
                "options": {"dropped": [0, 1, 2, 3, 4, 5, 6]},
                "scope": "buffer",
                "count_only": True,
            },
        }
    )
    async with open_world() as world:
        async with world.actors():
            async with world.feeder(data=data) as (url, _):
                await world.train(url, stop=lambda did, step: (did, step) == ("done", 3))
                await row_until(
                    world.bus.rows("live"),
                    "feeder.feeder",
                    lambda row: "filter.all" in row["load"] and row["load"].get("filter.easy", 0) >= 6,
                )
            async with world.feeder(data=data) as (url, feeding):
                await world.train(url)
                await feeding
        await check_history(world)
        assert not [record for record in await world.records() if isinstance(record, Settle)]
