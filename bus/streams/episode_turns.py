"""The stream TURNS: the log of an episode, which the next actor of its task goes on from. One actor at a time writes a
subject.

::

    take   turn   turn   state   turn   end          tm.<run>.turn.<task>.<index>, in order
     |       |                            |
     |       stored before it is delivered +-- the sample is stored
     from here on earlier writers are refused: each record names the sequence of the one before it

A record that cannot be stored in time leaves the episode unlogged, and it goes on; or, where its log is ``needed``,
raises NotStored, and the episode ends: no answer is delivered that the next actor would not find.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidemill.bus.client.jetstream import JetStream
from tidemill.bus.client.outbox import WRONG_LAST_SEQUENCE
from tidemill.bus.client.pull import remove_tasks
from tidemill.bus.client.rows import Rows
from tidemill.bus.errors import BusError, BusUnavailable, DetailedError, Refused, WireError
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.codec import TurnKind, TurnRecord, check_turn_record, decode_turn_record, encode_turn_record

_log = logging.getLogger(__name__)

STORE_S = 2.0  # Longest wait for a record, and for the answer that it is about
NEEDED_S = 30.0  # Longest wait for a record of a log that is needed: the restart of a bus takes seconds
READ_S = 10.0
_PAUSE_S = 0.1
_TAKES = 8


class Superseded(Exception):
    """The sample is made, or by another actor now. This one ends the episode without acking or nak'ing the task."""


class NotStored(DetailedError):
    """A record is not stored, or earlier ones are not read, of an episode that needs its log: it must end."""

    reason: str
    lasting: bool = False
    """Another try would end in the same way."""
    template = "the episode's log (TURNS): {reason}"


@dataclass(slots=True)
class TurnCounters:
    """Counts since the start."""

    stored: int = 0
    unlogged: int = 0
    """Episodes that go on without a log: a record was not stored in time, or is larger than a message may be."""
    ended: int = 0
    """Episodes that ended for such a reason, because their log is needed."""
    superseded: int = 0


class EpisodeLog:
    """The log of one sample, as the actor that took it writes it. Calls must not overlap."""

    def __init__(
        self, turns: "TurnStream", task: int, index: int, attempt: str, last: int | None, *, needed: bool = False
    ) -> None:
        self._turns, self._task, self._index, self._attempt = turns, task, index, attempt
        self._last, self._count, self._superseded, self._needed = last, 0, False, needed
        self._lost = NotStored("it is not known whether a record is stored")

    @property
    def kept(self) -> bool:
        """False once a record was not stored in time, and the log is not needed."""
        return self._superseded or self._needed or self._last is not None

    async def append(self, kind: TurnKind, **fields: Any) -> None:
        """Store a record with these fields of ``TurnRecord``, unless one before it was not stored. Raises Superseded.

        Raises NotStored where the log is needed, also for a record before this one; not for the end of an episode: a
        later attempt that does not find it gives the program the stored answers again.
        """
        needed = self._needed and kind not in (TurnKind.END, TurnKind.FAILED)
        if self._superseded:  # raised again: the first one may have reached no caller
            raise Superseded
        if self._last is None:
            if needed:
                raise NotStored(self._lost.reason, lasting=self._lost.lasting)
            return
        self._count += 1
        task, index, attempt = self._task, self._index, self._attempt
        record = TurnRecord(kind=kind, run=self._turns.run, task=task, index=index, attempt=attempt, **fields)
        message_id = f"turn.{task}.{index}.{attempt}.{self._count}"
        last, self._last = self._last, None  # unknown until it is stored: the call may be cancelled
        try:
            self._last = await self._turns.store(record, message_id, last, NEEDED_S if needed else STORE_S)
        except Superseded:
            self._superseded = True
            raise
        except NotStored as error:
            self._lost = error
            self._turns.note_lost(record, error.reason, ends=needed)
            if needed:
                raise


