"""The stream of samples on a real server: stored once, read without a gap, through kills at any point."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import msgpack
import pytest
from nats.aio.msg import Msg

from tests.bus_fixtures import BusOpener
from tests.bus_kit import Proxy, make_sample, take
from tests.refusals import refusal
from tests.waits import LIMIT_S, until, until_gone
from tidemill.bus.client import outbox
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusUnavailable, NotFound, StreamReplaced, StreamTrimmed, WireError
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.streams.readers import History
from tidemill.bus.streams.samples import header_fields, headers_of
from tidemill.bus.streams.shard_reading import Received
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.codec import encode_sample
from tidemill.bus.wire.messages import Cursor, Kind, Sample


def place(received: Received) -> tuple[int, int]:
    assert isinstance(received.sample, Sample), received.sample
    return received.sample.task, received.sample.index


async def publish(bus: Bus, *tasks: int) -> list[int]:
    return [await bus.samples.publish(make_sample(bus.run, task=task)) for task in tasks]


async def read_some(bus: Bus, count: int, cursor: Cursor | None = None, **options: object) -> list[Received]:
    stream = bus.samples.read(cursor, **options)  # type: ignore[arg-type]
    try:
        return await take(stream, count)
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


async def test_what_is_published_is_read_in_order(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        samples = [make_sample(bus.run, task=4, index=index) for index in range(8)]
        seqs = await asyncio.gather(*[bus.samples.publish(sample) for sample in samples])
        found = await read_some(bus, 8)
        assert [received.seq for received in found] == sorted(seqs) == list(range(1, 9))
        assert sorted(map(place, found)) == [(4, index) for index in range(8)]
        assert [received.pending for received in found] == list(range(7, -1, -1))
        assert header_fields(found[0].headers)["task"] == "4"
        assert found[0].size_bytes == len(encode_sample(samples[0]))


async def test_one_message_id_is_stored_once(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        first, again = await publish(bus, 1, 1)
        other = await bus.samples.publish(make_sample(bus.run, attempt="a1"))
        assert (first, again, other) == (1, 1, 2)
        assert bus.samples.stats.duplicates == 1


async def test_a_group_is_stored_with_one_too_large_for_a_message_and_one_that_is_there(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.samples.publish(make_sample(bus.run, task=4, index=1))
        group = [make_sample(bus.run, task=4, index=index) for index in range(3)]
        assert await bus.samples.publish_group(group) == [2, 1, 3]
        room = bus.jet.connection.max_payload - len(encode_sample(make_sample(bus.run)))
        large = make_sample(bus.run, task=5, index=0, prompt="x" * (room - 20))  # with its headers it is too large
        seqs = await bus.samples.publish_group([large, make_sample(bus.run, task=5, index=1)])
        assert [(await bus.samples.fetch(seq)).index for seq in seqs] == [0, 1]
        assert (bus.samples.stats.published, bus.samples.stats.duplicates) == (6, 1)
        assert await bus.samples.publish_group([]) == []
        assert not bus.jet.connection.last_error, "the server would have ended the connection"


@pytest.mark.parametrize("count", [1, 3])
async def test_a_publish_whose_answer_was_lost_is_not_stored_twice(
    nats_server: EmbeddedServer, open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The lost connection triggers the retry, not the time-out of an answer."""
    monkeypatch.setattr(outbox, "_ANSWER_S", 600.0)
    async with open_bus() as looker, Proxy(nats_server.url) as proxy:
        async with connect(proxy.url, looker.run, name="publisher") as bus:
            await publish(bus, 1)
            proxy.deaf = True
            group = [make_sample(bus.run, task=2, index=index) for index in range(count)]
            publishing = asyncio.create_task(bus.samples.publish_group(group))
            assert place((await read_some(looker, 1 + count))[count]) == (2, count - 1)
            assert not publishing.done()
            await proxy.cut()
            proxy.deaf = False
            async with asyncio.timeout(LIMIT_S):
                assert await publishing == [*range(2, 2 + count)]
            assert bus.samples.stats.duplicates == count
        assert (await looker.samples.info()).messages == 1 + count


