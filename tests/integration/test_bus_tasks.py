"""The work queue on a real server: leased, renewed, returned, failed, deleted - never lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import msgpack
import pytest

from tests.bus_fixtures import BusOpener
from tests.bus_kit import Proxy, make_task, take, until_backlog
from tests.refusals import refusal
from tests.waits import LIMIT_S, turn, until
from tidemill.bus.errors import NotFound, WireError
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams import tasks as bus_tasks
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.streams.tasks import Lease
from tidemill.bus.wire.codec import encode_dead, encode_task
from tidemill.bus.wire.messages import Dead, DeadLetterDecision, Kind
from tidemill.bus.wire.task_settings import Budget

LONG_S = 600.0
"""Seconds of a lease, or of a wait, that is not over within a test."""


async def issue(bus: Bus, count: int = 1, epoch: int = 1, **changes: object) -> list[int]:
    await bus.tasks.fence(epoch)
    return [await bus.tasks.issue(make_task(bus.run, epoch=epoch, offset=offset, **changes)) for offset in range(count)]


async def lease(bus: Bus, timeout_s: float = 60.0, kind: Kind = Kind.TRAIN) -> Lease:
    found = await bus.tasks.lease(timeout_s, kind=kind)
    assert found is not None
    return found


@asynccontextmanager
async def leasing(bus: Bus) -> AsyncIterator[list[Lease]]:
    """Lease whatever comes, and keep none of it, while the block runs."""
    found: list[Lease] = []

    async def lease_on() -> None:
        while True:
            found.append(await lease(bus, LONG_S))

    running = asyncio.create_task(lease_on())
    try:
        yield found
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def renew_soon(monkeypatch: pytest.MonkeyPatch, held: Lease) -> None:
    """Let its ``kept`` renew every 0.1 s, as if the lease were short; at the server it is not."""
    monkeypatch.setattr(held, "_lease_s", 0.3)


async def test_a_task_is_leased_once_and_acked(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        (id,) = await issue(bus, label={"answer": 4}, metadata={"a": 1})
        await until_backlog(bus, 1, 0)
        held = await lease(bus)
        assert (held.task.id, held.deliveries, held.task.label, held.task.offset) == (id, 1, {"answer": 4}, 0)
        await until_backlog(bus, 0, 1)
        assert await bus.tasks.lease(0.05) is None
        assert await held.ack()
        await until_backlog(bus, 0, 0)


async def test_a_task_that_comes_again_is_passed_over_as_soon_as_it_is_settled(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The floor that an actor has read may be old; for a task that others have had it is read again."""
    monkeypatch.setattr(bus_tasks, "_CONFIRM_S", 60.0)  # a floor that is not read in time is not waited for
    async with open_bus() as bus:
        first, second = await issue(bus, 2)
        held = await lease(bus)
        await bus.tasks.raise_floor(first)
        await held.nak()
        assert (await lease(bus)).task.id == second
        async with leasing(bus) as more:
            await until_backlog(bus, 0, 1)
        assert not more


