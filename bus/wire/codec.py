"""Bytes of every message: one msgpack map, ``schema`` and ``type`` first, arrays as raw little-endian bytes. Knows no transport.

A field without a default is required; one with a default may be missing. Unknown fields of a Task or Sample are kept in
``extra`` and written again; unknown fields inside ``sampling``, ``timings``, ``turns`` or ``budget`` are refused (they would change the
meaning). A message has the lowest schema that has its meaning, and its ``later`` fields only where they say something: so a message of
schema 1 has the same bytes in every release.
"""

import dataclasses
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Self

import msgpack

from bus.errors import UnknownSchema, WireError
from bus.wire.budget import Budget
from bus.wire.compiled import Compiled, nested, pair
from bus.wire.episode_invariants import check_plan, check_task
from bus.wire.episodes import SequenceSize, Turns
from bus.wire.fields import (
    ANY,
    BOOL,
    FLOAT,
    INT,
    MAP,
    MOST_LEVELS,
    PROMPT,
    TEXT,
    FieldCodec,
    array,
    choice,
    either,
    keyed,
    many,
    optional,
    shallow,
)
from bus.wire.invariants import check_sample
from bus.wire.json_object import JsonObject
from bus.wire.messages import (
    DEMONSTRATIONS,
    EPISODES,
    MASKED_SAMPLES,
    SCHEMA,
    Dead,
    DeadLetterDecision,
    Done,
    Evaluated,
    Fence,
    Kind,
    Partial,
    Plan,
    PlanRecord,
    Requeue,
    Sample,
    Sampling,
    Settle,
    Span,
    Status,
    Task,
    Timings,
)
from bus.wire.routed_experts import ROUTED_EXPERTS
from bus.wire.turn_records import TurnKind, TurnRecord

