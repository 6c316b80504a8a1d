"""Streams with one writer at a time, the newest learner: TASKS and PLAN, the log of plans.

Every message carries its writer's epoch and the expected sequence of the message before it. A fence is the first
message of an epoch; later messages of an older epoch are void, and so are messages of no learner: undecodable ones, or
with another epoch in the header. Writer and readers pass over them.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from tidemill.bus.client import pull
from tidemill.bus.client.connection import before_retry, retry
from tidemill.bus.client.jetstream import JetStream, Message, StreamState
from tidemill.bus.client.outbox import STREAM_FULL, WRONG_LAST_SEQUENCE
from tidemill.bus.errors import BusFull, BusUnavailable, Fenced, Refused, WireError
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.codec import decode_record, encode_record, record_name
from tidemill.bus.wire.messages import Fence, PlanRecord, Task
from tidemill.bus.wire.subjects import natural, nonce

_log = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0
_NO_EPOCH = -1  # Epoch of a message that names none: older than all


R = TypeVar("R", bound=Task | PlanRecord)


@dataclass(frozen=True, slots=True)
class FencedStream(Generic[R]):
    """A stream that one learner at a time writes, and the decoder of its messages."""

    jet: JetStream
    short: str
    """Short name of the stream: PLAN or TASKS."""
    fence_subject: str
    decode: Callable[[Message], R]

    @property
    def name(self) -> str:
        return subjects.stream(self.jet.run, self.short)

    def read(self, message: Message) -> R | None:
        """Return the record in a message; None, counted as a refusal, for a message of no learner."""
        return self.jet.refusals.read(self.short, message.seq, partial(self.checked, message))

    def checked(self, message: Message) -> R:
        """Return the record in a message. Raises WireError for a message of no learner."""
        decoded = self.decode(message)
        if epoch_of(message.headers) != decoded.epoch:
            got = message.headers.get(subjects.EPOCH_HEADER, "")[:40]
            raise WireError(subjects.EPOCH_HEADER, f"{decoded.epoch}, the epoch in the message", got)
        return decoded

    def epoch(self, message: Message) -> int:
        """Return the epoch of the learner that wrote the message; -1 for a message of no learner."""
        record = self.read(message)
        return _NO_EPOCH if record is None else record.epoch


class FencedWriter(Generic[R]):
    """Appends to ``stream`` as one epoch. ``fence`` comes first."""

    def __init__(self, stream: FencedStream[R]) -> None:
        self._log, self._jet, self._stream, self._fence_subject = stream, stream.jet, stream.name, stream.fence_subject
        self._nonce, self._count = nonce(), 0
        self._lock = asyncio.Lock()
        self.epoch = 0
        self._last = 0

    async def fence(self, epoch: int) -> None:
        """Take over, if that is not done already. Raises Fenced when the stream has a newer epoch."""
        if epoch < 1:
            raise ValueError(f"epoch: want >= 1, got {epoch}")
        async with self._lock:
            if self.epoch == epoch or await self._has_fenced(epoch):
                return
            # Read before the fence: a message that comes in between makes its expected sequence wrong, and is found by
            # ``_find_own``.
            self._last = (await self._jet.state(self._stream)).last_seq
            previous, self.epoch = self.epoch, epoch
            try:
                await self._append(self._fence_subject, encode_record(Fence(epoch=epoch)), self._new_id())
            except BaseException:
                self.epoch = previous
                raise

    @property
    def max_bytes(self) -> int:
        """Size of the largest message that the server takes, without its headers."""
        return self._jet.connection.max_payload - codec.HEADER_RESERVE_BYTES

    async def append(self, subject: str, payload: bytes) -> int:
        """Append a message and return its sequence. Retries for ever. Raises Fenced; WireError for one too large."""
        return (await self.append_all([(subject, payload)]))[0]

    async def append_all(self, messages: Sequence[tuple[str, bytes]]) -> list[int]:
        """Append messages, each a subject and a payload, in order; as ``append``. None is sent if one is too large.

        A stream without copies gets them in one round trip.
        """
        assert self.epoch, f"{self._stream}: fence() comes before the first message"
        for subject, payload in messages:
            # No try of such a message can succeed, and the client library's refusal looks like an outage.
            if not codec.fits(payload, self._jet.connection.max_payload):
                want = f"at most {self.max_bytes} bytes, as max_payload of the nats-server allows (raise it)"
                raise WireError(subject, want, len(payload))
        async with self._lock:
            ready: list[tuple[str, bytes, dict[str, str]]] = []
            for number, (subject, payload) in enumerate(messages):
                headers = self._headers(self._new_id(), after=self._last + number)
                if ready:  # A foreign message may have the place of the one before it, which must not be left out.
                    headers[subjects.EXPECTED_LAST_ID] = ready[-1][2][subjects.MESSAGE_ID]
                ready.append((subject, payload, headers))
            # A replicated stream of nats-server 2.15 that refuses a part of a batch stores no message any more.
            is_sent = len(ready) > 1 and self._jet.config.copies == 1
            acks = await self._jet.outbox.attempt_all(ready) if is_sent else [None] * len(ready)
            seqs = []
            for (subject, payload, headers), ack in zip(ready, acks, strict=True):
                if ack is not None:
                    self._last = max(self._last, ack.seq)
                seqs.append(ack.seq if ack else await self._append(subject, payload, headers[subjects.MESSAGE_ID]))
            return seqs

    def _new_id(self) -> str:
        self._count += 1
        return f"{self.epoch}.{self._nonce}.{self._count}"

    def _headers(self, message_id: str, *, after: int) -> dict[str, str]:
        return {
            subjects.MESSAGE_ID: message_id,
            subjects.EPOCH_HEADER: str(self.epoch),
            subjects.EXPECTED_LAST: str(after),
        }

    async def _append(self, subject: str, payload: bytes, message_id: str) -> int:
        logged_s = time.monotonic()
        while True:
            try:
                headers = self._headers(message_id, after=self._last)
                stored = await self._jet.outbox.attempt(subject, payload, headers)
                self._last = max(self._last, stored.seq)
                return stored.seq
            except Refused as error:
                if error.code == STREAM_FULL:  # its share of ``bus.quota_bytes``, which an operator may raise
                    logged_s = await self._pause(BusFull(self._stream, str(error)), logged_s)
                elif error.code not in WRONG_LAST_SEQUENCE:
                    raise
            except BusUnavailable as error:
                logged_s = await self._pause(error, logged_s)
            # The answer was lost, or another message has the expected place: the stream shows which of the two.
            mine = await self._find_own(message_id)
            if mine is not None:
                return mine

    async def _pause(self, error: BusUnavailable, logged_s: float) -> float:
        """Wait before the next try. Returns the time of the last line in the log."""
        await before_retry(self._jet.connection, error)
        if time.monotonic() - logged_s <= _LOG_EVERY_S:
            return logged_s
        _log.warning("bus: not stored yet stream=%s reason=%s", self._stream, error)
        return time.monotonic()

    async def _find_own(self, message_id: str) -> int | None:
        """Return the sequence of our message if it is after the last known one. Raises Fenced at a newer learner's."""
        while stored := await retry(self._jet.connection, partial(self._jet.next, self._stream, self._last + 1)):
            if stored.headers.get(subjects.MESSAGE_ID) == message_id:
                self._last = stored.seq
                return stored.seq
            epoch = self._log.epoch(stored)
            if epoch > self.epoch or (epoch == self.epoch and not self._is_mine(stored, epoch)):
                raise Fenced(self._stream, self.epoch, epoch)
            self._last = stored.seq
        return None

    def _is_mine(self, stored: Message, epoch: int) -> bool:
        """Return whether a message is ours, of a call that was cancelled before it was confirmed."""
        return stored.headers.get(subjects.MESSAGE_ID, "").startswith(f"{epoch}.{self._nonce}.")

    async def _has_fenced(self, epoch: int) -> bool:
        """Return whether our fence is the newest already. Raises Fenced when another is as new or newer."""
        fence = await self._newest_fence()
        if fence is None:
            return False
        newest = self._log.epoch(fence)
        if newest == epoch and self._is_mine(fence, epoch):
            self.epoch, self._last = epoch, fence.seq
            return True
        if newest >= epoch:
            raise Fenced(self._stream, epoch, newest)
        return False

    async def _newest_fence(self) -> Message | None:
        """Return the last message on the fences' subject that a learner wrote."""
        newest = await self._jet.last(self._stream, self._fence_subject)
        if newest is None or self._log.epoch(newest) != _NO_EPOCH:
            return newest
        fences = Fences(self._log)
        await fences.refresh()
        return await self._jet.message(self._stream, fences.last) if fences.last else None


