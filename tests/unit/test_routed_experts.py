"""The experts of tokens: bytes and their refusals, invariants, an engine's answer, rows of batches."""

import base64
import math
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.bus_kit import make_sample
from tests.data_kit import sample as made_sample
from tests.data_kit import task
from tests.examples import examples
from tests.learner_steps import packed_by_ranks, with_random_experts
from tests.refusals import refusal
from tests.unit.test_batch import plan_of
from tidemill.actors.engines.engine_client import read_answer
from tidemill.actors.engines.port import Generation
from tidemill.actors.errors import EngineFailed
from tidemill.bus.errors import WireError
from tidemill.bus.wire.codec import decode_sample, encode_sample
from tidemill.bus.wire.invariants import check_sample
from tidemill.bus.wire.messages import Sample, Sampling, Span
from tidemill.bus.wire.routed_experts import RoutedShape, check_routed_experts, unknown_rows
from tidemill.learner.batch.batching import build_batches
from tidemill.learner.errors import FeedError
from tidemill.learner.feed.feed_messages import decode_batch, encode_batch, unpack

SHAPE = RoutedShape(num_layers=4, layers=(1, 3), top_k=3, num_experts=7)
WIDE = replace(SHAPE, num_experts=256)
PLAIN = make_sample()


def routed(shape: RoutedShape = SHAPE, **changes: Any) -> Sample:
    [one] = with_random_experts([make_sample(**changes)], shape)
    return one


def experts() -> np.ndarray:
    """Return rows of a sample with at least one known row."""
    found = np.array(routed().routed_experts)
    found[0] = [[0, 1, 2], [4, 5, 6]]
    return found


# ---- bytes


@given(
    hnp.arrays(
        st.sampled_from([np.uint8, np.uint16]),
        st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 4)),
        elements=st.integers(0, 255),
    )
)
def test_any_array_comes_back(ids: np.ndarray) -> None:
    found = decode_sample(encode_sample(make_sample(routed_experts=ids))).routed_experts
    assert found is not None
    assert (found.dtype, found.shape) == (ids.dtype, ids.shape)
    assert (found == ids).all()


def test_the_bytes_are_those_of_the_document() -> None:
    """Read by hand: a map with the sizes, and raw little-endian ids, token by token."""
    ids = np.arange(2 * 2 * 3, dtype=np.uint16).reshape(2, 2, 3) + 255
    assert msgpack.unpackb(encode_sample(make_sample(routed_experts=ids)))["routed_experts"] == {
        "layers": 2,
        "top_k": 3,
        "dtype": "uint16",
        "ids": b"".join(int(each).to_bytes(2, "little") for each in range(255, 267)),
    }
    assert "routed_experts" not in msgpack.unpackb(encode_sample(PLAIN))


GOOD = {"layers": 2, "top_k": 3, "dtype": "uint8", "ids": bytes(12)}


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"layers": True},
        {"layers": 1 << 40},
        {"top_k": -3},
        {"top_k": 3.0},
        {"dtype": "int64"},
        {"dtype": 7},
        {"ids": bytes(13)},
        {"ids": [0] * 12},
        {"more": 1},
        None,
    ],
)
def test_a_wrong_map_is_refused_by_name(change: dict[str, Any] | None) -> None:
    value = 5 if change is None else GOOD | change
    data = msgpack.packb(msgpack.unpackb(encode_sample(PLAIN)) | {"routed_experts": value})
    with pytest.raises(WireError) as caught:
        decode_sample(data)
    assert caught.value.field == "routed_experts"


@pytest.mark.parametrize("name", GOOD)
def test_a_field_that_is_missing_is_refused(name: str) -> None:
    value = {key: each for key, each in GOOD.items() if key != name}
    with refusal(WireError, field="routed_experts"):
        decode_sample(msgpack.packb(msgpack.unpackb(encode_sample(PLAIN)) | {"routed_experts": value}))