@pytest.mark.parametrize("seed", range(3))
async def test_a_reader_goes_on_over_kills_of_the_server(
    nats_server: EmbeddedServer, open_bus: BusOpener, seed: int
) -> None:
    """Publishers retry, the reader reopens: every sample is there once, in the order of the stream."""
    async with open_bus() as bus, open_bus(name="reader") as reader:
        stream = reader.samples.read(None)
        publishing = [
            asyncio.create_task(bus.samples.publish(make_sample(bus.run, task=task))) for task in range(1, 31)
        ]
        found = await take(stream, 5 + 7 * seed)
        nats_server.kill()
        publishing += [
            asyncio.create_task(bus.samples.publish(make_sample(bus.run, task=task))) for task in range(31, 61)
        ]
        nats_server.start()
        found += await take(stream, 60 - len(found))
        seqs = await asyncio.gather(*publishing)
        assert [received.seq for received in found] == list(range(1, 61)) == sorted(seqs)
        assert sorted(place(received)[0] for received in found) == list(range(1, 61))
        nats_server.kill()
        nats_server.start()
        await publish(bus, 99)
        assert place((await take(stream, 1))[0]) == (99, 0)
        await stream.aclose()  # type: ignore[attr-defined]


async def test_deliveries_lost_on_the_way_are_noticed_and_read_again(
    nats_server: EmbeddedServer, open_bus: BusOpener
) -> None:
    async with open_bus() as bus, Proxy(nats_server.url) as proxy, connect(proxy.url, bus.run, name="reader") as reader:
        stream = reader.samples.read(None)
        await publish(bus, 1, 2)
        await take(stream, 2)
        proxy.deaf = True
        await publish(bus, 3, 4, 5)
        await bus.nc.flush()
        await until(lambda: proxy.swallowed > 0)
        proxy.deaf = False
        await publish(bus, 6)
        assert [place(received)[0] for received in await take(stream, 4)] == [3, 4, 5, 6]
        await stream.aclose()  # type: ignore[attr-defined]


