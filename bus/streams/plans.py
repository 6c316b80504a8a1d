"""The log of plans: the content of every step, written by one fenced learner."""

from collections.abc import AsyncIterator

from tidemill.bus.client.fenced_stream import FencedStream, FencedWriter, valid
from tidemill.bus.client.jetstream import JetStream, Message
from tidemill.bus.errors import WireError
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import decode_record, encode_record, record_name
from tidemill.bus.wire.messages import Fence, PlanRecord

_TRIMMED = ("plan", "done", "settle", "requeue", "evaluated")


class PlanLog:
    """Stream PLAN."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self._log = FencedStream(jet, subjects.PLAN, subjects.plan(jet.run, "fence"), _decode)
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

    async def trim(self, below: int) -> None:
        """Remove records with sequences < ``below``; fences stay."""
        for kind in _TRIMMED:
            await self._jet.purge(self._stream, below, subject=subjects.plan(self._jet.run, kind))


def _decode(message: Message) -> PlanRecord:
    """Return the record in a message. Raises WireError, also for a record on the subject of another kind."""
    record = decode_record(message.data)
    if not message.subject.endswith(f".{record_name(record)}"):
        raise WireError("type", f"that of the subject {message.subject}", record_name(record))
    return record
