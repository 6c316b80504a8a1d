"""Ownership of the accelerator when two learners write it: the newer one prevails, however late the other's write
comes.
"""

import asyncio
from typing import Any, cast

from tests.bus_fixtures import BusOpener
from tests.waits import LIMIT_S
from tidemill.bus.client.rows import Rows
from tidemill.bus.streams.bus import Bus
from tidemill.weightstore.push.accelerator_lease import AcceleratorLease


class HeldRows(Rows):
    """Real rows over a network that delays a write until the test releases it."""

    def __init__(self, rows: Rows) -> None:
        self.__dict__.update(vars(rows))
        self.writing, self.go = asyncio.Event(), asyncio.Event()

    async def _write(self, key: str, value: dict[str, Any], expected: int | None) -> int:
        self.writing.set()
        await self.go.wait()
        return await super()._write(key, value, expected)


class HeldBus:
    def __init__(self, bus: Bus) -> None:
        self.held, self.refusals = HeldRows(bus.rows("weights")), bus.refusals

    def rows(self, bucket: str) -> Rows:
        return self.held


async def test_a_replaced_learner_gives_no_turn_away_that_it_has_read_before(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        new, cut_off = AcceleratorLease(bus), HeldBus(bus)
        old = AcceleratorLease(cast(Bus, cut_off))
        await AcceleratorLease(bus).acquire(1)
        giving = asyncio.create_task(old.release(1))
        await asyncio.wait_for(cut_off.held.writing.wait(), LIMIT_S)
        await new.acquire(2)
        cut_off.held.go.set()
        await giving
        found = await bus.rows("weights").get("turn")
        assert found is not None and found[0] == {"whose": "learner", "epoch": 2}


async def test_conflicting_writes_are_retried_and_a_lower_epoch_is_refused(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        turns = AcceleratorLease(bus)
        await asyncio.gather(*[turns.acquire(1) for _ in range(8)])
        await turns.release(1)
        found = await bus.rows("weights").get("turn")
        assert found is not None and found[0] == {"whose": "engines", "epoch": 1}
        assert await turns.available()
        await turns.release(0)
        assert (await bus.rows("weights").get("turn")) == found
