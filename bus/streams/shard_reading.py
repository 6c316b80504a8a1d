"""Reading one shard of SAMPLES gapless from a cursor: messages, their parts, and what is decoded of them; and several
streams read as one.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Container, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tidemill.bus.client import pull
from tidemill.bus.client.jetstream import JetStream, Message, StreamState
from tidemill.bus.errors import NotFound, StreamReplaced, StreamTrimmed, WireError
from tidemill.bus.system.coroutines import ended
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.codec import check_sample, decode_sample
from tidemill.bus.wire.messages import Cursor, Sample
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.bus.wire.subjects import Shards

T = TypeVar("T")
PARTS_HEADER = "Tm-Parts"  # Header with the number of parts; only on a manifest
CREATED_SEPARATOR = ","  # Between the creation times of shards, which together identify SAMPLES
NO_CHECK = -1  # Value of ``vocab_size`` that disables the check of invariants


async def as_they_arrive(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield what the sources yield, until all have ended. A source goes on once the caller requests the next item."""
    if len(sources) == 1:  # without a task for each item
        async with aclosing(sources[0]) as items:
            async for item in items:
                yield item
        return
    waiting = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                source = waiting.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                yield item
                waiting[asyncio.ensure_future(anext(source))] = source
    finally:
        for future in waiting:
            await ended(future)
        for source in sources:
            await source.aclose()


