"""Batches: target alignment, masks and lags against a plain loop; frames by round trip and with damaged bytes."""

import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_kit import sample, task
from tests.learner_steps import packed_by_ranks
from tests.refusals import refusal
from tidemill.bus.wire.messages import Plan, Sample, Status
from tidemill.learner.batch.batch import MicroBatch, StepBatch
from tidemill.learner.batch.batching import build_batches
from tidemill.learner.buffer.assignment import assign
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.errors import FeedError
from tidemill.learner.feed.data_metrics import lags_of
from tidemill.learner.feed.feed_messages import decode_batch, encode_batch, encode_metadata, unpack
from tidemill.learner.ranks.rollout_only import figures


def plan_of(
    samples: list[Sample],
    *,
    step: int = 3,
    oldest_step: int | None = None,
    data_parallel: int = 1,
    max_tokens: int = 16,
    minibatches: int = 1,
) -> Plan:
    """Return the plan of these samples. Version v is the weights of step v."""
    ids = sorted({one.task for one in samples})
    sizes = [sum(one.task == id for one in samples) for id in ids]
    in_group = [sum(len(one.sizes) for one in samples if one.task == id) for id in ids]
    rows = np.array([len(one.sizes) for one in samples], np.int32)
    lengths = [size.num_tokens for one in samples for size in one.sizes]
    packed = assign(
        lengths, data_parallel=data_parallel, max_tokens=max_tokens, minibatches=minibatches, group_sizes=in_group
    )
    return Plan(
        epoch=1,
        step=step,
        tasks=np.array(ids, np.int64),
        seqs=np.arange(1, len(samples) + 1),
        group_sizes=np.array(sizes, np.int32),
        ranks=packed.ranks,
        micro_batches=packed.micro_batches,
        version_steps={span.version: span.version for one in samples for span in one.spans},
        oldest_step=oldest_step,
        data_parallel=data_parallel,
        num_micro_batches=packed.num_micro_batches,
        num_minibatches=packed.num_minibatches,
        config_digest="",
        chain="",
        rows=rows if (rows > 1).any() else None,
    )


@st.composite
def steps(draw: st.DrawFn) -> list[Sample]:
    samples = []
    for id in range(1, draw(st.integers(1, 3)) + 1):
        for index in range(draw(st.integers(1, 3))):
            spans = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=3))
            one = sample(task(id), index, spans)
            mask = np.array(
                draw(st.lists(st.integers(0, 1), min_size=one.response_length, max_size=one.response_length)), np.uint8
            )
            samples.append(replace(one, loss_mask=mask))
    return samples


def tokens_by_loop(one: Sample, plan: Plan) -> dict[tuple[int, int], tuple[float, int]]:
    """Map (position of the target, token) to (log-prob, lag) of the trainable tokens."""
    found, prompt = {}, len(one.tokens) - one.response_length
    versions = [span.version for span in one.spans for _ in range(span.num_tokens)]
    for position, version in enumerate(versions):
        step = plan.version_steps[version]
        if one.loss_mask[position] and (plan.oldest_step is None or step >= plan.oldest_step):
            target = prompt + position
            found[target, int(one.tokens[target])] = (float(one.rollout_log_probs[position]), plan.step - 1 - step)
    return found


@given(steps(), st.integers(1, 3), st.sampled_from([None, 0, 1, 2]), st.integers(1, 4))
def test_ranks_together_hold_every_token_once(
    samples: list[Sample], data_parallel: int, oldest_step: int | None, pad_to: int
) -> None:
    plan = plan_of(samples, oldest_step=oldest_step, data_parallel=data_parallel)
    batches = build_batches(plan, samples, pad_to=pad_to)
    found: dict[int, dict[tuple[int, int], tuple[float, int]]] = {row: {} for row in range(len(samples))}
    inputs: dict[int, list[int]] = {row: [] for row in range(len(samples))}
    for batch in batches:
        assert len(batch.micro_batches) == plan.num_micro_batches
        for part in batch.micro_batches:
            assert len(part.tokens_T) % pad_to == 0
            assert part.cu_seqlens[0] == 0
            assert part.cu_seqlens[-1] == len(part.tokens_T) > 0
            for at in range(len(part.tokens_T)):
                if (row := int(part.sample_T[at])) >= 0:
                    inputs[row].append(int(part.tokens_T[at]))
                if part.loss_mask_T[at]:
                    place = (int(part.position_ids_T[at]) + 1, int(part.targets_T[at]))
                    found[row][place] = (float(part.rollout_log_probs_T[at]), int(part.lag_T[at]))
                else:
                    assert (part.lag_T[at], part.rollout_log_probs_T[at]) == (-1, 0)
    assert found == {row: tokens_by_loop(one, plan) for row, one in enumerate(samples)}
    assert inputs == {row: one.tokens.tolist() for row, one in enumerate(samples)}
    assert {batch.num_tokens for batch in batches} == {sum(len(tokens_by_loop(one, plan)) for one in samples)}


