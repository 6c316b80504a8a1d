"""The stream PARTIALS on a real server: the newest of each index is found, broken ones are skipped, those of settled
tasks are deleted.
"""

import numpy as np

from tests.bus_fixtures import BusOpener
from tests.bus_kit import issue, make_partial
from tests.refusals import refusal
from tidemill.bus.errors import WireError
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Span


async def test_the_newest_of_each_index_is_found(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        assert await bus.partials.of(1) == {}
        for index, attempt in ((0, "a"), (1, "a"), (0, "b")):
            assert await bus.partials.store(make_partial(bus.run, 1, index, attempt=attempt))
        assert await bus.partials.store(make_partial(bus.run, 11, 0))
        found = await bus.partials.of(1)
        assert {index: partial.attempt for index, partial in found.items()} == {0: "b", 1: "a"}
        assert found[0].tokens.tolist() == [8, 9, 8]


async def test_an_unreadable_partial_hides_no_other(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        assert await bus.partials.store(make_partial(bus.run, 1, 0))
        await bus.js.publish(subjects.partial(bus.run, 1, 1), b"no msgpack map")
        await bus.js.publish(subjects.partial(bus.run, "x", 1), b"")
        assert list(await bus.partials.of(1)) == [0]
        await bus.partials.trim(2)
        assert list(await bus.partials.of(1)) == []
        with refusal(WireError, field="spans"):
            await bus.partials.store(make_partial(bus.run, 1, 0, spans=()))


async def test_partials_of_settled_tasks_are_removed_and_others_stay(open_bus: BusOpener) -> None:
    """Also those of a task that is not issued: no actor of the run can have made them."""
    async with open_bus() as bus:
        await issue(bus, 11)
        for task in (2, 9, 10, 11, 12):
            for index in (0, 1):
                await bus.partials.store(make_partial(bus.run, task, index))
        await bus.partials.trim(10)
        assert [len(await bus.partials.of(task)) for task in (2, 9, 10, 11, 12)] == [0, 0, 2, 2, 0]


async def test_a_partial_too_large_is_not_stored(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        many = 1_500_000
        spans = (Span(version=0, num_tokens=many),)
        huge = make_partial(
            bus.run,
            tokens=np.zeros(many, np.int32),
            rollout_log_probs=np.zeros(many, np.float32),
            spans=spans,
            position=many + 1,
        )
        assert not await bus.partials.store(huge)
        assert await bus.partials.of(1) == {}


async def test_a_run_that_is_older_than_the_stream_has_none(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.jet.call(f"STREAM.DELETE.{subjects.stream(bus.run, subjects.PARTIALS)}")
        assert not await bus.partials.store(make_partial(bus.run))
        await bus.partials.trim(5)
        assert await bus.partials.of(1) == {}