async def test_a_consumer_whose_creation_was_answered_too_late_is_removed(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bus() as bus:
        await publish(bus, 1)
        call, late = bus.jet.call, list[str]()

        async def answered_late(subject: str, *arguments: Any, **options: Any) -> Any:
            answer = await call(subject, *arguments, **options)
            if subject.startswith("CONSUMER.CREATE") and not late:
                late.append(subject)
                raise BusUnavailable(subject, "no answer")
            return answer

        monkeypatch.setattr(bus.jet, "call", answered_late)
        stream = bus.samples.read(None)
        assert [place(received)[0] for received in await take(stream, 1)] == [1]
        await stream.aclose()  # type: ignore[attr-defined]
        assert late

        async def consumers() -> Any:
            return (await call(f"CONSUMER.NAMES.TM_{bus.run}_SAMPLES"))["consumers"]

        async with asyncio.timeout(30):  # by itself the server would remove it after a minute
            await until_gone(consumers)


async def test_a_full_stream_makes_publishers_wait_until_it_is_trimmed(open_bus: BusOpener) -> None:
    async with open_bus(samples_max_bytes=40_000) as bus:
        big = {"prompt": "x" * 15_000}
        await asyncio.gather(*[bus.samples.publish(make_sample(bus.run, task=task, **big)) for task in (1, 2)])
        third = asyncio.create_task(bus.samples.publish(make_sample(bus.run, task=3, **big)))
        await until(lambda: bus.samples.stats.waiting_full == 1 and bus.samples.stats.full > 1)
        assert not third.done()
        await bus.samples.trim(2)
        assert await third == 3
        assert bus.samples.stats.waiting_full == 0
        assert "maximum bytes exceeded" in bus.samples.stats.last_error


async def test_a_group_waits_until_a_full_stream_is_trimmed(open_bus: BusOpener) -> None:
    async with open_bus(samples_max_bytes=40_000) as bus:
        big: dict[str, Any] = {"prompt": "x" * 15_000}
        await bus.samples.publish(make_sample(bus.run, task=1, **big))
        group = [make_sample(bus.run, task=2, index=index, **big) for index in range(2)]
        waiting = asyncio.create_task(bus.samples.publish_group(group))
        await until(lambda: bus.samples.stats.waiting_full == 1)
        await bus.samples.trim(2)
        assert sorted(await waiting) == [2, 3]


async def test_a_waiting_publish_can_be_cancelled(open_bus: BusOpener) -> None:
    async with open_bus(samples_max_bytes=1_000) as bus:
        waiting = asyncio.create_task(bus.samples.publish(make_sample(bus.run, prompt="x" * 2_000)))
        await until(lambda: bus.samples.stats.waiting_full == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert bus.samples.stats.waiting_full == 0


async def test_trim_keeps_what_is_not_below(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 1, 2, 3, 4)
        for below in (-5, 0, 1):  # before nats-server 2.15, purge(seq=1) wiped the whole stream
            await bus.samples.trim(below)
            assert (await bus.samples.info()).messages == 4
        await bus.samples.trim(3)
        state = await bus.samples.info()
        assert (state.first_seq, state.last_seq, state.messages) == (3, 4, 2)
        with refusal(ValueError, got="6"):
            await bus.samples.trim(6)
        with pytest.raises(NotFound):
            await bus.samples.fetch(2)
        assert (await bus.samples.fetch(3)).task == 3


async def test_a_cursor_skips_what_is_settled(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 1, 2, 3, 4, 5)
        created = (await bus.samples.info()).created
        found = await read_some(bus, 2, Cursor(created=created, floor=2, settled=(4,)))
        assert [received.seq for received in found] == [3, 5]
        assert await bus.samples.cursor() == Cursor(created=created, floor=0)


async def test_another_stream_than_the_cursors_is_refused(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 1)
        cursor = await bus.samples.cursor()
        await bus.js.delete_stream(f"TM_{bus.run}_SAMPLES")
        await bus.create_layout()
        await publish(bus, 1)
        with refusal(StreamReplaced, stream=f"TM_{bus.run}_SAMPLES"):
            await read_some(bus, 1, cursor)


async def test_what_is_needed_and_trimmed_is_an_error(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 1, 2, 3, 4)
        created = (await bus.samples.info()).created
        await bus.samples.trim(3)
        with refusal(StreamTrimmed, needed=2, first=3):
            await read_some(bus, 1, Cursor(created=created, floor=1))
        settled = await read_some(bus, 1, Cursor(created=created, floor=0, settled=(1, 2)))
        assert settled[0].seq == 3
        assert (await read_some(bus, 1))[0].seq == 3, "without a cursor, reading begins where the stream does"


async def test_a_hole_opened_before_a_slow_reader_is_an_error(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, *range(1, 6))
        stream = bus.samples.read(None)
        await take(stream, 5)
        bus.jet.connection._set_disconnected()  # as if the connection had broken: the reader opens again
        bus.jet.connection._set_connected()
        await publish(bus, *range(6, 10))
        await bus.samples.trim(9)
        with refusal(StreamTrimmed, needed=6):
            await take(stream, 4)


async def test_only_the_kinds_asked_for(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        for task, kind in enumerate((Kind.TRAIN, Kind.EVAL, Kind.TRAIN, Kind.EVAL), 1):
            await bus.samples.publish(make_sample(bus.run, task=task, kind=kind))
        assert [received.seq for received in await read_some(bus, 2, kinds=[Kind.EVAL])] == [2, 4]
        assert [received.seq for received in await read_some(bus, 2, kinds=[Kind.TRAIN])] == [1, 3]


async def test_what_is_broken_is_named_and_blocks_nothing(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        subject = f"tm.{bus.run}.sample.train.0.x"
        await bus.js.publish(subject, b"nonsense")
        await bus.samples.publish(make_sample(bus.run, index=8))
        await bus.js.publish(subject, encode_sample(make_sample("another-run")))
        await publish(bus, 7)
        errors = [received.sample for received in await read_some(bus, 4, vocab_size=100)]
        assert [error.field for error in errors[:3] if isinstance(error, WireError)] == ["message", "index", "run"]
        assert isinstance(errors[3], Sample)
        unchecked = await read_some(bus, 2, check=False)
        assert isinstance(unchecked[1].sample, Sample)


async def test_samples_of_another_run_are_not_published(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        with refusal(ValueError, place="sample.run"):
            await bus.samples.publish(make_sample("another"))


async def test_reading_leaves_no_consumer_behind(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 1)
        await read_some(bus, 1)
        async with asyncio.timeout(LIMIT_S):
            while (await bus.jet.call(f"STREAM.INFO.TM_{bus.run}_SAMPLES"))["state"]["consumer_count"]:
                continue


async def test_tail_shows_the_last_and_follows(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, *range(1, 6))
        assert [received.seq async for received in bus.samples.tail(last=2, follow=False)] == [4, 5]
        assert [received.seq async for received in bus.samples.tail(last=0, follow=False)] == []
        assert [received.seq async for received in bus.samples.tail(last=99, follow=False)] == [1, 2, 3, 4, 5]
        following = bus.samples.tail(last=1)
        assert (await take(following, 1))[0].seq == 5
        await publish(bus, 6)
        assert place((await take(following, 1))[0]) == (6, 0)
        await following.aclose()  # type: ignore[attr-defined]


async def test_tail_of_headers_carries_no_payload(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 7)
        (glimpse,) = [glimpse async for glimpse in History(bus.jet).glimpses(1, 1)]
        assert glimpse.headers.items() >= headers_of(make_sample(bus.run, task=7)).items()
        assert glimpse.size_bytes == len(encode_sample(make_sample(bus.run, task=7)))
        assert glimpse.subject == f"tm.{bus.run}.sample.train.3.a1"


async def test_tail_of_an_emptied_stream_ends(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 1, 2)
        await bus.samples.trim(3)
        assert [received.seq async for received in bus.samples.tail(last=9, follow=False)] == []


# --- larger than one message


@pytest.fixture
def nats_server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """The usual server, with messages of at most 4 KB for the tests marked so."""
    small = request.node.name.startswith("test_parts_")
    with EmbeddedServer(tmp_path / "nats", BusConfig(max_payload_bytes=4096) if small else BusConfig()) as server:
        yield server


def large(run: str, task: int, **changes: object) -> Sample:
    return make_sample(run, task=task, length=1000, response="y" * 3000, **changes)


async def test_parts_are_joined_and_read_in_place(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        one, two = large(bus.run, 1), large(bus.run, 2)
        await asyncio.gather(*[bus.samples.publish(sample) for sample in (one, make_sample(bus.run, task=3), two)])
        found = await read_some(bus, 3)
        assert {
            place(received)[0]: encode_sample(received.sample)
            for received in found
            if isinstance(received.sample, Sample)
        } == {
            1: encode_sample(one),
            2: encode_sample(two),
            3: encode_sample(make_sample(bus.run, task=3)),
        }
        last = (await bus.samples.info()).last_seq
        assert last == 3 + 2 * len(list(codec.cut(encode_sample(one), 4096)))
        assert encode_sample(await bus.samples.fetch(last)) in (encode_sample(one), encode_sample(two))
        tail = [received async for received in bus.samples.tail(last=99, follow=False)]
        assert sorted(place(received)[0] for received in tail) == [1, 2, 3]
        kinds = await read_some(bus, 3, kinds=[Kind.TRAIN])
        assert sorted(place(received)[0] for received in kinds) == [1, 2, 3]


async def test_parts_published_again_are_stored_once(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        first = await bus.samples.publish(large(bus.run, 1))
        assert await bus.samples.publish(large(bus.run, 1)) == first
        assert (await bus.samples.info()).last_seq == first


async def test_parts_without_a_manifest_block_nothing(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.js.publish(
            subjects.part(bus.run, "train", 1), b"half a sample", headers={"Nats-Msg-Id": "1.0.dead.chunk/0"}
        )
        await publish(bus, 2)
        (received,) = await read_some(bus, 1)
        assert (received.seq, place(received)) == (2, (2, 0))


async def part_of(bus: Bus, data: bytes, *, number: int, attempt: str = "a0") -> int:
    """Publish a part of the sample of ``manifest_of``. Returns its sequence."""
    message_id = f"{make_sample(bus.run, attempt=attempt).message_id}.chunk/{number}"
    return (await bus.js.publish(subjects.part(bus.run, "train", 1), data, headers={"Nats-Msg-Id": message_id})).seq


async def manifest_of(bus: Bus, data: bytes, *seqs: int, attempt: str = "a0") -> None:
    headers = headers_of(make_sample(bus.run, attempt=attempt)) | {"Tm-Parts": str(len(seqs))}
    await bus.js.publish(f"tm.{bus.run}.sample.train.3.a1.parts", codec.describe(data, seqs), headers=headers)


async def test_parts_without_a_manifest_do_not_keep_a_tail_from_its_end(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 1)
        await bus.js.publish(
            subjects.part(bus.run, "train", 1), b"half a sample", headers={"Nats-Msg-Id": "1.0.dead.chunk/0"}
        )
        async with asyncio.timeout(LIMIT_S):
            assert [received.seq async for received in bus.samples.tail(last=2, follow=False)] == [1]
            assert [received.seq async for received in bus.samples.tail(last=1, follow=False)] == []


async def test_parts_that_are_gone_or_wrong_are_named(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await part_of(bus, b"abc", number=0)
        await manifest_of(bus, b"abX", 1)
        await bus.js.publish(f"tm.{bus.run}.sample.train.3.a1.parts", b"\x81", headers={"Tm-Parts": "1"})
        await bus.js.publish(subjects.part(bus.run, "train", 2), b"abc")
        await bus.jet.call(f"STREAM.MSG.DELETE.TM_{bus.run}_SAMPLES", {"seq": 4})
        await bus.js.publish(
            f"tm.{bus.run}.sample.train.3.a1.parts", codec.describe(b"abc", [4]), headers={"Tm-Parts": "1"}
        )
        await publish(bus, 7)
        found = [received.sample for received in await read_some(bus, 4)]
        assert [error.field for error in found if isinstance(error, WireError)] == [
            "parts.sha256",
            "message",
            "parts.seqs",
        ]
        assert isinstance(found[3], Sample)


async def test_parts_that_a_kept_manifest_needs_survive_a_trim(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await publish(bus, 1)
        manifest = await bus.samples.publish(large(bus.run, 2))
        await bus.samples.trim(manifest)
        assert (await bus.samples.info()).first_seq == 2, "its first part"
        assert (await bus.samples.fetch(manifest)).task == 2
        await bus.samples.trim(manifest + 1)
        assert (await bus.samples.info()).messages == 0


@asynccontextmanager
async def fetches(bus: Bus) -> AsyncIterator[list[int]]:
    """Record the sequences that any client requests during the block, one at a time."""
    asked: list[int] = []

    async def note(message: Msg) -> None:
        request = json.loads(message.data)
        if request.keys() == {"seq"}:
            asked.append(request["seq"])

    sub = await bus.nc.subscribe(f"$JS.API.STREAM.MSG.GET.TM_{bus.run}_SAMPLES", cb=note)
    await bus.nc.flush()
    yield asked
    await bus.nc.flush()
    await sub.unsubscribe()


async def test_parts_that_no_sample_has_are_not_fetched(open_bus: BusOpener) -> None:
    """A manifest is a few bytes with arbitrary sequences: nothing is fetched for it before it is checked."""
    async with open_bus() as bus:
        seqs = [await part_of(bus, b"x" * 3000, number=number) for number in range(4)]
        await manifest_of(bus, b"x" * 3000 * 150, *seqs[:1] * 150, attempt="b")  # one part, over and over
        await manifest_of(bus, b"x" * 3000, *range(1, 1000), attempt="c")
        await manifest_of(bus, b"x" * 3000, 9_000_000, attempt="d")  # not stored yet
        await manifest_of(bus, b"", *seqs, attempt="e")
        huge = msgpack.packb({"schema": 1, "type": "parts", "seqs": seqs, "length": 1 << 62, "sha256": "0" * 64})
        await bus.js.publish(
            f"tm.{bus.run}.sample.train.3.a1.parts", huge, headers={"Nats-Msg-Id": "1.0.z", "Tm-Parts": "4"}
        )
        await publish(bus, 7)
        async with fetches(bus) as asked:
            found = [received.sample for received in await read_some(bus, 6)]
        assert [error.field for error in found[:5] if isinstance(error, WireError)] == [
            f"parts.{field}" for field in ("seqs",) * 3 + ("length",) * 2
        ]
        assert isinstance(found[5], Sample)
        assert asked == []


async def test_parts_are_fetched_no_further_than_the_first_that_is_not_the_samples(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        first = [await part_of(bus, b"x" * 3000, number=number) for number in range(2)]
        second = [await part_of(bus, b"x" * 3000, number=number, attempt="b") for number in range(2)]
        third = [await part_of(bus, b"x" * 3000, number=number, attempt="c") for number in range(4)]
        await manifest_of(bus, b"x" * 9000, *first, third[2])  # the last one is another sample's
        await manifest_of(bus, b"x" * 6000, *reversed(second), attempt="b")
        await manifest_of(bus, b"x" * 5000, *third, attempt="c")  # more than the stated length
        async with fetches(bus) as asked:
            found = [received async for received in bus.samples.tail(last=3, follow=False)]
        assert len(found) == 3
        assert all(isinstance(received.sample, WireError) for received in found)
        assert [seq for seq, _ in groupby(asked)] == [*first, third[2], second[1], *third[:2]], (
            "who answers late is asked again"
        )


async def test_parts_named_by_a_manifest_that_is_refused_hold_up_no_trimming(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        for task in range(1, 6):
            await publish(bus, task)
        await manifest_of(bus, b"x" * 3000, 1, attempt="b")
        await manifest_of(bus, b"x" * 3000, *range(1, 6), 1, attempt="c")
        await bus.samples.trim(5)
        assert (await bus.samples.info()).first_seq == 5


async def test_parts_of_more_than_a_sample_has_are_not_published(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        with refusal(WireError, field="sample"):
            await bus.samples.publish_bytes(
                bytes(codec.MAX_SAMPLE_BYTES + 1), f"tm.{bus.run}.sample.train.3.a1", {"Nats-Msg-Id": "1.0.a"}, task=1
            )
        assert (await bus.samples.info()).last_seq == 0


@pytest.mark.parametrize(
    "headers", [b"NATS/1.0", b"\xff\xff", b"NATS/1.0 \xff\xff\xff\r\n\r\n", b"NATS/1.0 100 Idle Heartbeat\r\n\r\n"]
)
async def test_headers_that_cannot_be_parsed_block_nothing(
    nats_server: EmbeddedServer, open_bus: BusOpener, headers: bytes
) -> None:
    """The client library would stop reading from the connection for good: the next sample would never arrive."""
    async with open_bus() as bus:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(nats_server.url.rsplit(":", 1)[1]))
        size = len(headers)
        writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
        writer.write(
            b"HPUB tm.%s.sample.train.0.x %d %d\r\n%bx\r\nPING\r\n" % (bus.run.encode(), size, size + 1, headers)
        )
        async with asyncio.timeout(LIMIT_S):
            while await reader.readline() != b"PONG\r\n":  # behind INFO, and perhaps a PING of the server
                pass
        writer.close()
        await publish(bus, 7)
        found = await read_some(bus, 2)
        assert isinstance(found[0].sample, WireError)
        assert isinstance(found[1].sample, Sample)