async def in_order(sources: Sequence[AsyncGenerator[T]], key: Callable[[T], Any]) -> AsyncGenerator[T]:
    """Yield what the sources, each in the order of ``key``, yield in that order, until all have ended."""
    async with AsyncExitStack() as stack:
        for source in sources:
            await stack.enter_async_context(aclosing(source))
        heads = {source: await anext(source, None) for source in sources}
        while ready := [(key(head), number, source) for number, (source, head) in enumerate(heads.items()) if head]:
            _, _, source = min(ready)
            item = heads[source]
            assert item is not None
            yield item
            heads[source] = await anext(source, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message of SAMPLES. A sample that was published in parts is one message, at the sequence of its manifest."""

    seq: int
    sample: Sample | WireError
    """The sample, or the reason it cannot be used (undecodable, invariant broken, parts missing)."""
    headers: dict[str, str]
    pending: int
    """Number of messages after this one when it was delivered."""
    stored_s: float
    size_bytes: int
    actor: str = ""
    """The actor that the subject names; known also for a message that cannot be decoded."""
    data: bytes = field(default=b"", repr=False)
    """The encoded sample; empty where it was received by another process."""


class ShardReading:
    def __init__(
        self,
        jet: JetStream,
        shards: Shards,
        shard: int,
        cursor: Cursor | None,
        vocab_size: int | None,
        checked_before: Container[int] = (),
        routed: RoutedShape | None = None,
    ) -> None:
        self._jet, self._vocab_size, self._checked_before, self._routed = jet, vocab_size, checked_before, routed
        self._shards, self._shard, self._stream = shards, shard, shards.stream(jet.run, shard)
        self._created: str | None = None
        self._settled, self._start = frozenset[int](), 1
        if cursor is not None:
            self._begin_after(cursor)
        self._parts_prefix = subjects.parts(jet.run, shards.suffix(shard)).removesuffix(">")

    def _begin_after(self, cursor: Cursor) -> None:
        """Begin after a cursor. Raises StreamReplaced for one of another number of shards."""
        created = cursor.created.split(CREATED_SEPARATOR)
        if not len(created) == len(cursor.position) == self._shards.count:
            raise StreamReplaced(self._stream, f"{cursor.created}, in {len(created)} shards", f"{self._shards.count}")
        self._created, places = created[self._shard], map(self._shards.place, cursor.settled)
        self._settled = frozenset(local for shard, local in places if shard == self._shard)
        self._start = self._shards.place(cursor.position[self._shard])[1] + 1

    async def messages(
        self, filters: Sequence[str], on_passed: Callable[[int], None] | None = None
    ) -> AsyncGenerator[Received]:
        """Yield the messages in order. Raises StreamReplaced, and StreamTrimmed at a hole in the sequences."""
        reader = pull.OrderedPull(self._jet, self._stream, self._start, filters=filters, on_open=self._opened)
        async with reader:
            expected = reader.position
            async for delivered in reader:
                if delivered.seq != expected and expected > self._start:
                    # A filter leaves out messages of other kinds, so a jump alone is no hole.
                    state = await self._jet.retry_for_ever(lambda: self._jet.state(self._stream))
                    self._check_first(state, expected)
                if delivered.seq not in self._settled and not delivered.subject.startswith(self._parts_prefix):
                    yield await self.received(delivered)
                if on_passed is not None:
                    on_passed(self._shards.seq(self._shard, delivered.seq))
                expected = reader.position

    async def received(self, delivered: Message) -> Received:
        """Return a message with its sample, decoded and checked, or with the reason it cannot be used."""
        sample: Sample | WireError
        data, seq = delivered.data, self._shards.seq(self._shard, delivered.seq)
        try:
            if PARTS_HEADER in delivered.headers:
                data = await payload_of(self._jet, delivered, self._stream)
            sample = decode_sample(data)
            if self._vocab_size != NO_CHECK and seq not in self._checked_before:
                check_sample(sample, vocab_size=self._vocab_size, routed=self._routed)
            if sample.run != self._jet.run:
                raise WireError("run", self._jet.run, sample.run)
            if self._shards.of_task(sample.task) != self._shard:
                want = f"one whose samples are in shard {self._shard} of {self._shards.count}"
                raise WireError("task", want, sample.task)
        except WireError as error:
            sample = error
        return Received(
            seq=seq,
            sample=sample,
            headers=delivered.headers,
            pending=delivered.pending,
            stored_s=delivered.stored_s,
            size_bytes=len(data),
            actor=subjects.actor_of_sample(delivered.subject),
            data=data,
        )

    def _opened(self, state: StreamState, position: int) -> None:
        """Check at the start and after every re-opening that it is the same stream, with the messages needed."""
        if self._created is None:
            self._created = state.created
            self._start = max(self._start, state.first_seq)
        if state.created != self._created:
            raise StreamReplaced(self._stream, self._created, state.created)
        self._check_first(state, max(position, self._start))

    def _check_first(self, state: StreamState, needed: int) -> None:
        if needed < state.first_seq:
            missing = next((seq for seq in range(needed, state.first_seq) if seq not in self._settled), None)
            if missing is not None:
                raise StreamTrimmed(self._stream, missing, state.first_seq)


async def payload_of(jet: JetStream, message: Message, stream: str) -> bytes:
    """Return the bytes of a sample in a shard's stream, joined from its parts where the message is a manifest.

    Raises WireError for an impossible manifest, and at a part that is gone, too large or another sample's.
    """
    if PARTS_HEADER not in message.headers:
        return message.data
    manifest = codec.read_manifest(message.data, seq=message.seq, max_payload=jet.connection.max_payload)
    joining = codec.Joining(manifest)
    for number, seq in enumerate(manifest.seqs):
        joining.add(await stored_part(jet, stream, message, number, seq))
    return joining.whole()


async def stored_part(jet: JetStream, stream: str, manifest: Message, number: int, seq: int) -> bytes:
    """Return the bytes of one part of a manifest. Raises WireError for another message."""
    try:
        part = await jet.retry_for_ever(partial(jet.message, stream, seq))
    except NotFound:
        raise WireError("parts.seqs", "parts that are in the stream", seq) from None
    message_id = manifest.headers.get(subjects.MESSAGE_ID, "")
    task = subjects.natural(message_id.partition(".")[0]) or 0
    shard = manifest.subject.split(".", 3)[2].removeprefix("sample")
    subject = subjects.part(jet.run, subjects.kind_of_sample(manifest.subject), task, shard)
    if part.subject != subject or part.headers.get(subjects.MESSAGE_ID) != part_id(message_id, number):
        want = f"part {number} of sample {message_id[:80]} at {seq}"
        raise WireError("parts.seqs", want, f"a message on {part.subject[:80]}")
    return part.data


async def states_of_shards(jet: JetStream) -> list[StreamState]:
    """Return identity and extent of each shard's stream, with the sequences there. Raises NotFound."""
    shards = await jet.shards()
    return [await jet.state(shards.stream(jet.run, shard)) for shard in range(shards.count)]


async def state_of_all(jet: JetStream) -> StreamState:
    """Return identity and extent of SAMPLES: of shards the sums, and the extent of their sequences."""
    shards, states = await jet.shards(), await states_of_shards(jet)
    return StreamState(
        created=CREATED_SEPARATOR.join(state.created for state in states),
        first_seq=min(shards.seq(shard, state.first_seq) for shard, state in enumerate(states)),
        last_seq=max(shards.seq(shard, state.last_seq) for shard, state in enumerate(states)),
        messages=sum(state.messages for state in states),
        bytes=sum(state.bytes for state in states),
    )


def part_id(message_id: str, number: int) -> str:
    """Return the message id of a part of a sample."""
    return f"{message_id}.chunk/{number}"