@given(steps(), st.integers(1, 3), st.sampled_from([None, 1]))
def test_lag_is_the_time_in_flight_and_the_time_in_the_queue(
    samples: list[Sample], data_parallel: int, oldest_step: int | None
) -> None:
    plan = plan_of(samples, data_parallel=data_parallel, oldest_step=oldest_step)
    in_queue, in_flight, tokens = lags_of(
        plan, [index_of(int(seq), one) for seq, one in zip(plan.seqs, samples, strict=True)]
    )
    in_queue, in_flight = np.repeat(in_queue, tokens), np.repeat(in_flight, tokens)
    expected = []
    for one in samples:
        lags = [lag for _, lag in tokens_by_loop(one, plan).values()]
        expected += [(min(lags), lag - min(lags)) for lag in lags]
    assert sorted(zip(in_queue.tolist(), in_flight.tolist(), strict=True)) == sorted(expected)
    assert (in_queue >= 0).all() and (in_flight >= 0).all()


def test_rows_of_the_step_are_the_same_on_every_rank() -> None:
    samples = [sample(task(id), index, reward={"score": float(id), "format": 1.0}) for id in (1, 2) for index in (0, 1)]
    samples[3] = replace(samples[3], status=Status.TRUNCATED)
    samples[2:] = [replace(one, sampling=replace(one.sampling, temperature=0.7)) for one in samples[2:]]
    for batch in build_batches(plan_of(samples, data_parallel=2), samples, recorded=True, state=b"s"):
        assert batch.rewards_N.tolist() == [1, 1, 2, 2]
        assert batch.groups_N.tolist() == [1, 1, 2, 2]
        assert batch.response_lengths_N.tolist() == [3, 3, 3, 3]
        assert batch.truncated_N.tolist() == [False, False, False, True]
        assert (batch.recorded, batch.state, batch.temperatures_N.tolist()) == (True, b"s", [1.0, 1.0, 0.7, 0.7])


