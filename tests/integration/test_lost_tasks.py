"""Lost tasks among the acknowledged ones, on a real queue: decided only when everything stored before has been read."""

import asyncio
from dataclasses import replace

import pytest

from tests import data_kit
from tests.bus_fixtures import BusOpener
from tests.waits import until
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.tasks import Lease
from tidemill.bus.wire.messages import Dead, Settle, Task
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.feed.intake import LostTasks


async def test_a_lost_task_of_a_rollout_is_found_by_the_floor_of_its_queue(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ack of the task was missed, and a task of another queue, with a lower id, is leased for long."""
    monkeypatch.setattr("tidemill.learner.feed.intake.LOOK_EVERY_S", 0.1)
    found = asyncio.Event()
    async with open_bus(rollouts=("agent",)) as bus, asyncio.TaskGroup() as group:
        await bus.tasks.fence(1)
        source = DataSource(data_kit.rules(run=bus.run))
        source.published(0, 0)
        held = await issued(bus, source, 1)
        gone = await issued(bus, source, 2, rollout="agent")
        assert await gone.ack() and not found.is_set()
        looking = group.create_task(LostTasks(bus, source, found.set).run())
        await found.wait()
        settle = source.settlement()
        assert isinstance(settle, Settle) and settle.tasks.tolist() == [gone.task.id]
        assert source.incomplete() == [held.task.id]
        looking.cancel()


async def issued(bus: Bus, source: DataSource, number: int, rollout: str = "") -> Lease:
    """Issue a task that the DataSource knows, and lease it."""
    task: Task = replace(data_kit.task(number), run=bus.run, rollout=rollout)
    task = replace(task, id=await bus.tasks.issue(task))
    source.issued(task, 0.0)
    lease = await bus.tasks.lease(10, rollout=rollout)
    assert lease is not None and lease.task.id == task.id
    return lease


async def test_a_task_is_judged_when_everything_stored_before_its_ack_is_read(open_bus: BusOpener) -> None:
    found = asyncio.Event()
    async with open_bus() as bus, asyncio.TaskGroup() as group:
        await bus.tasks.fence(1)
        source = DataSource(data_kit.rules(run=bus.run))
        source.published(0, 0)
        lost = LostTasks(bus, source, found.set)
        looking = group.create_task(lost.run())
        await bus.wait_connected(1)
        done, dead, empty = [await issued(bus, source, number) for number in (1, 2, 3)]
        seqs = [await bus.samples.publish(data_kit.sample(done.task, index)) for index in (0, 1)]
        await bus.dead.store(Dead(task=dead.task.id, reason="it fails", attempts=3, actor="a", prompt=""))
        for lease in (done, dead, empty):
            assert await lease.ack()
        await until(lambda: lost.num_waiting == 1)
        assert not found.is_set() and len(source.incomplete()) == 3, "its samples are stored, and not read yet"
        for index, seq in enumerate(seqs):
            source.add(index_of(seq, data_kit.sample(done.task, index)), 0.0)
        lost.passed(seqs[-1])
        await found.wait()
        settle = source.settlement()
        assert isinstance(settle, Settle)
        assert (settle.reason, settle.tasks.tolist()) == ("lost", [empty.task.id]), (
            "the complete one is trained, the dead one is dead"
        )
        looking.cancel()
