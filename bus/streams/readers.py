"""Readers of SAMPLES other than the learner: its history from any time or version on, and readers registered by name.

Trimming waits for a registered reader or not, by its policy. A row ``cursor.<name>`` of the bucket ``run`` holds its
floor: all samples up to there are processed. The learner's own row is in its checkpoint, and in no row.
"""

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidemill.bus.client.jetstream import JetStream, Message, StreamState, unix_time
from tidemill.bus.client.pull import follow, present
from tidemill.bus.client.rows import Rows, Value
from tidemill.bus.errors import BusError, DetailedError, NotFound, StreamReplaced, WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.shard_reading import (
    CREATED_SEPARATOR,
    Received,
    as_they_arrive,
    in_order,
    payload_of,
    state_of_all,
    states_of_shards,
)
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Cursor, Kind
from tidemill.bus.wire.rows import ReaderRow, row_of
from tidemill.bus.wire.subjects import Shards, nonce, token


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """A stored sample. One that was published in parts is one, at the sequence of its manifest."""

    seq: int
    subject: str
    headers: dict[str, str]
    data: bytes | WireError
    """The payload, joined from parts where there are any, or the reason it cannot be read."""
    stored_s: float
    """Unix time by the server's clock."""


class History:
    """The stored and the coming messages of SAMPLES. Every read has a consumer in the server's memory.

    Of several shards, samples from one sequence to another come in the order of their sequences, new ones as they
    arrive; a place in time or versions is a sequence before which no shard has a sample that belongs behind it.
    """

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet

    async def state(self) -> StreamState:
        return await state_of_all(self._jet)

    async def now_s(self) -> float:
        """Return the Unix time of the server's clock, by which ``stored_s`` is measured, too."""
        stream = subjects.stream(self._jet.run, subjects.PLAN)
        return unix_time((await self._jet.call(f"STREAM.INFO.{stream}"))["ts"])

    def glimpses(self, first: int, last: int | None = None) -> AsyncGenerator[Message]:
        """Yield the headers of the samples from ``first`` to ``last``; for ever without a last one."""
        return self._read(first, last, headers_only=True)

    async def payloads(
        self, first: int, last: int | None = None, *, only_shard: int | None = None
    ) -> AsyncIterator[StoredSample]:
        """Yield the samples from ``first`` to ``last``, perhaps of one shard alone; for ever without a last one."""
        async with aclosing(self._read(first, last, headers_only=False, only_shard=only_shard)) as messages:
            async for delivered in messages:
                yield await self._stored(delivered)

    async def payload(self, seq: int) -> StoredSample:
        """Return one sample. Raises NotFound; ValueError for the sequence of another kind of message."""
        shards = await self._jet.shards()
        shard, local = shards.place(seq)
        stream = shards.stream(self._jet.run, shard)
        message = await self._jet.retry_for_ever(partial(self._jet.message, stream, local))
        if not subjects.is_sample(self._jet.run, message.subject):
            raise ValueError(f"sequence {seq}: want a sample, got a message on {message.subject}")
        return await self._stored(message._replace(seq=seq))

    async def at_time(self, unix_s: float, *, name: str = subjects.SAMPLES) -> int:
        """Return the sequence of the first message of stream ``name`` stored then or later, or the next sequence."""
        if name != subjects.SAMPLES:
            return await self._at_time(subjects.stream(self._jet.run, name), unix_s)
        shards, seqs = await self._jet.shards(), []
        for shard in range(shards.count):
            seqs.append(shards.seq(shard, await self._at_time(shards.stream(self._jet.run, shard), unix_s)))
        return min(seqs)

    async def _at_time(self, stream: str, unix_s: float) -> int:
        state = await self._jet.state(stream)
        low, high = max(1, state.first_seq), state.last_seq + 1
        # A binary search: the times of a stream rise with its sequences.
        while low < high:
            middle = (low + high) // 2
            message = await self._jet.next(stream, middle)
            if message is not None and message.stored_s < unix_s:
                low = message.seq + 1
            else:
                high = middle
        return low

    async def at_task(self, task: int, *, name: str = subjects.SAMPLES) -> int:
        """Return ``at_time`` of the issue of a task: no earlier message refers to it. 1 when the task is gone."""
        try:
            issued = await self._jet.message(subjects.stream(self._jet.run, subjects.TASKS), task)
        except NotFound:
            return 1
        return await self.at_time(issued.stored_s, name=name)

    async def at_version(self, version: int) -> int:
        """Return the sequence of the first sample whose oldest token is of this version, or of the next one."""
        for candidate in sorted(v for v in await self._versions() if v >= version):
            if (seq := await self._first_of(candidate)) is not None:
                return seq
        return (await self.state()).last_seq + 1

    async def _first_of(self, version: int) -> int | None:
        """Return the smallest sequence of a version's samples; None = there is none."""
        shards, seqs = await self._jet.shards(), []
        for shard in range(shards.count):
            stream, suffix = shards.stream(self._jet.run, shard), shards.suffix(shard)
            filters = [subjects.samples(self._jet.run, kind, version, shard=suffix) for kind in Kind]
            firsts = [await self._jet.next(stream, 1, subject) for subject in filters]
            seqs += [shards.seq(shard, first.seq) for first in firsts if first is not None]
        return min(seqs, default=None)

    async def _versions(self) -> set[int]:
        shards, counts = await self._jet.shards(), dict[str, int]()
        for shard in range(shards.count):
            filter = subjects.samples(self._jet.run, shard=shards.suffix(shard))
            counts |= await self._jet.subjects(shards.stream(self._jet.run, shard), filter)
        return {version for subject in counts if (version := subjects.version_of_sample(subject)) is not None}

    async def _read(
        self, first: int, last: int | None, *, headers_only: bool, only_shard: int | None = None
    ) -> AsyncGenerator[Message]:
        shards = await self._jet.shards()
        chosen = range(shards.count) if only_shard is None else [only_shard]
        sources = [self._read_shard(shards, shard, first, last, headers_only) for shard in chosen]
        merged = as_they_arrive(sources) if last is None else in_order(sources, lambda message: message.seq)
        async with aclosing(merged) as messages:
            async for message in messages:
                yield message

    async def _read_shard(
        self, shards: Shards, shard: int, first: int, last: int | None, headers_only: bool
    ) -> AsyncGenerator[Message]:
        read, stream = follow if last is None else present, shards.stream(self._jet.run, shard)
        start, filters = shards.first(shard, first), [subjects.samples(self._jet.run, shard=shards.suffix(shard))]
        async for delivered in read(self._jet, stream, start, filters=filters, headers_only=headers_only):
            message = delivered._replace(seq=shards.seq(shard, delivered.seq))
            if last is not None and message.seq > last:
                return
            yield message

    async def _stored(self, message: Message) -> StoredSample:
        data: bytes | WireError
        shards = await self._jet.shards()
        shard, local = shards.place(message.seq)
        try:
            data = await payload_of(self._jet, message._replace(seq=local), shards.stream(self._jet.run, shard))
        except WireError as error:
            data = error
        seq, subject, headers = message.seq, message.subject, message.headers
        return StoredSample(seq=seq, subject=subject, headers=headers, data=data, stored_s=message.stored_s)


