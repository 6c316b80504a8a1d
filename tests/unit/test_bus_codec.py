"""Bytes of messages: round trips, refusals that name the field, and only WireError for arbitrary bytes."""

import contextlib
import dataclasses
from datetime import UTC
from decimal import Decimal
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.bus_kit import make_sample, make_task
from tests.examples import examples
from tests.refusals import refusal
from tidemill.bus.errors import UnknownSchema, WireError
from tidemill.bus.wire import codec
from tidemill.bus.wire.codec import TurnKind, TurnRecord
from tidemill.bus.wire.messages import (
    Dead,
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

INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
MAPS = st.dictionaries(TEXT, st.none() | INTS | TEXT | st.lists(INTS, max_size=3), max_size=3)
PROMPTS = TEXT | st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=3)


def arrays(dtype: str) -> st.SearchStrategy[Any]:
    return hnp.arrays(np.dtype(dtype), st.integers(0, 9), elements={"allow_nan": False} if "f" in dtype else None)


SAMPLINGS = st.builds(
    Sampling,
    temperature=FLOATS,
    top_p=FLOATS,
    top_k=INTS,
    max_new_tokens=INTS,
    stop=st.lists(TEXT, max_size=2).map(tuple),
    stop_token_ids=st.lists(INTS, max_size=2).map(tuple),
    seed=st.none() | INTS,
)
UNKNOWN = st.dictionaries(TEXT.map(lambda name: f"x-{name}"), MAPS, max_size=2)
TASKS = st.builds(
    Task,
    run=TEXT,
    epoch=INTS,
    prompt=PROMPTS,
    prompt_tokens=arrays("int32"),
    group_size=INTS,
    sampling=SAMPLINGS,
    prompt_epoch=INTS,
    offset=INTS,
    kind=st.sampled_from(Kind),
    label=TEXT | MAPS,
    reissue_of=st.none() | INTS,
    reissues=INTS,
    min_version=INTS,
    issue_step=INTS,
    metadata=MAPS,
    extra=UNKNOWN,
)
SAMPLES = st.builds(
    Sample,
    run=TEXT,
    task=INTS,
    index=INTS,
    group_size=INTS,
    attempt=TEXT,
    prompt=PROMPTS,
    tokens=arrays("int32"),
    response_length=INTS,
    response=TEXT,
    rollout_log_probs=arrays("float32"),
    loss_mask=arrays("uint8"),
    spans=st.lists(st.builds(Span, version=INTS, num_tokens=INTS), max_size=3).map(tuple),
    reward=FLOATS | st.dictionaries(TEXT, FLOATS, max_size=3),
    status=st.sampled_from(Status),
    sampling=SAMPLINGS,
    kind=st.sampled_from(Kind),
    label=TEXT | MAPS,
    metadata=MAPS,
    actor=TEXT,
    engine=TEXT,
    timings=st.builds(Timings, queued_s=FLOATS, generating_s=FLOATS, tools_s=FLOATS, reward_s=FLOATS),
    finish_reason=TEXT,
    created_s=FLOATS,
    extra=UNKNOWN,
)
RECORDS: st.SearchStrategy[PlanRecord] = st.one_of(
    st.builds(
        Plan,
        epoch=INTS,
        step=INTS,
        tasks=arrays("int64"),
        seqs=arrays("int64"),
        group_sizes=arrays("int32"),
        ranks=arrays("int32"),
        micro_batches=arrays("int32"),
        version_steps=st.dictionaries(INTS, INTS, max_size=3),
        oldest_step=st.none() | INTS,
        data_parallel=INTS,
        num_micro_batches=INTS,
        num_minibatches=INTS,
        config_digest=TEXT,
        chain=TEXT,
    ),
    st.builds(
        Done, epoch=INTS, step=INTS, metrics=st.dictionaries(TEXT, FLOATS, max_size=3), weights_digest=st.none() | TEXT
    ),
    st.builds(
        Evaluated, epoch=INTS, version=INTS, step=INTS, dataset=TEXT, metrics=st.dictionaries(TEXT, FLOATS, max_size=3)
    ),
    st.builds(Requeue, **dict.fromkeys(("epoch", "task", "root", "count", "prompt_epoch", "offset", "step"), INTS)),
    st.builds(Settle, epoch=INTS, reason=TEXT, tasks=arrays("int64"), seqs=arrays("int64"), step=INTS),
    st.builds(Fence, epoch=INTS),
)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    for field in dataclasses.fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            np.testing.assert_array_equal(left, right)
            assert left.dtype == right.dtype
        else:
            assert left == right, field.name


