"""Readers of the shards of SAMPLES in processes of their own, each with a connection to the bus, merged for one caller.

    shard 0 --> process: receive, join parts, decode, check --+
    shard 1 --> process --------------------------------------+--> decode --> the caller

What a reader sends over its socket pair, one msgpack value each: ``SEQ`` (passed), ``[SEQ, payload, error, ...]`` (a
message), ``[NAME, values]`` (the error of the bus that ended it). A reader that ends otherwise ends the reading: no
sample is lost with it, because the positions are the caller's.
"""

import asyncio
import dataclasses
import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncGenerator, Callable, Container
from typing import Any

import msgpack

from tidemill.bus import errors
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, DetailedError, WireError
from tidemill.bus.streams.bus import connect
from tidemill.bus.streams.shard_reading import Received
from tidemill.bus.system.coroutines import ended, to_the_end
from tidemill.bus.system.processes import Child, die_with_parent
from tidemill.bus.wire.codec import decode_sample
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Cursor, Sample
from tidemill.bus.wire.routed_experts import RoutedShape

BUS_WAIT_S = 300.0
_CHUNK_BYTES = 1 << 20  # Bytes that a reader sends ahead of the caller, beside what the sockets hold
_MAX_BYTES = 1 << 28  # Largest value, with what follows it in a chunk
_LENGTH = struct.Struct(">I")


class ReaderEnded(DetailedError, BusError):
    """The process that reads a shard has ended, and nothing else is known."""

    shard: int
    code: int
    template = (
        "reader of shard {shard} of SAMPLES: its process ended with {code} (its output is in the learner's log); "
        "the learner begins again where it stopped"
    )


class ShardReaders:
    """SAMPLES as ``SampleStream.read`` yields it, received, decoded and checked by a process for each shard."""

    def __init__(self, url: str, run: str, config: BusConfig) -> None:
        self._url, self._run, self._shards = url, run, config.sample_shards

    async def read(
        self,
        cursor: Cursor,
        *,
        vocab_size: int | None = None,
        routed: RoutedShape | None = None,
        checked_before: frozenset[int] = frozenset(),
        on_passed: Callable[[int], None],
    ) -> AsyncGenerator[Received]:
        """Yield the messages after the cursor, as ``SampleStream.read``; end it with ``aclose``.

        Raises ReaderEnded, and what a reader raised.
        """
        arrived: asyncio.Queue[list[Any] | BusError] = asyncio.Queue(self._shards)
        request = {
            "url": self._url,
            "run": self._run,
            "shards": self._shards,
            "cursor": dataclasses.asdict(cursor),
            "vocab_size": vocab_size,
            "routed": None if routed is None else dataclasses.asdict(routed),
        }
        readers = []
        for shard in range(self._shards):
            of_shard = {
                "shard": shard,
                "checked_before": [seq for seq in checked_before if seq % self._shards == shard],
            }
            readers.append(asyncio.create_task(_follow(shard, request | of_shard, arrived), name=f"reader {shard}"))
        behind = [0] * self._shards
        try:
            while True:
                values = await arrived.get()
                if isinstance(values, BusError):
                    raise values
                for value in values:
                    if isinstance(value, int):
                        on_passed(value)
                        continue
                    yield _received(value, behind)
                    on_passed(value[0])
        finally:
            await ended(*readers)


def readers_of(url: str, run: str, config: BusConfig) -> ShardReaders | None:
    """Return the reader processes of a run with several shards; None where its one stream is read without."""
    return ShardReaders(url, run, config) if config.sample_shards > 1 else None


