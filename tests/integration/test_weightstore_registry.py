"""The version registry on a real nats-server: numbers, the head, fences, snapshots."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.bus_fixtures import BusOpener
from tests.bus_kit import make_sample
from tests.refusals import refusal
from tidemill.bus.errors import Fenced, NotFound, UnreadableRow
from tidemill.bus.streams.bus import raise_epoch
from tidemill.bus.wire.subjects import bucket_stream
from tidemill.weightstore.store.registry import VersionRegistry


async def test_the_head_moves_only_by_publishing(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        assert await registry.head() is None
        assert (await registry.publish_initial("/model", 1)).version == 0
        row = await registry.reserve(7, 1, digest="d")
        assert (row.version, row.step, row.epoch, row.state, row.digest) == (1, 7, 1, "pushing", "d")
        assert await registry.row(1) == row  # before any engine can have seen it
        head = await registry.head()
        assert head is not None and head.version == 0
        published = await registry.publish(row)
        assert await registry.head() == published == await registry.row(1)
        assert published.state == "published"
        assert await registry.publish(row) == published  # the first answer may have been lost
        assert (await registry.publish_initial("/model", 1)).version == 1


async def test_a_push_that_fails_after_the_head_moved_leaves_the_version_published(open_bus: BusOpener) -> None:
    """The learner misses the answer, and a newer one fences it, or it reads only that the bus is away."""
    async with open_bus() as bus:
        first, second = VersionRegistry(bus), VersionRegistry(bus)
        row = await first.reserve(1, 1)
        await bus.rows("weights").put("head", {**asdict(row), "state": "published", "fence": 1})
        await first.fail(row)
        assert await first.row(1) == replace(row, state="published")

        later = await first.publish(await first.reserve(2, 1))
        await second.fence(2)
        await first.fail(later)
        newest = await second.publish(await second.reserve(3, 2))
        await first.fail(later)
        assert [await second.row(number) for number in (2, 3)] == [later, newest]

        failed = await second.reserve(4, 2)
        await second.fail(failed)
        assert await second.row(4) == replace(failed, state="failed")


async def test_a_number_is_never_used_twice(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        first, second = VersionRegistry(bus), VersionRegistry(bus)
        rows = await asyncio.gather(*[registry.reserve(step, 1) for step in range(8) for registry in (first, second)])
        assert sorted(row.version for row in rows) == list(range(1, 17))
        await first.fail(rows[0])
        await first.publish(max(rows, key=lambda row: row.version))
        after_restart = VersionRegistry(bus)
        assert (await after_restart.reserve(9, 2)).version == 17
        assert await after_restart.steps() == {row.version: row.step for row in rows} | {17: 9}


async def test_the_number_of_a_row_marked_as_deleted_is_not_used_again(open_bus: BusOpener) -> None:
    """An engine may have the version of that number, and samples of it may come."""
    async with open_bus() as bus:
        first, second = VersionRegistry(bus), VersionRegistry(bus)
        await second.reserve(1, 1)
        row = await first.reserve(2, 1)
        await bus.js.publish(
            f"$KV.TM_{bus.run}_weights.v.{row.version}", b"", headers={"KV-Operation": "DEL"}, timeout=60
        )
        assert (await second.reserve(2, 1)).version == row.version + 1
        assert (await VersionRegistry(bus).reserve(3, 1)).version == row.version + 2


async def test_a_running_learner_continues_its_numbers_when_the_rows_are_lost(open_bus: BusOpener) -> None:
    """This includes a learner that has taken none yet, but has seen those of the learner before it."""
    async with open_bus() as bus:
        first, second = VersionRegistry(bus), VersionRegistry(bus)
        await first.publish(await first.reserve(1, 1))
        await first.publish(await first.reserve(2, 1))
        await second.fence(2)
        for _ in range(2):
            await bus.jet.call(f"STREAM.PURGE.{bucket_stream(bus.run, 'weights')}")
            row = await second.publish(await second.reserve(3, 2))
        assert row.version == 4


async def test_lost_rows_are_written_again_and_the_numbers_behind_them_stay_unused(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        assert not await registry.lost({})
        known = {0: 0, 4: 3, 5: 4}
        assert await registry.lost(known)
        await registry.restore(known, epoch=2)
        assert not await registry.lost(known)
        head = await registry.head()
        assert head is not None and (head.version, head.step, head.state) == (5, 4, "published")
        assert {version: (await VersionRegistry(bus).step_of(version)) for version in known} == known
        assert (await VersionRegistry(bus).reserve(5, 2)).version > 5 + 100
        with pytest.raises(Fenced):
            await registry.restore(known, epoch=1)


async def test_a_head_that_is_alone_in_being_lost_is_the_newest_published_version(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        rows = [await registry.reserve(step, 1) for step in (1, 2, 3)]
        for row in rows[:2]:
            await registry.publish(row)
        await bus.rows("weights").delete("head")
        assert await registry.lost({1: 1})
        await registry.restore({1: 1}, epoch=1)
        head = await registry.head()
        assert head is not None and head.version == 2
        ahead = {1: 1, 2: 2, 3: 3}  # tokens of a version that is still being pushed are no loss
        assert not await registry.lost(ahead)


async def test_steps_are_known_of_every_version_that_an_engine_may_have_seen(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        writer, reader = VersionRegistry(bus), VersionRegistry(bus)
        pushing, failed = await writer.reserve(3, 1), await writer.reserve(4, 1)
        await writer.fail(failed)
        assert await reader.steps() == {1: 3, 2: 4}
        assert await reader.step_of(pushing.version) == 3
        with refusal(NotFound, what="version 9"):
            await reader.step_of(9)


@pytest.mark.parametrize("what", ["reserve", "publish", "fence"])
async def test_a_lower_epoch_is_refused(open_bus: BusOpener, what: str) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        old = await registry.reserve(1, 1)
        assert await registry.fence(2) is None  # no version has been published: the fence alone is no head
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "reserve": lambda: registry.reserve(2, 1),
            "publish": lambda: registry.publish(old),
            "fence": lambda: registry.fence(1),
        }
        with pytest.raises(Fenced):
            await calls[what]()
        assert await registry.head() is None
        new = await registry.publish(await registry.reserve(1, 2))
        assert await registry.fence(3) == new


async def test_the_row_of_a_head_whose_learner_was_killed_in_between_is_published_by_the_next_learner(
    open_bus: BusOpener,
) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        row = await registry.reserve(1, 1)
        await bus.rows("weights").put("head", {**asdict(row), "state": "published", "fence": 1})
        assert await registry.row(row.version) == row and row.state == "pushing"
        head = await VersionRegistry(bus).fence(2)
        assert head is not None and await registry.row(row.version) == head and head.state == "published"


async def test_of_two_learners_that_publish_at_once_the_newer_one_wins(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        for _ in range(5):
            registry = VersionRegistry(bus)
            epoch = (await registry.reserve(0, 10**6)).version * 10
            old, new = await registry.reserve(1, epoch), await registry.reserve(2, epoch + 1)
            results = await asyncio.gather(registry.publish(old), registry.publish(new), return_exceptions=True)
            head = await registry.head()
            assert head is not None and (head.version, head.epoch) == (new.version, new.epoch)
            assert not isinstance(results[1], BaseException)


async def test_a_version_behind_the_head_is_not_published(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        one, two = await registry.reserve(1, 1), await registry.reserve(2, 1)
        await registry.publish(two)
        with refusal(Fenced, where=re.compile(r"version 1 is behind version 2$"), mine=1, seen=1):
            await registry.publish(one)


async def test_the_newest_snapshot_is_known_until_it_is_gone(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        assert await registry.snapshot() is None
        await registry.publish_initial("/model", 1)
        initial = await registry.snapshot()
        assert initial is not None and (initial.version, initial.snapshot) == (0, "/model")
        for step in (1, 2, 3):
            await registry.publish(await registry.reserve(step, 1))
        await registry.set_snapshot(2, "http://two")
        await registry.set_snapshot(1, "http://one")  # older: of no use to a search for the newest
        found, head, one = await registry.snapshot(), await registry.head(), await registry.row(1)
        assert found is not None and (found.version, found.step, found.snapshot) == (2, 2, "http://two")
        assert one is not None and one.snapshot == "http://one"
        assert head is not None and (head.version, head.snapshot) == (3, "")
        await registry.set_snapshot(3, "http://three")
        head = await registry.head()
        assert head is not None and head.snapshot == "http://three"
        await registry.set_snapshot(3, "")
        assert await registry.snapshot() is None
        with pytest.raises(NotFound):
            await registry.set_snapshot(99, "http://nowhere")


async def test_a_snapshot_of_a_version_without_a_row_is_served_again_and_removed(open_bus: BusOpener) -> None:
    """Engines that run for long request none, and rows of old versions are removed behind the plans."""
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        await registry.publish(await registry.reserve(1, 1))
        await registry.set_snapshot(1, "http://one")
        for step in (2, 3, 4):
            await registry.publish(await registry.reserve(step, 1))
        await registry.forget(4)
        assert await registry.row(1) is None
        await registry.set_snapshot(1, "http://another-port/one")  # as a learner that begins again
        found = await registry.snapshot()
        assert found is not None and (found.version, found.snapshot) == (1, "http://another-port/one")
        await registry.set_snapshot(4, "http://four")
        await registry.set_snapshot(1, "")  # the oldest is removed
        found = await registry.snapshot()
        assert found is not None and found.version == 4
        with pytest.raises(NotFound):
            await registry.set_snapshot(2, "http://two")


async def test_a_version_comes_after_the_samples_there_are(open_bus: BusOpener) -> None:
    """The first to write it counts: the publisher before it pushes, or the feeder, for a sample that names a version
    not pushed yet.
    """
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        initial = await registry.publish_initial("model", 1)
        last = await bus.samples.publish(make_sample(bus.run))
        row = await registry.reserve(1, 1)
        assert (initial.after, row.after) == (0, last)
        assert await registry.row_for(row.version, last + 5) == row
        assert await registry.row_for(99, 1) is None
        await registry.publish(row)
        assert (await registry.row_for(row.version, last + 5)).after == last  # type: ignore[union-attr]
        for state, found in (("pushing", 7), ("published", -1)):
            await bus.rows("weights").put("v.50", {"version": 50, "step": 3, "epoch": 1, "state": state})
            for seq in (7, 9):
                assert (await registry.row_for(50, seq)).after == found, "of before there was such a thing"  # type: ignore[union-attr]


JUNK = (b"", b"\xff\x00", b"[1]", b'{"version": "x"}', b'{"version": 1, "step": -1, "epoch": 1}', b'{"fence": null}')


@pytest.mark.parametrize("junk", JUNK)
async def test_an_unreadable_head_is_lost_and_restored_by_the_newest_learner_alone(
    open_bus: BusOpener, junk: bytes
) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        epoch = await raise_epoch(bus)
        rows = [await registry.publish(await registry.reserve(step, epoch)) for step in (1, 2)]
        unpublished = await registry.reserve(3, epoch)

        async def spoil() -> None:
            await bus.js.publish(f"$KV.TM_{bus.run}_weights.head", junk, timeout=60)

        await spoil()
        with refusal(UnreadableRow, field="weights.head"):  # an engine waits until there is a head again
            await registry.head()
        assert await registry.lost({1: 1})
        assert await registry.repaired_head(epoch) == rows[-1] == await registry.head()
        await spoil()
        assert await registry.fence(epoch) == rows[-1], "a publisher that starts"
        await spoil()
        await registry.restore({1: 1, 2: 2}, epoch)
        assert await registry.head() == rows[-1]
        await spoil()
        reserved = await registry.reserve(4, epoch)
        published = await registry.publish(reserved)
        assert (await registry.head(), published.version) == (published, unpublished.version + 1)
        await spoil()
        assert await raise_epoch(bus) == epoch + 1
        for refused in (
            lambda: registry.repaired_head(epoch),
            lambda: registry.fence(epoch),
            lambda: registry.reserve(5, epoch),
            lambda: registry.restore({1: 1}, epoch),
            lambda: registry.publish(published),
        ):
            with pytest.raises(Fenced):
                await refused()
        assert await registry.fence(epoch + 1) == published


async def test_an_unreadable_head_of_a_run_without_a_version_has_the_fence_alone(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        await bus.js.publish(f"$KV.TM_{bus.run}_weights.head", b"junk", timeout=60)
        assert await registry.repaired_head(3) is None
        assert (await registry.newest_epoch(), await registry.head()) == (3, None)
        await bus.js.publish(f"$KV.TM_{bus.run}_weights.head", b"junk", timeout=60)
        assert (await registry.publish_initial("/model", 3)).version == 0
        assert (await registry.head()) == await registry.row(0)


async def test_unreadable_rows_of_versions_are_restored_with_the_head_and_no_number_is_skipped(
    open_bus: BusOpener,
) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        for step in (1, 2):
            await registry.publish(await registry.reserve(step, 1))
        for key in ("head", "v.1", "v.2"):
            await bus.js.publish(f"$KV.TM_{bus.run}_weights.{key}", b"junk", timeout=60)
        assert await registry.repaired_head(1) is None, "no version is known to be published"
        await registry.restore({1: 1, 2: 2}, 1)
        assert [row and (row.version, row.step) for row in (await registry.head(), await registry.row(1))] == [
            (2, 2),
            (1, 1),
        ]
        assert (await VersionRegistry(bus).reserve(3, 1)).version == 3


async def test_an_unreadable_row_of_a_version_is_whole_again_when_it_is_published(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        registry = VersionRegistry(bus)
        row = await registry.reserve(1, 1, digest="d")
        await bus.js.publish(f"$KV.TM_{bus.run}_weights.v.{row.version}", b"junk", timeout=60)
        assert await registry.publish(row) == await registry.row(row.version)


async def test_a_head_that_is_spoilt_and_repaired_before_the_row_is_published_is_the_version_again(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feeder repairs it, from the rows that are published by then."""
    async with open_bus() as bus:
        registry, feeders = VersionRegistry(bus), VersionRegistry(bus)
        first = await registry.publish(await registry.reserve(1, 1))
        row, change, repaired = await registry.reserve(2, 1), registry.rows.change, []

        async def later(key: str, fn: Any, **rest: Any) -> Any:
            if key == f"v.{row.version}" and not repaired:
                await bus.js.publish(f"$KV.TM_{bus.run}_weights.head", b"junk", timeout=60)
                repaired.append(await feeders.repaired_head(1))
            return await change(key, fn, **rest)

        monkeypatch.setattr(registry.rows, "change", later)
        published = await registry.publish(row)
        assert repaired == [first]
        assert await registry.head() == published == await registry.row(row.version)
