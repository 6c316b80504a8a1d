"""The stream TURNS on a real server: one actor at a time writes an episode's log, and nothing that is wrong with it
ends an episode.
"""

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from tests.bus_fixtures import BusOpener
from tests.bus_kit import issue
from tests.refusals import refusal
from tidemill.bus.errors import BusUnavailable, Refused
from tidemill.bus.streams import episode_turns
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.episode_turns import EpisodeLog, NotStored, Superseded
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import TurnKind
from tidemill.bus.wire.messages import Span

WITH = {"rollouts": ("agent",)}


def turn(number: int, length: int = 2, **changes: Any) -> dict[str, Any]:
    fields = {
        "number": number,
        "parent": number - 1,
        "context": np.array([5, 6], np.int32),
        "tokens": np.arange(length, dtype=np.int32),
        "log_probs": np.full(length, -0.5, np.float32),
        "spans": (Span(version=3, num_tokens=length),) if length else (),
        "id": f"chatcmpl-{number}",
        "finish": "stop",
        "matched": 2,
        "text": "seven",
        "engine": "e",
    }
    return fields | changes


@pytest.fixture(autouse=True)
def _slow_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record may wait for a busy machine, and so may the log of an earlier actor; the tests of the limit set their
    own.
    """
    monkeypatch.setattr(episode_turns, "STORE_S", 60.0)
    monkeypatch.setattr(episode_turns, "READ_S", 60.0)


async def kinds(bus: Bus, task: int = 1, index: int = 0) -> list[str]:
    records, _ = await bus.turns.take(task, index, "reader", first=False)
    return [str(record.kind) for record in records]


async def test_an_episode_is_read_back_as_it_was_stored(open_bus: BusOpener) -> None:
    async with open_bus(**WITH) as bus:
        records, log = await bus.turns.take(1, 0, "a", first=True)
        assert records == [] and log.kept
        await log.append(TurnKind.TURN, **turn(0))
        await log.append(TurnKind.TURN, **turn(1, matched="</call>"))
        await log.append(TurnKind.STATE, number=2, state={"state": [1, None]}, ids={"chatcmpl-1": 1}, rewards={0: 0.5})
        await log.append(TurnKind.END, sample_seq=77)
        found, _ = await bus.turns.take(1, 0, "b", first=False)
        assert [str(record.kind) for record in found] == ["take", "turn", "turn", "state", "end"]
        assert {record.attempt for record in found} == {"a"}
        first, second, state, end = found[1:]
        for name, want in turn(0).items():
            got = getattr(first, name)
            assert np.array_equal(got, want) if isinstance(want, np.ndarray) else got == want, name
        assert (second.parent, second.matched) == (0, "</call>")
        assert (state.state, dict(state.ids), dict(state.rewards), end.sample_seq) == (
            {"state": [1, None]},
            {"chatcmpl-1": 1},
            {0: 0.5},
            77,
        )
        assert await kinds(bus, 1, 1) == [], "another sample has a log of its own"


async def test_who_has_been_superseded_stores_nothing_more(open_bus: BusOpener) -> None:
    async with open_bus(**WITH) as bus:
        _, old = await bus.turns.take(1, 0, "a", first=True)
        await old.append(TurnKind.TURN, **turn(0))
        records, new = await bus.turns.take(1, 0, "b", first=False)
        for _ in range(2):
            with pytest.raises(Superseded):
                await old.append(TurnKind.TURN, **turn(1))
        await new.append(TurnKind.END, sample_seq=9)
        assert len(records) == 2 and bus.turns.counters.superseded == 1
        assert await kinds(bus) == ["take", "turn", "take", "end"]


async def test_an_actor_that_thinks_it_is_the_first_reads_what_there_is(open_bus: BusOpener) -> None:
    """A consumer that was made again counts deliveries from 1."""
    async with open_bus(**WITH) as bus:
        _, log = await bus.turns.take(1, 0, "a", first=True)
        await log.append(TurnKind.TURN, **turn(0))
        records, again = await bus.turns.take(1, 0, "b", first=True)
        assert [str(record.kind) for record in records] == ["take", "turn"]
        await again.append(TurnKind.TURN, **turn(1))


@pytest.mark.parametrize("first", [True, False])
async def test_the_episode_of_a_settled_task_is_not_begun_again(open_bus: BusOpener, first: bool) -> None:
    """A killed server may deliver an acknowledged task again, as if for the first time; the task's log is removed by
    then.
    """
    async with open_bus(**WITH) as bus:
        _, log = await bus.turns.take(1, 0, "a", first=True)
        await log.append(TurnKind.TURN, **turn(0))
        await bus.tasks.raise_floor(1)
        await bus.turns.trim(2)
        with pytest.raises(Superseded):
            await bus.turns.take(1, 0, "b", first=first)
        records, log = await bus.turns.take(2, 0, "a", first=first)
        assert records == [] and log.kept, "the next task is not settled"


async def test_without_the_floor_the_episode_goes_on_unlogged(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records may have been removed: it may be told other answers, and the actor says so."""
    async with open_bus(**WITH) as bus:

        async def fails(key: str) -> Any:
            raise BusUnavailable(key, "no answer")

        monkeypatch.setattr(bus.turns._rows, "read", fails)
        records, log = await bus.turns.take(1, 0, "a", first=True)
        assert records == [] and not log.kept and bus.turns.counters.unlogged == 1


