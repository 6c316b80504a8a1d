"""Samples of several token sequences, tasks with a rollout and plans with rows: both schemas, round trips, each
invariant broken once.
"""

import dataclasses
import hashlib
import math
import re
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bus_kit import make_episode, make_sample, make_task, make_turns
from tests.examples import examples
from tests.refusals import refusal
from tidemill.bus.errors import UnknownSchema, WireError
from tidemill.bus.streams.samples import header_fields, headers_of
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.messages import Dead, Kind, Plan, Sample, SequenceSize, Span, Turns
from tidemill.bus.wire.task_settings import Budget

NAN = math.nan


def ints(*values: int, dtype: Any = np.int32) -> Any:
    return np.array(values, dtype)


def make_plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "epoch": 1,
        "step": 2,
        "tasks": ints(4, dtype=np.int64),
        "seqs": ints(7, 8, dtype=np.int64),
        "group_sizes": ints(2),
        "ranks": ints(0, 1),
        "micro_batches": ints(0, 0),
        "version_steps": {3: 1},
        "oldest_step": None,
        "data_parallel": 2,
        "num_micro_batches": 1,
        "config_digest": "d",
        "chain": "c",
    }
    return Plan(**{**fields, **changes})


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    for field in dataclasses.fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, Turns):
            assert_same(left, right)
        elif isinstance(left, np.ndarray):
            assert (left.dtype, left.tolist()) == (right.dtype, right.tolist()), field.name
        else:
            assert left == right, field.name


# ---- schemas


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (codec.encode_sample(make_sample()), "1646cbc040c2d6859cbcf23c43a795bf8cf4e364bfe703e827fe4cc31c1bf665"),
        (
            codec.encode_sample(make_sample(extra={"x": 1}, label=(1, 2))),
            "9abaf0e5fea362d92dd955a769376ee08509dadc8d473a669fad86e3e06fa245",
        ),
        (codec.encode_task(make_task()), "608ecabf8913b3097893ac65301bbf50b0e26d0b3fe812054710a0a553bf5403"),
        (codec.encode_record(make_plan()), "ee6a01ff1421d2929e97b43358c6e7b4d939a2179d8e500d642d66ab15253fbc"),
    ],
)
def test_messages_of_schema_1_have_the_bytes_of_the_release_before(data: bytes, digest: str) -> None:
    assert msgpack.unpackb(data, strict_map_key=False)["schema"] == 1
    assert hashlib.sha256(data).hexdigest() == digest


def test_messages_of_schema_2_keep_their_bytes() -> None:
    """Their fields in order; a change here is a change of the wire."""
    sample = msgpack.unpackb(codec.encode_sample(make_episode()))
    assert list(sample)[-4:] == ["rollout", "sequences", "turns", "transcript"]
    assert sample["sequences"] == [[10, 6], [6, 2]]
    assert list(sample["turns"]) == [
        "at",
        "tokens",
        "begin_s",
        "seconds",
        "tools_s",
        "id",
        "finish",
        "agent",
        "rewards",
    ]
    assert sample["turns"]["at"] == b"\0\0\0\0\4\0\0\0\6\0\0\0"
    assert sample["turns"]["rewards"] == [[1, 0.1]]
    digests = [
        hashlib.sha256(data).hexdigest()[:16]
        for data in (
            codec.encode_sample(make_episode()),
            codec.encode_task(
                make_task(
                    rollout="calc", budget=Budget(turns=6, tokens=512, context=4096, total_tokens=16384, seconds=600.0)
                )
            ),
            codec.encode_record(make_plan(rows=ints(1, 2), ranks=ints(0, 1, 1), micro_batches=ints(0, 0, 0))),
        )
    ]
    assert digests == GOLDEN


GOLDEN = ["776328271df90438", "c1dadd861108aacd", "b4fe90d69ab3837d"]
"""Begins of the SHA-256 of a sample, a task and a plan of schema 2."""


def test_a_message_has_the_lowest_schema_that_has_its_meaning() -> None:
    """One sequence is schema 1, with turns, transcript and rollout, too: every reader may take it."""
    one = make_episode(sequences=(), spans=(Span(version=5, num_tokens=8),))
    found = msgpack.unpackb(codec.encode_sample(one))
    assert (found["schema"], found["rollout"], "sequences" in found) == (1, "calc", False)
    codec.check_sample(codec.decode_sample(codec.encode_sample(one)))
    assert msgpack.unpackb(codec.encode_sample(make_episode()))["schema"] == 2
    assert msgpack.unpackb(codec.encode_task(make_task(rollout="calc")))["schema"] == 2


