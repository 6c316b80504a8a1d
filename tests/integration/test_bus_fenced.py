"""One writer at a time: take-over, errors of the fenced writer, void messages, and lost answers."""

import asyncio
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.bus_fixtures import BusOpener
from tests.bus_kit import Proxy, make_task, take
from tests.refusals import refusal
from tests.waits import LIMIT_S, turn, until
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import Fenced, WireError
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect, current_epoch, raise_epoch
from tidemill.bus.wire.codec import encode_record
from tidemill.bus.wire.messages import Done, Fence, PlanRecord, Settle, Task


def done(step: int, epoch: int = 1) -> Done:
    return Done(epoch=epoch, step=step, metrics={"loss": 0.5})


async def steps(bus: Bus, start: int = 1) -> list[int]:
    return [record.step async for _, record in bus.plans.scan(start) if isinstance(record, Done)]


async def raw(bus: Bus, record: PlanRecord) -> None:
    """Publish like a writer that ignores fences."""
    await bus.js.publish(f"tm.{bus.run}.plan.done", encode_record(record), headers={"Tm-Epoch": str(record.epoch)})


async def test_epochs_count_up_also_when_two_start_at_once(open_bus: BusOpener) -> None:
    async with open_bus() as one, open_bus() as two:
        assert await current_epoch(one) == 0
        assert sorted(await asyncio.gather(*[raise_epoch(bus) for bus in (one, two) for _ in range(5)])) == list(
            range(1, 11)
        )
        assert await current_epoch(two) == 10