async def test_whose_log_is_removed_has_no_answer_to_give(open_bus: BusOpener) -> None:
    async with open_bus(**WITH) as bus:
        _, log = await bus.turns.take(1, 0, "a", first=True)
        await log.append(TurnKind.TURN, **turn(0))
        await bus.turns.trim(2)
        with pytest.raises(Superseded):
            await log.append(TurnKind.TURN, **turn(1))
        assert bus.turns.counters.unlogged == 0


async def test_a_record_whose_answer_was_lost_is_found_as_its_own(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the server has forgotten its message id: then it names another last sequence than the record does."""
    async with open_bus(**WITH) as bus:
        _, log = await bus.turns.take(1, 0, "a", first=True)
        send, sent = bus.jet.outbox.attempt, []

        async def attempt(subject: str, payload: bytes, headers: dict[str, str]) -> Any:
            if sent:
                raise Refused(subject, 10071, "wrong last sequence")
            sent.append(await send(subject, payload, headers))
            raise BusUnavailable(subject, "the answer is lost")

        with monkeypatch.context() as patch:
            patch.setattr(bus.jet.outbox, "attempt", attempt)
            await log.append(TurnKind.TURN, **turn(0))
        await log.append(TurnKind.TURN, **turn(1))
        assert await kinds(bus) == ["take", "turn", "turn"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": 0, "parent": 3},
        {"log_probs": np.array([0.1, 9.0], np.float32)},
        {"spans": ()},
        {"seconds": float("nan")},
        {"text": "\ud800"},
    ],
)
async def test_a_record_that_cannot_be_written_leaves_the_episode_unlogged(
    open_bus: BusOpener, wrong: dict[str, Any]
) -> None:
    async with open_bus(**WITH) as bus:
        _, log = await bus.turns.take(1, 0, "a", first=True)
        await log.append(TurnKind.TURN, **(turn(0) | wrong))
        assert not log.kept and bus.turns.counters.unlogged == 1
        await log.append(TurnKind.END, sample_seq=1)
        assert await kinds(bus) == ["take"]


async def test_a_full_stream_or_a_large_record_leaves_the_episode_unlogged(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bus(**WITH, turns_max_bytes=60_000) as bus:
        logs: list[EpisodeLog] = []
        for index in range(4):
            if index == 2:  # from here on the stream is full
                monkeypatch.setattr(episode_turns, "STORE_S", 0.5)
            logs.append((await bus.turns.take(1, index, "a", first=True))[1])
            await logs[-1].append(TurnKind.TURN, **turn(0, 3000))
        assert [log.kept for log in logs] == [True, True, False, False], "each turn has 24 kB"
        huge = (await bus.turns.take(1, 9, "a", first=True))[1]
        await huge.append(TurnKind.TURN, **turn(0, 1_200_000))
        assert not huge.kept


async def test_the_log_of_a_run_without_the_stream_is_not_kept(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_turns, "STORE_S", 0.3)
    async with open_bus() as bus:
        for first in (True, False):
            records, log = await bus.turns.take(1, 0, "a", first=first)
            assert records == [] and not log.kept
        await bus.turns.trim(5)


async def test_rubbish_in_a_log_is_passed_over_and_others_logs_are_trimmed(open_bus: BusOpener) -> None:
    async with open_bus(**WITH) as bus:
        await issue(bus, 10)
        for task in (1, 2, 10):
            _, log = await bus.turns.take(task, 0, "a", first=True)
            await log.append(TurnKind.TURN, **turn(0))
        for data in (b"", b"\xff" * 40, b"\x80"):
            await bus.js.publish(subjects.turn(bus.run, 1, 0), data, timeout=60)
        stray = await bus.jet.last(subjects.stream(bus.run, subjects.TURNS), subjects.turn(bus.run, 2, 0))
        assert stray is not None
        await bus.js.publish(subjects.turn(bus.run, 1, 0), stray.data, timeout=60)  # of another task
        records, log = await bus.turns.take(1, 0, "b", first=False)
        assert [str(record.kind) for record in records] == ["take", "turn"] and log.kept
        assert bus.jet.refusals.counts[subjects.TURNS] == 4
        await bus.turns.trim(10)
        assert [await kinds(bus, task) for task in (1, 2)] == [[], []]
        assert await kinds(bus, 10) == ["take", "turn"]


async def test_a_log_that_is_needed_raises_where_another_goes_on_without(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for every later record but those of the end, which nothing depends on."""
    async with open_bus(**WITH) as bus:
        _, log = await bus.turns.take(1, 0, "a", first=True, needed=True)
        await log.append(TurnKind.TURN, **turn(0))

        async def lost(subject: str, payload: bytes, headers: dict[str, str]) -> Any:
            raise BusUnavailable(subject, "not connected")

        with monkeypatch.context() as patch:
            patch.setattr(bus.jet.outbox, "attempt", lost)
            patch.setattr(episode_turns, "NEEDED_S", 0.3)
            for kind in (TurnKind.TURN, TurnKind.STATE):
                with refusal(NotStored, reason=re.compile(r"\b0\.3 s$"), lasting=False) as found:
                    await log.append(kind, **(turn(1) if kind is TurnKind.TURN else {"number": 1}))
                assert not found.value.lasting and log.kept
            with pytest.raises(NotStored):
                await bus.turns.take(1, 1, "a", first=True, needed=True)
            for kind in (TurnKind.FAILED, TurnKind.END):
                await log.append(kind)
        with pytest.raises(NotStored):
            await log.append(TurnKind.TURN, **turn(1))
        assert (bus.turns.counters.ended, bus.turns.counters.unlogged) == (2, 0)
        assert await kinds(bus) == ["take", "turn"]


@pytest.mark.parametrize("length", [3000, 1_200_000])
async def test_a_record_that_will_never_be_stored_is_a_lasting_reason(open_bus: BusOpener, length: int) -> None:
    """The record cannot be written, or is larger than a message may be."""
    async with open_bus(**WITH) as bus:
        _, log = await bus.turns.take(1, 0, "a", first=True, needed=True)
        wrong = {"text": "\ud800"} if length == 3000 else {}
        with pytest.raises(NotStored) as found:
            await log.append(TurnKind.TURN, **turn(0, length, **wrong))
        assert found.value.lasting


async def test_a_cancelled_record_may_be_stored_or_not(open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_bus(**WITH) as bus:
        _, log = await bus.turns.take(1, 0, "a", first=True, needed=True)
        sending = asyncio.Event()

        async def hangs(subject: str, payload: bytes, headers: dict[str, str]) -> Any:
            sending.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(bus.jet.outbox, "attempt", hangs)
            storing = asyncio.create_task(log.append(TurnKind.TURN, **turn(0)))
            await sending.wait()
            storing.cancel()
            await asyncio.gather(storing, return_exceptions=True)
        with pytest.raises(NotStored, match="it is not known whether a record is stored"):
            await log.append(TurnKind.TURN, **turn(1))


async def test_what_is_not_read_ends_an_episode_that_needs_its_log(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bus(**WITH) as bus:
        _, log = await bus.turns.take(1, 0, "a", first=True)
        await log.append(TurnKind.TURN, **turn(0))

        async def fails(stream: str, seq: int, subject: str) -> Any:
            raise BusUnavailable(subject, "no answer")

        with monkeypatch.context() as patch:
            patch.setattr(bus.jet, "next", fails)
            with refusal(NotStored, reason=re.compile(r"\.turn\.1\.0: "), lasting=False) as found:
                await bus.turns.take(1, 0, "b", first=False, needed=True)
            assert not found.value.lasting
        await bus.js.publish(subjects.turn(bus.run, 1, 0), b"\x80", timeout=60)
        with refusal(NotStored, reason=re.compile("^1 "), lasting=True) as found:
            await bus.turns.take(1, 0, "b", first=False, needed=True)
        assert found.value.lasting and bus.turns.counters.ended == 2
