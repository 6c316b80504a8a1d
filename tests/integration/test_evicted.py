"""The engines that take no pushes, with the reasons, are in the learner's live row, where ``tidemill status`` shows them."""

import asyncio

from bus.liveness.heartbeats import HeartbeatPublisher
from bus.wire.messages import LiveRow
from launch.run.roles import report_evicted
from tests.actor_kit import row_until
from tests.bus_fixtures import BusOpener
from weightstore.store.registry import VersionRegistry


async def test_the_learners_row_names_evicted_engines(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        rows, registry = bus.rows("live"), VersionRegistry(bus)
        async with HeartbeatPublisher(bus, LiveRow(role="learner", id="l", host="h", pid=1, phase="working")) as heartbeat:
            reporting = asyncio.create_task(report_evicted(bus, heartbeat))
            try:
                for evicted, shown in (
                    ({"e2": "engine http://b:1: begin: HTTP 401", "e1": "x"}, "e1 to take pushes: x; e2 to take pushes: engine http://b:1"),
                    ({}, ""),
                ):
                    await registry.set_evicted(evicted)
                    row = await row_until(rows, "learner.l", lambda row, shown=shown: bool(row["waits_for"]) == bool(shown))
                    assert row["waits_for"].startswith(shown)
            finally:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)
