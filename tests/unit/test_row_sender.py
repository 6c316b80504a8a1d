"""Entries of samples on their way from a reader to the feeder."""

import asyncio
import socket
from dataclasses import dataclass

import msgspec
import pytest

from tests.bus_kit import make_sample
from tests.waits import LIMIT_S, turn
from tidemill.learner.buffer.sample_index import SampleIndex, Unusable, index_of
from tidemill.learner.feed import shard_reader
from tidemill.learner.feed.shard_reader import RowSender


@dataclass
class Pipe:
    writer: asyncio.StreamWriter
    other: socket.socket


async def opened() -> Pipe:
    ours, other = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    return Pipe(writer, other)


def entry(seq: int, **fields: bytes) -> SampleIndex:
    index = index_of(seq, make_sample())
    index.sample = None
    return msgspec.structs.replace(index, **fields)


@pytest.mark.parametrize("field", ["data", "metadata"])
async def test_few_large_entries_wait_for_a_feeder_that_is_far_behind(field: str) -> None:
    """Though they are sent by time, not because they are many."""
    pipe = await opened()
    sender = RowSender(pipe.writer)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                for seq in range(1, 1000):
                    await sender.add(entry(seq, **{field: bytes(100_000)}), pending=0)
                    sender.flush()  # as its loop does
                    await turn()
        sent = pipe.writer.transport.get_write_buffer_size()
        assert sent < 10 << 20
    finally:
        pipe.other.close()
        pipe.writer.transport.abort()


async def test_an_entry_that_cannot_be_sent_ends_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold back all entries behind it, while the reader's heartbeats go on."""
    monkeypatch.setattr(shard_reader, "_FLUSH_S", 0.01)
    pipe = await opened()
    sender = RowSender(pipe.writer)
    try:
        await sender.add(Unusable(1, "a1", "spans", "less", 2**64), pending=0)
        sender.passed(1)
        with pytest.raises(OverflowError):
            async with asyncio.timeout(LIMIT_S):
                await sender.run()
    finally:
        pipe.other.close()
        pipe.writer.transport.abort()
