"""Bytes of messages, and the parts of a sample that is larger than one message. Knows no transport.

A field without a default is required. Unknown fields of a Task or Sample are kept in ``extra`` and written again;
inside of a field they are refused (they would change the meaning). A message has the lowest schema that has its
meaning, and its later fields only where they differ from the default: a message of schema 1 has the same bytes in every
release.
"""

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.errors import WireError
from tidemill.bus.wire.invariants import MAX_REWARD, MAX_SECONDS, check_covered, check_log_probs, check_plan, check_task
from tidemill.bus.wire.invariants import check_sample as check_sample  # beside the decoder of samples
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.message_format import MessageFormat, type_of
from tidemill.bus.wire.messages import (
    NOT_ON_WIRE,
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
    Span,
    Task,
)

_ID_LIMIT = 2**63
MOST_TURNS = 2**31
_SAMPLE = MessageFormat(Sample, "sample", later_from="rollout")
_TASK = MessageFormat(Task, "task", later_from="rollout")
_PARTIAL = MessageFormat(Partial, "partial")
_DEAD = MessageFormat(Dead, "dead")
_DECISION = MessageFormat(DeadLetterDecision, "word")
_OTHER_RECORDS = (Done, Settle, Requeue, Fence, Evaluated)
_RECORD_OF: Mapping[type, MessageFormat[Any]] = {
    Plan: MessageFormat(Plan, "plan", later_from="rows"),
    **{record: MessageFormat(record, record.__name__.lower()) for record in _OTHER_RECORDS},
}
_RECORDS = {record.name: record for record in _RECORD_OF.values()}
HEADER_RESERVE_BYTES = 1024  # Room left for headers in a message of the largest size
# Size limit of a sample: of a million tokens, it has 9 bytes for each, its text and its metadata
MAX_SAMPLE_BYTES = 64 << 20
_FEW_PARTS = 16  # Number of parts that may have any size
# Smallest mean size of more parts, or half of the payload of a message where that is less
_SMALLEST_PART_BYTES = 256 << 10


class TurnKind(StrEnum):
    """Kinds of a record."""

    TAKE = "take"
    """``attempt`` makes the sample from here on: no earlier one may write."""
    TURN = "turn"
    """An answer, stored before the program is given it."""
    STATE = "state"
    """State of the program behind its first ``number`` turns."""
    END = "end"
    """The sample is stored, as ``sample_seq``."""
    FAILED = "failed"
    """The episode failed. It begins anew: the records before this one are void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """A message of TURNS. R = tokens of the answer."""

    kind: TurnKind
    run: str
    task: int
    index: int
    attempt: str
    number: int = 0
    """Number of a turn, from 0 and in order of storage; of a state, above the numbers of the turns in front of it."""
    parent: int = -1
    """Number of the turn with the prompt and answer that its prompt begins with; -1 = none."""
    context: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Token ids of its prompt beyond its parent's end."""
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Sampled ids, [R]."""
    log_probs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    spans: tuple[Span, ...] = ()
    id: str = ""
    """Name of the turn, as the program saw it."""
    finish: str = ""
    matched: int | str | None = None
    """Token id or stop string that ended it."""
    text: str = ""
    agent: str = ""
    begin_s: float = 0.0
    seconds: float = 0.0
    trained: bool = True
    engine: str = ""
    state: JsonObject = field(default_factory=dict)
    """State that the program gave, in a record of kind ``state``."""
    ids: Mapping[str, int] = field(default_factory=dict)
    """Numbers of all turns in front of a state, by the names that a program has seen for them."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of turns so far, in a record of kind ``state``."""
    sample_seq: int = 0
    """Sequence of the sample in SAMPLES, in a record of kind ``end``."""
    extra: JsonObject = field(default_factory=dict, metadata=NOT_ON_WIRE)


def check_turn_record(record: TurnRecord) -> None:
    """Check a record. Raises WireError naming the field."""
    if not 1 <= record.task < _ID_LIMIT or not 0 <= record.index < _ID_LIMIT:
        raise WireError("task, index", f"1 <= task < {_ID_LIMIT} and index >= 0", f"{record.task}, {record.index}")
    if not record.attempt:
        raise WireError("attempt", "a nonce", record.attempt)
    if (record.kind is TurnKind.END) != (record.sample_seq > 0):
        raise WireError("sample_seq", "a sequence >= 1 in an end, and only there", record.sample_seq)
    if not -1 <= record.parent < max(record.number, 1) or not 0 <= record.number < MOST_TURNS:
        raise WireError("number, parent", f"-1 <= parent < number < {MOST_TURNS}", f"{record.number}, {record.parent}")
    if record.kind is TurnKind.TURN:
        _check_turn(record)
    if record.kind is TurnKind.STATE:
        _check_state(record)


def _check_turn(record: TurnRecord) -> None:
    length, log_probs = len(record.tokens), record.log_probs
    if not len(record.context) and record.parent < 0:
        raise WireError("context", "at least one id", "none")
    if len(log_probs) != length:
        raise WireError("log_probs", f"{length} values", len(log_probs))
    check_log_probs(log_probs)
    check_covered(record.spans, length)
    if not (abs(record.begin_s) <= MAX_SECONDS and abs(record.seconds) <= MAX_SECONDS):  # NaN fails it
        raise WireError("begin_s, seconds", f"within +-{MAX_SECONDS:g} s", f"{record.begin_s}, {record.seconds}")
    for name, ids in (("context", record.context), ("tokens", record.tokens)):
        if len(ids) and ids.min() < 0:
            raise WireError(name, "ids >= 0", int(ids.min()))


def _check_state(record: TurnRecord) -> None:
    for name, number in record.ids.items():
        if not 0 <= number < record.number:
            raise WireError(f"ids[{name!r}]", f"a number below {record.number}", number)
    for number, reward in record.rewards.items():
        if not 0 <= number < record.number or not abs(reward) <= MAX_REWARD:
            want = f"a number below {record.number}, and a reward within +-{MAX_REWARD:g}"
            raise WireError(f"rewards[{number}]", want, reward)


_TURN_RECORD = MessageFormat(TurnRecord, "turn")

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
