"""State that draining actors leave for the next actor of a task: partials, and sequences of finished samples."""

import logging

from tidemill.bus.client.jetstream import JetStream
from tidemill.bus.errors import NotFound, WireError
from tidemill.bus.wire import parts, subjects
from tidemill.bus.wire.codec import decode_partial, encode_partial
from tidemill.bus.wire.invariants import check_partial
from tidemill.bus.wire.messages import Partial

_log = logging.getLogger(__name__)


class Partials:
    """Stream PARTIALS. No process depends on it: a partial that is missing is generated again."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self._stream = subjects.stream(jet.run, subjects.PARTIALS)
        self._found = False

    async def store(self, partial: Partial) -> bool:
        """Store a partial, tried for ever under its message id. Cancellable.

        Returns False when it is larger than a message may be, or the run is older than the stream. Raises WireError
        when it breaks an invariant.
        """
        check_partial(partial)
        data = encode_partial(partial)
        if not parts.fits(data, self._jet.connection.max_payload):
            _log.warning("partial too large task=%d index=%d bytes=%d", partial.task, partial.index, len(data))
            return False
        if not await self._exists():
            _log.warning("partial not stored, there is no stream for it stream=%s", self._stream)
            return False
        subject = subjects.partial(self._jet.run, partial.task, partial.index)
        await self._jet.outbox.store(subject, data, {subjects.MESSAGE_ID: partial.message_id})
        return True

    async def of(self, task: int) -> dict[int, Partial]:
        """Return the newest partial of each index of a task; none without such a stream. Raises BusUnavailable."""
        by_index: dict[int, Partial] = {}
        try:
            for subject in await self._jet.subjects(self._stream, subjects.partial(self._jet.run, task)):
                message = await self._jet.last(self._stream, subject)
                if message is None:  # trimmed meanwhile
                    continue
                try:
                    partial = decode_partial(message.data)
                    check_partial(partial)
                except WireError as error:
                    _log.warning("partial not usable subject=%s error=%s", subject, error)
                    continue
                if (partial.run, partial.task) == (self._jet.run, task):
                    by_index[partial.index] = partial
        except NotFound:  # the run is older than the stream
            pass
        return by_index

    async def trim(self, below: int) -> None:
        """Remove the partials of tasks with ids < ``below``. Raises BusUnavailable."""
        await self._jet.purge_tasks(self._stream, lambda task: subjects.partial(self._jet.run, task), below)

    async def _exists(self) -> bool:
        if not self._found:
            try:
                await self._jet.retry_for_ever(lambda: self._jet.state(self._stream))
            except NotFound:
                return False
            self._found = True
        return True
