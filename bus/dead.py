"""What could not be processed, with the reason: reports of single failures, and tasks given up for good."""

import logging
from collections.abc import AsyncIterator

import msgpack

from bus import subjects
from bus.codec import decode_dead, encode_dead
from bus.errors import Refused
from bus.jetstream import JetStream
from bus.messages import SCHEMA, Dead
from bus.outbox import WRONG_LAST_SEQUENCE
from bus.pull import Delivered, OrderedPull, present

_log = logging.getLogger(__name__)


class DeadLetters:
    """Stream DEAD."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self._stream = subjects.stream(jet.run, subjects.DEAD)

    async def report(self, task: int, *, reason: str, actor: str, attempt: str) -> int:
        """Store one failure; the number of attempts at this task reported so far. The same attempt counts once."""
        subject = subjects.dead_report(self._jet.run, task)
        payload = msgpack.packb({"schema": SCHEMA, "type": "report", "task": task, "reason": reason, "actor": actor, "attempt": attempt})
        await self._jet.outbox.store(subject, payload, {subjects.MESSAGE_ID: f"report.{task}.{attempt}"})
        return (await self._jet.subjects(self._stream, subject)).get(subject, 0)

    async def store(self, dead: Dead) -> None:
        """Declare a task dead; nothing happens when it is already. Retries until stored."""
        headers = {subjects.MESSAGE_ID: f"dead.{dead.task}", subjects.EXPECTED_LAST_ON_SUBJECT: "0"}
        try:
            await self._jet.outbox.store(subjects.dead_task(self._jet.run, dead.task), encode_dead(dead), headers)
        except Refused as error:
            if error.code not in WRONG_LAST_SEQUENCE:
                raise
        else:
            _log.warning("task dead task=%d attempts=%d actor=%s reason=%s", dead.task, dead.attempts, dead.actor, dead.reason)

    async def scan(self, start: int = 1) -> AsyncIterator[tuple[int, Dead]]:
        """Dead tasks from sequence ``start`` to the present end."""
        async for delivered in present(self._jet, self._stream, start):
            if self._is_task(delivered):
                yield delivered.seq, decode_dead(delivered.data)

    async def follow(self, start: int = 1) -> AsyncIterator[tuple[int, Dead]]:
        """``scan``, then what comes, for ever."""
        filters = [subjects.dead_task(self._jet.run, "*")]
        async with OrderedPull(self._jet, self._stream, max(1, start), filters=filters) as pull:
            while True:
                delivered = await pull.next()
                assert delivered is not None
                yield delivered.seq, decode_dead(delivered.data)

    def _is_task(self, delivered: Delivered) -> bool:
        return delivered.subject.startswith(subjects.dead_task(self._jet.run, ""))
