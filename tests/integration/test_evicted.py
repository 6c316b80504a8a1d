"""The engines that take no pushes, with the reasons, are in the learner's live row, where ``tidemill status`` shows
them.
"""

import asyncio

from tests.actor_kit import row_until
from tests.bus_fixtures import BusOpener
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.wire.rows import LiveRow, NodeRow
from tidemill.launch.run.learner_process import LearnerRow
from tidemill.weightstore.store.registry import VersionRegistry


async def test_the_learners_row_names_evicted_engines(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        rows, registry = bus.rows("live"), VersionRegistry(bus)
        async with HeartbeatPublisher(
            bus, LiveRow(role="learner", id="l", host="h", pid=1, phase="working")
        ) as heartbeat:
            reporting = asyncio.create_task(LearnerRow(heartbeat).follow_evicted(bus))
            try:
                for evicted, shown in (
                    (
                        {"e2": "engine http://b:1: begin: HTTP 401", "e1": "x"},
                        "e1 to take pushes: x; e2 to take pushes: engine http://b:1",
                    ),
                    ({}, ""),
                ):
                    await registry.set_evicted(evicted)
                    row = await row_until(
                        rows, "learner.l", lambda row, shown=shown: bool(row["waits_for"]) == bool(shown)
                    )
                    assert row["waits_for"].startswith(shown)
            finally:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)


async def test_the_row_of_a_leader_names_evicted_engines_beside_what_its_agent_waits_for(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await VersionRegistry(bus).set_evicted({"e1": "x"})
        async with HeartbeatPublisher(
            bus, LiveRow(role="learner", id="l", host="h", pid=1, phase="waiting")
        ) as heartbeat:
            shown = LearnerRow(heartbeat)
            following = asyncio.create_task(shown.follow_evicted(bus))
            try:
                for waits_for, whole in (("node 1", "node 1; e1 to take pushes: x"), ("", "e1 to take pushes: x")):
                    shown.show(NodeRow(node=0, nodes=2, nonce="", waits_for=waits_for, reason="r"))
                    row = await row_until(
                        bus.rows("live"), "learner.l", lambda row, whole=whole: row["waits_for"] == whole
                    )
                    assert (row["phase"], row["trouble"]) == ("waiting", "r")
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
