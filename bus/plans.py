"""The log of plans: what every step was made of, written by one fenced learner."""

from collections.abc import AsyncIterator

from bus import subjects
from bus.codec import decode_record, encode_record, record_name
from bus.errors import WireError
from bus.fenced import FencedWriter, valid
from bus.jetstream import JetStream
from bus.messages import Fence, PlanRecord

_TRIMMED = ("plan", "done", "settle", "requeue")


class PlanLog:
    """Stream PLAN."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self._stream = subjects.stream(jet.run, subjects.PLAN)
        self._fence_subject = subjects.plan(jet.run, "fence")
        self._writer = FencedWriter(jet, self._stream, self._fence_subject)

    async def fence(self, epoch: int) -> None:
        """Take over as the only writer. Raises Fenced."""
        await self._writer.fence(epoch)

    async def append(self, record: PlanRecord) -> int:
        """Store a record; its sequence. Retries until stored. Raises Fenced; needs ``fence`` first.

        ``record.epoch`` must be the fenced one.
        """
        if isinstance(record, Fence) or record.epoch != self._writer.epoch:
            raise WireError("epoch", f"a record of epoch {self._writer.epoch}, no fence", f"{type(record).__name__} of {record.epoch}")
        return await self._writer.append(subjects.plan(self._jet.run, record_name(record)), encode_record(record))

    async def scan(self, start: int = 1) -> AsyncIterator[tuple[int, PlanRecord]]:
        """Every valid record from sequence ``start`` to the present end, fences included. Raises WireError for a broken one."""
        async for delivered in valid(self._jet, self._stream, self._fence_subject, start, follow=False):
            yield delivered.seq, decode_record(delivered.data)

    async def follow(self, start: int = 1) -> AsyncIterator[tuple[int, PlanRecord]]:
        """``scan``, then what comes, for ever."""
        async for delivered in valid(self._jet, self._stream, self._fence_subject, start, follow=True):
            yield delivered.seq, decode_record(delivered.data)

    async def trim(self, below: int) -> None:
        """Forget records with sequences < ``below``; fences stay."""
        for kind in _TRIMMED:
            await self._jet.purge(self._stream, below, subject=subjects.plan(self._jet.run, kind))