@given(SAMPLES)
def test_sample_round_trip(sample: Sample) -> None:
    assert_same(sample, codec.decode_sample(codec.encode_sample(sample)))


@given(TASKS, st.integers(1, 2**60))
def test_task_round_trip_gets_its_id_from_the_stream(task: Task, id: int) -> None:
    assert_same(dataclasses.replace(task, id=id), codec.decode_task(codec.encode_task(task), id))


@given(RECORDS)
def test_record_round_trip(record: PlanRecord) -> None:
    assert_same(record, codec.decode_record(codec.encode_record(record)))


PARTIALS = st.builds(
    Partial,
    run=TEXT,
    task=INTS,
    index=INTS,
    attempt=TEXT,
    tokens=arrays("int32"),
    rollout_log_probs=arrays("float32"),
    spans=st.lists(st.builds(Span, version=INTS, num_tokens=INTS), max_size=3).map(tuple),
    response=TEXT,
    seed=st.none() | INTS,
    position=INTS,
    sample_seq=INTS,
    actor=TEXT,
    timings=st.builds(Timings, queued_s=FLOATS, generating_s=FLOATS),
    extra=UNKNOWN,
)


@given(PARTIALS)
def test_partial_round_trip(partial: Partial) -> None:
    assert_same(partial, codec.decode_partial(codec.encode_partial(partial)))


TURN_RECORDS = st.builds(
    TurnRecord,
    kind=st.sampled_from(TurnKind),
    run=TEXT,
    task=INTS,
    index=INTS,
    attempt=TEXT,
    number=INTS,
    parent=INTS,
    context=arrays("int32"),
    tokens=arrays("int32"),
    log_probs=arrays("float32"),
    spans=st.lists(st.builds(Span, version=INTS, num_tokens=INTS), max_size=3).map(tuple),
    id=TEXT,
    finish=TEXT,
    matched=st.none() | INTS | TEXT,
    text=TEXT,
    agent=TEXT,
    begin_s=FLOATS,
    seconds=FLOATS,
    trained=st.booleans(),
    engine=TEXT,
    state=UNKNOWN,
    ids=st.dictionaries(TEXT, INTS, max_size=3),
    rewards=st.dictionaries(INTS, FLOATS, max_size=3),
    sample_seq=INTS,
    extra=UNKNOWN,
)


@given(TURN_RECORDS)
def test_turn_record_round_trip(record: TurnRecord) -> None:
    assert_same(record, codec.decode_turn_record(codec.encode_turn_record(record)))


def test_dead_round_trip() -> None:
    dead = Dead(task=4, reason="tool failed", attempts=3, actor="a", prompt=[{"role": "user", "content": "?"}])
    assert codec.decode_dead(codec.encode_dead(dead)) == dead


DECODERS = [
    *(
        codec.decode_sample,
        lambda data: codec.decode_task(data, 1),
        codec.decode_record,
        codec.decode_partial,
        codec.decode_dead,
    ),
    codec.decode_turn_record,
]


@settings(max_examples=examples(300))
@given(st.binary(max_size=200), st.sampled_from(DECODERS))
def test_arbitrary_bytes_raise_wire_error(data: bytes, decode: Any) -> None:
    with pytest.raises(WireError):
        decode(data)


@settings(max_examples=examples(300))
@given(st.data())
def test_damaged_bytes_decode_or_raise_wire_error(data: st.DataObject) -> None:
    """Any damage is refused as WireError, or leaves a message that can be decoded and checked without another error."""
    whole = bytearray(codec.encode_sample(make_sample()))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        codec.check_sample(codec.decode_sample(bytes(whole[: data.draw(st.integers(1, len(whole)))])))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | INTS, inner, max_size=3),
    max_leaves=6,
)


# A sample of schema 1 with a value of its own in one of these is refused by its schema.
OF_SCHEMA_2 = {"rollout", "sequences", "turns", "transcript", "demonstration", "routed_experts"} | {
    f"teacher_{name}" for name in ("log_probs", "top_ids", "top_log_probs")
}


