"""Bytes of messages, and the parts of a sample that is larger than one message. Knows no transport.

A field without a default is required. Unknown fields of a Task or Sample are kept in ``extra`` and written again;
inside of a field they are refused (they would change the meaning). A message has the lowest schema that has its
meaning, and its later fields only where they differ from the default: a message of schema 1 has the same bytes in every
release.
"""

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.bus.errors import WireError
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
    task = _TASK.read(data)
    object.__setattr__(task, "id", task_id)  # new, and in no other hands: a copy costs as much as the decoding
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


HEADER_RESERVE_BYTES = 1024  # Room left for headers in a message of the largest size
# Size limit of a sample: of a million tokens, it has 9 bytes for each, its text and its metadata
MAX_SAMPLE_BYTES = 64 << 20
_FEW_PARTS = 16  # Number of parts that may have any size
# Smallest mean size of more parts, or half of the payload of a message where that is less
_SMALLEST_PART_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsManifest:
    """The stored message of a sample with its bytes in parts stored before it.

    Any actor can write one, and its readers pay for the parts it names: so it is checked before any part is fetched,
    and every part as it arrives.
    """

    seqs: tuple[int, ...]
    length: int
    sha256: str
    """Digest of the joined bytes, hexadecimal."""


_MANIFEST = MessageFormat(PartsManifest, "parts")


def cut(data: bytes, max_payload: int) -> Iterator[bytes]:
    """Yield pieces that fit in a message each."""
    size = max_payload - HEADER_RESERVE_BYTES
    for start in range(0, len(data), size):
        yield data[start : start + size]


def fits(data: bytes, max_payload: int) -> bool:
    """Return whether a sample of these bytes fits in one message, beside its headers."""
    return len(data) <= max_payload - HEADER_RESERVE_BYTES


def describe(data: bytes, seqs: Sequence[int]) -> bytes:
    return _MANIFEST.encode(PartsManifest(seqs=tuple(seqs), length=len(data), sha256=hashlib.sha256(data).hexdigest()))


def read_manifest(data: bytes, *, seq: int, max_payload: int) -> PartsManifest:
    """Return the manifest stored at ``seq``, before which its parts must stand.

    Raises WireError, also for one that names more bytes or more parts than a sample has, or a part twice.
    """
    manifest = _MANIFEST.read(data)
    if not 0 < manifest.length <= MAX_SAMPLE_BYTES:
        raise WireError("parts.length", f"1 to {MAX_SAMPLE_BYTES} bytes", manifest.length)
    mean_bytes = max(1, min(_SMALLEST_PART_BYTES, (max_payload - HEADER_RESERVE_BYTES) // 2))
    max_parts = _FEW_PARTS + manifest.length // mean_bytes
    if not 0 < len(manifest.seqs) <= max_parts:
        raise WireError("parts.seqs", f"1 to {max_parts} parts for {manifest.length} bytes", len(manifest.seqs))
    first, last = min(manifest.seqs), max(manifest.seqs)
    if len(set(manifest.seqs)) < len(manifest.seqs) or first < 1 or last >= seq:
        got = f"{len(manifest.seqs)} from {first} to {last}"
        raise WireError("parts.seqs", f"sequences below {seq}, each once", got)
    return manifest


class Joining:
    """The parts of one manifest, in order, as they arrive: never more bytes than it states and one part."""

    def __init__(self, manifest: PartsManifest) -> None:
        self._manifest = manifest
        self._joined, self._digest = io.BytesIO(), hashlib.sha256()

    def add(self, part: bytes) -> None:
        """Add a part. Raises WireError when the parts are longer than stated."""
        length = self._joined.tell() + len(part)
        if length > self._manifest.length:
            raise WireError("parts.length", f"{self._manifest.length} bytes", f"{length} or more")
        self._joined.write(part)
        self._digest.update(part)

    def whole(self) -> bytes:
        """Return the sample's bytes. Raises WireError when length or digest differ."""
        if self._joined.tell() != self._manifest.length:
            raise WireError("parts.length", f"{self._manifest.length} bytes", self._joined.tell())
        if self._digest.hexdigest() != self._manifest.sha256:
            raise WireError("parts.sha256", self._manifest.sha256[:64], self._digest.hexdigest())
        return self._joined.getvalue()
