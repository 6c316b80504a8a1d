"""Bytes of messages. Knows no transport.

A field without a default is required. Unknown fields of a Task or Sample are kept in ``extra`` and written again;
inside of a field they are refused (they would change the meaning). A message has the lowest schema that has its
meaning, and its later fields only where they differ from the default: a message of schema 1 has the same bytes in every
release.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tidemill.bus.wire.invariants import check_plan, check_task
from tidemill.bus.wire.invariants import check_sample as check_sample  # beside the decoder of samples
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

_SAMPLE = MessageFormat(Sample, "sample", later_from="rollout")
_TASK = MessageFormat(Task, "task", later_from="rollout")
_PARTIAL = MessageFormat(Partial, "partial")
_TURN_RECORD = MessageFormat(TurnRecord, "turn")
_DEAD = MessageFormat(Dead, "dead")
_DECISION = MessageFormat(DeadLetterDecision, "word")
_OTHER_RECORDS = (Done, Settle, Requeue, Fence, Evaluated)
_RECORD_OF: Mapping[type, MessageFormat[Any]] = {
    Plan: MessageFormat(Plan, "plan", later_from="rows"),
    **{record: MessageFormat(record, record.__name__.lower()) for record in _OTHER_RECORDS},
}
_RECORDS = {record.name: record for record in _RECORD_OF.values()}

# Each pair raises WireError naming the field, and UnknownSchema where it reads. It checks no invariant.
encode_sample, decode_sample = _SAMPLE.encode, _SAMPLE.read
encode_partial, decode_partial = _PARTIAL.encode, _PARTIAL.read
encode_turn_record, decode_turn_record = _TURN_RECORD.encode, _TURN_RECORD.read
encode_dead, decode_dead = _DEAD.encode, _DEAD.read
encode_decision, decode_decision = _DECISION.encode, _DECISION.read


def encode_task(task: Task) -> bytes:
    """Return the bytes of a task, without its id. Raises WireError, also for a budget that no reader accepts."""
    check_task(task)
    return _TASK.encode(task)


def decode_task(data: bytes, task_id: int) -> Task:
    """Return a task from its bytes and its sequence in TASKS. Raises WireError naming the field, UnknownSchema."""
    task = dataclasses.replace(_TASK.read(data), id=task_id)
    check_task(task)
    return task


def encode_record(record: PlanRecord) -> bytes:
    """Return the bytes of a record of the log of plans. Raises WireError."""
    return _RECORD_OF[type(record)].encode(record)


def decode_record(data: bytes) -> PlanRecord:
    """Return a record of the log of plans. Raises WireError naming the field, UnknownSchema."""
    record: PlanRecord = _RECORDS[type_of(data, *_RECORDS)].read(data)
    if isinstance(record, Plan):
        check_plan(record)
    return record


def record_name(record: PlanRecord) -> str:
    """Return plan, done, settle, requeue, fence or evaluated: the record's ``type`` on the wire and its subject."""
    return _RECORD_OF[type(record)].name