@settings(max_examples=examples(300))
@example("sequences", [[0, 0], [0, 0]])
@given(st.sampled_from([field.name for field in dataclasses.fields(Sample) if field.name != "extra"]), VALUES)
def test_any_value_in_any_field_decodes_or_names_the_field(name: str, value: Any) -> None:
    fields = msgpack.unpackb(codec.encode_sample(make_sample()))
    fields[name] = value
    try:
        codec.check_sample(codec.decode_sample(msgpack.packb(fields)))
    except WireError as error:
        related = {
            "tokens": "response_length",
            "response_length": "rollout_log_probs",
            "group_size": "index",
            "teacher_top_ids": "teacher_log_probs",
            "teacher_top_log_probs": "teacher_log_probs",
        }
        newer = ["schema"] if name in OF_SCHEMA_2 else []
        assert error.field.startswith((name, related.get(name, name), "spans", "rollout_log_probs", *newer)), error


def test_arrays_are_read_only_views() -> None:
    sample = codec.decode_sample(codec.encode_sample(make_sample()))
    for array in (sample.tokens, sample.rollout_log_probs, sample.loss_mask):
        assert array.base is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def wire(**changes: Any) -> bytes:
    fields = msgpack.unpackb(codec.encode_sample(make_sample()))
    fields.update(changes)
    return msgpack.packb({name: value for name, value in fields.items() if value is not ...})


REQUIRED = [
    field.name
    for field in dataclasses.fields(Sample)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(WireError) as caught:
        codec.decode_sample(wire(**{name: ...}))
    assert caught.value.field == name
    assert "got 'nothing'" in str(caught.value)


def test_a_field_with_a_default_may_be_missing() -> None:
    sample = codec.decode_sample(wire(label=..., timings=..., finish_reason=...))
    assert (sample.label, sample.timings, sample.finish_reason) == (None, Timings(), "")


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("task", "1", "task"),
        ("task", True, "task"),
        ("task", 1.0, "task"),
        ("tokens", [1, 2], "tokens"),
        ("tokens", b"12345", "tokens"),
        ("rollout_log_probs", "x", "rollout_log_probs"),
        ("status", "done", "status"),
        ("kind", ["train"], "kind"),
        ("prompt", 5, "prompt"),
        ("prompt", ["hello"], "prompt[0]"),
        ("spans", [[1]], "spans[0]"),
        ("spans", {"version": 1}, "spans"),
        ("reward", "high", "reward"),
        ("reward", {"score": "high"}, "reward"),
        ("metadata", [1], "metadata"),
        ("sampling", None, "sampling"),
        ("sampling", {"temperature": "hot"}, "sampling.temperature"),
    ],
)
def test_a_wrong_type_is_refused_by_name(name: str, value: Any, field: str) -> None:
    with pytest.raises(WireError) as caught:
        codec.decode_sample(wire(**{name: value}))
    assert caught.value.field == field


@pytest.mark.parametrize("schema", [0, 4, "1", None, True, 2.0, ...])
def test_another_schema_is_refused(schema: Any) -> None:
    with refusal(UnknownSchema, field="schema"):
        codec.decode_sample(wire(schema=schema))


def test_a_message_of_another_type_is_refused() -> None:
    with refusal(WireError, field="type", got="task"):
        codec.decode_sample(codec.encode_task(make_task()))


def test_unknown_fields_are_kept_and_passed_on() -> None:
    sample = codec.decode_sample(wire(experts=b"\1\2", note={"a": [1]}))
    assert sample.extra == {"experts": b"\1\2", "note": {"a": [1]}}
    again = msgpack.unpackb(codec.encode_sample(sample))
    assert again["experts"] == b"\1\2"
    assert again["note"] == {"a": [1]}


def test_extra_never_replaces_a_field() -> None:
    sample = dataclasses.replace(make_sample(task=7), extra={"task": 8, "schema": 9, "type": "x"})
    assert codec.decode_sample(codec.encode_sample(sample)).task == 7


def test_an_unknown_sampling_parameter_is_refused() -> None:
    """It would change the sampling distribution unnoticed."""
    sampling = msgpack.unpackb(wire())["sampling"] | {"min_p": 0.1}
    with refusal(WireError, field="sampling.min_p"):
        codec.decode_sample(wire(sampling=sampling))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": np.arange(11)}, "tokens"),
        ({"tokens": [1, 2, 3]}, "tokens"),
        ({"rollout_log_probs": np.zeros((2, 4), np.float32)}, "rollout_log_probs"),
        ({"task": np.int64(3)}, "task"),
        ({"metadata": {"x": object()}}, "metadata"),
        ({"label": np.float32(1)}, "label"),
        ({"status": "finished"}, "status"),
        ({"response": "\ud800"}, "response"),
        ({"extra": {"x": object()}}, "x"),
        ({"sampling": Sampling(top_k="all")}, "sampling.top_k"),  # type: ignore[arg-type]
    ],
)
def test_a_field_that_cannot_be_written_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(WireError) as caught:
        codec.encode_sample(make_sample(**change))
    assert caught.value.field == field