__all__ = [
    "Table",
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

_FIRST = ("schema", "type")
_MISSING: object = object()
_AS_DATETIME = 3
"""msgpack's number for timestamps as datetime, the type that msgspec decodes them to as well."""
_BAD = (TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors that a value from outside can cause while it is packed or unpacked."""


_NEWEST = {"sample": DEMONSTRATIONS, "task": EPISODES, "plan": MASKED_SAMPLES}
"""Newest schema of the types that have more than one."""


class Table:
    """The fields of one message in wire order."""

    def __init__(self, message: type, name: str, later: tuple[str, ...] = (), **codecs: FieldCodec) -> None:
        """``later``: fields, the last ones, that came after the first release: they are written only where they say something."""
        fields = {field.name: field for field in dataclasses.fields(message)}
        assert set(codecs) <= set(fields), set(codecs) - set(fields)
        assert later == tuple(codecs)[len(codecs) - len(later) :], later
        self.message, self.name = message, name
        self._codecs, self._later = codecs, [(field, fields[field].default) for field in later]
        self._newest = _NEWEST.get(name, SCHEMA)
        self._values = attrgetter(*codecs) if len(codecs) > 1 else lambda value: (attrgetter(*codecs)(value),)
        self._packers = [(field, codec.exact, codec.pack) for field, codec in codecs.items()]
        self._unpackers = [(field, codec.exact, codec.unpack, _required(fields[field])) for field, codec in codecs.items()]
        self._keeps_unknown = "extra" in fields
        self._compiled: Compiled | None = None

    def compile(self) -> Self:
        """Have msgspec encode and decode the messages that have every field and no unknown one. Returns this table.

        It is worth its memory for samples.
        """
        later = {name for name, _ in self._later}
        always = {name: codec for name, codec in self._codecs.items() if name not in later}
        self._compiled = Compiled(self.message, always, {"schema": SCHEMA, "type": self.name})
        return self

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a message. Raises WireError naming the field that cannot be written."""
        unsaid = [name for name, default in self._later if _is(getattr(value, name), default)]
        plain = self._compiled is not None and not value.extra and len(unsaid) == len(self._later)
        if plain and (found := self._compiled.encode(value)) is not None:  # type: ignore[union-attr]
            return found
        packed: dict[str, object] = {"schema": SCHEMA, "type": self.name}
        self._pack(value, packed)
        if self._newest > SCHEMA:
            packed["schema"] = value.schema  # now that its fields have been found to be of their types
        for name in unsaid:
            del packed[name]
        if self._keeps_unknown:
            packed.update({key: unknown for key, unknown in value.extra.items() if key not in self._codecs and key not in _FIRST})
        try:
            return msgpack.packb(packed, datetime=True)
        except _BAD:
            raise self._not_packable(packed) from None

    def read(self, data: bytes) -> Any:
        """Return the message in ``data``. Raises WireError, UnknownSchema."""
        found = None if self._compiled is None else self._compiled.decode(data)
        return self.decode(unpack(data, self.name)) if found is None else found

    def decode(self, fields: Mapping[str, object]) -> Any:
        """Return the message in a map."""
        found = self._take(fields)
        if self._keeps_unknown and len(fields) > len(found) + 2:
            extra = {_name(key): value for key, value in fields.items() if key not in found and key not in _FIRST}
            found["extra"] = self._shallow(extra)
        message = self.message(**found)
        if self._newest > SCHEMA and message.schema > fields["schema"]:  # type: ignore[operator]
            said = ", ".join(name for name, default in self._later if not _is(getattr(message, name), default))
            raise WireError("schema", f"{message.schema} for a {self.name} with {said}", fields["schema"])
        return message

    def _shallow(self, extra: dict[str, object]) -> dict[str, object]:
        try:
            shallow(extra)
        except ValueError:
            raise WireError(self.name, f"unknown fields nested at most {MOST_LEVELS} deep", "deeper ones") from None
        return extra

    def pack(self, value: object) -> dict[str, object]:
        """Return a message as a map, without ``schema`` and ``type``."""
        packed: dict[str, object] = {}
        self._pack(value, packed)
        return packed

    def _pack(self, value: object, packed: dict[str, object]) -> None:
        field = ""
        try:
            for (field, exact, pack), item in zip(self._packers, self._values(value), strict=True):
                # The exact type, not isinstance: a bool is an int for Python, and another type on the wire.
                packed[field] = item if type(item) is exact else pack(item)
        except _BAD as error:
            if isinstance(error, WireError):
                raise WireError(f"{field}.{error.field}", error.want, error.got) from None
            raise WireError(field or self.name, self._codecs[field].want if field else self.message.__name__, _seen(value, field)) from None

    def _take(self, fields: Mapping[str, object]) -> dict[str, object]:
        found: dict[str, object] = {}
        field, value = "", None
        try:
            for field, exact, unpack, required in self._unpackers:
                value = fields.get(field, _MISSING)
                if type(value) is exact:
                    found[field] = value
                elif value is not _MISSING:
                    found[field] = unpack(value)
                elif required:
                    raise WireError("", self._codecs[field].want, "nothing")
        except _BAD as error:
            if isinstance(error, WireError):
                raise WireError(f"{field}.{error.field}".rstrip("."), error.want, error.got) from None
            raise WireError(field, self._codecs[field].want, _short(value)) from None
        return found

    def _not_packable(self, packed: Mapping[str, object]) -> WireError:
        for field, value in packed.items():
            try:
                msgpack.packb(value, datetime=True)
            except _BAD as error:
                return WireError(field, f"a value that msgpack can hold ({error})", _short(value))
        return WireError(self.name, "a value that msgpack can hold", _short(packed))

    def nested(self) -> FieldCodec:
        """Return the codec of this message as a field of another: a map without unknown fields."""

        def unpack(value: object) -> object:
            """Return the message in a map. Raises WireError for an unknown field, which would change the meaning."""
            if type(value) is not dict:
                raise TypeError
            found = self._take(value)
            if len(value) > len(found):
                unknown = next(key for key in value if key not in found)
                raise WireError(str(unknown), f"only fields of {self.message.__name__}", _short(value[unknown]))
            return self.message(**found)

        # msgspec takes no part in messages with arrays inside.
        wire: object = Any if any(codec.by_hand for codec in self._codecs.values()) else nested(self.message, self._codecs)
        return FieldCodec(f"a map ({self.message.__name__})", self.pack, unpack, wire=wire)


def _is(value: object, default: object) -> bool:
    """Return whether a later field has its default, which is None, or an empty text or tuple.

    The type is compared, too: a None for an empty text is refused like any other wrong type.
    """
    return type(value) is type(default) and value == default


def _name(key: object) -> str:
    if type(key) is not str:
        raise WireError("a field name", "text", key)
    return key


def _required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _seen(value: object, field: str) -> object:
    return _short(getattr(value, field, value) if field else value)


def _short(value: object) -> object:
    """Return the value if it is small, else a description: error messages stay readable."""
    try:
        text = repr(value)
    except RecursionError:
        return f"{type(value).__name__} nested too deeply to be shown"
    return value if len(text) <= 100 and isinstance(value, (int, float, str, type(None))) else f"{type(value).__name__} {text[:80]}"


def _pair(span: Span) -> list[int]:
    return [INT.pack(span.version), INT.pack(span.num_tokens)]


def _span(pair: object) -> Span:
    if type(pair) is not list or len(pair) != 2:
        raise TypeError
    return Span(version=INT.unpack(pair[0]), num_tokens=INT.unpack(pair[1]))


def _size(pair: object) -> SequenceSize:
    if type(pair) is not list or len(pair) != 2:
        raise TypeError
    return SequenceSize(INT.unpack(pair[0]), INT.unpack(pair[1]))


def _turn_reward(pair: object) -> tuple[int, float]:
    if type(pair) is not list or len(pair) != 2:
        raise TypeError
    return INT.unpack(pair[0]), FLOAT.unpack(pair[1])


_I4, _I8, _F4, _U1 = array("<i4"), array("<i8"), array("<f4"), array("u1")
_SPAN = FieldCodec("a pair [version, num_tokens]", _pair, _span, wire=pair(Span, ("version", int), ("num_tokens", int)))
_REWARD = either(FLOAT, keyed(TEXT, FLOAT))
_NUMBERS = keyed(TEXT, FLOAT)
_SIZE = FieldCodec("a pair [tokens, response tokens]", lambda size: [INT.pack(size[0]), INT.pack(size[1])], _size)
_TURN_REWARD = FieldCodec("a pair [turn, reward]", lambda pair: [INT.pack(pair[0]), FLOAT.pack(pair[1])], _turn_reward)
_KIND, _STATUS = choice(Kind), choice(Status)

_SAMPLING = Table(
    Sampling,
    "sampling",
    temperature=FLOAT,
    top_p=FLOAT,
    top_k=INT,
    max_new_tokens=INT,
    stop=many(TEXT),
    stop_token_ids=many(INT),
    seed=optional(INT),
)
_TIMINGS = Table(Timings, "timings", queued_s=FLOAT, generating_s=FLOAT, tools_s=FLOAT, reward_s=FLOAT)
_TURNS = Table(
    Turns,
    "turns",
    at=_I4,
    tokens=_I4,
    begin_s=_F4,
    seconds=_F4,
    tools_s=_F4,
    id=many(TEXT),
    finish=many(TEXT),
    agent=many(TEXT),
    rewards=many(_TURN_REWARD),
)
_BUDGET = Table(Budget, "budget", turns=INT, tokens=INT, context=INT, total_tokens=INT, seconds=FLOAT)
_TASK = Table(
    Task,
    "task",
    later=("rollout", "budget"),
    run=TEXT,
    epoch=INT,
    kind=_KIND,
    prompt=PROMPT,
    prompt_tokens=_I4,
    group_size=INT,
    sampling=_SAMPLING.nested(),
    prompt_epoch=INT,
    offset=INT,
    label=ANY,
    reissue_of=optional(INT),
    reissues=INT,
    min_version=INT,
    issue_step=INT,
    metadata=MAP,
    rollout=TEXT,
    budget=optional(_BUDGET.nested()),
)
_SAMPLE = Table(
    Sample,
    "sample",
    later=(
        *("rollout", "sequences", "turns", "transcript", "demonstration"),
        *("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs", "routed_experts"),
    ),
    run=TEXT,
    task=INT,
    index=INT,
    group_size=INT,
    attempt=TEXT,
    kind=_KIND,
    prompt=PROMPT,
    tokens=_I4,
    response_length=INT,
    response=TEXT,
    rollout_log_probs=_F4,
    loss_mask=_U1,
    spans=many(_SPAN),
    reward=_REWARD,
    status=_STATUS,
    sampling=_SAMPLING.nested(),
    label=ANY,
    metadata=MAP,
    actor=TEXT,
    engine=TEXT,
    timings=_TIMINGS.nested(),
    finish_reason=TEXT,
    created_s=FLOAT,
    rollout=TEXT,
    sequences=many(_SIZE),
    turns=optional(_TURNS.nested()),
    transcript=many(MAP),
    demonstration=BOOL,
    teacher_log_probs=optional(_F4),
    teacher_top_ids=optional(_I4),
    teacher_top_log_probs=optional(_F4),
    routed_experts=optional(ROUTED_EXPERTS),
).compile()
_PARTIAL = Table(
    Partial,
    "partial",
    run=TEXT,
    task=INT,
    index=INT,
    attempt=TEXT,
    tokens=_I4,
    rollout_log_probs=_F4,
    spans=many(_SPAN),
    response=TEXT,
    seed=optional(INT),
    position=INT,
    sample_seq=INT,
    actor=TEXT,
    timings=_TIMINGS.nested(),
)
_TURN_RECORD = Table(
    TurnRecord,
    "turn",
    kind=choice(TurnKind),
    run=TEXT,
    task=INT,
    index=INT,
    attempt=TEXT,
    number=INT,
    parent=INT,
    context=_I4,
    tokens=_I4,
    log_probs=_F4,
    spans=many(_SPAN),
    id=TEXT,
    finish=TEXT,
    matched=optional(either(INT, TEXT)),
    text=TEXT,
    agent=TEXT,
    begin_s=FLOAT,
    seconds=FLOAT,
    trained=BOOL,
    engine=TEXT,
    state=MAP,
    ids=keyed(TEXT, INT),
    rewards=keyed(INT, FLOAT),
    sample_seq=INT,
)
_PLAN = Table(
    Plan,
    "plan",
    later=("rows", "masked"),
    epoch=INT,
    step=INT,
    tasks=_I8,
    seqs=_I8,
    group_sizes=_I4,
    ranks=_I4,
    micro_batches=_I4,
    version_steps=keyed(INT, INT),
    oldest_step=optional(INT),
    data_parallel=INT,
    num_micro_batches=INT,
    num_minibatches=INT,
    config_digest=TEXT,
    chain=TEXT,
    rows=optional(_I4),
    masked=optional(_I8),
)
_DONE = Table(Done, "done", epoch=INT, step=INT, metrics=_NUMBERS, weights_digest=optional(TEXT))
_SETTLE = Table(Settle, "settle", epoch=INT, reason=TEXT, tasks=_I8, seqs=_I8, step=INT)
_REQUEUE = Table(Requeue, "requeue", epoch=INT, task=INT, root=INT, count=INT, prompt_epoch=INT, offset=INT, step=INT)
_FENCE = Table(Fence, "fence", epoch=INT)
_EVALUATED = Table(Evaluated, "evaluated", epoch=INT, version=INT, step=INT, dataset=TEXT, metrics=_NUMBERS)
_DEAD = Table(
    Dead,
    "dead",
    task=INT,
    reason=TEXT,
    attempts=INT,
    actor=TEXT,
    prompt=PROMPT,
    root=INT,
    reissues=INT,
    prompt_epoch=INT,
    offset=INT,
)
_DECISION = Table(DeadLetterDecision, "word", task=INT, word=TEXT, by=TEXT)
_RECORDS = {table.name: table for table in (_PLAN, _DONE, _SETTLE, _REQUEUE, _FENCE, _EVALUATED)}
_RECORD_OF = {table.message: table for table in _RECORDS.values()}


def encode_sample(sample: Sample) -> bytes:
    """Return the bytes of a sample. Raises WireError naming the field that cannot be written."""
    return _SAMPLE.encode(sample)


def decode_sample(data: bytes) -> Sample:
    """Return a sample from its bytes; arrays are read-only views. Raises WireError naming the field, UnknownSchema. Checks no invariant."""
    sample: Sample = _SAMPLE.read(data)
    return sample


def encode_task(task: Task) -> bytes:
    """Return the bytes of a task; its id is not among them. Raises WireError, also for a rollout or budget that no reader accepts."""
    check_task(task)
    return _TASK.encode(task)


def decode_task(data: bytes, id: int) -> Task:
    """Return a task from its bytes and its sequence in TASKS. Raises WireError naming the field, UnknownSchema."""
    task: Task = dataclasses.replace(_TASK.read(data), id=id)
    check_task(task)
    return task


def encode_partial(partial: Partial) -> bytes:
    """Return the bytes of a partial. Raises WireError."""
    return _PARTIAL.encode(partial)


def decode_partial(data: bytes) -> Partial:
    """Return a partial. Raises WireError naming the field, UnknownSchema. Checks no invariant."""
    partial: Partial = _PARTIAL.read(data)
    return partial


def encode_turn_record(record: TurnRecord) -> bytes:
    """Return the bytes of a record of TURNS. Raises WireError."""
    return _TURN_RECORD.encode(record)


def decode_turn_record(data: bytes) -> TurnRecord:
    """Return a record of TURNS. Raises WireError naming the field, UnknownSchema. Checks no invariant."""
    record: TurnRecord = _TURN_RECORD.read(data)
    return record


def encode_record(record: PlanRecord) -> bytes:
    """Return the bytes of a record of the log of plans. Raises WireError."""
    return _RECORD_OF[type(record)].encode(record)


def decode_record(data: bytes) -> PlanRecord:
    """Return a Plan, Done, Settle, Requeue, Fence or Evaluated. Raises WireError naming the field, UnknownSchema."""
    fields = unpack(data, *_RECORDS)
    record: PlanRecord = _RECORDS[fields["type"]].decode(fields)
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
    dead: Dead = _DEAD.read(data)
    return dead


def encode_decision(decision: DeadLetterDecision) -> bytes:
    """Return the bytes of a decision on a dead task. Raises WireError."""
    return _DECISION.encode(decision)


def decode_decision(data: bytes) -> DeadLetterDecision:
    """Return a decision on a dead task. Raises WireError naming the field, UnknownSchema."""
    decision: DeadLetterDecision = _DECISION.read(data)
    return decision


def unpack(data: bytes, *types: str) -> JsonObject:
    """Return the map of a message of one of these types. Raises WireError, UnknownSchema."""
    try:
        # strict_map_key: the keys of ``version_steps`` are integers.
        fields = msgpack.unpackb(data, strict_map_key=False, timestamp=_AS_DATETIME)
    except (*_BAD, msgpack.UnpackException) as error:
        raise WireError("message", "one msgpack map", f"{len(data)} bytes: {error or type(error).__name__}") from None
    if type(fields) is not dict:
        raise WireError("message", "one msgpack map", _short(fields))
    named = isinstance(fields.get("type"), str)
    known = range(SCHEMA, (_NEWEST.get(fields["type"], SCHEMA) if named else SCHEMA) + 1)
    if type(fields.get("schema")) is not int or fields["schema"] not in known:
        raise UnknownSchema("schema", " or ".join(map(str, known)), _short(fields.get("schema", "nothing")))
    if not named or fields["type"] not in types:
        raise WireError("type", " or ".join(types), _short(fields.get("type", "nothing")))
    return fields
