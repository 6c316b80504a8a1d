"""The stream of samples: publish until stored, read gapless from a cursor, fetch, trim, tail."""

import re
from collections.abc import AsyncIterator, Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tidemill.bus.client import pull
from tidemill.bus.client.jetstream import JetStream, Message, StreamState
from tidemill.bus.errors import NotFound, StreamReplaced, StreamTrimmed, WireError
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.codec import check_sample, decode_sample, encode_sample
from tidemill.bus.wire.messages import Cursor, Kind, Sample
from tidemill.bus.wire.routed_experts import RoutedShape

# Header with all fields for readers that do not read the payload (docs/decisions/011-one-header-for-onlookers.md)
SAMPLE_HEADER = "Tm-Sample"
PARTS_HEADER = "Tm-Parts"  # Header with the number of parts; only on a manifest
_HEADER_VALUE = re.compile(r"[!-~]{1,200}")  # Printable ASCII without a space: spaces separate the fields of the header


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
    """Stream SAMPLES."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self._stream = subjects.stream(jet.run, subjects.SAMPLES)
        self.stats = PublishStats()

    async def publish(self, sample: Sample) -> int:
        """Store an unchecked sample, retried for ever under its message id, and return its sequence. Cancellable.

        Any number may be in flight at once. Waits while the stream is full. Raises WireError for a sample that cannot
        be encoded, and ValueError for a sample of another run.
        """
        if sample.run != self._jet.run:
            raise ValueError(f"sample.run: want {self._jet.run!r}, got {sample.run!r}")
        subject = subjects.sample(self._jet.run, sample.kind, sample.min_version, sample.actor)
        return await self.publish_bytes(encode_sample(sample), subject, headers_of(sample))

    async def publish_bytes(self, data: bytes, subject: str, headers: dict[str, str]) -> int:
        """Store a sample that is encoded already, as ``publish`` does; ``headers``: as ``headers_of`` returns them."""
        if not codec.fits(data, self._jet.connection.max_payload):
            if len(data) > codec.MAX_SAMPLE_BYTES:
                raise WireError("sample", f"<= {codec.MAX_SAMPLE_BYTES} bytes", len(data))
            seqs = await self._store_parts(subjects.kind_of_sample(subject), headers[subjects.MESSAGE_ID], data)
            data, subject = codec.describe(data, seqs), subjects.manifest(subject)
            headers = {**headers, PARTS_HEADER: str(len(seqs))}
        seq = await self._store(subject, data, headers)
        self.stats.published += 1
        return seq

    def read(
        self,
        cursor: Cursor | None,
        *,
        kinds: Collection[Kind] | None = None,
        vocab_size: int | None = None,
        routed: RoutedShape | None = None,
        check: bool = True,
        checked_before: Container[int] = (),
        on_passed: Callable[[int], None] | None = None,
    ) -> AsyncIterator[Received]:
        """Yield every message after the cursor in stream order, for ever, over server restarts; end it with ``aclose``.

        None begins at the first message there is. Sequences that the cursor counts as settled are skipped. With
        ``check``, samples are checked against the invariants, except ``checked_before``, which passed those of their
        time. ``vocab_size``, ``routed`` (sizes of the model's routing): None = not known. ``on_passed`` gets every
        sequence, parts and settled ones included, once the caller requests the next message. Raises StreamReplaced;
        StreamTrimmed when messages after the cursor are gone.
        """
        reading = _Reading(self._jet, self._stream, cursor, vocab_size if check else _NO_CHECK, checked_before, routed)
        return reading.messages(self._filters(kinds), on_passed)

    async def cursor(self) -> Cursor:
        """Return a cursor before the first message there is now."""
        state = await self.info()
        return Cursor(created=state.created, floor=max(0, state.first_seq - 1))

    async def fetch(self, seq: int) -> Sample:
        """Return one sample by sequence, joined from its parts; unchecked. Raises NotFound, WireError."""
        message = await self._jet.message(self._stream, seq)
        return decode_sample(await payload_of(self._jet, message))

    async def info(self) -> StreamState:
        return await self._jet.state(self._stream)

    async def trim(self, below: int) -> None:
        """Remove messages with sequences < ``below``, except from the first part on that a later manifest still needs.

        A sample is lost when its parts are trimmed before its manifest is stored (readers get a WireError): keep a
        window of history, as ``history_samples`` does.
        """
        state = await self.info()
        if below > state.last_seq + 1:
            raise ValueError(f"{self._stream}: want below <= {state.last_seq + 1}, got {below}")
        await self._jet.purge(self._stream, min(below, await self._oldest_part_needed(below)))

    async def tail(self, *, last: int = 0, follow: bool = True) -> AsyncIterator[Received]:
        """Yield about the ``last`` newest messages (parts count), then, with ``follow``, every new one, for ever.

        Samples are decoded, not checked.
        """
        reading = _Reading(self._jet, self._stream, None, _NO_CHECK)
        start, filters = max(1, (await self.info()).last_seq - last + 1), [subjects.samples(self._jet.run)]
        read = pull.follow if follow else pull.present
        async for delivered in read(self._jet, self._stream, start, filters=filters):
            yield await reading.received(delivered)

    def _filters(self, kinds: Collection[Kind] | None) -> list[str]:
        """Return none for all kinds: parts come, too, so that a jump in the sequences can only be a hole."""
        if kinds is None or set(kinds) == set(Kind):
            return []
        return [subjects.samples(self._jet.run, kind) for kind in sorted(kinds)]

    async def _store_parts(self, kind: str, message_id: str, data: bytes) -> list[int]:
        subject = subjects.part(self._jet.run, kind, int(message_id.partition(".")[0]))
        seqs = []
        for number, piece in enumerate(codec.cut(data, self._jet.connection.max_payload)):
            seqs.append(await self._store(subject, piece, {subjects.MESSAGE_ID: _part_id(message_id, number)}))
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

    async def _oldest_part_needed(self, below: int) -> int:
        """Return the smallest sequence of a part that a manifest from ``below`` on names; ``below`` for none."""
        oldest, seq = below, below
        manifests = subjects.manifest(subjects.samples_of(self._jet.run, "*"))
        while message := await self._jet.next(self._stream, max(1, seq), manifests):
            seq = message.seq + 1
            oldest = await self._first_part(message, oldest)
        return oldest

    async def _first_part(self, manifest: Message, oldest: int) -> int:
        """Return the sequence of a readable manifest's first part, at most ``oldest``."""
        max_payload = self._jet.connection.max_payload
        try:
            seqs = codec.read_manifest(manifest.data, seq=manifest.seq, max_payload=max_payload).seqs
            if min(seqs) < oldest:
                await _part(self._jet, manifest, seqs.index(min(seqs)), min(seqs))
        except WireError:
            return oldest
        return min(oldest, *seqs)


_NO_CHECK = -1  # Value of ``vocab_size`` that disables the check of invariants


class _Reading:
    def __init__(
        self,
        jet: JetStream,
        stream: str,
        cursor: Cursor | None,
        vocab_size: int | None,
        checked_before: Container[int] = (),
        routed: RoutedShape | None = None,
    ) -> None:
        self._jet, self._stream, self._vocab_size, self._checked_before = jet, stream, vocab_size, checked_before
        self._routed = routed
        self._created = None if cursor is None else cursor.created
        self._settled = frozenset() if cursor is None else frozenset(cursor.settled)
        self._start = 1 if cursor is None else cursor.floor + 1
        self._parts_prefix = subjects.parts(jet.run).removesuffix(">")

    async def messages(
        self, filters: Sequence[str], on_passed: Callable[[int], None] | None = None
    ) -> AsyncIterator[Received]:
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
                    on_passed(delivered.seq)
                expected = reader.position

    async def received(self, delivered: Message) -> Received:
        """Return a message with its sample, decoded and checked, or with the reason it cannot be used."""
        sample: Sample | WireError
        data = delivered.data
        try:
            if PARTS_HEADER in delivered.headers:
                data = await payload_of(self._jet, delivered)
            sample = decode_sample(data)
            if self._vocab_size != _NO_CHECK and delivered.seq not in self._checked_before:
                check_sample(sample, vocab_size=self._vocab_size, routed=self._routed)
            if sample.run != self._jet.run:
                raise WireError("run", self._jet.run, sample.run)
        except WireError as error:
            sample = error
        return Received(
            seq=delivered.seq,
            sample=sample,
            headers=delivered.headers,
            pending=delivered.pending,
            stored_s=delivered.stored_s,
            size_bytes=len(data),
            actor=subjects.actor_of_sample(delivered.subject),
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


async def payload_of(jet: JetStream, message: Message) -> bytes:
    """Return the bytes of a sample, joined from its parts where the message is a manifest.

    Raises WireError for an impossible manifest, and at a part that is gone, too large or another sample's.
    """
    if PARTS_HEADER not in message.headers:
        return message.data
    manifest = codec.read_manifest(message.data, seq=message.seq, max_payload=jet.connection.max_payload)
    joining = codec.Joining(manifest)
    for number, seq in enumerate(manifest.seqs):
        joining.add(await _part(jet, message, number, seq))
    return joining.whole()


async def _part(jet: JetStream, manifest: Message, number: int, seq: int) -> bytes:
    try:
        part = await jet.retry_for_ever(partial(jet.message, subjects.stream(jet.run, subjects.SAMPLES), seq))
    except NotFound:
        raise WireError("parts.seqs", "parts that are in the stream", seq) from None
    message_id = manifest.headers.get(subjects.MESSAGE_ID, "")
    task = subjects.natural(message_id.partition(".")[0]) or 0
    subject = subjects.part(jet.run, subjects.kind_of_sample(manifest.subject), task)
    if part.subject != subject or part.headers.get(subjects.MESSAGE_ID) != _part_id(message_id, number):
        want = f"part {number} of sample {message_id[:80]} at {seq}"
        raise WireError("parts.seqs", want, f"a message on {part.subject[:80]}")
    return part.data


def _part_id(message_id: str, number: int) -> str:
    return f"{message_id}.chunk/{number}"


def headers_of(sample: Sample) -> dict[str, str]:
    """Return the headers of a sample: one for readers without the payload, because each header costs CPU."""
    versions = f"{sample.min_version}-{sample.max_version}" if sample.spans else "none"
    fields = [f"group={sample.group_size} versions={versions} reward={sample.score:.6g}"]
    fields.append(f"status={sample.status} tokens={sample.response_length}")
    if sample.turns is not None:
        fields.append(f"turns={len(sample.turns.at)}")
    if len(sample.sequences) > 1:
        fields.append(f"sequences={len(sample.sequences)}")
    if (sampled := int(np.count_nonzero(sample.loss_mask))) != sample.response_length:
        fields.append(f"sampled={sampled}")
    if _HEADER_VALUE.fullmatch(sample.engine):
        fields.append(f"engine={sample.engine}")
    return {subjects.MESSAGE_ID: sample.message_id, SAMPLE_HEADER: " ".join(fields)}


def header_fields(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a sample's headers: ``task`` and ``index`` (of the message id), ``group``, ..."""
    task, _, after_task = headers.get(subjects.MESSAGE_ID, "").partition(".")
    summary = dict(word.split("=", 1) for word in headers.get(SAMPLE_HEADER, "").split(" ") if "=" in word)
    return {"task": task, "index": after_task.partition(".")[0], **summary}