@pytest.mark.parametrize(
    ("data", "decode", "said"),
    [
        (codec.encode_sample(make_episode()), codec.decode_sample, "sequences"),
        (codec.encode_task(make_task(rollout="calc")), lambda data: codec.decode_task(data, 1), "rollout"),
        (
            codec.encode_record(make_plan(rows=ints(2, 1), ranks=ints(0, 1, 1), micro_batches=ints(0, 0, 0))),
            codec.decode_record,
            "rows",
        ),
    ],
)
def test_a_meaning_of_schema_2_under_schema_1_is_refused(data: bytes, decode: Any, said: str) -> None:
    """A reader of the release before would take it as something else."""
    fields = msgpack.unpackb(data, strict_map_key=False)
    assert decode(msgpack.packb(fields)) is not None
    with refusal(WireError, field="schema", want=re.compile(said), got=1):
        decode(msgpack.packb({**fields, "schema": 1}))


def test_types_without_a_second_schema_refuse_it() -> None:
    fields = msgpack.unpackb(codec.encode_dead(Dead(task=1, reason="", attempts=1, actor="", prompt="")))
    with refusal(UnknownSchema, field="schema", got=2):
        codec.decode_dead(msgpack.packb({**fields, "schema": 2}))


# ---- round trips


ROUND = [
    make_episode(),
    make_episode(sequences=(), spans=(Span(version=5, num_tokens=8),), turns=None),
    make_episode(turns=Turns(at=ints(0, 4, 6), tokens=ints(2, 2, 2)), transcript=(), extra={"mine": [1]}),
]


@pytest.mark.parametrize("sample", ROUND)
def test_an_episode_round_trip(sample: Sample) -> None:
    again = codec.decode_sample(codec.encode_sample(sample))
    assert_same(sample, again)
    codec.check_sample(again)


def test_task_and_plan_round_trip() -> None:
    task = make_task(rollout="calc", budget=Budget(turns=3, seconds=1.5), chat_template_args={"enable_thinking": False})
    assert_same(dataclasses.replace(task, id=3), codec.decode_task(codec.encode_task(task), 3))
    plan = make_plan(rows=ints(2, 1), ranks=ints(0, 1, 1), micro_batches=ints(0, 0, 0))
    assert_same(plan, codec.decode_record(codec.encode_record(plan)))


def test_the_header_counts_turns_sequences_and_sampled_tokens() -> None:
    fields = header_fields(headers_of(make_episode()))
    assert [fields[name] for name in ("tokens", "turns", "sequences", "sampled")] == ["8", "3", "2", "6"]
    assert {"turns", "sequences", "sampled"}.isdisjoint(header_fields(headers_of(make_sample())))


def test_a_rollout_has_a_subject_and_a_consumer_of_its_own() -> None:
    assert (subjects.task("r", "train", "calc"), subjects.consumer(Kind.TRAIN, "calc")) == (
        "tm.r.task.train-calc",
        "rollout-calc",
    )
    assert (subjects.task("r", "train"), subjects.consumer(Kind.EVAL)) == ("tm.r.task.train", "eval")


# ---- invariants


def turns(**changes: Any) -> dict[str, Any]:
    return {"turns": make_turns(**changes)}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sequences": (SequenceSize(10, 6), SequenceSize(2, 2))}, "sequences[1]"),
        ({"sequences": (SequenceSize(10, 8), SequenceSize(6, 0))}, "sequences[1]"),
        ({"sequences": (SequenceSize(20, 6), SequenceSize(-4, 2))}, "sequences[1]"),
        ({"sequences": (SequenceSize(2**70, 6), SequenceSize(6, 2))}, "sequences"),
        ({"sequences": (SequenceSize(9, 6), SequenceSize(6, 2))}, "sequences"),
        ({"sequences": (SequenceSize(10, 5), SequenceSize(6, 2))}, "sequences"),
        ({"sequences": (SequenceSize(16, 7),)}, "sequences"),
        ({"spans": (Span(version=5, num_tokens=8),)}, "spans"),
        ({"spans": (Span(version=5, num_tokens=7), Span(version=6, num_tokens=1))}, "spans"),
        (
            {
                "loss_mask": ints(1, 1, 0, 0, 1, 1, 0, 0, dtype=np.uint8),
                "rollout_log_probs": np.zeros(8, np.float32),
                "turns": None,
            },
            "loss_mask",
        ),
        (turns(tokens=ints(2, 2)), "turns.tokens"),
        (turns(id=("t-0",)), "turns.id"),
        (turns(begin_s=np.zeros(2, np.float32)), "turns.begin_s"),
        (turns(seconds=np.array([0, NAN, 0], np.float32)), "turns.seconds[1]"),
        (turns(tools_s=np.array([0, 0, 1e12], np.float32)), "turns.tools_s[2]"),
        (turns(at=ints(-1, 4, 6)), "turns[0]"),
        (turns(tokens=ints(2, 0, 2)), "turns[1]"),
        (turns(tokens=ints(2, 2, 3)), "turns[2]"),
        (turns(tokens=ints(2, 2, 2**31 - 1)), "turns[2]"),
        (turns(at=ints(0, 4, 4), tokens=ints(2, 2, 2)), "turns"),
        (turns(at=ints(0, 3, 6), tokens=ints(2, 3, 2)), "turns"),
        (turns(at=ints(0, 5, 6), tokens=ints(2, 1, 2)), "turns"),
        (turns(at=ints(0, 4, 7), tokens=ints(2, 3, 1)), "turns[1]"),
        (turns(rewards=((3, 1.0),)), "turns.rewards"),
        (turns(rewards=((-1, 1.0),)), "turns.rewards"),
        (turns(rewards=((1, 1.0), (1, 0.0))), "turns.rewards"),
        (turns(rewards=((2, NAN),)), "turns.rewards of turn 2"),
        (turns(rewards=((2, 2e6),)), "turns.rewards of turn 2"),
    ],
)
def test_a_broken_promise_of_an_episode_names_its_field(change: dict[str, Any], field: str) -> None:
    codec.check_sample(make_episode(), vocab_size=92)
    with pytest.raises(WireError) as caught:
        codec.check_sample(make_episode(**change), vocab_size=92)
    assert caught.value.field == field