# Policies: trimming waits for the reader (until the stream is too full), or goes on without it
WAIT, LEAVE = "wait", "leave"
_PREFIX = "cursor"


class CursorTaken(DetailedError, BusError):
    """Another process has taken over this name."""

    name: str
    template = "cursor {name}: taken over by another reader of this name; this one ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardExtent:
    """A shard of SAMPLES, and the first and the last of its sequences; ``step`` is between neighbours."""

    shard: int
    first_seq: int
    last_seq: int
    step: int

    def behind(self, floor: int) -> int:
        """Return the number of messages after a position."""
        return max(0, (self.last_seq - floor) // self.step)


async def shard_extents(jet: JetStream) -> dict[str, ShardExtent]:
    """Return the shards of SAMPLES by the creation time of their streams, which is in the row of a reader."""
    shards, states = await jet.shards(), await states_of_shards(jet)
    return {
        state.created: ShardExtent(
            shard=shard,
            first_seq=shards.seq(shard, state.first_seq),
            last_seq=shards.seq(shard, state.last_seq),
            step=shards.count,
        )
        for shard, state in enumerate(states)
    }


class Cursors:
    """The registered readers of a run, for trimming and for display."""

    def __init__(self, bus: Bus) -> None:
        self._rows = bus.rows("run")

    async def all(self) -> dict[str, ReaderRow]:
        """Return the readers by name. Raises BusUnavailable."""
        rows = await self._rows.all(_PREFIX)
        return {key.removeprefix(f"{_PREFIX}."): row_of(ReaderRow, value) for key, (value, _) in rows.items()}

    async def first_needed(self, created: str) -> int | None:
        """Return the smallest sequence that a waiting reader of the stream needs; None for none."""
        waiting = [row.floor + 1 for row in (await self.all()).values() if _waits(row, created)]
        return min(waiting, default=None)

    async def give_up(self, below: int, created: str) -> list[str]:
        """Stop waiting for readers that need a message before ``below``. Returns their names."""
        late = [name for name, row in (await self.all()).items() if _waits(row, created) and row.floor + 1 < below]
        for name in late:
            await _change(self._rows, name, given_up=True)
        return late

    async def drop(self, name: str) -> None:
        """Remove a reader. Raises NotFound."""
        if not (await self._rows.read(_key(name)))[1]:
            raise NotFound("cursor", name)
        await self._rows.delete(_key(name))


class Reader:
    """A registered reader of SAMPLES, of one of its shards: reads from its position on, and moves it."""

    def __init__(self, bus: Bus, name: str, row: ReaderRow, *, extent: ShardExtent, is_new: bool) -> None:
        self._bus, self._rows, self.name, self.row = bus, bus.rows("run"), name, row
        self._extent, self._is_new = extent, is_new

    @classmethod
    async def open(cls, bus: Bus, name: str, *, policy: str = WAIT, shard: int = 0) -> "Reader":
        """Register under ``name``, or continue from the last reader of this name, which is refused from now on.

        Of several shards each has a reader, with a name of its own.

        A new one begins at the first sample there is. Raises StreamReplaced when the row is of another stream,
        ValueError for an unknown policy, BusUnavailable.
        """
        if policy not in (WAIT, LEAVE):
            raise ValueError(f"policy: want {WAIT} or {LEAVE}, got {policy!r}")
        created, extent = list((await shard_extents(bus.jet)).items())[shard]
        mine = f"{bus.name} {nonce()}"

        def taken_over(value: Value | None) -> Value:
            before = None if value is None else row_of(ReaderRow, value)
            if before is not None and before.created != created:
                raise StreamReplaced(f"cursor {name}", before.created, created)
            floor = max(0, extent.first_seq - extent.step) if before is None else before.floor
            return dataclasses.asdict(ReaderRow(created=created, floor=floor, policy=policy, owner=mine))

        before, after = await bus.rows("run").change(_key(name), taken_over, replace_unreadable=True)
        return cls(bus, name, row_of(ReaderRow, after), extent=extent, is_new=before is None)

    async def read(self, *, vocab_size: int | None = None, check: bool = True) -> AsyncIterator[Received]:
        """Yield every sample after its position, in stream order, for ever. Raises StreamTrimmed, StreamReplaced."""
        # A new reader begins at the first sample there is when it reads, even if those at its position have been
        # trimmed meanwhile.
        cursor, count = None, self._extent.step
        if not self._is_new:
            created, floors = CREATED_SEPARATOR.join([self.row.created] * count), (self.row.floor,) * count
            cursor = Cursor(created=created, floor=self.row.floor, floors=floors if count > 1 else ())
        reading = self._bus.samples.read(cursor, vocab_size=vocab_size, check=check, only_shard=self._extent.shard)
        async for received in reading:
            yield received

    async def advance(self, floor: int) -> None:
        """Record that samples up to ``floor``, which never falls, are processed. Raises CursorTaken, BusUnavailable."""
        if floor > self.row.floor:
            self._is_new = False
            self.row = await _change(self._rows, self.name, owner=self.row.owner, floor=floor)

    async def leave(self) -> None:
        """Remove the registration. Raises CursorTaken."""
        value, _ = await self._rows.read(_key(self.name))
        if value is not None and value.get("owner") != self.row.owner:
            raise CursorTaken(self.name)
        await self._rows.delete(_key(self.name))


def _waits(row: ReaderRow, created: str) -> bool:
    return row.policy == WAIT and not row.given_up and row.created == created


async def _change(rows: Rows, name: str, *, owner: str | None = None, **changes: Any) -> ReaderRow:
    """Change a row by compare-and-set; with ``owner``, only while the row names it. Raises NotFound, CursorTaken."""

    def changed(value: Value | None) -> Value:
        if value is None:
            raise NotFound("cursor", name)
        row = row_of(ReaderRow, value)
        if owner is not None and row.owner != owner:
            raise CursorTaken(name)
        new = dataclasses.replace(row, **changes)
        return dataclasses.asdict(dataclasses.replace(new, floor=max(row.floor, new.floor)))

    return row_of(ReaderRow, (await rows.change(_key(name), changed, replace_unreadable=True)).after)


def _key(name: str) -> str:
    return f"{_PREFIX}.{token(name)}"
