"""SAMPLES for readers other than the learner: from any time or version on, as headers or as payloads."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from tidemill.bus.client.jetstream import JetStream, Message, StreamState, unix_time
from tidemill.bus.client.pull import Delivered, follow, present
from tidemill.bus.errors import NotFound, WireError
from tidemill.bus.streams.samples import Glimpse, glimpse_of, payload_of
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Kind


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
    """The stored and the coming messages of SAMPLES. Every read has a consumer in the server's memory."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self._stream = subjects.stream(jet.run, subjects.SAMPLES)
        self._filters = [subjects.samples(jet.run)]

    async def state(self) -> StreamState:
        """Return identity and extent of SAMPLES."""
        return await self._jet.state(self._stream)

    async def now_s(self) -> float:
        """Return the Unix time of the server's clock, by which ``stored_s`` is measured, too."""
        return unix_time((await self._jet.call(f"STREAM.INFO.{self._stream}"))["ts"])

    async def glimpses(self, first: int, last: int | None = None) -> AsyncIterator[Glimpse]:
        """Yield the headers of the samples from ``first`` to ``last``; for ever without a last one."""
        async for delivered in self._read(first, last, headers_only=True):
            yield glimpse_of(delivered)

    async def payloads(self, first: int, last: int | None = None) -> AsyncIterator[StoredSample]:
        """Yield the samples from ``first`` to ``last``; for ever without a last one."""
        async for delivered in self._read(first, last, headers_only=False):
            yield await self._stored(delivered)

    async def payload(self, seq: int) -> StoredSample:
        """Return one sample. Raises NotFound; ValueError for the sequence of another kind of message."""
        message = await self._jet.retry_for_ever(partial(self._jet.message, self._stream, seq))
        if not subjects.is_sample(self._jet.run, message.subject):
            raise ValueError(f"sequence {seq}: want a sample, got a message on {message.subject}")
        return await self._stored(message)

    async def at_time(self, unix_s: float, *, name: str = subjects.SAMPLES) -> int:
        """Return the sequence of the first message of stream ``name`` stored then or later, or the next sequence."""
        stream = subjects.stream(self._jet.run, name)
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
            filters = [subjects.samples(self._jet.run, kind, candidate) for kind in Kind]
            firsts = [await self._jet.next(self._stream, 1, subject) for subject in filters]
            if seqs := [first.seq for first in firsts if first is not None]:
                return min(seqs)
        return (await self.state()).last_seq + 1

    async def _versions(self) -> set[int]:
        counts = await self._jet.subjects(self._stream, subjects.samples(self._jet.run))
        return {version for subject in counts if (version := subjects.version_of_sample(subject)) is not None}

    async def _read(self, first: int, last: int | None, *, headers_only: bool) -> AsyncIterator[Delivered]:
        read = follow if last is None else present
        async for delivered in read(self._jet, self._stream, first, filters=self._filters, headers_only=headers_only):
            if last is not None and delivered.seq > last:
                return
            yield delivered

    async def _stored(self, message: Delivered | Message) -> StoredSample:
        data: bytes | WireError
        try:
            data = await payload_of(self._jet, message)
        except WireError as error:
            data = error
        seq, subject, headers = message.seq, message.subject, message.headers
        return StoredSample(seq=seq, subject=subject, headers=headers, data=data, stored_s=message.stored_s)