def test_turns_may_be_delivered_in_another_order() -> None:
    """A sub-agent's turn, in a sequence of its own, may end before the turns of its parent."""
    codec.check_sample(make_episode(**turns(at=ints(6, 0, 4))))


def test_a_response_without_context_is_refused() -> None:
    whole = make_sample()
    with refusal(WireError, field="response_length"):
        codec.check_sample(dataclasses.replace(whole, tokens=whole.tokens[3:]))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rollout": "a.b"}, "rollout"),
        ({"rollout": "x" * 65}, "rollout"),
        ({"rollout": "*"}, "rollout"),
        ({"budget": Budget(turns=1)}, "budget"),
        ({"chat_template_args": {"enable_thinking": False}}, "chat_template_args"),
        ({"rollout": "calc", "chat_template_args": {"messages": []}}, "chat_template_args"),
        ({"rollout": "calc", "chat_template_args": {"x": b"\0"}}, "chat_template_args"),
        ({"rollout": "calc", "budget": Budget(total_tokens=-1)}, "budget.total_tokens"),
        ({"rollout": "calc", "budget": Budget(seconds=NAN)}, "budget.seconds"),
        ({"rollout": "calc", "budget": Budget(seconds=math.inf)}, "budget.seconds"),
    ],
)
def test_a_rollout_that_no_subject_can_have_is_neither_written_nor_read(change: dict[str, Any], field: str) -> None:
    with pytest.raises(WireError) as written:
        codec.encode_task(make_task(**change))
    raw = {**msgpack.unpackb(codec.encode_task(make_task())), "schema": 2}
    raw.update(
        {name: dataclasses.asdict(value) if isinstance(value, Budget) else value for name, value in change.items()}
    )
    with pytest.raises(WireError) as read:
        codec.decode_task(msgpack.packb(raw), 1)
    assert written.value.field == read.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rows": ints(2)}, "rows"),
        ({"rows": ints(3, 0)}, "rows"),
        ({"rows": ints(1, 3)}, "ranks"),
        ({"rows": ints(1, 1), "ranks": ints(0, 1)}, "micro_batches"),
    ],
)
def test_a_plan_whose_rows_contradict_its_columns_is_refused(change: dict[str, Any], field: str) -> None:
    base: dict[str, Any] = {"rows": ints(2, 1), "ranks": ints(0, 1, 1), "micro_batches": ints(0, 0, 0)}
    with pytest.raises(WireError) as caught:
        codec.decode_record(codec.encode_record(make_plan(**{**base, **change})))
    assert caught.value.field == field


# ---- hostile input


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(300))
@given(st.sampled_from(["schema", "rollout", "sequences", "turns", "transcript"]), VALUES)
def test_any_value_in_a_field_of_episodes_is_read_or_refused(name: str, value: Any) -> None:
    fields = msgpack.unpackb(codec.encode_sample(make_episode()))
    fields[name] = value
    try:
        codec.check_sample(codec.decode_sample(msgpack.packb(fields)))
    except WireError as error:
        assert error.field.startswith((name, "schema", "spans", "turns", "response_length")), error


@settings(max_examples=examples(300))
@given(
    st.sampled_from(["at", "tokens", "begin_s", "seconds", "tools_s", "id", "finish", "agent", "rewards", "added"]),
    VALUES,
)
def test_any_value_in_a_column_of_turns_is_read_or_refused(name: str, value: Any) -> None:
    fields = msgpack.unpackb(codec.encode_sample(make_episode()))
    fields["turns"][name] = value
    try:
        codec.check_sample(codec.decode_sample(msgpack.packb(fields)))
    except WireError as error:
        assert error.field.startswith("turns"), error


@settings(max_examples=examples(300))
@given(st.data())
def test_damaged_bytes_of_an_episode_are_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(codec.encode_sample(make_episode()))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.check_sample(codec.decode_sample(bytes(whole[: data.draw(st.integers(1, len(whole)))])))
    except WireError as error:
        assert error.field