async def _follow(shard: int, request: JsonObject, arrived: "asyncio.Queue[list[Any] | BusError]") -> None:
    """Run one reader, and put what it sends into ``arrived``, a chunk at a time; at its end an error."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())]
        child = Child(f"reader {shard}", command)
        await child.start(pass_fds=[theirs.fileno()])
    stream, writer = await asyncio.open_connection(sock=ours, limit=_CHUNK_BYTES)
    waiting = asyncio.create_task(child.wait(), name=f"reader {shard} to end")
    try:
        packed = msgpack.packb(request)
        writer.write(_LENGTH.pack(len(packed)) + packed)
        error = await _pass_on(stream, arrived)
        await arrived.put(error or ReaderEnded(shard, await waiting))
    finally:
        writer.close()
        child.send(signal.SIGKILL)  # it has nothing to bring to an end: its place in the stream is the caller's
        await to_the_end(_result(waiting))


async def _result(waiting: "asyncio.Task[int]") -> int:
    return await waiting


async def _pass_on(stream: asyncio.StreamReader, arrived: "asyncio.Queue[list[Any] | BusError]") -> BusError | None:
    """Put the values of a reader into ``arrived``. Returns the error of the bus that ended it; None = not known."""
    unpacker = msgpack.Unpacker(max_buffer_size=_MAX_BYTES)
    while chunk := await stream.read(_CHUNK_BYTES):
        unpacker.feed(chunk)
        values = list(unpacker)
        last = values[-1] if values else 0
        if isinstance(last, list) and isinstance(last[0], str):
            await arrived.put(values[:-1])
            name, fields = last
            return getattr(errors, name)(*fields)  # type: ignore[no-any-return]
        if values:
            await arrived.put(values)
    return None


def _received(value: list[Any], behind: list[int]) -> Received:
    """Return a message as a reader sent it. ``behind``: messages of each shard after the last one, to be updated."""
    seq, data, error, headers, pending, stored_s, size_bytes, actor = value
    behind[seq % len(behind)] = pending
    sample: Sample | WireError
    try:
        sample = WireError(*error) if error is not None else decode_sample(data)
    except WireError as undecodable:
        sample = undecodable
    return Received(
        seq=seq,
        sample=sample,
        headers=headers,
        pending=sum(behind),
        stored_s=stored_s,
        size_bytes=size_bytes,
        actor=actor,
    )


# ---- the process: python -m tidemill.bus.streams.reader_processes DESCRIPTOR PARENT


async def _serve(connection: socket.socket) -> None:
    stream, writer = await asyncio.open_connection(sock=connection)
    (size,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    request = msgpack.unpackb(await stream.readexactly(size))
    try:
        await _read(request, writer)
    except DetailedError as error:
        if not isinstance(error, BusError) or not hasattr(errors, type(error).__name__):
            raise
        writer.write(msgpack.packb([type(error).__name__, error.args], default=str))
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def _read(request: JsonObject, writer: asyncio.StreamWriter) -> None:
    """Send what the shard has after the cursor, for ever."""
    config, shard = BusConfig(sample_shards=request["shards"]), request["shard"]
    at, routed = request["cursor"], request["routed"]
    cursor = Cursor(created=at["created"], floor=at["floor"], settled=tuple(at["settled"]), floors=tuple(at["floors"]))
    checked_before: Container[int] = frozenset(request["checked_before"])
    sent = 0

    def pass_on(seq: int) -> None:
        if seq != sent:  # the caller itself passes a message that it got
            writer.write(msgpack.packb(seq))

    async with connect(request["url"], request["run"], config, name=f"reader {shard}", wait_s=BUS_WAIT_S) as bus:
        reading = bus.samples.read(
            cursor,
            vocab_size=request["vocab_size"],
            routed=None if routed is None else RoutedShape(**routed | {"layers": tuple(routed["layers"])}),
            checked_before=checked_before,
            on_passed=pass_on,
            only_shard=shard,
        )
        async for received in reading:
            sent = received.seq
            error = received.sample if isinstance(received.sample, WireError) else None
            row = [
                received.seq,
                b"" if error is not None else received.data,
                None if error is None else [str(value) for value in error.args],
                received.headers,
                received.pending,
                received.stored_s,
                received.size_bytes,
                received.actor,
            ]
            writer.write(msgpack.packb(row))
            await writer.drain()


def main() -> None:
    """Read one shard for the process at the other end of the socket, and end with it."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)()
    asyncio.run(_serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main()
