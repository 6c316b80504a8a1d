"""Every message on the wire, held to the same rules: what is missing, misshapen, foreign or far too deep names its field.

What holds for samples alone is in ``test_bus_codec.py``, the promises of a sample in ``test_bus_invariants.py``.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import codec
from bus.errors import UnknownSchema, WireError
from bus.messages import Dead, Done, Fence, Plan, Settle
from tests.bus_kit import make_sample, make_task


class Wire(NamedTuple):
    """A kind of message: an example, its bytes' fields, and what reads it."""

    message: Any
    fields: dict[str, Any]
    decode: Callable[[bytes], Any]

    def with_field(self, name: str, value: Any) -> bytes:
        return msgpack.packb({**self.fields, name: value})

    def without(self, name: str) -> bytes:
        return msgpack.packb({key: value for key, value in self.fields.items() if key != name})

    def names(self) -> list[str]:
        return [name for name in self.fields if name not in ("schema", "type")]


def _wires() -> dict[str, Wire]:
    ids, few = np.array([4, 9], np.int64), np.array([1, 0], np.int32)
    plan = Plan(
        epoch=1,
        step=3,
        tasks=ids,
        seqs=ids,
        group_sizes=few,
        ranks=few,
        micro_batches=few,
        version_steps={2: 2},
        oldest_step=1,
        data_parallel=2,
        num_micro_batches=2,
        config_digest="c",
        chain="d",
    )
    records = [
        plan,
        Done(epoch=1, step=3, metrics={"loss": 0.1}, weights_digest="w"),
        Settle(epoch=1, reason="stale", tasks=ids, seqs=ids, step=3),
        Fence(epoch=2),
    ]
    dead = Dead(task=4, reason="tool broke", attempts=3, actor="a", prompt="1+1=")
    found = {
        "sample": (make_sample(), codec.encode_sample(make_sample()), codec.decode_sample),
        "task": (make_task(), codec.encode_task(make_task()), lambda data: codec.decode_task(data, 1)),
        "dead": (dead, codec.encode_dead(dead), codec.decode_dead),
        **{codec.record_name(record): (record, codec.encode_record(record), codec.decode_record) for record in records},
    }
    return {name: Wire(message, msgpack.unpackb(data, strict_map_key=False), decode) for name, (message, data, decode) in found.items()}


WIRES = _wires()
FIELDS = [(name, field) for name, wire in WIRES.items() for field in wire.names()]
ARRAYS = [(name, field) for name, wire in WIRES.items() for field in wire.names() if isinstance(getattr(wire.message, field), np.ndarray)]


def _required(message: Any) -> list[str]:
    kinds = (dataclasses.MISSING, dataclasses.MISSING)
    return [field.name for field in dataclasses.fields(message) if (field.default, field.default_factory) == kinds]


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, wire in WIRES.items() for field in _required(wire.message)])
def test_a_missing_field_of_any_message_is_named(name: str, field: str) -> None:
    with pytest.raises(WireError) as caught:
        WIRES[name].decode(WIRES[name].without(field))
    assert (caught.value.field, caught.value.got) == (field, "nothing")


@pytest.mark.parametrize(("name", "field"), ARRAYS)
def test_bytes_that_are_no_whole_numbers_of_elements_are_refused(name: str, field: str) -> None:
    size = getattr(WIRES[name].message, field).dtype.itemsize
    whole = b"\0" * (2 * size)
    assert len(getattr(WIRES[name].decode(WIRES[name].with_field(field, whole)), field)) == 2
    for wrong in ([whole[:-1]] if size > 1 else []) + [whole.decode(), [0, 0], None]:
        with pytest.raises(WireError) as caught:
            WIRES[name].decode(WIRES[name].with_field(field, wrong))
        assert caught.value.field == field


@pytest.mark.parametrize(("name", "field"), ARRAYS)
def test_every_decoded_array_is_read_only(name: str, field: str) -> None:
    array = getattr(WIRES[name].decode(msgpack.packb(WIRES[name].fields)), field)
    np.testing.assert_array_equal(array, getattr(WIRES[name].message, field))
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("schema", [0, 2, 1.0, "1", True, None, [1]])
@pytest.mark.parametrize("name", WIRES)
def test_another_schema_of_any_message_is_refused(name: str, schema: Any) -> None:
    with pytest.raises(UnknownSchema, match="schema: want 1, got"):
        WIRES[name].decode(WIRES[name].with_field("schema", schema))


