"""Streams as configured, read back, and separated by run."""

import asyncio
from typing import Any

import pytest
from nats.aio.msg import Msg

from tests.bus_fixtures import BusOpener
from tests.bus_kit import make_sample
from tests.refusals import refusal
from tidemill.bus.errors import ConfigMismatch, NoRoom
from tidemill.bus.wire import subjects


async def test_creating_the_layout_twice_changes_nothing(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.samples.publish(make_sample(bus.run))
        before = await bus.samples.info()
        await bus.create_layout()
        assert await bus.samples.info() == before


async def test_the_stream_by_which_runs_are_found_is_created_last(open_bus: BusOpener) -> None:
    """A host that found the run between two streams read a bucket that was not there, and ended."""
    created: list[str] = []

    async def note(message: Msg) -> None:
        created.append(message.subject.rsplit(".", 1)[1])

    async with (
        open_bus(layout=False, name="onlooker") as onlooker,
        onlooker.jet.connection.subscribed("$JS.API.STREAM.CREATE.*", note),
    ):
        await onlooker.jet.connection.nc.flush()
        async with open_bus() as bus:
            pass
        await onlooker.jet.connection.nc.flush()
    # TRAINED, which a run does without, gets the room that the others leave.
    assert created[-2:] == [subjects.stream(bus.run, name) for name in (subjects.TRAINED, subjects.TASKS)]
    assert subjects.bucket_stream(bus.run, "live") in created


@pytest.mark.parametrize(
    ("setting", "value", "field"),
    [
        ("duplicate_window_s", 60.0, "SAMPLES.duplicate_window"),
        ("samples_max_bytes", 1_000_000, "SAMPLES.max_bytes"),
        ("lease_s", 7.0, "TASKS.rollout.ack_wait"),
    ],
)
async def test_another_setting_than_the_servers_is_named(
    open_bus: BusOpener, setting: str, value: Any, field: str
) -> None:
    async with open_bus() as bus:
        run = bus.run
    async with open_bus(layout=False, **{setting: value}) as other:
        with pytest.raises(ConfigMismatch) as caught:
            await other.create_layout()
    assert f"{caught.value.name}.{caught.value.field}" == f"TM_{run}_{field}"


async def test_a_stream_larger_than_the_disk_is_refused_with_the_remedy(open_bus: BusOpener) -> None:
    async with open_bus(layout=False, samples_max_bytes=10**18) as bus:
        with refusal(NoRoom, setting="bus.samples_max_bytes"):
            await bus.create_layout()


async def test_the_stream_for_viewers_is_changed_where_it_is_and_ends_no_start(
    open_bus: BusOpener, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bus(trained_max_bytes=2_000_000) as bus:
        info, run = f"STREAM.INFO.{subjects.stream(bus.run, subjects.TRAINED)}", bus.run
        for max_bytes in (1_000_000, 3_000_000):
            async with open_bus(layout=False, run=run, trained_max_bytes=max_bytes) as other:
                await other.create_layout()
            assert (await bus.jet.call(info))["config"]["max_bytes"] == max_bytes
        assert not caplog.records
        for cause in ({"trained_max_bytes": 10**18}, {"trained_max_bytes": 3_000_000, "duplicate_window_s": 600.0}):
            config = (await bus.jet.call(info))["config"]
            if "duplicate_window_s" in cause:
                verb = f"STREAM.UPDATE.{config['name']}"
                await bus.jet.call(verb, {**config, "duplicate_window": 10**9, "max_age": 10**10})
            caplog.clear()
            async with open_bus(layout=False, run=run, **cause) as other:
                await other.create_layout()
            assert "the stream for values of trained tokens is not as configured" in caplog.text


async def test_a_setting_dropped_by_the_server_is_an_error(open_bus: BusOpener) -> None:
    """An old server drops settings that it does not know: the stream exists, the field does not."""
    async with open_bus(layout=False) as bus:
        await bus.jet.call(
            f"STREAM.CREATE.TM_{bus.run}_SAMPLES",
            {"name": f"TM_{bus.run}_SAMPLES", "subjects": [f"tm.{bus.run}.sample.>"]},
        )
        with refusal(ConfigMismatch, field="subjects"):
            await bus.create_layout()


async def test_buckets_of_an_older_release_are_changed_where_they_are(open_bus: BusOpener) -> None:
    """They allowed rollups, with which a client that may write one row can remove all others."""
    async with open_bus() as bus:
        name = subjects.bucket_stream(bus.run, "weights")
        config = (await bus.jet.call(f"STREAM.INFO.{name}"))["config"]
        await bus.jet.call(f"STREAM.UPDATE.{name}", {**config, "allow_rollup_hdrs": True})
        revision = await bus.rows("weights").put("head", {"fence": 7})
        await bus.create_layout()
        assert (await bus.jet.call(f"STREAM.INFO.{name}"))["config"]["allow_rollup_hdrs"] is False
        assert await bus.rows("weights").get("head") == ({"fence": 7}, revision)
        await bus.rows("weights").delete("head")  # a delete needs no rollup
        assert await bus.rows("weights").get("head") is None


async def test_two_runs_share_a_server(open_bus: BusOpener) -> None:
    async with open_bus(run="one") as one, open_bus(run="one_SAMPLES") as two:
        await one.samples.publish(make_sample("one"))
        assert (await one.samples.info()).messages == 1
        assert (await two.samples.info()).messages == 0


async def test_layout_is_made_by_two_at_once(open_bus: BusOpener) -> None:
    async with open_bus(layout=False) as one, open_bus(layout=False) as two:
        await asyncio.gather(one.create_layout(), two.create_layout())