def test_schema_and_type_come_first() -> None:
    assert list(msgpack.unpackb(codec.encode_sample(make_sample())))[:2] == ["schema", "type"]


ODD = st.one_of(
    st.none(),
    st.booleans(),
    INTS,
    st.integers(2**63, 2**64 - 1),
    st.floats(),
    TEXT,
    st.binary(max_size=9),
    MAPS,
    st.dictionaries(INTS, TEXT, max_size=2),
    st.lists(st.lists(INTS, max_size=3), max_size=3),
    st.dictionaries(TEXT, FLOATS | INTS | st.booleans(), max_size=2),
    st.builds(msgpack.ExtType, st.integers(0, 9), st.binary(max_size=9)),
    st.builds(msgpack.Timestamp, st.integers(0, 2**33), st.integers(0, 999_999_999)),
)


WIRE_ORDER = (
    *("run", "task", "index", "group_size", "attempt", "kind", "prompt", "tokens", "response_length", "response"),
    *(
        "rollout_log_probs",
        "loss_mask",
        "spans",
        "reward",
        "status",
        "sampling",
        "label",
        "metadata",
        "actor",
        "engine",
        "timings",
    ),
    *("finish_reason", "created_s"),
)
"""Fields of a sample of schema 1, as every release writes them."""


def _by_another_library(sample: Sample) -> bytes:
    fields: dict[str, Any] = {"schema": 1, "type": "sample"}
    for name in WIRE_ORDER:
        value = getattr(sample, name)
        if isinstance(value, np.ndarray):
            value = value.tobytes()
        fields[name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
    fields |= sample.extra
    return msgpack.packb(fields)  # type: ignore[no-any-return]


@settings(max_examples=examples(200))
@given(sample=SAMPLES)
def test_another_library_writes_the_same_bytes(sample: Sample) -> None:
    assert codec.encode_sample(sample) == _by_another_library(sample)


@settings(max_examples=examples(200))
@given(sample=SAMPLES, data=st.data())
def test_a_changed_sample_is_refused_or_comes_back_as_it_was_read(sample: Sample, data: st.DataObject) -> None:
    """One field is changed, missing, doubled or unknown, inside and outside, and bytes are damaged."""
    fields = msgpack.unpackb(codec.encode_sample(dataclasses.replace(sample, extra={})), strict_map_key=False)
    inside = data.draw(st.sampled_from(["", "sampling", "timings"]))
    holder = fields[inside] if inside else fields
    name, change = (
        data.draw(st.sampled_from(sorted(holder))),
        data.draw(st.sampled_from(["value", "missing", "unknown", "order"])),
    )
    if change == "value":
        holder[name] = data.draw(ODD)
    elif change != "unknown":
        value = holder.pop(name)
        holder.update({name: value} if change == "order" else {})
    if change == "unknown":
        holder[data.draw(TEXT)] = data.draw(ODD)
    payload = bytearray(msgpack.packb(fields))
    if data.draw(st.booleans()):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        decoded = codec.decode_sample(bytes(payload))
        assert repr(codec.decode_sample(codec.encode_sample(decoded))) == repr(decoded), "NaN equals itself here"


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


class Words(str):
    """A text of another type."""


NOT_USUAL = st.one_of(
    ODD,
    st.just(object()),
    st.sampled_from(
        [
            np.float64(0.5),
            np.int64(3),
            np.float32(1),
            Decimal(1),
            {1, 2},
            (1, 2),
            Words("x"),
            "\ud800",
            2**70,
            Status.ABORTED,
        ]
    ),
    st.datetimes(timezones=st.just(UTC)) | st.datetimes(),
    st.integers(1, 80).map(nested),
)


@settings(max_examples=examples(300))
@given(sample=SAMPLES, data=st.data())
def test_a_sample_with_a_value_of_another_type_is_refused_or_comes_back(sample: Sample, data: st.DataObject) -> None:
    plain = dataclasses.replace(sample, extra={})
    odd, inside = data.draw(NOT_USUAL), data.draw(st.sampled_from(["", "sampling", "timings", "metadata", "spans"]))
    if inside in ("sampling", "timings"):
        holder = getattr(plain, inside)
        name = data.draw(st.sampled_from([field.name for field in dataclasses.fields(holder)]))
        changed = dataclasses.replace(plain, **{inside: dataclasses.replace(holder, **{name: odd})})
    elif inside == "metadata":
        name, changed = inside, dataclasses.replace(plain, metadata={"a": {"b": [odd]}})
    elif inside == "spans":
        name, changed = inside, dataclasses.replace(plain, spans=(Span(version=odd, num_tokens=1),))
    else:
        name = data.draw(st.sampled_from([field.name for field in dataclasses.fields(plain) if field.name != "extra"]))
        changed = dataclasses.replace(plain, **{name: odd})
    try:
        written = codec.encode_sample(changed)
    except WireError as error:
        path = f"{inside}.{name}" if inside in ("sampling", "timings") else name
        assert error.field.startswith((path, "schema")), error
    else:
        assert codec.encode_sample(codec.decode_sample(written)) == written


@pytest.mark.parametrize("field", ["rollout", "sequences", "turns", "transcript"])
@pytest.mark.parametrize("value", [None, "", (), 0])
def test_an_empty_value_of_another_type_is_refused(field: str, value: object) -> None:
    """The fields that are left out when empty are of their types, too: None is not an empty text."""
    default = getattr(make_sample(), field)
    changed = dataclasses.replace(make_sample(), **{field: value})
    if type(value) is type(default):
        assert codec.encode_sample(changed) == codec.encode_sample(make_sample())
        return
    with pytest.raises(WireError) as caught:
        codec.encode_sample(changed)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [Decimal("0.5"), np.float64(0.5)])