@pytest.mark.parametrize("name", WIRES)
def test_one_message_is_never_read_as_another(name: str) -> None:
    data = msgpack.packb(WIRES[name].fields)
    records = {"plan", "done", "settle", "fence"}
    for other, wire in WIRES.items():
        if other != name and not {name, other} <= records:
            with pytest.raises(WireError, match=r"^type: want"):
                wire.decode(data)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=17),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(-9, 9) | st.booleans(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400)
@given(st.sampled_from(FIELDS), VALUES)
def test_any_value_in_any_field_of_any_message_decodes_or_names_it(where: tuple[str, str], value: Any) -> None:
    name, field = where
    try:
        WIRES[name].decode(WIRES[name].with_field(field, value))
    except WireError as error:
        assert error.field.split(".")[0] == field


@settings(max_examples=200)
@given(st.sampled_from(sorted(WIRES)), st.dictionaries(TEXT | st.integers() | st.none() | st.booleans(), VALUES, max_size=4))
def test_any_further_fields_are_taken_or_refused_as_wire_error(name: str, fields: dict[Any, Any]) -> None:
    with contextlib.suppress(WireError):
        WIRES[name].decode(msgpack.packb({**fields, **WIRES[name].fields}))


@pytest.mark.parametrize("depth", [50, 400, 800, 950, 1000, 1020, 5000])
@pytest.mark.parametrize(("name", "field"), [*FIELDS, ("sample", "schema"), ("task", "type"), ("sample", "a field of tomorrow")])
def test_what_is_nested_too_deeply_is_a_wire_error(name: str, field: str, depth: int) -> None:
    """A list in a list in a list: the message may be refused, the reader must not fall."""
    marker = b"here it goes"
    nested = b"\x91" * depth + b"\x01"
    data = WIRES[name].with_field(field, marker).replace(msgpack.packb(marker), nested)
    with contextlib.suppress(WireError):
        WIRES[name].decode(data)


@pytest.mark.parametrize("name", ["sample", "task"])
def test_fields_of_tomorrow_pass_through(name: str) -> None:
    wire = WIRES[name]
    encode = {"sample": codec.encode_sample, "task": codec.encode_task}[name]
    tomorrow = {"top_p_sets": b"\1\2", "teacher": {"name": "t", "log_probs": [0.1, -0.2]}}
    message = wire.decode(msgpack.packb({**wire.fields, **tomorrow}))
    assert message.extra == tomorrow
    assert msgpack.unpackb(encode(message)) == {**wire.fields, **tomorrow}


@pytest.mark.parametrize("name", sorted(set(WIRES) - {"sample", "task"}))
def test_records_of_tomorrow_can_be_read(name: str) -> None:
    message = WIRES[name].decode(WIRES[name].with_field("tomorrow", 1))
    assert type(message) is type(WIRES[name].message)


DOUBLES = st.floats(allow_nan=False) | st.sampled_from([0.1, 1 / 3, 1763683200.123456, 5e-324, -0.0, 2.0**53 + 2])


@given(DOUBLES)
def test_doubles_survive_to_the_last_bit(value: float) -> None:
    """``use_single_float`` once destroyed time stamps."""
    data = codec.encode_sample(
        make_sample(metadata={"t": value, "deep": [{"t": value}]}, label=[value], created_s=value, reward={"score": value}, extra={"x": value})
    )
    sample = codec.decode_sample(data)
    found = [sample.metadata["t"], sample.metadata["deep"][0]["t"], sample.label[0], sample.created_s, sample.score, sample.extra["x"]]
    assert [number.hex() for number in found] == [value.hex()] * 6
    task = codec.decode_task(codec.encode_task(make_task(metadata={"t": value}, label=value)), 1)
    assert [task.metadata["t"].hex(), task.label.hex()] == [value.hex()] * 2
