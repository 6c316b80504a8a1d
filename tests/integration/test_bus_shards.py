"""SAMPLES in several shards on a real nats-server: read as one stream, by one process or by a process for each."""

import asyncio
import dataclasses
import re
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import pytest
import zmq

from tests.bus_fixtures import BusOpener
from tests.bus_kit import make_sample
from tests.feeder_kit import KEYS
from tests.forked import fork_child
from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import ConfigMismatch, StreamReplaced, StreamTrimmed, WireError
from tidemill.bus.server.auth import permissions
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.streams.readers import Cursors, History, Reader, shard_extents
from tidemill.bus.streams.shard_reading import Received
from tidemill.bus.system.processes import Child
from tidemill.bus.wire.codec import encode_sample
from tidemill.bus.wire.messages import Cursor, Sample
from tidemill.bus.wire.subjects import Shards, is_behind
from tidemill.learner.buffer.sample_index import ReadOptions, SampleIndex, Unusable
from tidemill.learner.errors import FeederLost, FeedError
from tidemill.learner.feed.sample_transfer import SampleClient
from tidemill.learner.feed.shard_readers import ReaderEnded, ReaderFrozen, ShardReaders
from tidemill.weightstore.store.registry import VersionRegistry

SHARDS = 3
T = TypeVar("T")


@pytest.fixture(autouse=True)
def forked_readers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fork_server: None) -> None:
    """Fork the readers, which executed import for half a second each, but for those that do not start."""
    if "program" not in request.fixturenames:
        monkeypatch.setattr(Child, "spawn", fork_child)


async def publish(bus: Bus, *tasks: int, **changes: object) -> list[int]:
    return [await bus.samples.publish(make_sample(bus.run, task=task, **changes)) for task in tasks]


async def read(reading: AsyncGenerator[T], count: int) -> list[T]:
    async with asyncio.timeout(LIMIT_S), aclosing(reading) as messages:
        return [await anext(messages) for _ in range(count)]


def shard_readers(
    server: EmbeddedServer, bus: Bus, *, vocab_size: int = 100, with_data: bool = False, silent_s: float = 60.0
) -> ShardReaders:
    options = ReadOptions(vocab_size=vocab_size, with_data=with_data)
    listen = "tcp://127.0.0.1:1"
    return ShardReaders(server.url, bus.run, bus.config, options, listen=listen, keys=KEYS, silent_s=silent_s)


async def entries_of(
    readers: ShardReaders, cursor: Cursor, passed: list[int]
) -> AsyncGenerator[SampleIndex | Unusable]:
    """Yield the entries one by one."""
    async with aclosing(readers.read(cursor, on_passed=passed.append)) as reading:
        async for rows in reading:
            for entry in rows.entries:
                yield entry


def read_by_processes(
    server: EmbeddedServer, bus: Bus, cursor: Cursor, passed: list[int]
) -> AsyncGenerator[SampleIndex | Unusable]:
    return entries_of(shard_readers(server, bus, with_data=True), cursor, passed)


def content_of(message: Received | SampleIndex | Unusable) -> Sample | WireError:
    match message:
        case SampleIndex():
            return message.content
        case Unusable():
            return message.error
    return message.sample


