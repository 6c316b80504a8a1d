"""Rows and heartbeats on a real server."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator

import pytest

from tests.bus_fixtures import BusOpener
from tests.bus_kit import Proxy, take
from tests.refusals import refusal
from tests.waits import LIMIT_S, turn, until, until_gone
from tidemill.bus.client.rows import Row, Value
from tidemill.bus.errors import NotFound, RowConflict, UnreadableRow, WireError
from tidemill.bus.liveness import HeartbeatPublisher, LiveView, processes, release
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect, raise_epoch
from tidemill.bus.system import usage
from tidemill.bus.wire.rows import Capabilities, LiveRow, MachineUse


async def test_a_row_is_changed_by_compare_and_set(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        rows = bus.rows("weights")
        assert await rows.get("mine") is None
        first = await rows.update("mine", {"version": 0}, 0)
        with pytest.raises(RowConflict):
            await rows.update("mine", {"version": 9}, 0)
        second = await rows.update("mine", {"version": 1}, first)
        with refusal(RowConflict, key="weights.mine", expected=first):
            await rows.update("mine", {"version": 2}, first)
        assert await rows.get("mine") == ({"version": 1}, second)
        third = await rows.put("mine", {"version": 5})
        assert third > second
        await rows.delete("mine")
        await rows.delete("mine")
        assert await rows.get("mine") is None
        await rows.update("mine", {"version": 6}, 0)


async def test_rows_are_listed(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        rows = bus.rows("weights")
        assert await rows.keys() == []
        for version in range(40):
            await rows.put(f"m.{version}", {"version": version})
        await rows.delete("m.7")
        assert len(await rows.keys()) == 39
        assert {key: value["version"] for key, (value, _) in (await rows.all()).items()} == {
            f"m.{n}": n for n in range(40) if n != 7
        }
        assert await bus.rows("run").keys() == [], "buckets are apart"


async def test_rows_are_there_after_a_kill_of_the_server(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        revision = await bus.rows("run").put("epoch", {"epoch": 3})
        nats_server.kill()
        reading = asyncio.create_task(bus.rows("run").get("epoch"))
        await turn()
        nats_server.start()
        assert await reading == ({"epoch": 3}, revision)


async def test_a_write_whose_answer_was_lost_is_recognised(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    async with (
        open_bus() as looker,
        Proxy(nats_server.url) as proxy,
        connect(proxy.url, looker.run, name="writer") as bus,
    ):
        revision = await bus.rows("run").update("epoch", {"epoch": 1}, 0)
        watching = looker.rows("run").watch("epoch")
        await anext(watching)
        proxy.deaf = True
        updating = asyncio.create_task(bus.rows("run").update("epoch", {"epoch": 2}, revision))
        assert (await take(watching, 1))[0] == ({"epoch": 2}, revision + 1)
        await watching.aclose()  # type: ignore[attr-defined]
        await proxy.cut()
        proxy.deaf = False
        assert await updating == revision + 1


async def test_a_watcher_sees_every_state_it_wakes_to(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        rows = bus.rows("weights")
        watching = rows.watch("mine", every_s=30)
        assert (await take(watching, 1)) == [None]
        coming = asyncio.create_task(take(watching, 1))
        await turn()
        revision = await rows.put("mine", {"version": 1})
        assert await coming == [({"version": 1}, revision)], "a write wakes it"
        nats_server.kill()
        nats_server.start()
        await watching.aclose()  # type: ignore[attr-defined]
        looking = rows.watch("mine", every_s=0.1)
        assert await take(looking, 1) == [({"version": 1}, revision)]
        await rows.delete("mine")  # publishes no message that could wake the watch
        assert await take(looking, 1) == [None]
        await looking.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["", "a b", "a.", ".a", "a..b", "a*", "ä"])
async def test_a_bad_key_is_refused(open_bus: BusOpener, key: str) -> None:
    async with open_bus() as bus:
        with refusal(ValueError, place="run"):
            await bus.rows("run").put(key, {})


async def test_what_is_no_row_is_refused(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        with refusal(ValueError, place="bucket", got="'x'"):
            bus.rows("x")
        with refusal(WireError, field="run.a"):
            await bus.rows("run").put("a", {"x": object()})
        await bus.js.publish(f"$KV.TM_{bus.run}_run.a", b"[1]")
        with refusal(WireError, field="run.a", got="list", revision=1):
            await bus.rows("run").get("a")


def row(id: str, role: str = "actor") -> LiveRow:
    return LiveRow(role=role, id=id, host="h", pid=1, phase="working")


def without_use(row: LiveRow) -> LiveRow:
    return dataclasses.replace(row, use=MachineUse())


async def test_a_process_is_alive_while_its_row_changes(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        view = LiveView(bus)
        async with (
            HeartbeatPublisher(bus, row("a1")) as heartbeat,
            HeartbeatPublisher(bus, row("e1", "engine")) as engine,
        ):
            await until(lambda: heartbeat.written_s > 0)
            await until(lambda: engine.written_s > 0)
            (first,) = await view.alive("actor")
            assert first.use.memory_bytes and first.use.cpu_share is not None
            assert without_use(first) == dataclasses.replace(row("a1"), release=release(), log=first.log)
            stated = Capabilities(
                ranks=2,
                peer_snapshots=True,
                colocated=True,
                devices=("GPU-a",),
                visible_devices=("GPU-a", "GPU-b"),
                nccl="2.29.7",
            )
            heartbeat.update(phase="draining", load={"in_flight": 3.0}, capabilities=stated, taking_memory=True)
            await heartbeat.stored()
            assert list(map(without_use, await view.alive("actor"))) == [heartbeat.row]
            assert heartbeat.row.capabilities == stated and heartbeat.row.phase == "draining"
            assert [found.role for found, _ in await processes(bus, look_s=0.05)] == ["actor", "engine"]
        assert await view.refresh() == [], "a clean exit leaves no row"


async def test_a_row_that_stands_still_grows_old(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        view = LiveView(bus, dead_after_s=0.2)
        with pytest.raises(RuntimeError, match="killed"):
            async with HeartbeatPublisher(bus, row("a1")) as heartbeat:
                await until(lambda: heartbeat.written_s > 0)
                raise RuntimeError("killed")
        assert [found.id for found in await view.alive()] == ["a1"], "seen for the first time counts as just changed"
        await until_gone(view.alive)
        assert (await view.refresh())[0][1] > 0.2


async def test_a_heartbeat_outlives_an_outage(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    async with open_bus() as bus, HeartbeatPublisher(bus, row("a1"), every_s=0.1) as heartbeat:
        await until(lambda: heartbeat.written_s > 0)
        nats_server.kill()
        await until(lambda: heartbeat.last_error != "")
        before = heartbeat.written_s
        nats_server.start()
        await until(lambda: heartbeat.written_s > before)
        assert heartbeat.last_error == ""


async def test_rows_do_not_age_while_the_bus_is_full(open_bus: BusOpener) -> None:
    """No heartbeat is stored then, and no process is dead for that: learner and engines on one accelerator rely on
    it.
    """
    async with open_bus() as bus, open_bus(run=bus.run, layout=False) as other, asyncio.timeout(LIMIT_S):
        await bus.rows("live").put("actor.a1", dataclasses.asdict(row("a1")))
        view = LiveView(other, dead_after_s=0.1)
        await until_gone(view.alive)
        async with bus.reporting_full(lambda: "no room"):
            await until(lambda: other.full())  # the subscription of another connection is none, either
            for _ in range(5):
                assert [alive.id for alive in await view.alive()] == ["a1"]
                await asyncio.sleep(0.05)
        await until_gone(view.alive)


async def test_a_bus_is_one_run(open_bus: BusOpener) -> None:
    async with open_bus(run="one") as one, open_bus(run="two") as two:
        await one.rows("run").put("epoch", {"epoch": 1})
        assert await two.rows("run").get("epoch") is None
        assert isinstance(one, Bus)


async def test_a_row_that_is_said_to_be_stored_can_be_read(open_bus: BusOpener) -> None:
    async with open_bus() as bus, HeartbeatPublisher(bus, row("a1")) as heartbeat:
        await heartbeat.stored()
        assert heartbeat.written_s > float("-inf")
        assert await bus.rows("live").get("actor.a1") is not None


async def test_a_row_that_cannot_be_read_hides_no_other(open_bus: BusOpener) -> None:
    """Any process may write its own live row: invalid bytes there must not hide the rows of others."""
    async with open_bus() as bus:
        view = LiveView(bus)
        for id, data in (
            ("a", b"junk"),
            ("b", b"[" * 9999),
            ("c", b'{"role": "actor", "id": "c", "host": "h", "pid": 1, "phase": [1]}'),
        ):
            await bus.js.publish(f"$KV.TM_{bus.run}_live.actor.{id}", data)
        await bus.rows("live").put("actor.d", dataclasses.asdict(row("e")))  # a row of another process's id
        async with HeartbeatPublisher(bus, row("e"), every_s=0.1):
            found: list[LiveRow] = []
            while not found or not found[0].unreadable.startswith("4 "):
                found = await view.alive()
            assert [one.id for one in found] == ["e"]
        assert bus.refusals.counts == {"live": 4}, "once each, however often they are looked at"
        assert found[0].unreadable.startswith("4 unreadable messages (live 4), newest: live actor.")


async def test_an_unreadable_row_is_replaced_passed_over_or_refused(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        rows = bus.rows("run")
        revision = (await bus.js.publish(f"$KV.TM_{bus.run}_run.task_floor", b"{}")).seq
        assert await rows.read("task_floor") == (None, revision)
        with refusal(UnreadableRow, field="run.task_floor", got="nothing", revision=revision):
            await rows.get("task_floor")
        await bus.tasks.raise_floor(5)
        assert await rows.get("task_floor") == ({"floor": 5}, revision + 1)
        assert await rows.read("another") == (None, 0)
        await rows.put("epoch", {"epoch": 1})
        watching = rows.watch("epoch", every_s=0.1)
        await take(watching, 1)
        await bus.js.publish(f"$KV.TM_{bus.run}_run.epoch", b"junk")
        last = await rows.put("epoch", {"epoch": 2})
        assert (await take(watching, 1)) == [({"epoch": 2}, last)]
        await watching.aclose()  # type: ignore[attr-defined]
        await bus.js.publish(f"$KV.TM_{bus.run}_run.epoch", b"junk")
        with refusal(UnreadableRow, field="run.epoch"):
            await raise_epoch(bus)


async def test_changes_at_the_same_time_are_all_made(open_bus: BusOpener) -> None:
    async with open_bus() as bus, open_bus(name="other") as other:
        calls = 0

        def one_more(value: Value | None) -> Value:
            nonlocal calls
            calls += 1
            return {"count": 0 if value is None else value["count"] + 1}

        changes = [one.rows("weights").change("mine", one_more) for one in (bus, other) for _ in range(5)]
        found = await asyncio.gather(*changes)
        assert sorted(changed.after["count"] for changed in found) == list(range(10)), (
            "each is made once, on top of another"
        )
        assert all((changed.before or {"count": -1})["count"] == changed.after["count"] - 1 for changed in found)
        assert calls > 10, "those that met another were made again"
        assert (await bus.rows("weights").get("mine") or ({}, 0))[0] == {"count": 9}


async def test_a_change_may_leave_the_row_as_it_is(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        rows = bus.rows("weights")
        assert await rows.change("mine", lambda value: None) == (None, None)
        assert await rows.get("mine") is None
        revision = await rows.put("mine", {"version": 1})
        assert await rows.change("mine", lambda value: None) == ({"version": 1}, {"version": 1})
        with refusal(NotFound, where="weights", what="mine"):
            await rows.change("mine", not_there)
        assert await rows.get("mine") == ({"version": 1}, revision)


def not_there(value: Value | None) -> Value:
    raise NotFound("weights", "mine")


async def test_an_unreadable_row_is_changed_only_where_that_is_wanted(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        rows = bus.rows("run")
        await bus.js.publish(f"$KV.TM_{bus.run}_run.epoch", b"junk")
        with pytest.raises(UnreadableRow):
            await rows.change("epoch", lambda value: {"epoch": 7})
        assert await rows.change("epoch", lambda value: None, replace_unreadable=True) == (None, None)
        assert (await rows.read("epoch"))[0] is None
        assert (await rows.change("epoch", lambda value: {"epoch": 7}, replace_unreadable=True)) == (None, {"epoch": 7})
        assert (await rows.read("epoch"))[0] == {"epoch": 7}


async def test_a_row_that_another_client_marked_as_deleted_is_written_again(open_bus: BusOpener) -> None:
    """A marker is a message like any other: a compare-and-set has to name its revision, not 0."""
    async with open_bus() as bus:
        rows = bus.rows("run")
        for key in ("epoch", "task_floor"):
            await rows.put(key, {"epoch": 4, "floor": 4})
            await bus.js.publish(f"$KV.TM_{bus.run}_run.{key}", b"", headers={"KV-Operation": "DEL"})
            assert (await rows.get(key), await rows.read(key)) == (None, (None, 0))
        async with asyncio.timeout(LIMIT_S):
            assert (await rows.change("epoch", lambda value: {"epoch": 7})) == (None, {"epoch": 7})
            assert (await rows.change("task_floor", lambda value: {"floor": 9})) == (None, {"floor": 9})
        assert [(await rows.read(key))[0] for key in ("epoch", "task_floor")] == [{"epoch": 7}, {"floor": 9}]
        with pytest.raises(RowConflict):
            await rows.update("task_floor", {"floor": 10}, 0)


async def test_a_row_is_kept_while_its_writer_runs(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        rows = bus.rows("run")
        keeping = asyncio.create_task(rows.keep("api_key", {"key": "k" * 20}, every_s=0.1))
        try:
            watching = rows.watch("api_key", every_s=0.1)
            for spoil in (b"junk", b"[]", b'{"key": ""}', b'{"key": "a\\nb"}'):
                await take_until(watching, {"key": "k" * 20})
                await bus.js.publish(f"$KV.TM_{bus.run}_run.api_key", spoil)
            await take_until(watching, {"key": "k" * 20})
            await rows.delete("api_key")
            await take_until(watching, {"key": "k" * 20})
            await rows.put("api_key", {"key": "another"})  # readable: a key may be replaced
            await bus.js.publish(f"$KV.TM_{bus.run}_run.epoch", b"x")
            await take_until(watching, {"key": "another"})
            assert not keeping.done()
            await watching.aclose()  # type: ignore[attr-defined]
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def take_until(watching: AsyncIterator[Row | None], value: Value) -> None:
    async with asyncio.timeout(LIMIT_S):
        async for found in watching:
            if found is not None and found[0] == value:
                return


async def test_a_heartbeat_goes_on_where_the_use_of_the_machine_cannot_be_read(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example at a limit of threads."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "process use":
            raise RuntimeError("can't start new thread")
        start(thread)

    async with open_bus() as bus, HeartbeatPublisher(bus, row("e", "engine"), every_s=0.05) as heartbeat:
        await heartbeat.stored()
        monkeypatch.setattr(usage, "TREE_EVERY_S", 0.0)
        monkeypatch.setattr(threading.Thread, "start", refused)
        for phase in ("draining", "done"):
            await until(lambda: "can't start new thread" in caplog.text)
            heartbeat.update(phase=phase)
            await heartbeat.stored()
        ((stored, _),) = await LiveView(bus).refresh()
        assert (stored.phase, stored.use) == ("done", MachineUse())
    assert caplog.text.count("use of the machine not read") == 1
