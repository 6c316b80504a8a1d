"""The stream of samples: publish until stored, read gapless from a cursor, fetch, trim, tail."""

import re
from collections.abc import AsyncGenerator, Callable, Collection, Container, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from tidemill.bus.client import pull
from tidemill.bus.client.jetstream import JetStream, Message, StreamState
from tidemill.bus.client.outbox import PublishAck
from tidemill.bus.errors import WireError
from tidemill.bus.streams.shard_reading import (
    CREATED_SEPARATOR,
    NO_CHECK,
    PARTS_HEADER,
    Received,
    ShardReading,
    as_they_arrive,
    in_order,
    part_id,
    payload_of,
    state_of_all,
    states_of_shards,
    stored_part,
)
from tidemill.bus.system.coroutines import all_of
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.codec import decode_sample, encode_sample
from tidemill.bus.wire.messages import Cursor, Kind, Sample
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.bus.wire.subjects import Position, Shards

# Header with all fields for readers that do not read the payload (docs/decisions/011-one-header-for-onlookers.md)
SAMPLE_HEADER = "Tm-Sample"
_HEADER_VALUE = re.compile(r"[!-~]{1,200}")  # Printable ASCII without a space: spaces separate the fields of the header


@dataclass(slots=True, kw_only=True)
class PublishStats:
    """Counters of publishing."""

    published: int = 0
    duplicates: int = 0
    """Messages stored by an earlier try with a lost acknowledgement; part of ``published``."""
    retries: int = 0
    full: int = 0
    waiting_full: int = 0
    """Publishes that wait at present because the stream is full."""
    last_error: str = ""