class Fences(Generic[R]):
    """The fences of a stream that have been read so far: (sequence, epoch) in order."""

    def __init__(self, stream: FencedStream[R]) -> None:
        self._log = stream
        self._known: list[tuple[int, int]] = []
        self._read_to = 0

    @property
    def last(self) -> int:
        """Sequence of the newest fence; 0 for none."""
        return self._known[-1][0] if self._known else 0

    async def refresh(self) -> None:
        """Read the fences raised since the last call."""
        while fence := await self._log.jet.next(self._log.name, self._read_to + 1, self._log.fence_subject):
            self._read_to = fence.seq
            epoch = self._log.epoch(fence)
            if epoch != _NO_EPOCH:
                self._known.append((fence.seq, epoch))

    def voids(self, seq: int, epoch: int) -> bool:
        """Return whether a message comes after a fence of a newer epoch."""
        return any(fence < seq and newer > epoch for fence, newer in self._known)

    def newest_below(self, seq: int) -> int:
        """Return the highest epoch of the fences before a sequence."""
        return max((epoch for fence, epoch in self._known if fence < seq), default=_NO_EPOCH)


async def valid(stream: FencedStream[R], start: int, *, follow: bool) -> AsyncIterator[tuple[Message, R]]:
    """Yield the messages from ``start`` that no fence voids, fences included; to the present end, or for ever."""
    fences = Fences(stream)
    await fences.refresh()
    epoch = fences.newest_below(start)
    async for delivered in (pull.follow if follow else pull.present)(stream.jet, stream.name, start):
        record = stream.read(delivered)
        if record is None:
            continue
        if delivered.subject == stream.fence_subject:
            epoch = max(epoch, record.epoch)
        if record.epoch >= epoch:
            yield delivered, record
        else:
            where = f"stream={stream.name} seq={delivered.seq}"
            _log.warning("bus: void %s epoch=%d fenced_by=%d", where, record.epoch, epoch)