async def test_a_task_chooses_the_stream_and_a_sequence_names_one_message(open_bus: BusOpener) -> None:
    async with open_bus(sample_shards=SHARDS) as bus:
        seqs = await publish(bus, *range(1, 10))
        assert [seq % SHARDS for seq in seqs] == [task % SHARDS for task in range(1, 10)]
        assert len(set(seqs)) == 9
        assert [(await bus.samples.fetch(seq)).task for seq in seqs] == list(range(1, 10))
        states = await bus.samples.states()
        assert [state.messages for state in states] == [3, 3, 3]
        assert (await bus.samples.info()).messages == 9
        assert await bus.samples.ends() == (9, 10, 11)
        configs = [await bus.jet.call(f"STREAM.INFO.TM_{bus.run}_SAMPLES-{shard}of3") for shard in range(SHARDS)]
        assert [info["config"]["max_bytes"] for info in configs] == [bus.config.samples_max_bytes // SHARDS] * SHARDS


async def test_readers_that_do_not_know_the_number_of_shards_see_one_stream(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus(sample_shards=SHARDS) as bus, connect(nats_server.url, bus.run, name="viewer") as viewer:
        seqs = await publish(bus, *range(1, 8))
        tail = [received async for received in viewer.samples.tail(last=99, follow=False)]
        assert [received.seq for received in tail] == sorted(seqs)
        history = History(viewer.jet)
        payloads = [stored async for stored in history.payloads(1, max(seqs))]
        assert [stored.seq for stored in payloads] == sorted(seqs)
        assert (await history.payload(seqs[3])).data == payloads[sorted(seqs).index(seqs[3])].data
        assert await history.at_version(3) == min(seqs)
        glimpses = history.glimpses(max(seqs) + 1)
        following = asyncio.create_task(read(glimpses, 1))
        (new,) = await publish(bus, 8)
        assert [glimpse.seq for glimpse in await following] == [new]


@pytest.mark.parametrize("by_processes", [False, True])
async def test_a_cursor_goes_on_in_every_shard(
    open_bus: BusOpener, nats_server: EmbeddedServer, by_processes: bool
) -> None:
    """Parts, settled samples and an invalid one included; every sequence is passed once, in the order of its shard."""
    async with open_bus(sample_shards=SHARDS) as bus:
        before = await bus.samples.cursor()
        first = await publish(bus, 1, 2, 3, 4)
        size = 3 * nats_server.config.max_payload_bytes // 2 // 9
        (large,) = await publish(bus, 5, length=size)
        (invalid,) = await publish(bus, 6, rollout_log_probs=make_sample(length=8).rollout_log_probs + 1)
        floors = tuple(first[0] if shard == first[0] % SHARDS else shard for shard in range(SHARDS))
        cursor = Cursor(created=before.created, floor=min(floors), settled=(first[2],), floors=floors)
        passed: list[int] = []
        reading = (
            read_by_processes(nats_server, bus, cursor, passed)
            if by_processes
            else bus.samples.read(cursor, vocab_size=size + 3, on_passed=passed.append)
        )
        messages = await read(reading, 4)
        assert {received.seq for received in messages} == {first[1], first[3], large, invalid}
        by_seq = {received.seq: content_of(received) for received in messages}
        assert isinstance(by_seq[invalid], WireError)
        whole = by_seq[first[3]]
        assert isinstance(whole, Sample)
        assert whole.tokens.tolist() == make_sample(task=4).tokens.tolist()
        of_shards = [[seq for seq in passed if seq % SHARDS == shard] for shard in range(SHARDS)]
        assert all(seqs == sorted(set(seqs)) for seqs in of_shards)
        assert first[0] not in passed
        if not by_processes:  # they say of many sequences at once that they are passed
            assert {len([seq for seq in seqs if seq < large]) for seqs in of_shards} >= {1}


async def test_a_cursor_of_other_streams_or_of_trimmed_messages_is_refused(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus(sample_shards=SHARDS) as bus:
        before = await bus.samples.cursor()
        seqs = await publish(bus, *range(1, 7))
        other = dataclasses.replace(before, created=before.created.replace("2", "1"))
        with pytest.raises(StreamReplaced):
            await read(bus.samples.read(other), 1)
        with pytest.raises(StreamReplaced):
            await read(bus.samples.read(Cursor(created=before.created.split(",")[0], floor=0)), 1)
        below = [shard for shard in range(SHARDS)]
        below[2] = seqs[4] + 1  # tasks 2 and 5
        await bus.samples.trim(*below)
        assert [state.messages for state in await bus.samples.states()] == [2, 2, 0]
        with pytest.raises(StreamTrimmed):
            await read(bus.samples.read(before), 6)
        with pytest.raises(StreamTrimmed):
            await read(read_by_processes(nats_server, bus, before, []), 6)


async def test_another_number_of_shards_is_refused_before_anything_is_made(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus(sample_shards=2) as bus:
        for count in (1, 3):
            async with connect(nats_server.url, bus.run, BusConfig(sample_shards=count), name="other") as other:
                with refusal(ConfigMismatch, field="sample_shards", want=count, got=2):
                    await other.create_layout()
        names = (await bus.jet.call("STREAM.NAMES", {"subject": f"tm.{bus.run}.>"}))["streams"]
        assert sorted(name for name in names if "SAMPLES" in name) == [
            f"TM_{bus.run}_SAMPLES-0of2",
            f"TM_{bus.run}_SAMPLES-1of2",
        ]


async def test_a_registered_reader_reads_its_shard_alone_and_goes_on_there(open_bus: BusOpener) -> None:
    async with open_bus(sample_shards=2) as bus:
        seqs = await publish(bus, *range(1, 7))
        of_shard_1 = [seq for seq in seqs if seq % 2 == 1]
        first = await Reader.open(bus, "mine", shard=1)
        messages = await read(first.read(check=False), 2)  # type: ignore[arg-type]
        assert [received.seq for received in messages] == of_shard_1[:2]
        await first.advance(of_shard_1[0])
        again = await Reader.open(bus, "mine", shard=1)
        messages = await read(again.read(check=False), 2)  # type: ignore[arg-type]
        assert [received.seq for received in messages] == of_shard_1[1:]
        with pytest.raises(StreamReplaced):
            await Reader.open(bus, "mine", shard=0)
        created, extent = list((await shard_extents(bus.jet)).items())[1]
        assert await Cursors(bus).first_needed(created) == of_shard_1[0] + 1
        assert (await Cursors(bus).all())["mine"].created == created
        assert extent.behind(of_shard_1[0]) == 2


async def test_a_sample_in_the_shard_of_another_task_is_invalid(open_bus: BusOpener) -> None:
    async with open_bus(sample_shards=2) as bus:
        sample = make_sample(bus.run, task=2)
        await bus.samples.publish_bytes(
            encode_sample(sample), f"tm.{bus.run}.sample.train.3.a1", {"Nats-Msg-Id": "1.0.forged"}, task=1
        )
        (received,) = await read(bus.samples.read(None), 1)
        assert isinstance(received.sample, WireError)
        assert received.sample.field == "task"


async def test_a_version_begins_behind_the_end_of_every_shard(open_bus: BusOpener) -> None:
    async with open_bus(sample_shards=2) as bus:
        registry = VersionRegistry(bus)
        await registry.publish_initial("model", 1)
        before = await publish(bus, 1, 2, 3)
        row = await registry.reserve(1, 1)
        assert row.position == await bus.samples.ends()
        after = await publish(bus, 4, 5)
        stored = await registry.row(row.version)
        assert stored is not None
        assert [is_behind(seq, stored.position) for seq in before] == [True] * 3
        assert [is_behind(seq, stored.position) for seq in after] == [False] * 2


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The reader processes that were started, in the order of their starts."""
    children: list[Child] = []

    class Noted(Child):
        async def start(self, pass_fds: object = ()) -> None:  # type: ignore[override]
            await super().start(pass_fds)  # type: ignore[arg-type]
            children.append(self)

    monkeypatch.setattr("tidemill.learner.feed.shard_readers.Child", Noted)
    return children


def of_shard(children: list[Child], shard: int) -> Child:
    return next(child for child in children if child.name == f"reader {shard}")


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (signal.SIGKILL, ReaderEnded, "reader of shard 1 of SAMPLES: its process ended with -9"),
        (signal.SIGSTOP, ReaderFrozen, "reader of shard 1 of SAMPLES: nothing from its process for 8 s"),
    ],
)
async def test_a_killed_or_frozen_reader_ends_the_reading(
    open_bus: BusOpener,
    nats_server: EmbeddedServer,
    started: list[Child],
    number: signal.Signals,
    error: type[Exception],
    words: str,
) -> None:
    async with open_bus(sample_shards=2) as bus:
        await publish(bus, 1, 2)
        reading = entries_of(shard_readers(nats_server, bus, silent_s=8), await bus.samples.cursor(), [])
        async with asyncio.timeout(LIMIT_S), aclosing(reading):
            assert {(await anext(reading)).seq % 2, (await anext(reading)).seq % 2} == {0, 1}
            of_shard(started, 1).send(number)
            with pytest.raises(error, match=words):
                await anext(reading)
        assert not any(child.running for child in started)


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
async def test_a_reader_that_does_not_start_ends_the_reading(
    open_bus: BusOpener, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    async with open_bus(sample_shards=2) as bus:
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises((ReaderEnded, FileNotFoundError)):
            await read(read_by_processes(nats_server, bus, await bus.samples.cursor(), []), 1)


async def test_readers_read_on_after_a_signal_to_all_processes_of_a_job(
    open_bus: BusOpener, nats_server: EmbeddedServer, started: list[Child]
) -> None:
    """The feeder drains then, for which it needs them."""
    async with open_bus(sample_shards=2) as bus:
        await publish(bus, 1, 2)
        reading = read_by_processes(nats_server, bus, await bus.samples.cursor(), [])
        async with asyncio.timeout(LIMIT_S), aclosing(reading):
            assert {(await anext(reading)).seq % 2 for _ in range(2)} == {0, 1}
            for child in started:
                child.send(signal.SIGTERM)
            seqs = await publish(bus, 3, 4)
            assert {(await anext(reading)).seq for _ in range(2)} == set(seqs)


async def test_parts_of_every_shard_are_joined_and_outlive_trimming(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """A sequence in a manifest is one of its shard's stream."""
    size = nats_server.config.max_payload_bytes // 9 * 3 // 2
    samples = [make_sample("r", task=task, length=size if task > 2 else 8) for task in range(1, 7)]
    async with open_bus(sample_shards=2) as bus:
        samples = [dataclasses.replace(sample, run=bus.run) for sample in samples]
        begin = await bus.samples.cursor()
        seqs = [await bus.samples.publish(sample) for sample in samples]
        assert [state.messages for state in await bus.samples.states()] == [7, 7], "two parts and a manifest each"
        # All before the last sample of a shard, whose parts are needed on
        await bus.samples.trim(*sorted(seqs[-2:], key=lambda seq: seq % 2))
        assert [state.messages for state in await bus.samples.states()] == [3, 3]
        floors = tuple(sorted(seqs[2:4], key=lambda seq: seq % 2))
        cursor = dataclasses.replace(begin, floor=min(floors), floors=floors)
        readers = shard_readers(nats_server, bus, vocab_size=size + 3, with_data=True)
        messages = await read(entries_of(readers, cursor, []), 2)
        assert {received.seq for received in messages} == set(seqs[-2:])
        whole = [*[content_of(received) for received in messages], *[await bus.samples.fetch(seq) for seq in seqs[-2:]]]
        for sample in whole:
            assert isinstance(sample, Sample), sample
            assert sample.tokens.tolist() == samples[-1].tokens.tolist()
        stored = await History(bus.jet).payload(seqs[-1])
        assert stored.data == encode_sample(samples[-1])


async def test_ranks_fetch_samples_from_the_readers_until_these_are_released(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """Only the index of a sample comes to the feeder; a reader has the sample until the feeder releases it."""
    async with open_bus(sample_shards=2) as bus:
        samples = [make_sample(bus.run, task=task, length=1000) for task in (1, 2, 3)]
        seqs = [await bus.samples.publish(sample) for sample in samples]
        readers = shard_readers(nats_server, bus, vocab_size=2000)
        async with asyncio.timeout(LIMIT_S), aclosing(entries_of(readers, await bus.samples.cursor(), [])) as reading:
            entries = [await anext(reading) for _ in seqs]
            assert all(isinstance(entry, SampleIndex) and not entry.data for entry in entries)
            fetched = await asyncio.to_thread(fetch, readers, seqs)
            assert [fetched[seq].tokens.tolist() for seq in seqs] == [sample.tokens.tolist() for sample in samples]
            readers.release(seqs[:1])
            with refusal(FeedError, where=re.compile("^reader at port "), want="2 samples", got=0):
                while True:  # until the reader has read what is released
                    await asyncio.to_thread(fetch, readers, [seqs[0], seqs[2]])
            assert set(await asyncio.to_thread(fetch, readers, seqs[1:])) == set(seqs[1:])


def fetch(readers: ShardReaders, seqs: list[int]) -> dict[int, Sample]:
    """Fetch samples as a rank does."""
    return fetch_from(readers.ports, seqs, silence_s=30)


def fetch_from(ports: Sequence[int], seqs: list[int], *, silence_s: float) -> dict[int, Sample]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as feeder:
        client = SampleClient(context, "tcp://127.0.0.1:1", KEYS)
        try:
            return client.fetch(seqs, ports, silence_s=silence_s, feeder=feeder, on_feeder=lambda: None)
        finally:
            client.close()


def test_a_rank_names_the_reader_that_it_cannot_reach_and_what_to_do() -> None:
    """Shard 0 is a port that accepts connections and answers nothing, shard 1 one at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as silent, KeptPort() as closed:
        ports = [silent.getsockname()[1], closed.number]
        with refusal(FeedError, where=f"reader of shard 1 at 127.0.0.1 port {ports[1]}") as refused:
            fetch_from(ports, [0, 1], silence_s=0.5)
        assert "connect to any port of the feeder's machine" in str(refused.value)
        with refusal(FeederLost, last_reason=f"reader of shard 0 at 127.0.0.1 port {ports[0]}"):
            fetch_from(ports, [0], silence_s=0.5)


def test_users_may_store_their_own_samples_in_every_shard() -> None:
    allowed = permissions("actor", "actor-0", "r", BusConfig(sample_shards=2)).publish
    for shard in range(2):
        suffix = Shards(2).suffix(shard)
        assert f"tm.r.sample{suffix}.*.*.actor-0" in allowed
        assert f"tm.r.part{suffix}.*.*" in allowed


@pytest.mark.parametrize("count", [1, 2, 3, 64])
def test_the_first_sequence_of_a_shard_from_any_on(count: int) -> None:
    shards = Shards(count)
    for seq in range(3 * count):
        for shard in range(count):
            local = shards.first(shard, seq)
            assert shards.seq(shard, local) >= seq > shards.seq(shard, local - 1)
            assert shards.place(shards.seq(shard, local)) == (shard, local)
