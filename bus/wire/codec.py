"""Bytes of every message: one msgpack map, ``schema`` and ``type`` first, arrays as raw little-endian bytes. Knows no transport.

A field without a default is required; one with a default may be missing. Unknown fields of a Task or Sample are kept in
``extra`` and written again; unknown fields inside ``sampling``, ``timings``, ``turns`` or ``budget`` are refused (they would change the
meaning). A message has the lowest schema that has its meaning, and its ``later`` fields only where they differ from the default: so a
message of schema 1 has the same bytes in every release.
"""

import dataclasses

from tidemill.bus.wire.budget import Budget
from tidemill.bus.wire.compiled import pair
from tidemill.bus.wire.episode_invariants import check_plan, check_task
from tidemill.bus.wire.episodes import SequenceSize, Turns
from tidemill.bus.wire.fields import (
    ANY,
    BOOL,
    FLOAT,
    INT,
    MAP,
    PROMPT,
    TEXT,
    FieldCodec,
    array,
    choice,
    either,
    keyed,
    many,
    optional,
)
from tidemill.bus.wire.invariants import check_sample
from tidemill.bus.wire.messages import (
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
from tidemill.bus.wire.routed_experts import ROUTED_EXPERTS
from tidemill.bus.wire.table import Table, unpack
from tidemill.bus.wire.turn_records import TurnKind, TurnRecord

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
    later=("rollout", "budget", "chat_template_args", "row_digest"),
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
    chat_template_args=optional(MAP),
    row_digest=optional(INT),
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