JUNK = st.recursive(
    st.none() | st.integers() | st.binary(max_size=20) | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
)


@settings(max_examples=examples(60))
@given(st.dictionaries(st.sampled_from([*GOOD, "x"]), JUNK | st.sampled_from(list(GOOD.values()))) | JUNK)
def test_anything_else_is_a_wire_error_or_checked(value: Any) -> None:
    try:
        data = msgpack.packb(msgpack.unpackb(encode_sample(PLAIN)) | {"routed_experts": value})
    except OverflowError:  # a number that msgpack cannot hold
        return
    try:
        check_sample(decode_sample(data), routed=SHAPE)
    except WireError as error:
        assert error.field.startswith("routed_experts")


def test_a_long_sample_has_the_documented_size() -> None:
    """docs/models.md: 48 layers of 8 experts of 128, 32,768 tokens."""
    shape = RoutedShape(num_layers=48, layers=tuple(range(48)), top_k=8, num_experts=128)
    assert math.isclose(shape.bytes_per_token * 32768, 12.6e6, rel_tol=2e-3)
    assert (shape.dtype, WIDE.dtype, replace(WIDE, num_experts=255).dtype) == (np.uint8, np.uint16, np.uint8)


# ---- invariants


def changed(where: Any, value: Any) -> np.ndarray:
    found = experts()
    found[where] = value
    return found


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (experts()[:-1], {"field": "routed_experts", "got": "an array of shape (10, 2, 3)"}),
        (experts().reshape(len(experts()), -1), {"field": "routed_experts"}),
        (np.zeros((len(PLAIN.tokens), 0, 3), np.uint8), {"field": "routed_experts"}),
        (experts()[:, :1], {"field": "routed_experts", "got": "1 and 3"}),
        (experts()[..., :2], {"field": "routed_experts", "got": "2 and 2"}),
        (changed((0, 1), (0, 1, 7)), {"field": "routed_experts", "got": 7}),
        (
            changed((0, 1), (5, 4, 5)),
            {"field": "routed_experts[0]", "got": "one of them twice"},
        ),
        (
            changed((0, 1, 2), 255),
            {"field": "routed_experts[0]", "got": "experts in some"},
        ),
        (changed(slice(None), 0), {"field": "routed_experts", "got": "0 everywhere"}),
    ],
)
def test_wrong_experts_name_the_reason(ids: np.ndarray, reason: dict[str, Any]) -> None:
    with refusal(WireError, **reason):
        check_sample(make_sample(routed_experts=ids), routed=SHAPE)


@pytest.mark.parametrize("ids", [experts(), SHAPE.unknown(len(PLAIN.tokens)), None])
def test_sound_experts_pass(ids: np.ndarray | None) -> None:
    check_sample(make_sample(routed_experts=ids), routed=SHAPE)
    check_sample(make_sample(routed_experts=ids))


def test_the_actor_does_not_need_the_sizes_of_the_model() -> None:
    check_sample(make_sample(routed_experts=experts()[:, :1]))
    with refusal(WireError, field="routed_experts", got="0 everywhere"):
        check_sample(make_sample(routed_experts=changed(slice(None), 0)))


def test_zeros_of_one_expert_are_refused_too() -> None:
    with refusal(WireError, field="routed_experts", got="0 everywhere"):
        check_routed_experts(np.zeros((3, 2, 1), np.uint8), 3)


# ---- reports and answers of an engine


@pytest.mark.parametrize(
    "change",
    [
        {"layers": []},
        {"layers": [3, 1]},
        {"layers": [1, 1]},
        {"layers": [1, 4]},
        {"layers": [-1]},
        {"layers": "13"},
        {"layers": [1.0]},
        {"top_k": 0},
        {"top_k": 8},
        {"num_experts": True},
        {"num_layers": None},
    ],
)
def test_sizes_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    assert RoutedShape.read(SHAPE.described()) == SHAPE
    with pytest.raises(ValueError, match="want"):
        RoutedShape.read(SHAPE.described() | change)
    with pytest.raises(ValueError, match="got 7: "):
        RoutedShape.read(7)


