"""Readers of SAMPLES for the feeder: in its own process where there is one stream, else a process for each shard.

    shard 0 --> shard_reader.py --+--> index of each sample --> the feeder, which decides
    shard 1 --> shard_reader.py --+
                       +--> samples --> ranks

A reader process that ends, or sends nothing for a minute, ends the reading: no sample is lost with it, because the
positions are the caller's.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from tidemill.bus import errors
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, DetailedError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import ended, to_the_end
from tidemill.bus.system.processes import Child
from tidemill.bus.wire.messages import Cursor
from tidemill.learner.buffer.sample_index import ReadOptions
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.feeder_settings import FeederSettings
from tidemill.learner.feed.shard_reader import (
    FROM_READER,
    Failed,
    Opened,
    ReadRequest,
    Rows,
    entry_of,
    frame,
    next_frame,
)

SILENT_S = 60.0
"""Time in seconds without anything from a reader that has begun after which it counts as frozen."""
_START_S = 300.0  # Longest start of a reader: imports of many processes at once, from a slow disk
_END_S = 5.0  # Time in which a reader that has closed its socket ends
_AHEAD_BYTES = 1 << 16  # Bytes that a reader sends ahead of the caller, beside what the sockets hold
_Arrived = asyncio.Queue[Rows | Exception]
"""What the readers have read, and the error that ends one."""


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


class SampleReaders(Protocol):
    """SAMPLES as the feeder reads it."""

    ports: Sequence[int]
    """Where ranks fetch the samples of each shard; empty = they get them from the feeder."""

    def read(
        self, cursor: Cursor, *, checked_before: frozenset[int] = frozenset(), on_passed: Callable[[int], None]
    ) -> AsyncGenerator[Rows]:
        """Yield what comes after the cursor, in the order of each shard, for ever; end it with ``aclose``.

        ``checked_before`` as for ``SampleStream.read``. ``on_passed`` gets sequences up to which all of their shard is
        read, once the caller requests the next rows. Raises what the reader of a shard raises.
        """
        ...

    def release(self, seqs: Sequence[int]) -> None:
        """Forget samples that no rank needs any more."""
        ...


class OneReader:
    """``SampleReaders`` within this process."""

    def __init__(self, bus: Bus, options: ReadOptions) -> None:
        self.ports: Sequence[int] = ()
        self._bus, self._options = bus, options

    async def read(
        self, cursor: Cursor, *, checked_before: frozenset[int] = frozenset(), on_passed: Callable[[int], None]
    ) -> AsyncGenerator[Rows]:
        """Yield the messages, one by one."""
        options = self._options
        reading = self._bus.samples.read(
            cursor,
            vocab_size=options.vocab_size,
            routed=options.routed,
            checked_before=checked_before,
            on_passed=on_passed,
        )
        async with aclosing(reading) as messages:
            async for received in messages:
                yield Rows(0, received.pending, [entry_of(received, options)])

    def release(self, seqs: Sequence[int]) -> None:
        """Do nothing: the feeder itself has the samples."""


class ShardReaders:
    """``SampleReaders`` in a process for each shard."""

    def __init__(
        self,
        url: str,
        run: str,
        config: BusConfig,
        options: ReadOptions,
        *,
        listen: str,
        keys: FeedKeys,
        silent_s: float = SILENT_S,
    ) -> None:
        """``listen``: host and port at which ranks reach the feeder; readers have a free port of this host each."""
        self._url, self._run, self._options, self._keys, self._silent_s = url, run, options, keys, silent_s
        self._shards, self._listen = config.sample_shards, f"{listen.rpartition(':')[0]}:*"
        self.ports: Sequence[int] = [0] * self._shards
        self._writers: dict[int, asyncio.StreamWriter] = {}

    async def read(
        self, cursor: Cursor, *, checked_before: frozenset[int] = frozenset(), on_passed: Callable[[int], None]
    ) -> AsyncGenerator[Rows]:
        """Yield rows of many messages. Raises ReaderEnded, ReaderFrozen, and what a reader raised."""
        arrived: _Arrived = asyncio.Queue(self._shards)
        readers = []
        for shard in range(self._shards):
            request = ReadRequest(
                url=self._url,
                run=self._run,
                shards=self._shards,
                shard=shard,
                cursor=cursor,
                options=self._options,
                checked_before=[seq for seq in checked_before if seq % self._shards == shard],
                listen=self._listen,
                keys=self._keys,
            )
            readers.append(asyncio.create_task(self._follow(shard, request, arrived), name=f"reader {shard}"))
        behind = [0] * self._shards
        try:
            while True:
                rows = await arrived.get()
                if isinstance(rows, Exception):
                    raise rows
                if rows.entries:
                    behind[rows.entries[0].seq % self._shards] = rows.pending
                    rows.pending = sum(behind)
                    yield rows
                if rows.passed:
                    on_passed(rows.passed)
        finally:
            await ended(*readers)

    def release(self, seqs: Sequence[int]) -> None:
        """Let the readers forget samples."""
        for shard, writer in self._writers.items():
            writer.write(frame([seq for seq in seqs if seq % self._shards == shard]))

    async def _follow(self, shard: int, request: ReadRequest, arrived: _Arrived) -> None:
        """Run one reader, and put what it sends into ``arrived``; at its end an error, whichever."""
        try:
            error: Exception = await self._run_reader(shard, request, arrived)
        except Exception as other:  # without it the caller would wait for ever
            error = other
        await arrived.put(error)

    async def _run_reader(self, shard: int, request: ReadRequest, arrived: _Arrived) -> Exception:
        ours, theirs = socket.socketpair()
        with theirs:
            module = "tidemill.learner.feed.shard_reader"
            child = Child(
                f"reader {shard}", [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())]
            )
            try:
                await child.start(pass_fds=[theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        stream, writer = await asyncio.open_connection(sock=ours, limit=_AHEAD_BYTES)
        waiting = asyncio.create_task(child.wait(), name=f"reader {shard} to end")
        try:
            writer.write(frame(request))
            self._writers[shard] = writer
            if error := await self._pass_on(shard, stream, arrived):
                return error
            await asyncio.wait({waiting}, timeout=_END_S)
            child.send(signal.SIGKILL)
            return ReaderEnded(shard, await waiting)
        finally:
            self._writers.pop(shard, None)
            writer.close()
            child.send(signal.SIGKILL)  # it has nothing to bring to an end: its place in the stream is the caller's
            await to_the_end(_result(waiting))

    async def _pass_on(self, shard: int, stream: asyncio.StreamReader, arrived: _Arrived) -> BusError | None:
        """Put what a reader sends into ``arrived``. Returns the error of the bus that ended it; None = not known."""
        limit_s = _START_S
        while data := await _next(shard, stream, limit_s):
            message, limit_s = FROM_READER.decode(data), self._silent_s
            if isinstance(message, Rows):
                await arrived.put(message)
            elif isinstance(message, Opened):
                self.ports = [*self.ports[:shard], message.port, *self.ports[shard + 1 :]]
            elif isinstance(message, Failed):
                return getattr(errors, message.name)(*message.args)  # type: ignore[no-any-return]
        return None


def readers_of(bus: Bus, settings: FeederSettings) -> SampleReaders:
    """Return the readers of a run."""
    places, options = settings.places, settings.read_options
    if places.bus.sample_shards == 1:
        return OneReader(bus, options)
    return ShardReaders(
        places.bus_url, places.run, places.bus, options, listen=places.listen, keys=places.keys.for_feeder()
    )


async def _result(waiting: "asyncio.Task[int]") -> int:
    return await waiting


async def _next(shard: int, stream: asyncio.StreamReader, limit_s: float) -> bytes:
    """Return the next message of a reader; none when it has ended. Raises ReaderFrozen."""
    reading = asyncio.ensure_future(next_frame(stream))
    try:
        for wait_s in (limit_s, _END_S):  # twice: this process itself may have been stopped for so long
            done, _ = await asyncio.wait({reading}, timeout=wait_s)
            if done:
                return reading.result()
    except (asyncio.IncompleteReadError, ConnectionError):  # it ended, perhaps before it had read the request
        return b""
    finally:
        await ended(reading)
    raise ReaderFrozen(shard, limit_s)
