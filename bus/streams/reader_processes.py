"""Readers of the shards of SAMPLES in processes of their own, each with a connection to the bus, merged for one caller.

    shard 0 --> process: receive, join parts, decode, check --+
    shard 1 --> process --------------------------------------+--> decode --> the caller

What a reader sends over its socket pair, one msgpack value each: ``SEQ`` (passed), ``[SEQ, payload, error, ...]`` (a
message), ``[NAME, values]`` (the error of the bus that ended it), nil (it runs). A reader that ends otherwise, or sends
nothing for a minute, ends the reading: no sample is lost with it, because the positions are the caller's.
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
from tidemill.bus.system.coroutines import beside, ended, to_the_end
from tidemill.bus.system.processes import Child, die_with_parent
from tidemill.bus.wire.codec import decode_sample
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Cursor, Sample
from tidemill.bus.wire.routed_experts import RoutedShape

BUS_WAIT_S = 300.0
SILENT_S = 60.0
"""Time in seconds without anything from a reader that has begun after which it counts as frozen."""
_START_S = 300.0  # Longest start of a reader: imports of many processes at once, from a slow disk
_BEAT_S = 1.0
_END_S = 5.0  # Time in which a reader that has closed its socket ends
_CHUNK_BYTES = 1 << 20  # Bytes that a reader sends ahead of the caller, beside what the sockets hold
_MAX_BYTES = 1 << 28  # Largest value, with what follows it in a chunk
_LENGTH = struct.Struct(">I")
_Arrived = asyncio.Queue[list[Any] | Exception]
"""Values of the readers, a chunk at a time, and the error that ends one."""


class ReaderEnded(DetailedError, BusError):
    """The process that reads a shard has ended, and nothing else is known."""

    shard: int
    code: int
    template = (
        "reader of shard {shard} of SAMPLES: its process ended with {code} (its output is in the learner's log); "
        "the learner begins again where it stopped"
    )


class ReaderFrozen(DetailedError, BusError):
    """The process that reads a shard runs no more, and has not ended."""

    shard: int
    seconds: float
    template = (
        "reader of shard {shard} of SAMPLES: nothing from its process for {seconds:.0f} s (stopped, or starved); "
        "the learner begins again where it stopped"
    )


class ShardReaders:
    """SAMPLES as ``SampleStream.read`` yields it, received, decoded and checked by a process for each shard."""

    def __init__(self, url: str, run: str, config: BusConfig, *, silent_s: float = SILENT_S) -> None:
        self._url, self._run, self._shards, self._silent_s = url, run, config.sample_shards, silent_s

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

        Raises ReaderEnded, ReaderFrozen, and what a reader raised.
        """
        arrived: _Arrived = asyncio.Queue(self._shards)
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
            of_shard = [seq for seq in checked_before if seq % self._shards == shard]
            reading = _follow(shard, request | {"shard": shard, "checked_before": of_shard}, arrived, self._silent_s)
            readers.append(asyncio.create_task(reading, name=f"reader {shard}"))
        behind = [0] * self._shards
        try:
            while True:
                values = await arrived.get()
                if isinstance(values, Exception):
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


async def _follow(shard: int, request: JsonObject, arrived: _Arrived, silent_s: float) -> None:
    """Run one reader, and put what it sends into ``arrived``, a chunk at a time; at its end an error, whichever."""
    try:
        error: Exception = await _run_reader(shard, request, arrived, silent_s)
    except Exception as other:  # without it the caller would wait for ever
        error = other
    await arrived.put(error)


async def _run_reader(shard: int, request: JsonObject, arrived: _Arrived, silent_s: float) -> Exception:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())]
        child = Child(f"reader {shard}", command)
        try:
            await child.start(pass_fds=[theirs.fileno()])
        except BaseException:
            ours.close()
            raise
    stream, writer = await asyncio.open_connection(sock=ours, limit=_CHUNK_BYTES)
    waiting = asyncio.create_task(child.wait(), name=f"reader {shard} to end")
    try:
        packed = msgpack.packb(request)
        writer.write(_LENGTH.pack(len(packed)) + packed)
        if error := await _pass_on(shard, stream, arrived, silent_s):
            return error
        await asyncio.wait({waiting}, timeout=_END_S)
        child.send(signal.SIGKILL)
        return ReaderEnded(shard, await waiting)
    finally:
        writer.close()
        child.send(signal.SIGKILL)  # it has nothing to bring to an end: its place in the stream is the caller's
        await to_the_end(_result(waiting))


async def _result(waiting: "asyncio.Task[int]") -> int:
    return await waiting


async def _pass_on(shard: int, stream: asyncio.StreamReader, arrived: _Arrived, silent_s: float) -> BusError | None:
    """Put the values of a reader into ``arrived``. Returns the error of the bus that ended it; None = not known."""
    unpacker, limit_s = msgpack.Unpacker(max_buffer_size=_MAX_BYTES), _START_S
    while chunk := await _chunk(shard, stream, limit_s):
        unpacker.feed(chunk)
        values, limit_s = [value for value in unpacker if value is not None], silent_s
        last = values[-1] if values else 0
        if isinstance(last, list) and isinstance(last[0], str):
            await arrived.put(values[:-1])
            name, fields = last
            return getattr(errors, name)(*fields)  # type: ignore[no-any-return]
        if values:
            await arrived.put(values)
    return None


async def _chunk(shard: int, stream: asyncio.StreamReader, limit_s: float) -> bytes:
    """Return the next bytes of a reader; none when it has ended. Raises ReaderFrozen."""
    for wait_s in (limit_s, _END_S):  # twice: this process itself may have been stopped for so long
        try:
            async with asyncio.timeout(wait_s):
                return await stream.read(_CHUNK_BYTES)
        except TimeoutError:
            continue
        except ConnectionError:  # it ended before it had read the request
            return b""
    raise ReaderFrozen(shard, limit_s)


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


async def _beat(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(msgpack.packb(None))
        await asyncio.sleep(_BEAT_S)


async def _serve(connection: socket.socket) -> None:
    stream, writer = await asyncio.open_connection(sock=connection)
    (size,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    request = msgpack.unpackb(await stream.readexactly(size))
    try:
        async with beside(_beat(writer)):
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
    # Sent to all processes of a job at once: the feeder needs its readers until it has drained.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)()
    asyncio.run(_serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main()