def answer(rows: int, tokens: int = 4, *, finish: str = "stop", **meta: Any) -> dict[str, Any]:
    """Return an engine's answer with ``rows`` rows of experts: row r has r % 5, and the two ids after it, in the layers
    with experts.
    """
    whole = np.zeros((rows, SHAPE.num_layers, SHAPE.top_k), np.int32)
    for row in range(rows):
        whole[row, list(SHAPE.layers)] = [row % 5, row % 5 + 1, row % 5 + 2]
    return {
        "output_ids": list(range(tokens)),
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-1.0, each, None] for each in range(tokens)],
            "weight_versions": [{"version": "3", "start": 0, "end": tokens}] if tokens else [],
            "routed_experts": base64.b64encode(whole.tobytes()).decode(),
            **meta,
        },
    }


def parsed(given: dict[str, Any], begun: Generation | None = None, prompt: int = 3) -> Generation:
    return read_answer("http://e", given, Sampling(), begun, prompt_tokens=prompt, routed=SHAPE)


def test_an_answer_has_a_row_for_every_token_but_the_last() -> None:
    found = parsed(answer(6)).routed_experts
    assert found is not None
    assert (found.shape, found.dtype) == ((7, 2, 3), np.uint8)
    assert found[:-1, 0, 0].tolist() == found[:-1, 1, 0].tolist() == [0, 1, 2, 3, 4, 0]
    assert unknown_rows(found).tolist() == [False] * 6 + [True]


def test_rows_that_an_aborted_answer_lacks_are_unknown() -> None:
    found = parsed(answer(4, finish="abort")).routed_experts
    assert found is not None
    assert unknown_rows(found).tolist() == [False] * 4 + [True] * 3
    assert parsed(answer(0, 0, finish="abort", routed_experts=None)).routed_experts is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (answer(6, routed_experts=None), "has no meta_info.routed_experts, which the request asked for"),
        (answer(5), r"want base64 of int32 \[6, 4, 3\]"),
        (answer(7), r"want base64 of int32 \[6, 4, 3\]"),
        (answer(6, routed_experts="?" * 8), "want base64 of int32"),
        (answer(6, routed_experts="AAAA"), "want base64 of int32"),
        (answer(6, routed_experts=[1, 2]), "want base64 of int32.*list"),
        (
            answer(6, routed_experts=base64.b64encode(np.full((6, 4, 3), 7, np.int32).tobytes()).decode()),
            "with ids < 7",
        ),
        (
            answer(6, routed_experts=base64.b64encode(np.full((6, 4, 3), -1, np.int32).tobytes()).decode()),
            "with ids < 7",
        ),
        (answer(6, routed_experts=base64.b64encode(np.zeros((6, 4, 3), np.int32).tobytes()).decode()), "0 everywhere"),
        (
            answer(6, routed_experts=base64.b64encode(np.ones((6, 4, 3), np.int32).tobytes()).decode()),
            "one of them twice",
        ),
    ],
)
def test_a_wrong_answer_is_the_engines_failure(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineFailed, match=reason):
        parsed(given)


def begun(experts: np.ndarray | None) -> Generation:
    spans = (Span(version=2, num_tokens=2),)
    return Generation(
        id="b",
        tokens=np.array([4, 5], np.int32),
        log_probs=np.zeros(2, np.float32),
        spans=spans,
        finish="abort",
        routed_experts=experts,
    )