async def test_records_are_stored_behind_their_fence_in_order(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.plans.fence(1)
        seqs = [await bus.plans.append(done(step)) for step in (1, 2, 3)]
        assert seqs == [2, 3, 4]
        assert [type(record) async for _, record in bus.plans.scan()] == [Fence, Done, Done, Done]
        assert await steps(bus) == [1, 2, 3]
        assert await steps(bus, 4) == [3]
        following = bus.plans.follow(3)
        assert [seq for seq, _ in await take(following, 2)] == [3, 4]
        await bus.plans.append(done(4))
        assert (await take(following, 1))[0][0] == 5
        await following.aclose()  # type: ignore[attr-defined]


async def test_a_record_that_is_larger_than_a_message_is_refused_and_not_tried_for_ever(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.plans.fence(1)
        await bus.tasks.fence(1)
        room = bus.plans.max_record_bytes
        assert room == BusConfig().max_payload_bytes - 1024
        large = Settle(epoch=1, reason="lost", tasks=np.arange(room // 8), seqs=np.zeros(0, np.int64), step=1)
        async with asyncio.timeout(LIMIT_S):
            with refusal(
                WireError, field=re.compile(r"\.plan\.settle$"), want=re.compile(rf"\b{room} bytes, .*\bmax_payload\b")
            ):
                await bus.plans.append(large)
            with refusal(WireError, field=re.compile(r"\.task\.train$"), want=re.compile(rf"\b{room} bytes")):
                await bus.tasks.issue(make_task(bus.run, epoch=1, prompt="p" * room))
            fitting = replace(large, tasks=np.arange(room // 8 - 100))
            assert await bus.plans.append(fitting) == 2


async def test_a_second_writer_fences_the_first_off(open_bus: BusOpener) -> None:
    async with open_bus() as old, open_bus() as new:
        await old.plans.fence(1)
        await old.tasks.fence(1)
        await old.plans.append(done(1))
        await new.plans.fence(2)
        await new.tasks.fence(2)
        with refusal(Fenced, mine=1, seen=2):
            await old.plans.append(done(2))
        with pytest.raises(Fenced):
            await old.tasks.issue(make_task(old.run, epoch=1))
        with pytest.raises(Fenced):
            await old.plans.append(done(2))
        assert await new.plans.append(done(2, epoch=2)) == 4
        assert await steps(new) == [1, 2]


@pytest.mark.parametrize("epoch", [1, 2])
async def test_no_fence_is_raised_below_a_newer_one(open_bus: BusOpener, epoch: int) -> None:
    async with open_bus() as new, open_bus() as old:
        await new.plans.fence(2)
        await new.plans.fence(2)  # a second fence by the same writer changes nothing
        with pytest.raises(Fenced):
            await old.plans.fence(epoch)
        assert [seq async for seq, _ in new.plans.scan()] == [1]


async def test_a_new_fence_goes_behind_what_the_old_writer_just_wrote(open_bus: BusOpener) -> None:
    async with open_bus() as old, open_bus() as new:
        await old.plans.fence(1)
        results = await asyncio.gather(
            *[old.plans.append(done(step)) for step in range(1, 20)], new.plans.fence(2), return_exceptions=True
        )
        stored = [result for result in results[:-1] if isinstance(result, int)]
        assert all(isinstance(result, Fenced) for result in results[len(stored) : -1])
        assert await steps(new) == list(range(1, len(stored) + 1))
        assert await new.plans.append(done(20, epoch=2)) == len(stored) + 3


async def test_records_after_a_newer_fence_are_void(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.plans.fence(1)
        await bus.plans.append(done(1))
        await bus.plans.fence(2)
        await raw(bus, done(99, epoch=1))
        await bus.js.publish(f"tm.{bus.run}.plan.done", encode_record(done(98)))  # names no epoch at all
        seq = await bus.plans.append(done(2, epoch=2))
        assert seq == 6, "the writer goes on behind what is void"
        assert await steps(bus) == [1, 2]
        assert await steps(bus, 4) == [2], "also when the scan begins behind the fence"


async def test_an_append_whose_answer_was_lost_is_recognised(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    """The server answers the second try with "wrong last sequence", because its own message is stored there. Message
    ids alone would not
    suffice: they are forgotten after the duplicate window.
    """
    async with (
        open_bus(duplicate_window_s=0.1) as looker,
        Proxy(nats_server.url) as proxy,
        connect(proxy.url, looker.run, name="learner") as bus,
    ):
        await bus.plans.fence(1)
        await bus.plans.append(done(1))
        proxy.deaf = True
        appending = asyncio.create_task(bus.plans.append(done(2)))
        following = looker.plans.follow(3)
        assert (await take(following, 1))[0][0] == 3
        await following.aclose()  # type: ignore[attr-defined]
        await proxy.cut()
        proxy.deaf = False
        assert await appending == 3
        assert await bus.plans.append(done(3)) == 4
        assert await steps(looker) == [1, 2, 3]


async def test_tasks_are_stored_many_at_once_in_order_also_when_the_answers_are_lost(
    nats_server: EmbeddedServer, open_bus: BusOpener
) -> None:
    """And behind messages of no learner, which take the places that the writer expects."""
    async with (
        open_bus(duplicate_window_s=0.1) as looker,
        Proxy(nats_server.url) as proxy,
        connect(proxy.url, looker.run, name="learner") as bus,
    ):

        def tasks(first: int) -> list[Task]:
            return [make_task(looker.run, epoch=1, offset=first + number) for number in range(4)]

        await bus.tasks.fence(1)
        assert await bus.tasks.issue_all(tasks(0)) == [2, 3, 4, 5]
        await looker.js.publish(f"tm.{looker.run}.task.train", b"of no learner")
        assert await bus.tasks.issue_all(tasks(4)) == [7, 8, 9, 10]
        proxy.deaf = True
        issuing = asyncio.create_task(bus.tasks.issue_all(tasks(8)))
        await until(lambda: _stored(looker, 14))
        await proxy.cut()
        proxy.deaf = False
        assert await issuing == [11, 12, 13, 14]
        assert [task.offset async for task in looker.tasks.scan()] == [*range(12)]
        async with open_bus(run=looker.run, layout=False) as newer:
            await newer.tasks.fence(2)
            with pytest.raises(Fenced):
                await bus.tasks.issue_all(tasks(12))
        assert await looker.tasks.last_id() == 15


async def _stored(bus: Bus, seq: int) -> bool:
    return await bus.tasks.last_id() == seq


async def test_an_append_that_was_cancelled_after_it_was_stored_does_not_block_the_next(
    nats_server: EmbeddedServer, open_bus: BusOpener
) -> None:
    async with (
        open_bus() as looker,
        Proxy(nats_server.url) as proxy,
        connect(proxy.url, looker.run, name="learner") as bus,
    ):
        await bus.plans.fence(1)
        proxy.deaf = True
        appending = asyncio.create_task(bus.plans.append(done(1)))
        following = looker.plans.follow(2)
        await take(following, 1)
        await following.aclose()  # type: ignore[attr-defined]
        appending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await appending
        await proxy.cut()
        proxy.deaf = False
        assert await bus.plans.append(done(2)) == 3
        assert await steps(looker) == [1, 2]


@pytest.mark.parametrize("seed", range(3))
async def test_appends_over_kills_of_the_server_are_each_stored_once(
    nats_server: EmbeddedServer, open_bus: BusOpener, seed: int
) -> None:
    async with open_bus() as bus:
        await bus.plans.fence(1)
        kills = set(random.Random(seed).sample(range(1, 40), 3))
        for step in range(1, 41):
            appending = asyncio.create_task(bus.plans.append(done(step)))
            if step in kills:
                await turn()
                nats_server.kill()
                nats_server.start()
            await appending
        assert await steps(bus) == list(range(1, 41))


async def test_a_record_of_another_epoch_is_not_appended(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.plans.fence(3)
        with refusal(WireError, field="epoch"):
            await bus.plans.append(done(1, epoch=2))


async def test_trimmed_records_are_gone_and_fences_stay(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.plans.fence(1)
        for step in (1, 2, 3):
            await bus.plans.append(done(step))
        await bus.plans.trim(4)
        assert [seq async for seq, _ in bus.plans.scan()] == [1, 4]
        assert await bus.plans.append(done(4)) == 5


async def test_a_message_of_no_learner_is_no_fence(open_bus: BusOpener) -> None:
    """Invalid bytes behind a fence are ignored, with any epoch in their header: the writer appends behind them, and
    readers skip them.
    """
    async with open_bus() as bus, open_bus() as actor:
        await bus.plans.fence(3)
        await bus.tasks.fence(3)
        for subject in (
            f"tm.{bus.run}.plan.done",
            f"tm.{bus.run}.plan.fence",
            f"tm.{bus.run}.task.train",
            f"tm.{bus.run}.task.fence",
        ):
            for data in (b"junk", encode_record(done(99, epoch=5)), encode_record(Fence(epoch=5))[:-1]):
                for epoch in ("3", "999", "9" * 5000, "\u00b2"):
                    await bus.js.publish(subject, data, headers={"Tm-Epoch": epoch})
        seq = await bus.plans.append(done(1, epoch=3))
        id = await bus.tasks.issue(make_task(bus.run, epoch=3))
        assert [found async for found, _ in bus.plans.scan()] == [1, seq] == [1, 26]
        assert [task.id async for task in bus.tasks.scan()] == [id]
        lease = await actor.tasks.lease(20)
        assert lease is not None and lease.task.id == id
        assert bus.refusals.counts == {"PLAN": 24, "TASKS": 24}


async def test_a_fence_that_no_learner_wrote_hides_no_older_one(open_bus: BusOpener) -> None:
    async with open_bus() as new, open_bus() as old:
        await new.plans.fence(7)
        await new.js.publish(f"tm.{new.run}.plan.fence", b"junk", headers={"Tm-Epoch": "1"})
        with refusal(Fenced, mine=5, seen=7):
            await old.plans.fence(5)
        await old.plans.fence(8)
        assert await old.plans.append(done(1, epoch=8)) == 4