@pytest.mark.parametrize("place", ["reward", "part", "temperature"])
def test_numbers_of_other_types_are_written_as_floats(place: str, value: Any) -> None:
    """A reward function may return one."""

    def with_number(number: Any) -> Sample:
        if place == "temperature":
            return make_sample(sampling=Sampling(temperature=number))
        return make_sample(reward=number if place == "reward" else {"part": number})

    assert codec.encode_sample(with_number(value)) == codec.encode_sample(with_number(0.5))


@pytest.mark.parametrize("value", [Decimal("1e400"), Decimal("-Infinity"), Decimal("NaN"), Decimal("sNaN")])
def test_a_decimal_without_a_float_is_refused_or_no_finite_reward(value: Decimal) -> None:
    with pytest.raises(WireError) as caught:
        codec.check_sample(codec.decode_sample(codec.encode_sample(make_sample(reward=value))))
    assert caught.value.field == "reward"


def test_equal_numbers_have_equal_bytes() -> None:
    whole = make_sample(reward=1, created_s=3, timings=Timings(queued_s=2), sampling=Sampling(temperature=1))
    real = make_sample(reward=1.0, created_s=3.0, timings=Timings(queued_s=2.0), sampling=Sampling(temperature=1.0))
    assert codec.encode_sample(whole) == codec.encode_sample(real)


def test_a_field_that_stands_twice_is_read_as_the_last_one() -> None:
    whole = codec.encode_sample(make_sample())
    size = int.from_bytes(whole[1:3], "big")
    twice = whole[:1] + (size + 1).to_bytes(2, "big") + whole[3:] + msgpack.packb("run") + msgpack.packb("other")
    assert codec.decode_sample(twice).run == "other"


@pytest.mark.parametrize("name", ["extra", "x"])
def test_an_unknown_field_may_have_any_name(name: str) -> None:
    assert codec.decode_sample(wire(**{name: [1]})).extra == {name: [1]}


@pytest.mark.parametrize("field", ["metadata", "label", "prompt", "unknown"])
def test_what_is_nested_too_deeply_to_be_shown_is_refused(field: str) -> None:
    fields = msgpack.unpackb(codec.encode_sample(make_sample()))
    for levels in (30, 60, 66, 400):
        fields[field] = {
            "label": nested(levels),
            "unknown": nested(levels),
            "prompt": [{"content": nested(levels)}],
        }.get(field, {"a": nested(levels)})
        data = msgpack.packb(fields)
        if levels < 64:
            codec.decode_sample(data)
            continue
        with pytest.raises(WireError):
            codec.decode_sample(data)
