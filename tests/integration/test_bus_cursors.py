"""Registered readers: their positions, the permissions to move them, and the messages that trimming keeps for them."""

import pytest

from tests.bus_fixtures import BusOpener
from tests.data_kit import sample, task
from tests.refusals import refusal
from tidemill.bus.errors import NotFound, StreamTrimmed
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.readers import LEAVE, WAIT, Cursors, CursorTaken, Reader


async def publish(bus: Bus, count: int) -> None:
    of = task(1, run=bus.run)
    for number in range(count):
        await bus.samples.publish(sample(of, number % of.group_size, attempt=f"{number}.{await bus.tasks.last_id()}"))


async def take(reader: Reader, count: int) -> list[int]:
    found = []
    async for received in reader.read():
        found.append(received.seq)
        if len(found) == count:
            return found
    raise AssertionError("unreachable")


async def test_a_reader_continues_at_its_position_and_only_the_last_of_a_name_moves_it(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 5)
        first = await Reader.open(bus, "archive")
        assert await take(first, 3) == [1, 2, 3]
        await first.advance(3)
        await first.advance(2)
        second = await Reader.open(bus, "archive")
        assert await take(second, 2) == [4, 5]
        with refusal(CursorTaken, name="archive"):
            await first.advance(5)
        with pytest.raises(CursorTaken):
            await first.leave()
        await second.advance(4)
        assert {name: (place.floor, place.policy) for name, place in (await Cursors(bus).all()).items()} == {
            "archive": (4, WAIT)
        }
        await second.leave()
        assert await Cursors(bus).all() == {}
        with pytest.raises(NotFound):
            await Cursors(bus).drop("archive")


async def test_trimming_waits_for_readers_with_policy_wait_until_they_are_given_up(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 9)
        created = (await bus.samples.info()).created
        cursors = Cursors(bus)
        assert await cursors.first_needed(created) is None
        waits, leaves = await Reader.open(bus, "waits"), await Reader.open(bus, "leaves", policy=LEAVE)
        await waits.advance(6)
        assert await cursors.first_needed(created) == 7
        assert await cursors.first_needed("another stream") is None, "its place means nothing there"
        assert await cursors.give_up(7, created) == [], "it needs nothing before 7"
        await bus.samples.trim(7)
        again = await Reader.open(bus, "leaves", policy=LEAVE)
        with refusal(StreamTrimmed, needed=1, first=7):
            await take(again, 1)
        assert await take(waits, 1) == [7]
        assert await cursors.give_up(9, created) == ["waits"]
        assert await cursors.first_needed(created) is None
        assert (await cursors.all())["waits"].given_up
        await waits.advance(8)
        assert (await cursors.all())["waits"].floor == 8
        back = await Reader.open(bus, "waits")
        assert not (await cursors.all())["waits"].given_up, "who comes back is waited for again"
        await cursors.drop("waits")
        with pytest.raises(NotFound):
            await back.advance(9)
        assert leaves.row.floor == 0


async def test_a_new_reader_begins_at_what_is_there_even_if_it_is_trimmed_meanwhile(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 4)
        reader = await Reader.open(bus, "new")
        await bus.samples.trim(3)  # decided before the reader's row was written
        assert await take(reader, 2) == [3, 4]
