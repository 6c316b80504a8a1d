"""What could not be processed, with the reason: reports of single failures, tasks given up for good, and what was said of those."""

import logging
from collections.abc import AsyncIterator

import msgpack

from bus import subjects
from bus.codec import decode_dead, decode_word, encode_dead, encode_word
from bus.errors import Refused
from bus.jetstream import JetStream
from bus.messages import SCHEMA, Dead, Word
from bus.nonce import nonce
from bus.outbox import WRONG_LAST_SEQUENCE
from bus.pull import Delivered, OrderedPull, present
from bus.repeated import Repeated

REQUEUE, DROP = "requeue", "drop"
"""Words."""

_log = logging.getLogger(__name__)


class DeadLetters:
    """Stream DEAD."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self._stream = subjects.stream(jet.run, subjects.DEAD)
        self._repeated = Repeated(_log)

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
            self._repeated("task dead", f"task={dead.task} attempts={dead.attempts} actor={dead.actor} reason={dead.reason}")

    async def say(self, word: Word) -> bool:
        """Say what shall become of a dead task; False = somebody has before. Retries until stored."""
        headers = {subjects.MESSAGE_ID: f"word.{word.task}.{nonce()}", subjects.EXPECTED_LAST_ON_SUBJECT: "0"}
        try:
            await self._jet.outbox.store(subjects.dead_word(self._jet.run, word.task), encode_word(word), headers)
        except Refused as error:
            if error.code not in WRONG_LAST_SEQUENCE:
                raise
            return False
        return True

    async def words(self) -> dict[int, Word]:
        """What has been said so far, by task."""
        found = [decode_word(delivered.data) async for delivered in present(self._jet, self._stream, 1) if self._is_word(delivered)]
        return {word.task: word for word in found}

    async def scan(self, start: int = 1) -> AsyncIterator[tuple[int, Dead]]:
        """Dead tasks from sequence ``start`` to the present end."""
        async for delivered in present(self._jet, self._stream, start):
            if self._is_task(delivered):
                yield delivered.seq, decode_dead(delivered.data)

    async def follow(self, start: int = 1) -> AsyncIterator[tuple[int, Dead | Word]]:
        """Dead tasks and what was said of them, from sequence ``start`` on, for ever."""
        filters = [subjects.dead_task(self._jet.run, "*"), subjects.dead_word(self._jet.run, "*")]
        async with OrderedPull(self._jet, self._stream, max(1, start), filters=filters) as pull:
            while True:
                delivered = await pull.next()
                assert delivered is not None
                yield delivered.seq, decode_word(delivered.data) if self._is_word(delivered) else decode_dead(delivered.data)

    def _is_word(self, delivered: Delivered) -> bool:
        return delivered.subject.startswith(subjects.dead_word(self._jet.run, ""))

    def _is_task(self, delivered: Delivered) -> bool:
        return delivered.subject.startswith(subjects.dead_task(self._jet.run, ""))