class SampleStream:
    """Stream SAMPLES, or all its shards, read as one stream."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self.stats = PublishStats()

    async def publish(self, sample: Sample) -> int:
        """Store an unchecked sample, retried for ever under its message id, and return its sequence. Cancellable.

        Any number may be in flight at once. Waits while the stream is full. Raises WireError for a sample that cannot
        be encoded, and ValueError for a sample of another run.
        """
        return await self.publish_bytes(*self._encoded(sample), task=sample.task)

    async def publish_group(self, samples: Sequence[Sample]) -> list[int]:
        """Store samples of one task as ``publish`` does; all are sent before an answer is waited for."""
        if len(samples) < 2:
            return [await self.publish(sample) for sample in samples]
        messages, shards, task = list(map(self._encoded, samples)), await self._jet.shards(), samples[0].task
        shard, acks = shards.of_task(task), list[PublishAck | None]([None] * len(samples))
        if all(codec.fits(data, self._jet.connection.max_payload) for data, _, _ in messages):
            acks = await self._jet.outbox.attempt_all(
                [(_in_shard(subject, shards, shard), data, headers) for data, subject, headers in messages]
            )
        # The others are sent again, under the same ids, until they are stored.
        missing = [message for message, ack in zip(messages, acks, strict=True) if ack is None]
        seqs = iter(await all_of(self.publish_bytes(*message, task=task) for message in missing))
        self.stats.published += len(samples) - len(missing)
        self.stats.duplicates += sum(ack is not None and ack.duplicate for ack in acks)
        return [next(seqs) if ack is None else shards.seq(shard, ack.seq) for ack in acks]

    def _encoded(self, sample: Sample) -> tuple[bytes, str, dict[str, str]]:
        """Return the bytes, subject and headers of a sample. Raises as ``publish``."""
        if sample.run != self._jet.run:
            raise ValueError(f"sample.run: want {self._jet.run!r}, got {sample.run!r}")
        subject = subjects.sample(self._jet.run, sample.kind, sample.min_version, sample.actor)
        return encode_sample(sample), subject, headers_of(sample)

    async def publish_bytes(self, data: bytes, subject: str, headers: dict[str, str], *, task: int) -> int:
        """Store a sample of ``task`` that is encoded already, as ``publish`` does, with headers as ``headers_of``'s."""
        shards = await self._jet.shards()
        shard = shards.of_task(task)
        subject = _in_shard(subject, shards, shard)
        if not codec.fits(data, self._jet.connection.max_payload):
            if len(data) > codec.MAX_SAMPLE_BYTES:
                raise WireError("sample", f"<= {codec.MAX_SAMPLE_BYTES} bytes", len(data))
            parts = subjects.part(self._jet.run, subjects.kind_of_sample(subject), task, shards.suffix(shard))
            seqs = await self._store_parts(parts, headers[subjects.MESSAGE_ID], data)
            data, subject = codec.describe(data, seqs), subjects.manifest(subject)
            headers = {**headers, PARTS_HEADER: str(len(seqs))}
        seq = await self._store(subject, data, headers)
        self.stats.published += 1
        return shards.seq(shard, seq)

    async def read(
        self,
        cursor: Cursor | None,
        *,
        kinds: Collection[Kind] | None = None,
        vocab_size: int | None = None,
        routed: RoutedShape | None = None,
        check: bool = True,
        checked_before: Container[int] = (),
        on_passed: Callable[[int], None] | None = None,
        only_shard: int | None = None,
    ) -> AsyncGenerator[Received]:
        """Yield every message after the cursor in stream order, for ever, over server restarts; end it with ``aclose``.

        Shards are in order each, and as they arrive among each other; ``only_shard``: one of them alone. None begins at
        the first message there is. Sequences that the cursor counts as settled are skipped. With ``check``, samples are
        checked against the invariants, except ``checked_before``, which passed those of their time. ``vocab_size``,
        ``routed`` (sizes of the model's routing): None = not known. ``on_passed`` gets every sequence, parts and
        settled ones included, once the caller requests the next message. Raises StreamReplaced; StreamTrimmed when
        messages after the cursor are gone.
        """
        shards = await self._jet.shards()
        checks, chosen = vocab_size if check else NO_CHECK, range(shards.count) if only_shard is None else [only_shard]
        sources = []
        for shard in chosen:
            reading = ShardReading(self._jet, shards, shard, cursor, checks, checked_before, routed)
            sources.append(reading.messages(self._filters(kinds, shards.suffix(shard)), on_passed))
        pending = dict.fromkeys(chosen, 0)
        async with aclosing(as_they_arrive(sources)) as messages:
            async for received in messages:
                pending[received.seq % shards.count] = received.pending
                behind = sum(pending.values())
                yield received if behind == received.pending else replace(received, pending=behind)

    async def cursor(self) -> Cursor:
        """Return a cursor before the first message there is now."""
        shards, states = await self._jet.shards(), await self.states()
        floors = tuple(shards.seq(shard, max(0, state.first_seq - 1)) for shard, state in enumerate(states))
        created = CREATED_SEPARATOR.join(state.created for state in states)
        return Cursor(created=created, floor=min(floors), floors=floors if shards.count > 1 else ())

    async def fetch(self, seq: int) -> Sample:
        """Return one sample by sequence, joined from its parts; unchecked. Raises NotFound, WireError."""
        shards = await self._jet.shards()
        shard, local = shards.place(seq)
        stream = shards.stream(self._jet.run, shard)
        return decode_sample(await payload_of(self._jet, await self._jet.message(stream, local), stream))

    async def info(self) -> StreamState:
        """Return identity and extent of the stream; of shards the sums, and the extent of their sequences."""
        return await state_of_all(self._jet)

    async def states(self) -> list[StreamState]:
        """Return identity and extent of each shard's stream, with the sequences there."""
        return await states_of_shards(self._jet)

    async def ends(self) -> Position:
        """Return the last sequence of each shard."""
        shards = await self._jet.shards()
        return tuple(shards.seq(shard, state.last_seq) for shard, state in enumerate(await self.states()))

    async def trim(self, *below: int) -> None:
        """Remove messages with sequences < ``below``, except from the first part on that a later manifest still needs.

        There is one ``below`` for each shard. A sample is lost when its parts are trimmed before its manifest is stored
        (readers get a WireError): keep a window of history, as ``history_samples`` does.
        """
        shards = await self._jet.shards()
        assert len(below) == shards.count, f"want a sequence for each of {shards.count} shards, got {below}"
        states = await self.states() if max(below) >= 2 else []
        for shard, (state, seq) in enumerate(zip(states, below, strict=False)):
            stream, first = shards.stream(self._jet.run, shard), shards.first(shard, seq)
            if first < 2:  # there is nothing to remove
                continue
            if first > state.last_seq + 1:
                raise ValueError(f"{stream}: want below <= {state.last_seq + 1}, got {first}")
            needed = await self._oldest_part_needed(stream, shards.suffix(shard), first)
            await self._jet.purge(stream, min(first, needed))

    async def tail(self, *, last: int = 0, follow: bool = True) -> AsyncGenerator[Received]:
        """Yield about the ``last`` newest messages (parts count), then, with ``follow``, every new one, for ever.

        Samples are decoded, not checked.
        """
        shards, states = await self._jet.shards(), await self.states()
        starts = [max(1, state.last_seq - -(-last // shards.count) + 1) for state in states]
        sources = [self._tail_of(shards, shard, start, follow=follow) for shard, start in enumerate(starts)]
        merged = as_they_arrive(sources) if follow else in_order(sources, lambda received: received.seq)
        async with aclosing(merged) as messages:
            async for received in messages:
                yield received

    async def _tail_of(self, shards: Shards, shard: int, start: int, *, follow: bool) -> AsyncGenerator[Received]:
        reading = ShardReading(self._jet, shards, shard, None, NO_CHECK)
        filters, read = (
            [subjects.samples(self._jet.run, shard=shards.suffix(shard))],
            pull.follow if follow else pull.present,
        )
        async for delivered in read(self._jet, shards.stream(self._jet.run, shard), start, filters=filters):
            yield await reading.received(delivered)

    def _filters(self, kinds: Collection[Kind] | None, suffix: str) -> list[str]:
        """Return none for all kinds: parts come, too, so that a jump in the sequences can only be a hole."""
        if kinds is None or set(kinds) == set(Kind):
            return []
        return [subjects.samples(self._jet.run, kind, shard=suffix) for kind in sorted(kinds)]

    async def _store_parts(self, subject: str, message_id: str, data: bytes) -> list[int]:
        seqs = []
        for number, piece in enumerate(codec.cut(data, self._jet.connection.max_payload)):
            seqs.append(await self._store(subject, piece, {subjects.MESSAGE_ID: part_id(message_id, number)}))
        return seqs

    async def _store(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        stats, waits_full = self.stats, False

        def note_retry(reason: str, full: bool) -> None:
            nonlocal waits_full
            stats.retries += 1
            stats.full += full
            stats.waiting_full += full - waits_full
            stats.last_error, waits_full = reason, full

        try:
            stored = await self._jet.outbox.store(subject, data, headers, on_retry=note_retry)
        finally:
            stats.waiting_full -= waits_full
        stats.duplicates += stored.duplicate
        return stored.seq

    async def _oldest_part_needed(self, stream: str, suffix: str, below: int) -> int:
        """Return the smallest sequence of a part that a manifest from ``below`` on names; ``below`` for none."""
        oldest, seq = below, below
        manifests = subjects.manifest(subjects.samples_of(self._jet.run, "*", suffix))
        while message := await self._jet.next(stream, max(1, seq), manifests):
            seq = message.seq + 1
            oldest = await self._first_part(message, stream, oldest)
        return oldest

    async def _first_part(self, manifest: Message, stream: str, oldest: int) -> int:
        """Return the sequence of a readable manifest's first part, at most ``oldest``."""
        max_payload = self._jet.connection.max_payload
        try:
            seqs = codec.read_manifest(manifest.data, seq=manifest.seq, max_payload=max_payload).seqs
            if min(seqs) < oldest:
                await stored_part(self._jet, stream, manifest, seqs.index(min(seqs)), min(seqs))
        except WireError:
            return oldest
        return min(oldest, *seqs)


def _in_shard(subject: str, shards: Shards, shard: int) -> str:
    return subjects.in_shard(subject, shards.suffix(shard)) if shards.count > 1 else subject


def headers_of(sample: Sample) -> dict[str, str]:
    """Return the headers of a sample: one for readers without the payload, because each header costs CPU."""
    versions = f"{sample.min_version}-{sample.max_version}" if sample.spans else "none"
    fields = [f"group={sample.group_size} versions={versions} reward={sample.score:.6g}"]
    fields.append(f"status={sample.status} tokens={sample.response_length}")
    if sample.turns is not None:
        fields.append(f"turns={len(sample.turns.at)}")
    if len(sample.sequences) > 1:
        fields.append(f"sequences={len(sample.sequences)}")
    if (sampled := sample.sampled_length) != sample.response_length:
        fields.append(f"sampled={sampled}")
    if _HEADER_VALUE.fullmatch(sample.engine):
        fields.append(f"engine={sample.engine}")
    return {subjects.MESSAGE_ID: sample.message_id, SAMPLE_HEADER: " ".join(fields)}


def header_fields(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a sample's headers: ``task`` and ``index`` (of the message id), ``group``, ..."""
    task, _, after_task = headers.get(subjects.MESSAGE_ID, "").partition(".")
    summary = dict(word.split("=", 1) for word in headers.get(SAMPLE_HEADER, "").split(" ") if "=" in word)
    return {"task": task, "index": after_task.partition(".")[0], **summary}