@given(steps(), st.integers(1, 2), st.sampled_from([None, 1, 2]), st.integers(1, 3))
def test_minibatches_and_trainable_tokens_of_every_sample_are_known_everywhere(
    samples: list[Sample], data_parallel: int, oldest_step: int | None, minibatches: int
) -> None:
    """Group g is in minibatch g mod M, and so are the rows that hold its tokens."""
    plan = plan_of(samples, oldest_step=oldest_step, data_parallel=data_parallel, minibatches=minibatches)
    groups = sorted({one.task for one in samples})
    for batch in build_batches(plan, samples):
        assert batch.num_minibatches == min(minibatches, len(groups))
        assert batch.minibatches_N.tolist() == [groups.index(one.task) % batch.num_minibatches for one in samples]
        assert batch.trainable_N.tolist() == [len(tokens_by_loop(one, plan)) for one in samples]
        each = len(batch.micro_batches) // batch.num_minibatches
        for number, part in enumerate(batch.micro_batches):
            assert set(batch.minibatches_N[part.sample_T[part.sample_T >= 0]]) <= {number // each}


def test_a_lost_end_is_seen() -> None:
    """Status completed without a final token is reported, except where a string ended the response or no end token is
    known.
    """
    whole = sample(task(1), 0)
    last = int(whole.tokens[-1])
    cut = replace(whole, status=Status.TRUNCATED)
    stopped = replace(whole, sampling=replace(whole.sampling, stop=("x",)))
    by_id = replace(whole, sampling=replace(whole.sampling, stop_token_ids=(last,)))
    samples = [replace(one, index=index) for index, one in enumerate((whole, cut, stopped, by_id))]
    found = {
        eos: build_batches(plan_of(samples), samples, eos_ids=eos)[0].unended_N
        for eos in (frozenset(), frozenset({last + 1}))
    }
    assert not found[frozenset()].any()
    assert found[frozenset({last + 1})].tolist() == [True, False, False, False]
    assert not build_batches(plan_of(samples), samples, eos_ids=frozenset({last}))[0].unended_N.any()


def test_demonstrations_are_in_no_figure_of_a_policy() -> None:
    """They have no log-probs, and may end as they like."""
    own = sample(task(1), 0)
    shown = replace(
        sample(task(2), 0), rollout_log_probs=np.zeros_like(own.rollout_log_probs), reward=5.0, demonstration=True
    )
    eos = frozenset({int(own.tokens[-1]) + 1})
    both, alone = (build_batches(plan_of(samples), samples, eos_ids=eos)[0] for samples in ([own, shown], [shown]))
    for batch in (both, alone):
        assert batch.unended_N.all()
    assert both.engine_log_probs.tolist() == own.rollout_log_probs.tolist() and not len(alone.engine_log_probs)
    found = figures(both)
    assert (
        found["data/logprob_mean"] == pytest.approx(own.rollout_log_probs.mean()) and found["train/unended_share"] == 1
    )
    assert (
        found["train/reward_mean"] == own.score
        and not {"data/logprob_mean", "train/unended_share"} & figures(alone).keys()
    )


def test_an_empty_micro_batch_is_one_masked_row() -> None:
    one = sample(task(1), 0)
    (_, empty) = build_batches(plan_of([one], data_parallel=2), [one], pad_to=2)
    (part,) = empty.micro_batches
    assert part.sample_T.tolist() == [-1, -1]
    assert part.cu_seqlens.tolist() == [0, 2]
    assert not part.loss_mask_T.any()


def same(one: Any, other: Any) -> bool:
    for field in fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            assert np.array_equal(left, right), field.name
        elif isinstance(left, tuple) and field.name == "micro_batches":
            assert len(left) == len(right)
            assert all(same(a, b) for a, b in zip(left, right, strict=True))
        else:
            assert left == right, field.name
    return True


def received(batch: StepBatch, *, offset: int = 0) -> StepBatch:
    """Return the batches after a round trip through bytes, each frame at an odd address if ``offset`` is odd."""
    frames = [memoryview(bytearray(bytes(offset) + bytes(frame)))[offset:] for frame in encode_batch(batch)]
    return decode_batch(unpack(frames[0], where="test"), frames[1:])


@given(steps(), st.integers(0, 3))
@settings(max_examples=30)
def test_frames_round_trip(samples: list[Sample], offset: int) -> None:
    for batch in build_batches(plan_of(samples, data_parallel=2), samples, state=b"state"):
        again = received(batch, offset=offset)
        assert same(batch, again)
        arrays = [getattr(part, field.name) for part in again.micro_batches for field in fields(MicroBatch)]
        assert all(array.flags.aligned and array.flags.writeable for array in arrays)


@given(steps(), st.integers(1, 3), st.sampled_from([1, 4]), st.sampled_from([None, 1]))
@settings(max_examples=30)
def test_ranks_that_pack_their_share_have_the_same_batch(
    samples: list[Sample], data_parallel: int, pad_to: int, oldest_step: int | None
) -> None:
    """Of an index without tokens that came over msgpack, and of the samples."""
    plan = plan_of(samples, data_parallel=data_parallel, oldest_step=oldest_step)
    whole = build_batches(plan, samples, pad_to=pad_to)
    assert all(map(same, whole, packed_by_ranks(plan, samples, pad_to=pad_to)))


def test_metadata_is_one_more_frame() -> None:
    samples = [sample(task(1), 0, metadata={"level": "hard", "ids": [1, 2**40]}), sample(task(1), 1, metadata={})]
    (batch,) = build_batches(plan_of(samples), samples)
    frames = [bytes(frame) for frame in encode_batch(batch)]
    header, packed = unpack(frames[0], where="test"), encode_metadata([index_of(0, one) for one in samples])
    again = decode_batch(header, [*frames[1:], packed], with_metadata=True)
    assert again.metadata == ({"level": "hard", "ids": [1, 2**40]}, {})
    assert again.rewards_N.tolist() == batch.rewards_N.tolist() and decode_batch(header, frames[1:]).metadata == ()
    for other, what in (
        (b"", "metadata of 2"),
        (encode_metadata([index_of(0, samples[0])]), "got 1"),
        (packed[:-1], "metadata of 2"),
        (b"\x92\1\2", "got 2"),
    ):
        with pytest.raises(FeedError, match=what):
            decode_batch(header, [*frames[1:], other], with_metadata=True)
    with refusal(FeedError, where="batch 3", got=len(frames) - 1):
        decode_batch(header, frames[1:], with_metadata=True)


def test_missing_and_cut_frames_are_refused() -> None:
    samples = [sample(task(1), 0), sample(task(1), 1)]
    (batch,) = build_batches(plan_of(samples), samples)
    frames = [bytes(frame) for frame in encode_batch(batch)]
    header = unpack(frames[0], where="test")
    with refusal(FeedError, where="batch 3", got=len(frames) - 2):
        decode_batch(header, frames[1:-1])
    at = frames.index(batch.micro_batches[0].tokens_T.tobytes())
    with refusal(FeedError, where="batch frame tokens_T", got=95):
        decode_batch(header, [*frames[1:at], frames[at][:-1], *frames[at + 1 :]])
    with refusal(FeedError, where="batch 3", got=re.compile(r"\b11\b")):
        decode_batch(header, [*frames[1:at], frames[at][:-8], *frames[at + 1 :]])


def test_a_header_that_is_none_is_refused() -> None:
    for frame in (b"", b"\xc1", b"\x01", b"\x80"):
        with refusal(FeedError, where="somewhere"):
            unpack(frame, where="somewhere")


def test_tokens_of_a_later_step_are_our_own_mistake() -> None:
    one = sample(task(1), 0, ((3, 2),))
    with pytest.raises(AssertionError, match="later step"):
        build_batches(plan_of([one], step=3), [one])
