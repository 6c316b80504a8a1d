"""The stream TURNS: the log of an episode, which the next actor of its task goes on from. One actor at a time writes a subject.

::

    take   turn   turn   state   turn   end          tm.<run>.turn.<task>.<index>, in order
     |       |                            |
     |       stored before it is delivered +-- the sample is stored
     from here on earlier writers are refused: each record names the sequence of the one before it

Nothing in it is ever needed. A record that cannot be stored in time leaves the episode unlogged, and it goes on.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from bus.client.jetstream import JetStream
from bus.client.outbox import WRONG_LAST_SEQUENCE
from bus.client.rows import Rows
from bus.errors import BusError, BusUnavailable, NotFound, Refused, WireError
from bus.wire import parts, subjects
from bus.wire.codec import decode_turn_record, encode_turn_record
from bus.wire.turn_records import TurnKind, TurnRecord, check_turn_record

_log = logging.getLogger(__name__)

STORE_S = 2.0
"""Longest wait for a record, in seconds. The answer that it is about waits as long."""
READ_S = 10.0
"""Longest wait for the log of an earlier actor."""
_PAUSE_S = 0.1
_TAKES = 8
"""Tries to take an episode while others write to its log."""


class Superseded(Exception):
    """Another actor makes the sample now, or it is made. This one ends the episode, and neither acks nor naks the task."""


@dataclass(slots=True)
class TurnCounters:
    """Counts since the start."""

    stored: int = 0
    unlogged: int = 0
    """Episodes that go on without a log: a record was not stored in time, or is larger than a message may be."""
    superseded: int = 0


class EpisodeLog:
    """The log of one sample, as the actor that took it writes it. Calls must not overlap."""

    def __init__(self, turns: "TurnStream", task: int, index: int, attempt: str, last: int | None) -> None:
        self._turns, self._task, self._index, self._attempt = turns, task, index, attempt
        self._last, self._count, self._superseded = last, 0, False

    @property
    def kept(self) -> bool:
        """True while records are stored, or refused; False once one was not stored in time."""
        return self._superseded or self._last is not None

    async def append(self, kind: TurnKind, **fields: Any) -> None:
        """Store a record with these fields of ``TurnRecord``, unless one before it was not stored. Raises Superseded."""
        if self._superseded:  # raised again: the first one may have reached no caller
            raise Superseded
        if self._last is None:
            return
        self._count += 1
        record = TurnRecord(kind=kind, run=self._turns.run, task=self._task, index=self._index, attempt=self._attempt, **fields)
        last, self._last = self._last, None  # a call that is cancelled here leaves it unknown whether the record is stored
        try:
            self._last = await self._turns.store(record, f"turn.{self._task}.{self._index}.{self._attempt}.{self._count}", last)
        except Superseded:
            self._superseded = True
            raise


class TurnStream:
    """The stream TURNS of a run."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self.run = jet.run
        self.counters = TurnCounters()
        self._stream = subjects.stream(jet.run, subjects.TURNS)
        self._rows = Rows(jet, "run")

    async def take(self, task: int, index: int, attempt: str, *, first: bool) -> tuple[list[TurnRecord], EpisodeLog]:
        """Begin to write the log of a sample; return the records of earlier attempts, and the log.

        ``first``: no actor had the task before, so there should be none. Raises Superseded when others take it all the time, and for a task
        that is settled: a server that was killed can deliver one again, also as if for the first time, and its records are removed.
        """
        records: list[TurnRecord] = []
        for _ in range(_TAKES):
            last = 0
            if not first:
                try:
                    async with asyncio.timeout(READ_S):
                        records, last = await self._read(task, index)
                except (BusError, TimeoutError) as error:
                    return [], self._not_read(task, index, attempt, error)
            log = EpisodeLog(self, task, index, attempt, last)
            try:
                await log.append(TurnKind.TAKE)
            except Superseded:
                first = False
                continue
            try:
                # Whatever was read: the log may have been removed meanwhile, and have records of actors that found it so.
                async with asyncio.timeout(READ_S):
                    if await self._settled(task):
                        break
            except (BusError, TimeoutError) as error:
                return [], self._not_read(task, index, attempt, error)
            return records, log
        self.counters.superseded += 1
        raise Superseded

    def _not_read(self, task: int, index: int, attempt: str, error: Exception) -> EpisodeLog:
        """Return the log of an episode that goes on without one."""
        _log.warning("log of an episode not read task=%d index=%d error=%s", task, index, error)
        self.counters.unlogged += 1
        return EpisodeLog(self, task, index, attempt, None)

    async def _settled(self, task: int) -> bool:
        """Return whether a task is settled. Read after the episode is taken: the floor is raised before records are removed (``trim``)."""
        row, _ = await self._rows.read(subjects.FLOOR_KEY)
        return row is not None and row["floor"] >= task

    async def store(self, record: TurnRecord, message_id: str, last: int) -> int | None:
        """Store a record behind sequence ``last`` of its subject; return its sequence, None when it is not stored. Raises Superseded."""
        try:
            check_turn_record(record)
            data = encode_turn_record(record)
        except WireError as error:
            self._unlogged(record, str(error))
            return None
        if not parts.fits(data, self._jet.connection.max_payload):
            self._unlogged(record, f"{len(data)} bytes are more than a message may have")
            return None
        subject = subjects.turn(self.run, record.task, record.index)
        headers = {subjects.MESSAGE_ID: message_id, subjects.EXPECTED_LAST_ON_SUBJECT: str(last)}
        try:
            async with asyncio.timeout(STORE_S):
                seq = await self._stored(subject, data, headers)
        except TimeoutError:
            self._unlogged(record, f"not stored within {STORE_S:g} s")
        except Superseded:
            if record.kind is not TurnKind.TAKE:
                self.counters.superseded += 1
            raise
        except BusError as error:
            self._unlogged(record, str(error))
        else:
            self.counters.stored += 1
            return seq
        return None

    async def _stored(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        while True:
            try:
                return (await self._jet.outbox.attempt(subject, data, headers)).seq
            except BusUnavailable:
                await asyncio.sleep(_PAUSE_S)
            except Refused as error:
                if error.code not in WRONG_LAST_SEQUENCE:
                    raise
                try:
                    message = await self._jet.last(self._stream, subject)
                except NotFound:  # removed, because the task is settled
                    raise Superseded from None
                if message.headers.get(subjects.MESSAGE_ID) == headers[subjects.MESSAGE_ID]:
                    return message.seq  # stored by a try that got no answer
                raise Superseded from None

    def _unlogged(self, record: TurnRecord, reason: str) -> None:
        _log.warning("episode goes on without a log task=%d index=%d record=%s error=%s", record.task, record.index, record.kind, reason)
        self.counters.unlogged += 1

    async def _read(self, task: int, index: int) -> tuple[list[TurnRecord], int]:
        """Return the usable records of a sample in order, and the last sequence of its subject, or 0. Raises BusUnavailable."""
        subject = subjects.turn(self.run, task, index)
        records: list[TurnRecord] = []
        seq = 0
        while True:
            try:
                message = await self._jet.next(self._stream, seq + 1, subject)
            except NotFound:
                return records, seq
            seq = message.seq
            record = self._jet.refusals.read(subjects.TURNS, seq, partial(self._record, message.data, task, index))
            if record is not None:
                records.append(record)

    def _record(self, data: bytes, task: int, index: int) -> TurnRecord:
        """Return the record in a message. Raises WireError."""
        record = decode_turn_record(data)
        check_turn_record(record)
        if (record.run, record.task, record.index) != (self.run, task, index):
            raise WireError("run, task, index", f"{self.run}, {task}, {index}", f"{record.run}, {record.task}, {record.index}")
        return record

    async def trim(self, below: int) -> None:
        """Remove the logs of tasks with ids < ``below``, which are settled: not above the task floor. Raises BusUnavailable."""
        if not self._jet.config.rollouts:  # then there is no such stream
            return
        await self._jet.purge_tasks(self._stream, lambda task: subjects.turn(self.run, task), below)