def test_a_continued_answer_keeps_the_first_rows() -> None:
    """Prompt of 3, 2 continued tokens, 4 new ones: row 4 belongs to the last continued token; the new answer sampled
    its successor.
    """
    first = SHAPE.unknown(5)
    first[:4] = [[6, 5, 4], [3, 2, 1]]
    found = parsed(answer(8), begun(first)).routed_experts
    assert found is not None
    assert found[:4, 0, 0].tolist() == [6] * 4
    assert found[4:8, 0, 0].tolist() == [4, 0, 1, 2]
    lost = parsed(answer(8), begun(None)).routed_experts
    assert lost is not None
    assert unknown_rows(lost).tolist() == [True] * 4 + [False] * 4 + [True]


# ---- batches


def test_every_token_keeps_its_experts_in_a_packed_row() -> None:
    """Samples on two ranks, with padding; against a loop over the samples."""
    ones = [made_sample(task(1), 0, [(1, 3)]), made_sample(task(1), 1, [(1, 5)]), made_sample(task(2), 0, [(1, 6)])]
    samples = with_random_experts(ones, SHAPE)
    for batch in build_batches(plan_of(samples, data_parallel=2), samples, pad_to=4, routed=SHAPE):
        assert batch.routing == (2, 3)
        for row in batch.micro_batches:
            found = row.experts.reshape(len(row.tokens_T), 2, 3)
            for at, number in enumerate(row.sample_T):
                given = None if number < 0 else samples[number].routed_experts
                want = None if given is None else given[row.position_ids_T[at]]
                if want is None or want[0, 0] == 255:
                    assert (found[at] == -1).all()
                else:
                    assert (found[at] == want).all()


def test_ranks_that_pack_their_share_have_the_same_experts() -> None:
    ones = [made_sample(task(1), index, [(1, 3 + index)]) for index in range(3)]
    samples = [*with_random_experts(ones[:2], SHAPE), ones[2]]
    plan = plan_of(samples, data_parallel=2)
    whole = build_batches(plan, samples, pad_to=4, routed=SHAPE)
    for batch, again in zip(whole, packed_by_ranks(plan, samples, pad_to=4, routed=SHAPE), strict=True):
        assert [row.experts.tolist() for row in batch.micro_batches] == [
            row.experts.tolist() for row in again.micro_batches
        ]
        assert batch.routing_known == again.routing_known > 0


def test_the_known_share_counts_tokens_before_a_target() -> None:
    samples = [made_sample(task(1), 0, [(1, 3)]), made_sample(task(1), 1, [(1, 3)])]
    known = with_random_experts(samples, SHAPE, unknown_share=0.0)
    assert build_batches(plan_of(samples), known, routed=SHAPE)[0].routing_known == 1.0
    assert build_batches(plan_of(samples), [known[0], samples[1]], routed=SHAPE)[0].routing_known == 0.5
    assert build_batches(plan_of(samples), samples, routed=SHAPE)[0].routing_known == 0.0
    assert not len(build_batches(plan_of(samples), known)[0].micro_batches[0].experts)


def test_experts_of_other_sizes_are_not_replayed() -> None:
    """Samples of recorded plans are not checked again."""
    [one] = with_random_experts([made_sample(task(1), 0, [(1, 3)])], WIDE)
    other = replace(SHAPE, top_k=2)
    (batch,) = build_batches(plan_of([one]), [one], routed=other)
    assert (batch.micro_batches[0].experts == -1).all()


def test_frames_keep_them_and_wrong_ones_are_refused() -> None:
    samples = with_random_experts([made_sample(task(1), index, [(1, 3)]) for index in (0, 1)], WIDE)
    (batch,) = build_batches(plan_of(samples), samples, routed=WIDE)
    frames = [bytes(memoryview(frame)) for frame in encode_batch(batch)]
    header = unpack(frames[0], where="batch")
    again = decode_batch(header, frames[1:])
    assert (again.routing, again.routing_known) == (batch.routing, batch.routing_known)
    assert all(
        (ours.experts == its.experts).all() for ours, its in zip(again.micro_batches, batch.micro_batches, strict=True)
    )
    with refusal(FeedError, where="batch 3", got=71):
        decode_batch(header, [*frames[1:-1], frames[-1][:-2]])
