"""Bytes of messages. Knows no transport.

A field without a default is required; one with a default may be missing. Unknown fields of a Task or Sample are kept in
``extra`` and written again; unknown fields inside ``sampling``, ``timings``, ``turns`` or ``budget`` are refused (they
would change the meaning). A message has the lowest schema that has its meaning, and its later fields only where they
differ from the default: so a message of schema 1 has the same bytes in every release.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tidemill.bus.wire.invariants import check_plan, check_sample, check_task
from tidemill.bus.wire.message_format import MessageFormat, type_of
from tidemill.bus.wire.messages import (
    Dead,
    DeadLetterDecision,
    Done,
    Evaluated,
    Fence,
    Partial,
    Plan,
    PlanRecord,
    Requeue,
    Sample,
    Settle,
    Task,
)
from tidemill.bus.wire.turn_records import TurnRecord

__all__ = [
    "check_sample",
    "decode_dead",
    "decode_decision",
    "decode_partial",
    "decode_record",
    "decode_sample",
    "decode_task",
    "decode_turn_record",
    "encode_dead",
    "encode_decision",
    "encode_partial",
    "encode_record",
    "encode_sample",
    "encode_task",
    "encode_turn_record",
]


_SAMPLE = MessageFormat(Sample, "sample", later_from="rollout")
_TASK = MessageFormat(Task, "task", later_from="rollout")
_PARTIAL = MessageFormat(Partial, "partial")
_TURN_RECORD = MessageFormat(TurnRecord, "turn")
_DEAD = MessageFormat(Dead, "dead")
_DECISION = MessageFormat(DeadLetterDecision, "word")
_PLAN = MessageFormat(Plan, "plan", later_from="rows")
_DONE = MessageFormat(Done, "done")
_SETTLE = MessageFormat(Settle, "settle")
_REQUEUE = MessageFormat(Requeue, "requeue")
_FENCE = MessageFormat(Fence, "fence")
_EVALUATED = MessageFormat(Evaluated, "evaluated")
_RECORDS: Mapping[str, MessageFormat[Any]] = {
    record.name: record for record in (_PLAN, _DONE, _SETTLE, _REQUEUE, _FENCE, _EVALUATED)
}
_RECORD_OF = {record.message: record for record in _RECORDS.values()}


def encode_sample(sample: Sample) -> bytes:
    """Return the bytes of a sample. Raises WireError naming the field that cannot be written."""
    return _SAMPLE.encode(sample)


def decode_sample(data: bytes) -> Sample:
    """Return a sample from its bytes; arrays are read-only views. Raises WireError naming the field, UnknownSchema.
    Checks no invariant.
    """
    return _SAMPLE.read(data)


def encode_task(task: Task) -> bytes:
    """Return the bytes of a task; its id is not among them. Raises WireError, also for a rollout or budget that no
    reader accepts.
    """
    check_task(task)
    return _TASK.encode(task)


def decode_task(data: bytes, id: int) -> Task:
    """Return a task from its bytes and its sequence in TASKS. Raises WireError naming the field, UnknownSchema."""
    task = dataclasses.replace(_TASK.read(data), id=id)
    check_task(task)
    return task


def encode_partial(partial: Partial) -> bytes:
    """Return the bytes of a partial. Raises WireError."""
    return _PARTIAL.encode(partial)


def decode_partial(data: bytes) -> Partial:
    """Return a partial. Raises WireError naming the field, UnknownSchema. Checks no invariant."""
    return _PARTIAL.read(data)


def encode_turn_record(record: TurnRecord) -> bytes:
    """Return the bytes of a record of TURNS. Raises WireError."""
    return _TURN_RECORD.encode(record)


def decode_turn_record(data: bytes) -> TurnRecord:
    """Return a record of TURNS. Raises WireError naming the field, UnknownSchema. Checks no invariant."""
    return _TURN_RECORD.read(data)


def encode_record(record: PlanRecord) -> bytes:
    """Return the bytes of a record of the log of plans. Raises WireError."""
    return _RECORD_OF[type(record)].encode(record)


def decode_record(data: bytes) -> PlanRecord:
    """Return a Plan, Done, Settle, Requeue, Fence or Evaluated. Raises WireError naming the field, UnknownSchema."""
    record: PlanRecord = _RECORDS[type_of(data, *_RECORDS)].read(data)
    if isinstance(record, Plan):
        check_plan(record)
    return record


def record_name(record: PlanRecord) -> str:
    """Return plan, done, settle, requeue, fence or evaluated: the record's ``type`` on the wire and its subject."""
    return _RECORD_OF[type(record)].name


def encode_dead(dead: Dead) -> bytes:
    """Return the bytes of a dead task. Raises WireError."""
    return _DEAD.encode(dead)


def decode_dead(data: bytes) -> Dead:
    """Return a dead task. Raises WireError naming the field, UnknownSchema."""
    return _DEAD.read(data)


def encode_decision(decision: DeadLetterDecision) -> bytes:
    """Return the bytes of a decision on a dead task. Raises WireError."""
    return _DECISION.encode(decision)


def decode_decision(data: bytes) -> DeadLetterDecision:
    """Return a decision on a dead task. Raises WireError naming the field, UnknownSchema."""
    return _DECISION.read(data)
