"""`tidemill up` with a filter that drops 99 of 100 groups, with its actor killed in the middle: full steps, and nothing
unaccounted.
"""

import asyncio
import json
from pathlib import Path

import pytest

from tests.whole.running import SMOKE, assert_books_balance, kill, live, up
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Done, Plan, Settle
from tidemill.launch.run.audit import audit
from tidemill.learner.buffer.step_plan import is_filtered

STEPS, GROUPS, SIZE, ONE_OF = 3, 2, 2, 100
READ_EVERY = 60
"""Dropped groups between two readings of the accounting."""


@pytest.mark.slow
async def test_steps_are_full_though_99_of_100_groups_are_dropped(tmp_path: Path) -> None:
    config = tmp_path / "rare.yaml"
    rare = {"use": "tests.child_filters:rare", "options": {"one_of": ONE_OF}, "workers": 1, "timeout_s": 60.0}
    settings = {
        "data": {"filters": {"rare": rare}},
        "staleness": {"max_refill": 1000.0, "over_sampling": 10.0},
        "sampling": {"max_new_tokens": 2},
        "learner": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "checkpoint_every": 0},
        "actor": {"join_requests": True},
    }
    config.write_text(json.dumps(settings))
    with up(tmp_path, "bus.lease_s=3", "run=smoke", config=[SMOKE, config]) as run:
        async with run.bus() as bus:
            readings, _ = await asyncio.gather(follow(bus), kill_in_the_middle(bus))
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    assert readings >= STEPS * GROUPS * (ONE_OF - 1) // READ_EVERY
    assert_books_balance(run.summary, max_lag=2)
    assert (run.summary["steps"], run.summary["samples_trained"]) == (STEPS, STEPS * GROUPS * SIZE)
    assert run.summary["books_balance"] and run.summary["restarts"] == {"actor-0": 1}, run.summary
    assert {step["data/groups"] for step in run.metrics} == {GROUPS}
    dropped = run.summary["samples_dropped"]
    assert (
        set(dropped) == {"filtered:rare"} and dropped["filtered:rare"] >= (STEPS * GROUPS - 1) * (ONE_OF - 1) * SIZE
    ), dropped


async def follow(bus: Bus) -> int:
    """Read the accounting while the run goes on, until its last step is done, and return the number of readings."""
    drops, readings = 0, 0
    async for _, record in bus.plans.follow():
        if isinstance(record, Plan):
            assert len(record.seqs) == GROUPS * SIZE, "a full step"
        elif isinstance(record, Settle):
            drops += _dropped(record)
        if isinstance(record, Done) or drops // READ_EVERY > readings:
            readings += 1
            accounting, _ = await audit(bus)
            assert accounting.balance() and not (accounting.lost or accounting.trained_twice), accounting
        if isinstance(record, Done) and record.step == STEPS:
            return readings
    raise AssertionError("the log ended")


async def kill_in_the_middle(bus: Bus) -> None:
    """Kill the actor between two steps. It reads the log by itself: readings of the accounting would keep it until the
    run is over.
    """
    drops = 0
    async for _, record in bus.plans.follow():
        drops += _dropped(record) if isinstance(record, Settle) else 0
        if drops > ONE_OF * GROUPS // 2:
            kill((await live(bus, "actor")).pid)
            return


def _dropped(record: Settle) -> int:
    return len(record.tasks) if is_filtered(record.reason) else 0
