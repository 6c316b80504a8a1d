"""The process that reads a shard of SAMPLES for the feeder, and its messages: ``shard_reader DESCRIPTOR PARENT``.

    SAMPLES --> receive, join parts, decode, check --+--> index --> the feeder (socket pair), many in a message
                                                     +--> bytes, held until released --> ranks (ZMQ)

feeder -> reader: a ``ReadRequest``, then lists of the sequences that no rank needs any more.
reader -> feeder: ``Opened``, then ``Rows``, ``Alive`` and at its end perhaps ``Failed``.
A message is a length, then msgpack. The process keeps no state: its positions are the feeder's.
"""

import asyncio
import signal
import socket
import struct
import sys
from collections.abc import Container
from contextlib import suppress
from typing import Any

import msgspec

from tidemill.bus import errors
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, WireError
from tidemill.bus.streams.bus import connect
from tidemill.bus.streams.shard_reading import Received
from tidemill.bus.system.coroutines import Waiter, first_error
from tidemill.bus.system.processes import die_with_parent
from tidemill.bus.wire.messages import Cursor, Kind, Sample
from tidemill.learner.buffer.sample_index import ReadOptions, SampleIndex, Unusable, index_of, unusable
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.sample_transfer import SampleServer

_LENGTH = struct.Struct(">I")
BUS_WAIT_S = 300.0
_BEAT_S = 1.0
_MOST_ROWS, _MOST_BYTES = 128, 1 << 20
_FLUSH_S = 0.05
"""Longest time that the index of a sample waits for others: the feeder is woken once for all of them."""


class ReadRequest(msgspec.Struct, kw_only=True):
    """First message to a reader."""

    url: str
    run: str
    shards: int
    shard: int
    cursor: Cursor
    options: ReadOptions
    checked_before: list[int]
    listen: str
    """Where ranks fetch samples: tcp://host:*."""
    keys: FeedKeys


class Opened(msgspec.Struct, array_like=True, tag="opened"):
    """Ranks can fetch samples at this port."""

    port: int


class Rows(msgspec.Struct, array_like=True, tag="rows"):
    """What a reader has read: ``passed`` is the last sequence of the shard, settled ones and parts included."""

    passed: int
    pending: int
    """Messages of SAMPLES that are not read yet, as far as it is known."""
    entries: list[SampleIndex | Unusable]


class Alive(msgspec.Struct, array_like=True, tag="alive"):
    """The reader runs."""


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The error of the bus that ended a reader."""

    name: str
    args: list[Any]


FromReader = Opened | Rows | Alive | Failed
FROM_READER: msgspec.msgpack.Decoder[FromReader] = msgspec.msgpack.Decoder(FromReader)
_REQUEST: msgspec.msgpack.Decoder[ReadRequest] = msgspec.msgpack.Decoder(ReadRequest)
_SEQS: msgspec.msgpack.Decoder[list[int]] = msgspec.msgpack.Decoder(list[int])


def frame(message: object) -> bytes:
    packed = msgspec.msgpack.encode(message, enc_hook=_text)
    return _LENGTH.pack(len(packed)) + packed


def _text(value: object) -> object:
    """Return a value of an error that msgpack does not have, as text; a sample stays in the reader."""
    return str(value)


async def next_frame(stream: asyncio.StreamReader) -> bytes:
    """Return the bytes of the next message. Raises IncompleteReadError, ConnectionError at the end of the stream."""
    (size,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    return await stream.readexactly(size)


async def next_request(stream: asyncio.StreamReader) -> ReadRequest:
    """Return the first message to a reader."""
    return _REQUEST.decode(await next_frame(stream))


async def next_released(stream: asyncio.StreamReader) -> list[int]:
    """Return sequences of samples that no rank needs any more."""
    return _SEQS.decode(await next_frame(stream))


def entry_of(received: Received, options: ReadOptions) -> SampleIndex | Unusable:
    """Return the entry of a message, with its sample."""
    if isinstance(received.sample, WireError):
        return unusable(received.seq, received.sample, received.actor)
    metadata = msgspec.msgpack.encode(received.sample.metadata) if options.with_metadata else b""
    return index_of(received.seq, received.sample, received.actor, routed=options.routed, metadata=metadata)


class RowSender:
    """Collects entries, and sends them when they are many, or old."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._entries = writer, list[SampleIndex | Unusable]()
        self._passed = self._sent = self._pending = self._num_bytes = 0
        self._due = Waiter()

    def passed(self, seq: int) -> None:
        """Note that all up to ``seq`` is read."""
        self._passed = seq
        self._due.wake()

    async def run(self) -> None:
        """Send what is old, until cancelled. Raises what ``frame`` does: no timer could end this process by it."""
        while True:
            await self._due.wait()
            await asyncio.sleep(_FLUSH_S)
            if self._entries or self._passed != self._sent:
                self.flush()

    async def add(self, entry: SampleIndex | Unusable, *, pending: int) -> None:
        """Send an entry, now or with others. Waits while the feeder is far behind."""
        self._entries.append(entry)
        self._pending = pending
        self._num_bytes += len(entry.data) + len(entry.metadata) if isinstance(entry, SampleIndex) else 0
        if len(self._entries) >= _MOST_ROWS or self._num_bytes >= _MOST_BYTES:
            self.flush()
        await self._writer.drain()  # each time: few large entries are sent by ``run`` alone

    def flush(self) -> None:
        """Send all entries and the position. An entry that is not passed yet is sent with a position before it."""
        passed = self._passed if self._passed != self._sent else 0  # each position is sent once; 0 = none
        self._writer.write(frame(Rows(passed, self._pending, self._entries)))
        self._entries, self._num_bytes, self._sent = [], 0, self._passed