class TurnStream:
    """The stream TURNS of a run."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self.run = jet.run
        self.counters = TurnCounters()
        self._stream = subjects.stream(jet.run, subjects.TURNS)
        self._rows = Rows(jet, "run")

    async def take(
        self, task: int, index: int, attempt: str, *, first: bool, needed: bool = False
    ) -> tuple[list[TurnRecord], EpisodeLog]:
        """Begin to write the log of a sample; return the records of earlier attempts, and the log.

        ``first``: no actor had the task before, so there should be none. ``needed``: raise NotStored where the episode
        would go on without its log. Raises Superseded when others take it all the time, and for a task that is settled:
        a server that was killed can deliver one again, also as if for the first time, and its records are removed.
        """
        records: list[TurnRecord] = []
        for _ in range(_TAKES):
            last = 0
            if not first:
                try:
                    async with asyncio.timeout(READ_S):
                        records, last, refused = await self._read(task, index)
                except (BusError, TimeoutError) as error:
                    return [], self._not_read(task, index, attempt, error, needed=needed)
                if refused and needed:
                    self.counters.ended += 1
                    raise NotStored(f"{refused} records of earlier actors cannot be read", lasting=True)
            log = EpisodeLog(self, task, index, attempt, last, needed=needed)
            try:
                await log.append(TurnKind.TAKE)
            except Superseded:
                first = False
                continue
            try:
                # Whatever was read: the log may have been removed meanwhile, and have records of actors that found it
                # so.
                async with asyncio.timeout(READ_S):
                    if await self._settled(task):
                        break
            except (BusError, TimeoutError) as error:
                return [], self._not_read(task, index, attempt, error, needed=needed)
            return records, log
        self.counters.superseded += 1
        raise Superseded

    def _not_read(self, task: int, index: int, attempt: str, error: Exception, *, needed: bool) -> EpisodeLog:
        """Return the log of an episode that goes on without one. Raises NotStored where it is needed."""
        if needed:
            self.counters.ended += 1
            raise NotStored(f"the records of earlier actors were not read: {error}")
        _log.warning("log of an episode not read task=%d index=%d error=%s", task, index, error)
        self.counters.unlogged += 1
        return EpisodeLog(self, task, index, attempt, None)

    async def _settled(self, task: int) -> bool:
        """Return whether a task is settled, read after the take: the floor is raised before records are removed."""
        row, _ = await self._rows.read(subjects.FLOOR_KEY)
        return row is not None and row["floor"] >= task

    async def store(self, record: TurnRecord, message_id: str, last: int, within_s: float) -> int:
        """Store a record behind sequence ``last`` of its subject; return its sequence. Raises Superseded, NotStored."""
        try:
            check_turn_record(record)
            data = encode_turn_record(record)
        except WireError as error:
            raise NotStored(str(error), lasting=True) from error
        if not codec.fits(data, self._jet.connection.max_payload):
            raise NotStored(f"{len(data)} bytes are more than a message may have", lasting=True)
        subject = subjects.turn(self.run, record.task, record.index)
        headers = {subjects.MESSAGE_ID: message_id, subjects.EXPECTED_LAST_ON_SUBJECT: str(last)}
        try:
            async with asyncio.timeout(within_s):
                seq = await self._stored(subject, data, headers)
        except TimeoutError:
            raise NotStored(f"not stored within {within_s:g} s") from None
        except Superseded:
            if record.kind is not TurnKind.TAKE:
                self.counters.superseded += 1
            raise
        except BusError as error:
            raise NotStored(str(error), lasting=True) from error
        self.counters.stored += 1
        return seq

    async def _stored(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        while True:
            try:
                return (await self._jet.outbox.attempt(subject, data, headers)).seq
            except BusUnavailable:
                await asyncio.sleep(_PAUSE_S)
            except Refused as error:
                if error.code not in WRONG_LAST_SEQUENCE:
                    raise
                message = await self._jet.last(self._stream, subject)  # None: removed, because the task is settled
                if message is None or message.headers.get(subjects.MESSAGE_ID) != headers[subjects.MESSAGE_ID]:
                    raise Superseded from None
                return message.seq  # stored by a try that got no answer

    def note_lost(self, record: TurnRecord, reason: str, *, ends: bool) -> None:
        """Count and log a record that is not stored. ``ends``: the episode does, too; else it goes on."""
        what = "episode ends: its log is needed" if ends else "episode goes on without a log"
        _log.warning("%s task=%d index=%d record=%s error=%s", what, record.task, record.index, record.kind, reason)
        self.counters.ended += ends
        self.counters.unlogged += not ends

    async def _read(self, task: int, index: int) -> tuple[list[TurnRecord], int, int]:
        """Return a sample's usable records, the last sequence of its subject (or 0), and the number of others."""
        subject = subjects.turn(self.run, task, index)
        records: list[TurnRecord] = []
        seq = refused = 0
        while message := await self._jet.next(self._stream, seq + 1, subject):
            seq = message.seq
            record = self._jet.refusals.read(subjects.TURNS, seq, partial(self._record, message.data, task, index))
            if record is not None:
                records.append(record)
            else:
                refused += 1
        return records, seq, refused

    def _record(self, data: bytes, task: int, index: int) -> TurnRecord:
        """Return the record in a message. Raises WireError."""
        record = decode_turn_record(data)
        check_turn_record(record)
        if (record.run, record.task, record.index) != (self.run, task, index):
            got = f"{record.run}, {record.task}, {record.index}"
            raise WireError("run, task, index", f"{self.run}, {task}, {index}", got)
        return record

    async def trim(self, below: int) -> None:
        """Remove the logs of settled tasks, with ids < ``below``. Raises BusUnavailable."""
        if not self._jet.config.rollouts:  # then there is no such stream
            return
        await remove_tasks(self._jet, self._stream, lambda task: subjects.turn(self.run, task), below)
