"""Dead letters: reports of single failures, tasks given up for good, and the operator's decisions on those."""

import logging
from collections.abc import AsyncIterator
from functools import partial

import msgspec

from tidemill.bus.client.jetstream import JetStream, Message
from tidemill.bus.client.outbox import WRONG_LAST_SEQUENCE
from tidemill.bus.client.pull import OrderedPull, present, remove_tasks
from tidemill.bus.errors import NotFound, Refused, WireError
from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import decode_dead, decode_decision, encode_dead, encode_decision
from tidemill.bus.wire.messages import SCHEMA, Dead, DeadLetterDecision
from tidemill.bus.wire.subjects import nonce

REQUEUE, DROP = "requeue", "drop"
_IDS, _COUNTS = 2**63, 2**31

_log = logging.getLogger(__name__)


class DeadLetters:
    """Stream DEAD."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self._stream = subjects.stream(jet.run, subjects.DEAD)
        self._repeated = FailureLog(_log)
        self._tasks, self._decisions = subjects.dead(jet.run, "task"), subjects.dead(jet.run, "word")

    async def report(self, task: int, *, reason: str, actor: str, attempt: str) -> int:
        """Store one failure. Returns the number of attempts at this task reported so far, each counted once."""
        subject = subjects.dead(self._jet.run, "report", task)
        fields = {"schema": SCHEMA, "type": "report", "task": task, "reason": reason, "actor": actor}
        payload = msgspec.msgpack.encode({**fields, "attempt": attempt})
        await self._jet.outbox.store(subject, payload, {subjects.MESSAGE_ID: f"report.{task}.{attempt}"})
        return (await self._jet.subjects(self._stream, subject)).get(subject, 0)

    async def store(self, dead: Dead) -> None:
        """Declare a task dead; nothing happens when it is already. Retries until stored."""
        headers = {subjects.MESSAGE_ID: f"dead.{dead.task}", subjects.EXPECTED_LAST_ON_SUBJECT: "0"}
        try:
            await self._jet.outbox.store(subjects.dead(self._jet.run, "task", dead.task), encode_dead(dead), headers)
        except Refused as error:
            if error.code not in WRONG_LAST_SEQUENCE:
                raise
        else:
            cause = f"attempts={dead.attempts} actor={dead.actor} reason={dead.reason}"
            self._repeated("task dead", f"task={dead.task} {cause}")

    async def decide(self, decision: DeadLetterDecision) -> bool:
        """Store the decision on a dead task. Returns False when there is one already. Retries until stored."""
        subject = subjects.dead(self._jet.run, "word", decision.task)
        headers = {subjects.MESSAGE_ID: f"word.{decision.task}.{nonce()}", subjects.EXPECTED_LAST_ON_SUBJECT: "0"}
        try:
            await self._jet.outbox.store(subject, encode_decision(decision), headers)
        except Refused as error:
            if error.code not in WRONG_LAST_SEQUENCE:
                raise
            # The first try may have stored this one, and its answer may be lost.
            stored = await self._jet.last(self._stream, subject)
            return stored is not None and stored.headers.get(subjects.MESSAGE_ID) == headers[subjects.MESSAGE_ID]
        return True

    async def decisions(self) -> dict[int, DeadLetterDecision]:
        stored = present(self._jet, self._stream, 1, filters=[self._decisions])
        records = [self._read(delivered) async for delivered in stored]
        return {decision.task: decision for decision in records if isinstance(decision, DeadLetterDecision)}

    async def of(self, task: int) -> Dead | None:
        """Return the dead letter of one task; None when there is none, or none that can be read."""
        try:
            message = await self._jet.last(self._stream, subjects.dead(self._jet.run, "task", task))
            return None if message is None else decode_dead(message.data)
        except (NotFound, WireError):
            return None

    async def scan(self, start: int = 1) -> AsyncIterator[tuple[int, Dead]]:
        """Yield the dead tasks from sequence ``start`` to the present end."""
        async for delivered in present(self._jet, self._stream, start, filters=[self._tasks]):
            record = self._read(delivered)
            if isinstance(record, Dead):
                yield delivered.seq, record

    async def follow(self, start: int = 1) -> AsyncIterator[tuple[int, Dead | DeadLetterDecision]]:
        """Yield dead tasks and the decisions on them, from sequence ``start`` on, for ever."""
        async with OrderedPull(self._jet, self._stream, max(1, start), filters=[self._tasks, self._decisions]) as pull:
            async for delivered in pull:
                record = self._read(delivered)
                if record is not None:
                    yield delivered.seq, record

    async def letters(self) -> list[int]:
        """Return the ids of the dead tasks, sorted."""
        tasks = map(subjects.task_named, await self._jet.subjects(self._stream, subjects.dead(self._jet.run, "task")))
        return sorted(task for task in tasks if task is not None)

    async def size_bytes(self) -> int:
        """Return the size of the stream: letters, decisions, reports and whatever else is stored there."""
        return (await self._jet.state(self._stream)).bytes

    async def letters_bytes(self) -> int:
        """Return the size of the dead letters and the decisions on them, as the stream counts them."""
        filters = [self._tasks, self._decisions]
        stored = present(self._jet, self._stream, 1, filters=filters, headers_only=True)
        return sum([message.stored_bytes async for message in stored])

    async def trim_reports(self, below: int) -> bool:
        """Remove the reports of single failures of tasks with ids < ``below``, and of tasks that there are not.

        Returns False when there are so many that the rest is left for the next call.
        """
        return await self._trim("report", below)

    async def trim_letters(self, below: int) -> bool:
        """Remove dead tasks with ids < ``below`` and the decisions on them, and those of tasks that there are not.

        Returns False when there are so many that the rest is left for the next call.
        """
        return all([await self._trim(kind, below) for kind in ("word", "task")])

    async def _trim(self, kind: str, below: int) -> bool:
        return await remove_tasks(self._jet, self._stream, lambda task: subjects.dead(self._jet.run, kind, task), below)

    def _read(self, delivered: Message) -> Dead | DeadLetterDecision | None:
        return self._jet.refusals.read(subjects.DEAD, delivered.seq, partial(_decode, delivered))


def _decode(delivered: Message) -> Dead | DeadLetterDecision:
    """Return the record in a message. Raises WireError, also for another task than its subject's."""
    *_, kind, named = delivered.subject.split(".")
    letter = decode_decision(delivered.data) if kind == "word" else decode_dead(delivered.data)
    if str(letter.task) != named or letter.task < 1:  # also for ``007``: one subject a task, where the first one wins
        raise WireError("task", f"that of the subject, {named[:40]}", letter.task)
    if isinstance(letter, Dead):
        place = (letter.reissues, letter.prompt_epoch, letter.offset)
        if not (-1 <= letter.root < _IDS and min(place) >= 0 and max(place) < _COUNTS):
            raise WireError("root, reissues, prompt_epoch, offset", "those of a task", (letter.root, *place))
    return letter
