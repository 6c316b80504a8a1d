"""One writer at a time on a stream: the newest learner's. Writing, and reading what it wrote.

Every message carries the epoch of its writer and the sequence it expects to stand behind. A fence is the first message of an
epoch; messages of an older epoch behind it are void.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from bus import subjects
from bus.codec import encode_record
from bus.errors import BusUnavailable, Fenced, NotFound, Refused
from bus.jetstream import JetStream, Message
from bus.messages import Fence
from bus.nonce import nonce
from bus.outbox import WRONG_LAST_SEQUENCE
from bus.pull import Delivered, OrderedPull, present

_log = logging.getLogger(__name__)

_RETRY_S = 0.1
_SAY_EVERY_S = 5.0
_NO_EPOCH = -1
"""Epoch of a message that names none: older than all."""


class FencedWriter:
    """Appends to ``stream`` as one epoch. ``fence`` comes first."""

    def __init__(self, jet: JetStream, stream: str, fence_subject: str) -> None:
        self._jet, self._stream, self._fence_subject = jet, stream, fence_subject
        self._nonce, self._count = nonce(), 0
        self._lock = asyncio.Lock()
        self.epoch = 0
        self._last = 0

    async def fence(self, epoch: int) -> None:
        """Take over. Does nothing when it is done already. Raises Fenced when a newer epoch stands there."""
        if epoch < 1:
            raise ValueError(f"epoch: want >= 1, got {epoch}")
        async with self._lock:
            if self.epoch == epoch or await self._stands(epoch):
                return
            self._last = (await self._jet.state(self._stream)).last_seq
            previous, self.epoch = self.epoch, epoch
            try:
                await self._append(self._fence_subject, encode_record(Fence(epoch=epoch)))
            except BaseException:
                self.epoch = previous
                raise

    async def append(self, subject: str, payload: bytes) -> int:
        """Store a message behind all others; its sequence. Retries for ever. Raises Fenced; cancellable."""
        assert self.epoch, f"{self._stream}: fence() comes before the first message"
        async with self._lock:
            return await self._append(subject, payload)

    async def _append(self, subject: str, payload: bytes) -> int:
        self._count += 1
        message_id = f"{self.epoch}.{self._nonce}.{self._count}"
        said_s = time.monotonic()
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
                if self._jet.link.closed:
                    raise
                if time.monotonic() - said_s > _SAY_EVERY_S:
                    said_s = time.monotonic()
                    _log.warning("bus: not stored yet stream=%s reason=%s", self._stream, error)
                await asyncio.sleep(_RETRY_S)
            mine = await self._look(message_id)
            if mine is not None:
                return mine

    async def _look(self, message_id: str) -> int | None:
        """What stands behind the last message we know of: ours (its sequence), a newer learner's (Fenced), or what is void."""
        while True:
            try:
                found = await self._jet.next(self._stream, self._last + 1)
            except NotFound as error:
                if error.what == "stream":
                    raise
                return None
            except BusUnavailable:
                if self._jet.link.closed:
                    raise
                continue
            if found.headers.get(subjects.MESSAGE_ID) == message_id:
                self._last = found.seq
                return found.seq
            seen = epoch_of(found.headers)
            if seen > self.epoch or (seen == self.epoch and not self._is_mine(found, seen)):
                raise Fenced(self._stream, self.epoch, seen)
            self._last = found.seq

    def _is_mine(self, found: Message, epoch: int) -> bool:
        """Ours, but of a call that was cancelled before it heard that it was stored."""
        return found.headers.get(subjects.MESSAGE_ID, "").startswith(f"{epoch}.{self._nonce}.")

    async def _stands(self, epoch: int) -> bool:
        """Whether our fence is the newest already (a call before was cancelled). Raises Fenced when another's is as new or newer."""
        try:
            fence = await self._jet.last(self._stream, self._fence_subject)
        except NotFound as error:
            if error.what == "stream":
                raise
            return False
        newest = epoch_of(fence.headers)
        if newest == epoch and self._is_mine(fence, epoch):
            self.epoch, self._last = epoch, fence.seq
            return True
        if newest >= epoch:
            raise Fenced(self._stream, epoch, newest)
        return False


class Fences:
    """The fences of a stream, as far as they are known: (sequence, epoch) in order."""

    def __init__(self, jet: JetStream, stream: str, fence_subject: str) -> None:
        self._jet, self._stream, self._subject = jet, stream, fence_subject
        self._known: list[tuple[int, int]] = []

    async def refresh(self) -> None:
        """Learn of the fences raised since the last time."""
        start = self._known[-1][0] + 1 if self._known else 1
        while True:
            try:
                found = await self._jet.next(self._stream, start, self._subject)
            except NotFound as error:
                if error.what == "stream":
                    raise
                return
            self._known.append((found.seq, epoch_of(found.headers)))
            start = found.seq + 1

    def voids(self, seq: int, epoch: int) -> bool:
        """Whether a message stands behind a fence of a newer epoch."""
        return any(fence < seq and newer > epoch for fence, newer in self._known)

    def newest_below(self, seq: int) -> int:
        """The highest epoch of the fences before a sequence."""
        return max((epoch for fence, epoch in self._known if fence < seq), default=_NO_EPOCH)


async def valid(jet: JetStream, stream: str, fence_subject: str, start: int, *, follow: bool) -> AsyncIterator[Delivered]:
    """Messages from ``start`` on that no fence voids, fences included; to the present end, or for ever."""
    fences = Fences(jet, stream, fence_subject)
    await fences.refresh()
    epoch = fences.newest_below(start)
    async for delivered in _endless(jet, stream, start) if follow else present(jet, stream, start):
        found = epoch_of(delivered.headers)
        if delivered.subject == fence_subject:
            epoch = max(epoch, found)
        if found >= epoch:
            yield delivered
        else:
            _log.warning("bus: void stream=%s seq=%d epoch=%d fenced_by=%d", stream, delivered.seq, found, epoch)


async def _endless(jet: JetStream, stream: str, start: int) -> AsyncIterator[Delivered]:
    async with OrderedPull(jet, stream, max(1, start)) as pull:
        while True:
            delivered = await pull.next()
            assert delivered is not None
            yield delivered


def epoch_of(headers: dict[str, str]) -> int:
    """Epoch of a message's writer; -1 when it names none."""
    value = headers.get(subjects.EPOCH_HEADER, "")
    return int(value) if value.isascii() and value.isdigit() else _NO_EPOCH
