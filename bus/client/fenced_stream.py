"""A stream with one writer at a time, the newest learner: writing it, and reading its valid messages.

Every message carries its writer's epoch and the expected sequence of the message before it. A fence is the first
message of an epoch; later messages of an older epoch are void, and so are messages of no learner: undecodable ones, or
with another epoch in the header. Writer and readers pass over them.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from tidemill.bus.client import pull
from tidemill.bus.client.connection import before_retry, retry
from tidemill.bus.client.jetstream import JetStream, Message
from tidemill.bus.client.outbox import WRONG_LAST_SEQUENCE
from tidemill.bus.errors import BusUnavailable, Fenced, Refused, WireError
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.codec import encode_record
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
        """Whole name of the stream, with the run's name."""
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
                await self._append(self._fence_subject, encode_record(Fence(epoch=epoch)))
            except BaseException:
                self.epoch = previous
                raise

    @property
    def max_bytes(self) -> int:
        """Size of the largest message that the server takes, without its headers."""
        return self._jet.connection.max_payload - codec.HEADER_RESERVE_BYTES

    async def append(self, subject: str, payload: bytes) -> int:
        """Append a message and return its sequence. Retries for ever. Raises Fenced; WireError for one too large."""
        assert self.epoch, f"{self._stream}: fence() comes before the first message"
        # No try of such a message can succeed, and the client library's refusal looks like an outage.
        if not codec.fits(payload, self._jet.connection.max_payload):
            want = f"at most {self.max_bytes} bytes, as max_payload of the nats-server allows (raise it)"
            raise WireError(subject, want, len(payload))
        async with self._lock:
            return await self._append(subject, payload)

    async def _append(self, subject: str, payload: bytes) -> int:
        self._count += 1
        message_id = f"{self.epoch}.{self._nonce}.{self._count}"
        logged_s = time.monotonic()
        while True:
            headers = {
                subjects.MESSAGE_ID: message_id,
                subjects.EPOCH_HEADER: str(self.epoch),
                subjects.EXPECTED_LAST: str(self._last),
            }
            try:
                stored = await self._jet.outbox.attempt(subject, payload, headers)
                self._last = max(self._last, stored.seq)
                return stored.seq
            except Refused as error:
                if error.code not in WRONG_LAST_SEQUENCE:
                    raise
            except BusUnavailable as error:
                await before_retry(self._jet.connection, error)
                if time.monotonic() - logged_s > _LOG_EVERY_S:
                    logged_s = time.monotonic()
                    _log.warning("bus: not stored yet stream=%s reason=%s", self._stream, error)
            # The answer was lost, or another message has the expected place: the stream shows which of the two.
            mine = await self._find_own(message_id)
            if mine is not None:
                return mine

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