async def read(request: ReadRequest, server: SampleServer, sender: RowSender) -> None:
    """Send what the shard has after the cursor, for ever."""
    config, options = BusConfig(sample_shards=request.shards), request.options
    checked_before: Container[int] = frozenset(request.checked_before)
    async with connect(request.url, request.run, config, name=f"reader {request.shard}", wait_s=BUS_WAIT_S) as bus:
        reading = bus.samples.read(
            request.cursor,
            vocab_size=options.vocab_size,
            routed=options.routed,
            checked_before=checked_before,
            on_passed=sender.passed,
            only_shard=request.shard,
        )
        async for received in reading:
            entry = entry_of(received, options)
            if isinstance(entry, SampleIndex):
                sample: Sample = entry.sample
                entry.sample = None
                if options.with_data or sample.kind is Kind.EVAL:
                    entry.data = received.data
                if sample.kind is Kind.TRAIN:
                    server.hold(received.seq, received.data)
            await sender.add(entry, pending=received.pending)


async def _release(stream: asyncio.StreamReader, server: SampleServer) -> None:
    """Release samples as the feeder says, until it closes the connection."""
    with suppress(asyncio.IncompleteReadError):
        while True:
            server.release(await next_released(stream))


async def _beat(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(frame(Alive()))
        await asyncio.sleep(_BEAT_S)


async def _serve(connection: socket.socket) -> None:
    stream, writer = await asyncio.open_connection(sock=connection)
    request = await next_request(stream)
    server = SampleServer(request.listen, request.keys)
    writer.write(frame(Opened(server.port)))
    sender = RowSender(writer)
    try:
        async with asyncio.TaskGroup() as group:
            for loop in (_beat(writer), sender.run(), server.admit(), server.serve(), _release(stream, server)):
                group.create_task(loop)
            await read(request, server, sender)
    except BaseExceptionGroup as group_error:
        error = first_error(group_error)
        if not isinstance(error, BusError) or not hasattr(errors, type(error).__name__):
            raise error from None
        sender.flush()
        writer.write(frame(Failed(type(error).__name__, list(error.args))))
        await writer.drain()
    finally:
        server.close()
    writer.close()
    await writer.wait_closed()


def main() -> None:
    """Read one shard for the process at the other end of the socket, and end with it."""
    # Sent to all processes of a job at once: the feeder needs its readers until it has drained.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)()
    asyncio.run(_serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main()