async def test_acks_are_received_and_the_floor_stops_at_a_leased_task(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewals and naks are no acks; neither is a forged ack on a similar subject."""
    monkeypatch.setattr(bus_tasks, "_CONFIRM_S", 60.0)  # an ack that is not confirmed in time is sent again
    heard: asyncio.Queue[int] = asyncio.Queue()
    async with open_bus() as bus, bus.tasks.acks(heard.put_nowait):
        first, second = await issue(bus, 2)
        held, over = await lease(bus), await lease(bus)
        await held.renew()
        await bus.jet.connection.send("$JS.ACK." + bus.jet.run.join(("TM_", "_TASKS")) + ".rollout.x.y.z.0.0", b"+ACK")
        assert await over.ack()
        assert (await heard.get(), await bus.tasks.acked_to()) == (second, 0)
        await held.nak()
        again = await lease(bus)
        assert await again.ack()
        assert (await heard.get(), again.task.id) == (first, first)
        assert await bus.tasks.acked_to() >= second
        assert heard.empty()


async def test_rollouts_have_queues_of_their_own(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    """Neither leases, nor acks, nor floors of one touch another's; an onlooker that does not know them counts all."""
    heard: asyncio.Queue[int] = asyncio.Queue()
    async with open_bus(rollouts=("agent", "tool-user")) as bus, bus.tasks.acks(heard.put_nowait):
        (plain,) = await issue(bus)
        (agents,) = await issue(bus, rollout="agent", budget=Budget(turns=3))
        (tools,) = await issue(bus, rollout="tool-user")
        for name in ("", "agent", "tool-user"):
            await until_backlog(bus, 1, 0, name)
        held = await bus.tasks.lease(60, rollout="agent")
        assert held is not None and (held.task.id, held.task.budget) == (agents, Budget(turns=3))
        assert await bus.tasks.lease(0.05, rollout="agent") is None
        assert (await lease(bus)).task.id == plain
        assert await held.ack()
        assert await heard.get() == agents
        assert [await bus.tasks.acked_to(name) for name in ("", "agent", "tool-user")] == [0, agents, 0]
        async with connect(nats_server.url, bus.run, name="onlooker") as other:
            await until_backlog(other, 1, 1)
        last = await bus.tasks.lease(60, rollout="tool-user")
        assert last is not None and last.task.id == tools and await last.ack()
        await bus.tasks.trim(tools + 1)
        assert [task.id async for task in bus.tasks.scan()] == []


async def test_kinds_have_queues_of_their_own(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.tasks.fence(1)
        train = await bus.tasks.issue(make_task(bus.run))
        evaluation = await bus.tasks.issue(make_task(bus.run, kind=Kind.EVAL))
        assert (await lease(bus, kind=Kind.EVAL)).task.id == evaluation
        assert (await lease(bus)).task.id == train


async def test_many_wait_at_once_and_each_gets_another_task(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        waiting = [asyncio.create_task(lease(bus)) for _ in range(20)]
        await turn()
        ids = await issue(bus, 20)
        assert sorted([(await held).task.id for held in waiting]) == ids


async def test_a_task_returned_by_nak_is_redelivered_at_once(open_bus: BusOpener) -> None:
    async with open_bus(lease_s=60) as bus:
        (id,) = await issue(bus)
        first = await lease(bus)
        await first.nak()
        again = await lease(bus)
        assert again.task.id == id and again.deliveries >= 2
        assert again.attempt != first.attempt


async def test_a_task_returned_with_a_delay_is_redelivered_later(open_bus: BusOpener) -> None:
    async with open_bus(lease_s=LONG_S) as bus:
        await issue(bus)
        held = await lease(bus)
        since = asyncio.get_running_loop().time()
        await held.nak(0.4)
        await lease(bus)  # after the delay, and not when the lease is over
        assert asyncio.get_running_loop().time() - since > 0.3


async def test_a_lease_that_is_not_renewed_runs_out(open_bus: BusOpener) -> None:
    async with open_bus(lease_s=0.5) as bus:
        (id,) = await issue(bus)
        await lease(bus)
        again = await lease(bus)
        assert again.task.id == id and again.deliveries >= 2


async def test_the_end_of_a_kept_lease_does_not_wait_for_a_renewal_that_swallows_its_cancellation(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewing = asyncio.Event()

    async def renew(lease: Lease) -> bool:
        if renewing.is_set():  # it would renew for ever
            return True
        renewing.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return True

    monkeypatch.setattr(Lease, "renew", renew)
    async with open_bus(lease_s=LONG_S) as bus:
        await issue(bus)
        held = await lease(bus)
        renew_soon(monkeypatch, held)
        async with asyncio.timeout(LIMIT_S):
            async with held.kept():
                await renewing.wait()
        monkeypatch.undo()
        assert await held.ack()


async def test_a_lease_that_is_kept_does_not_run_out(open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is leased later, and whose lease is not kept, is the one that comes again."""
    async with open_bus(lease_s=6) as bus:
        first, second = await issue(bus, 2)
        held, loose = await lease(bus), await lease(bus)
        assert (held.task.id, loose.task.id) == (first, second)
        renew_soon(monkeypatch, held)
        async with held.kept():
            again = await lease(bus)
            assert again.task.id == second and again.deliveries >= 2
            assert await again.ack()
            assert await bus.tasks.lease(0.05) is None
        monkeypatch.undo()
        assert await held.ack()
        await until_backlog(bus, 0, 0)


async def test_a_cancelled_wait_for_a_lease_loses_no_task(open_bus: BusOpener) -> None:
    """A task that arrives for a cancelled lease request goes to the next actor at once, not after the lease time."""
    async with open_bus(lease_s=LONG_S) as bus:
        leaving = asyncio.create_task(lease(bus))
        await bus.nc.flush()
        await asyncio.sleep(0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        (id,) = await issue(bus)
        async with connect(bus.nc.connected_url.geturl(), bus.run, bus.config, name="other") as other:
            assert (await lease(other)).task.id == id


async def test_an_actor_that_vanishes_gives_its_task_to_another(
    nats_server: EmbeddedServer, open_bus: BusOpener
) -> None:
    async with open_bus(lease_s=0.5) as bus:
        (id,) = await issue(bus)
        async with Proxy(nats_server.url) as proxy, connect(proxy.url, bus.run, bus.config, name="dying") as dying:
            assert (await lease(dying)).task.id == id
            await proxy.cut()
        assert (await lease(bus)).task.id == id


async def test_a_wait_goes_on_over_a_kill_of_the_server(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    async with open_bus() as bus, open_bus(name="actor") as actor:
        waiting = asyncio.create_task(lease(actor))
        await actor.nc.flush()
        nats_server.kill()
        nats_server.start()
        (id,) = await issue(bus)
        assert (await waiting).task.id == id


async def test_settled_tasks_delivered_again_are_acked_unworked(
    nats_server: EmbeddedServer, open_bus: BusOpener
) -> None:
    """A killed server forgets acks that it had confirmed; tasks below the floor are not worked on again."""
    async with open_bus(lease_s=3) as bus:
        ids = await issue(bus, 6)
        held = [await lease(bus) for _ in range(5)]
        await bus.tasks.raise_floor(ids[4])
        await bus.tasks.raise_floor(ids[2])
        nats_server.kill()
        nats_server.start()
        async with open_bus(lease_s=3, name="fresh") as fresh:
            mine = await lease(fresh)
            assert mine.task.id == ids[5], "the five before it, never settled, are passed over"
            async with mine.kept(), leasing(fresh) as more:
                await until_backlog(fresh, 0, 1)  # those whose lease ran out later are passed over, too
            assert {other.task.id for other in more} <= {ids[5]}, "its own lease may have run out on a busy machine"
        assert len(held) == 5
        assert (await bus.rows("run").get("task_floor") or ({}, 0))[0] == {"floor": ids[4]}


async def test_reports_of_failure_make_a_task_dead(open_bus: BusOpener) -> None:
    async with open_bus(max_attempts=3) as bus:
        (id,) = await issue(bus)
        for attempt in (1, 2):
            held = await lease(bus)
            assert held.deliveries == attempt
            assert not await held.fail("tool broke", actor=f"a{attempt}")
        held = await lease(bus)
        assert await held.fail("tool broke again", actor="a3")
        assert await bus.tasks.lease(0.05) is None
        await until_backlog(bus, 0, 0)
        ((_, dead),) = [item async for item in bus.dead.scan()]
        assert (dead.task, dead.reason, dead.attempts, dead.actor, dead.prompt) == (
            id,
            "tool broke again",
            3,
            "a3",
            "1+1=",
        )


async def test_a_report_counts_once_and_a_death_is_logged_once(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        (id,) = await issue(bus)
        held = await lease(bus)
        for _ in range(2):
            assert await bus.dead.report(id, reason="x", actor="a", attempt=held.attempt) == 1
        assert await bus.dead.report(id, reason="x", actor="a", attempt="another") == 2
        dead = bus_tasks._dead(held.task, "x", 2, "a")
        await bus.dead.store(dead)
        await bus.dead.store(replace(dead, reason="y"))
        assert [item.reason async for _, item in bus.dead.scan()] == ["x"]
        following = bus.dead.follow()
        assert (await anext(following))[1].task == id
        await following.aclose()  # type: ignore[attr-defined]


async def test_a_task_that_cannot_be_read_is_dead_and_blocks_nothing(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        (id,) = await issue(bus)
        await bus.js.publish(f"tm.{bus.run}.task.train", b"nonsense", headers={"Tm-Epoch": "1"})
        assert (await lease(bus)).task.id == id
        async with leasing(bus) as more:
            await until_backlog(bus, 0, 1)
        assert not more
        ((_, dead),) = [item async for item in bus.dead.scan()]
        assert (dead.task, dead.prompt) == (id + 1, "")
        assert "want one msgpack map" in dead.reason


async def test_a_task_delivered_too_often_is_dead(open_bus: BusOpener) -> None:
    async with open_bus(lease_s=60) as bus:
        (id,) = await issue(bus)
        for _ in range(bus_tasks.MAX_DELIVERIES):
            await (await lease(bus)).nak()
        async with leasing(bus) as more:
            await until_backlog(bus, 0, 0)
        assert not more
        ((_, dead),) = [item async for item in bus.dead.scan()]
        assert (dead.task, dead.attempts) == (id, 51)


async def test_a_task_behind_a_newer_fence_is_void_for_actors_too(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await issue(bus, epoch=1)
        await bus.tasks.fence(2)
        late = encode_task(make_task(bus.run, epoch=1, offset=9))
        await bus.js.publish(
            f"tm.{bus.run}.task.train", late, headers={"Tm-Epoch": "1"}
        )  # by a writer that ignores the fence
        (valid,) = await issue(bus, epoch=2)
        assert [(await lease(bus)).task.id for _ in range(2)] == [2, valid]
        assert await bus.tasks.lease(0.05) is None


async def test_a_task_of_a_newer_schema_is_left_to_an_actor_of_a_newer_release(open_bus: BusOpener) -> None:
    async with open_bus() as bus, leasing(bus) as leases:
        await bus.tasks.fence(1)
        newer = msgpack.packb({**msgpack.unpackb(encode_task(make_task(bus.run))), "schema": 9})
        stored = await bus.js.publish(f"tm.{bus.run}.task.train", newer, headers={"Tm-Epoch": "1"})
        (valid,) = await issue(bus)
        await until(lambda: [held.task.id for held in leases] == [valid])
        await until(lambda: bus.refusals.counts["TASKS"] == 1)
        assert (await bus.tasks.backlog()) == (0, 2), "it waits to be delivered again"
        assert [dead async for _, dead in bus.dead.scan()] == []
        assert f"TASKS {stored.seq}: schema: want 1 or 2, got 9" in str(bus.refusals)


async def test_scan_and_fetch_give_tasks_by_id(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        ids = await issue(bus, 4)
        assert [task.id async for task in bus.tasks.scan()] == ids
        assert [task.offset async for task in bus.tasks.scan(ids[2])] == [2, 3]
        assert [task.id async for task in bus.tasks.scan(99)] == []
        assert (await bus.tasks.fetch(ids[1])).offset == 1
        await bus.tasks.trim(ids[2])
        assert [task.id async for task in bus.tasks.scan()] == ids[2:]
        assert await bus.tasks.last_id() == ids[3]
        with pytest.raises(NotFound):
            await bus.tasks.fetch(ids[0])


async def test_trimmed_tasks_are_not_leased_and_fences_stay(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        ids = await issue(bus, 3)
        await bus.tasks.trim(ids[2] + 1)
        assert await bus.tasks.lease(0.05) is None
        assert [task.id async for task in bus.tasks.scan()] == []
        assert sum((await bus.jet.subjects(f"TM_{bus.run}_TASKS", ">")).values()) == 1


async def test_a_task_of_another_epoch_is_not_issued(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.tasks.fence(3)
        with refusal(WireError, field="epoch", got=2):
            await bus.tasks.issue(make_task(bus.run, epoch=2))


async def test_a_lease_returns_false_while_the_bus_is_away(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    async with open_bus(lease_s=0.5) as bus:
        await issue(bus)
        held = await lease(bus)
        nats_server.kill()
        assert not await held.ack()
        await until(lambda: not bus.connected)
        assert not await held.renew()
        assert await bus.tasks.lease(0.1) is None
        nats_server.start()
        assert (await lease(bus)).task.id == held.task.id


async def test_dead_letters_that_cannot_be_read_are_passed_over(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.js.publish(f"tm.{bus.run}.dead.task.1", b"junk")
        await bus.js.publish(f"tm.{bus.run}.dead.word.1", b"\xff")
        dead = Dead(task=2, reason="r", attempts=3, actor="a", prompt="p", root=2)
        await bus.js.publish(f"tm.{bus.run}.dead.task.3", encode_dead(dead))  # about another task than its subject
        await bus.js.publish(f"tm.{bus.run}.dead.task.4", encode_dead(replace(dead, task=4, offset=2**62)))
        await bus.dead.store(dead)
        assert await bus.dead.decide(DeadLetterDecision(task=2, word="drop"))
        assert [letter async for _, letter in bus.dead.scan()] == [dead]
        assert list(await bus.dead.decisions()) == [2]
        following = bus.dead.follow()
        assert [seq for seq, _ in await take(following, 2)] == [5, 6]
        await following.aclose()  # type: ignore[attr-defined]
        assert bus.refusals.counts == {"DEAD": 4}, "once each, however often they are read"
        assert "newest: DEAD 2: message: want one msgpack map" in str(bus.refusals)


async def test_a_decision_whose_answer_was_lost_is_ones_own(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    async with (
        open_bus() as looker,
        Proxy(nats_server.url) as proxy,
        connect(proxy.url, looker.run, name="operator") as bus,
    ):
        proxy.deaf = True
        deciding = asyncio.create_task(bus.dead.decide(DeadLetterDecision(task=1, word="drop")))
        await until(lambda: looker.dead.decisions())  # the stream is read again and again
        await proxy.cut()
        proxy.deaf = False
        assert await deciding
        assert not await bus.dead.decide(DeadLetterDecision(task=1, word="drop")), "the same, decided by another"