def epoch_of(headers: dict[str, str]) -> int:
    """Return the epoch in a message's header; -1 when it has none."""
    named = natural(headers.get(subjects.EPOCH_HEADER, ""))
    return _NO_EPOCH if named is None else named


# ---- the log of plans

# Scores stay: they are few, and decide on an early end
_TRIMMED = ("plan", "done", "settle", "requeue")


class PlanLog:
    """Stream PLAN: the content of every step."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self._log = FencedStream(jet, subjects.PLAN, subjects.plan(jet.run, "fence"), _decode_record)
        self._stream = self._log.name
        self._writer = FencedWriter(self._log)

    @property
    def max_record_bytes(self) -> int:
        """Size of the largest record that the server stores."""
        return self._writer.max_bytes

    async def created(self) -> str:
        """Return the creation time of the log, which tells runs of one name apart. Raises NotFound, BusUnavailable."""
        return (await self._jet.state(self._stream)).created

    async def fence(self, epoch: int) -> None:
        """Take over as the only writer. Raises Fenced."""
        await self._writer.fence(epoch)

    async def append(self, record: PlanRecord) -> int:
        """Store a record of the fenced epoch and return its sequence. Retries until stored. Needs ``fence`` first.

        Raises Fenced, and WireError for a record that is larger than a message.
        """
        if isinstance(record, Fence) or record.epoch != self._writer.epoch:
            got = f"{type(record).__name__} of {record.epoch}"
            raise WireError("epoch", f"a record of epoch {self._writer.epoch}, no fence", got)
        return await self._writer.append(subjects.plan(self._jet.run, record_name(record)), encode_record(record))

    async def scan(self, start: int = 1) -> AsyncIterator[tuple[int, PlanRecord]]:
        """Yield every valid record from sequence ``start`` to the present end, fences included."""
        async for delivered, record in valid(self._log, start, follow=False):
            yield delivered.seq, record

    async def follow(self, start: int = 1) -> AsyncIterator[tuple[int, PlanRecord]]:
        """Yield the records of ``scan``, then every new one, for ever."""
        async for delivered, record in valid(self._log, start, follow=True):
            yield delivered.seq, record

    async def stamped(self, *, follow: bool = True) -> AsyncIterator[tuple[int, float, PlanRecord]]:
        """Yield (sequence, Unix time by the server's clock, record) as ``follow`` does, or as ``scan``."""
        async for delivered, record in valid(self._log, 1, follow=follow):
            yield delivered.seq, delivered.stored_s, record

    async def state(self) -> StreamState:
        return await self._jet.state(self._stream)

    async def trim(self, below: int) -> None:
        """Remove records with sequences < ``below``; fences and scores stay."""
        for kind in _TRIMMED:
            await self._jet.purge(self._stream, below, subject=subjects.plan(self._jet.run, kind))


def _decode_record(message: Message) -> PlanRecord:
    """Return the record in a message. Raises WireError, also for a record on the subject of another kind."""
    record = decode_record(message.data)
    if not message.subject.endswith(f".{record_name(record)}"):
        raise WireError("type", f"that of the subject {message.subject}", record_name(record))
    return record
