"""Filters: decisions of the built-in ones, results that a function of a user may have, and groups that are dropped,
masked and ordered.
"""

import json
import math
import random
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data_kit import rules, sample, task
from tests.examples import THOROUGH
from tests.refusals import refusal
from tests.unit.test_datasource import Pond
from tidemill.bus.errors import WireError
from tidemill.bus.section import read
from tidemill.bus.wire.codec import decode_record, encode_record
from tidemill.bus.wire.messages import MASKED_SAMPLES, Plan, SequenceSize, Settle, Status
from tidemill.learner.batch.batching import build_batches
from tidemill.learner.buffer.groups import Verdict
from tidemill.learner.buffer.step_plan import Waits, chain_of
from tidemill.learner.data import BUILT_IN, Filters, identity_of
from tidemill.learner.filters import (
    FILTER,
    TABLE,
    Decision,
    FilterGroup,
    FilterSample,
    decision_in,
    decision_of,
    group_of,
)
from tidemill.rewards.errors import BadRewardOption, RewardFailed
from tidemill.rewards.registry import bind

STEPS = 12 if THOROUGH else 4
"""Steps of a run of which groups are rejected."""


def one(index: int = 0, reward: float = 0.0, **values: Any) -> FilterSample:
    found = {
        "parts": {},
        "response": "",
        "tokens": np.arange(5, dtype=np.int32),
        "log_probs": np.full(3, -1.0, np.float32),
        "loss_mask": np.ones(3, np.uint8),
        "status": Status.COMPLETED,
        "sequences": (SequenceSize(5, 3),),
    }
    return FilterSample(index=index, reward=reward, **(found | values))


def group(*samples: FilterSample) -> FilterGroup:
    return FilterGroup(prompt="p", label=None, metadata={}, samples=samples)


def rewards(*values: float) -> FilterGroup:
    return group(*(one(index, value) for index, value in enumerate(values)))


def decide(name: str, of: FilterGroup, **options: Any) -> Decision:
    return decision_in(name, decision_of(name, bind(name, options, FILTER)(of)), of)


def test_every_filter_that_ships_is_found() -> None:
    assert set(TABLE) == set(BUILT_IN)
    for name in BUILT_IN:
        bind(name, {"vocab_size": 10} if name == "gibberish" else {}, FILTER)


@pytest.mark.parametrize(
    ("values", "options", "keep"),
    [
        ((1.0, 1.0, 1.0), {}, False),
        ((1.0, 1.0, 0.0), {}, True),
        ((0.1 + 0.2, 0.3), {}, False),  # they differ by the rounding of float64
        ((0.1 + 0.2, 0.3), {"tolerance": 0.0}, True),
        ((0.0, 1e-3), {"tolerance": 1e-2}, False),
        ((5.0,), {}, False),
    ],
)
def test_equal_rewards(values: tuple[float, ...], options: dict[str, float], keep: bool) -> None:
    assert decide("equal_rewards", rewards(*values), **options).keep is keep


def test_a_part_of_the_reward_may_decide() -> None:
    of = group(one(0, 0.5, parts={"correct": 1.0, "form": 0.0}), one(1, 0.2, parts={"correct": 1.0, "form": 1.0}))
    assert decide("equal_rewards", of).keep
    assert not decide("equal_rewards", of, part="correct").keep
    assert decide("equal_rewards", of, part="form").keep
    with refusal(RewardFailed, word="filter", reason=re.compile("'acc'")):
        decide("equal_rewards", of, part="acc")


@pytest.mark.parametrize(("mean", "reason"), [(0.0, "hard"), (0.1, ""), (0.5, ""), (0.9, ""), (1.0, "easy")])
def test_mean_reward(mean: float, reason: str) -> None:
    found = decide("mean_reward", rewards(mean, mean), at_least=0.1, at_most=0.9)
    assert (found.keep, found.reason) == (not reason, reason)


def test_truncated_samples_are_masked_and_groups_of_many_dropped() -> None:
    of = group(one(0), one(1, status=Status.TRUNCATED), one(2, status=Status.TRUNCATED))
    assert decide("truncated", of) == Decision(masked=(1, 2))
    assert not decide("truncated", of, max_share=0.5).keep
    assert decide("truncated", of, max_share=0.7).keep


def test_length() -> None:
    of = group(
        *(
            one(index, loss_mask=np.array([1] * count + [0] * (9 - count), np.uint8))
            for index, count in enumerate((1, 4, 9))
        )
    )
    assert decide("length", of, at_least=2, at_most=8).masked == (0, 2)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40), st.integers(1, 6))
def test_repetition_counts_certain_tokens_in_a_row(tokens: list[tuple[bool, bool]], window: int) -> None:
    """(certain, sampled) of each token: tokens of the environment are passed over."""
    log_probs = np.array(
        [0.0 if certain and sampled else -3.0 if sampled else 0.0 for certain, sampled in tokens], np.float32
    )
    of = group(one(0, log_probs=log_probs, loss_mask=np.array([sampled for _, sampled in tokens], np.uint8)))
    sampled = "".join("x" if certain else " " for certain, sampled in tokens if sampled)
    longest = max(map(len, sampled.split(" ")))
    assert (decide("repetition", of, window=window).masked == (0,)) is (longest >= window)


def test_gibberish_wants_a_rare_token_of_low_probability() -> None:
    bound = -math.log(1000) - 2

    def of(id: int, log_prob: float, mask: int = 1) -> FilterGroup:
        tokens, log_probs = np.array([1, 2, 3, id, 4], np.int32), np.array([-1.0, log_prob, -1.0], np.float32)
        return group(one(0, tokens=tokens, log_probs=log_probs, loss_mask=np.array([1, mask, 1], np.uint8)))

    masked = [
        decide("gibberish", one, vocab_size=1000, rare_from=500).masked
        for one in (of(501, bound - 0.1), of(500, bound - 0.1))
    ]
    masked += [
        decide("gibberish", one, vocab_size=1000, rare_from=500).masked
        for one in (of(501, bound + 0.1), of(501, bound - 0.1, 0))
    ]
    assert masked == [(0,), (), (), ()]

    # Two sequences of three tokens, two of them responses: 501 is the second's context, 502 its first sampled token.
    tokens, log_probs = (
        np.array([1, 2, 3, 501, 502, 4], np.int32),
        np.array([bound - 1, -1.0, -1.0, bound - 1], np.float32),
    )
    episode = one(
        0,
        tokens=tokens,
        log_probs=log_probs,
        loss_mask=np.ones(4, np.uint8),
        sequences=(SequenceSize(3, 2), SequenceSize(3, 2)),
    )
    (again,) = FILTER.decode(json.loads(FILTER.encode(group(episode)))).samples
    assert episode.response_tokens.tolist() == again.response_tokens.tolist() == [2, 3, 502, 4]
    assert decide("gibberish", group(episode), vocab_size=1000, rare_from=500).masked == ()
    rare = replace(episode, log_probs=np.array([-1.0, -1.0, bound - 1, -1.0], np.float32))
    assert decide("gibberish", group(rare), vocab_size=1000, rare_from=500).masked == (0,)
    with refusal(BadRewardOption, reward="gibberish", option="vocab_size"):
        bind("gibberish", {}, FILTER)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (True, {}),
        (None, {}),
        ("", {}),
        (np.True_, {}),
        (False, {"keep": False}),
        ("too easy: 1.0", {"keep": False, "reason": "too_easy__1.0"}),
        ("x" * 100, {"keep": False, "reason": "x" * 40}),
        ({"masked": [1]}, {"masked": [1]}),
        ({"priority": 2}, {"priority": 2.0}),
        (
            SimpleNamespace(keep=False, reason="zero_std_0.0", keep_when_insufficient=True),
            {"keep": False, "reason": "zero_std_0.0"},
        ),
        (Decision(masked=(0,)), {"masked": [0]}),
    ],
)
def test_what_a_filter_may_return(result: object, found: dict[str, object]) -> None:
    assert decision_of("f", result) == {"keep": True, "reason": "", "masked": [], "priority": 0.0} | found


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (1, "want true, false, a reason"),
        ([True], "want true, false, a reason"),
        ({"drop": True}, "want true, false, a reason"),
        ({"keep": 1}, "keep: want true or false, got 1"),
        ({"masked": "1"}, "masked: want a list"),
        ({"masked": [True]}, "masked: want a list"),
        ({"priority": "high"}, r"priority: want a number within \+-1e6"),
        ({"priority": math.nan}, "priority"),
        ({"priority": 1e7}, "priority"),
    ],
)
def test_what_a_filter_may_not_return(result: object, words: str) -> None:
    with refusal(RewardFailed, reward="f", word="filter", reason=re.compile(words)):
        decision_of("f", result)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda of: st.lists(of) | st.dictionaries(st.text(), of),
    )
)
def test_any_result_is_a_decision_or_refused(result: object) -> None:
    try:
        found = decision_of("f", result)
        decision_in("f", found, rewards(0.0, 1.0))
    except RewardFailed:
        return
    assert set(found) == {"keep", "reason", "masked", "priority"}


def test_a_group_is_the_same_on_both_sides_of_a_child() -> None:
    of = group_of(
        task(7), [sample(task(7), index, ((0, 3),), reward={"score": 1.0, "a": 0.5}) for index in range(2)], {0: 0}, 3
    )
    import json

    again = FILTER.decode(json.loads(FILTER.encode(of)))
    assert again.samples[1].parts == {"score": 1.0, "a": 0.5}
    assert again.samples[0].lag == of.samples[0].lag == 2
    for mine, other in zip(of.samples, again.samples, strict=True):
        assert (mine.index, mine.reward, mine.status, mine.response) == (
            other.index,
            other.reward,
            other.status,
            other.response,
        )
        for name in ("tokens", "log_probs", "loss_mask"):
            assert np.array_equal(getattr(mine, name), getattr(other, name))


# ---- settings


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"f": {"use": "equal_reward"}}, {"place": "filters.f.use", "got": "'equal_reward'"}),
        ({"f": {}}, {"place": "filters.f.use", "got": "nothing"}),
        ({"f": 3}, {"place": "filters.f", "got": "3"}),
        ({"a b": "equal_rewards"}, {"place": "filters.a b", "got": "'a b'"}),
        ({"f": {"use": "m:f", "optoins": {}}}, {"place": "filters.f.optoins"}),
        ({"f": {"use": "m:f", "options": 3}}, {"place": "filters.f.options", "got": "3"}),
        ({"f": {"use": "m:f", "count_only": "no"}}, {"place": "filters.f.count_only", "got": "'no'"}),
        ({"f": {"use": "m:f", "scope": "step"}}, {"place": "filters.f.scope", "got": "'step'"}),
        (
            {"f": {"use": "length", "scope": "buffer"}},
            {"place": "filters.f.scope", "got": "buffer"},
        ),
        ({"f": {"use": "m:f", "timeout_s": 0}}, {"place": "filters.f.timeout_s", "got": "0"}),
        ({"f": {"use": "m:f", "workers": 0}}, {"place": "filters.f.workers", "got": "0"}),
    ],
)
def test_bad_settings_are_refused(value: dict[str, Any], words: dict[str, Any]) -> None:
    with refusal(ValueError, **words):
        tuple(read(Filters, value, "filters").values())


def test_only_filters_that_decide_are_part_of_the_rules() -> None:
    counted = tuple(read(Filters, {"a": {"use": "equal_rewards", "count_only": True}}, "filters").values())
    deciding = tuple(read(Filters, {"a": {"use": "equal_rewards", "timeout_s": 3}}, "filters").values())
    assert (identity_of(()), identity_of(counted)) == ("", "[]"), "groups wait for filters that only count, too"
    assert identity_of(deciding) == '[["a", "equal_rewards", {}]]'
    of_all = tuple(read(Filters, {"a": {"use": "m:f", "scope": "buffer"}}, "filters").values())
    assert (
        identity_of(of_all)
        == '[["a", "m:f", {}, "buffer"]]'
        != identity_of(tuple(read(Filters, {"a": "m:f"}, "filters").values()))
    )
    assert rules().digest == rules(filters="", over_sampling=0.0).digest != replace(rules(), filters="x").digest


# ---- groups that are dropped, masked and ordered


def test_a_complete_group_waits_for_its_verdict() -> None:
    pond = Pond(filters="f")
    for of in pond.issue(1, 2):
        pond.complete(of)
    assert "2 wait for the filters" in pond.waits().text
    assert [of.id for of, _ in pond.source.unjudged()] == [1, 2]
    for of, seqs in pond.source.unjudged():
        assert len(seqs) == 2
        pond.source.judged(of.id, Verdict())
    assert pond.take_plan().masked is None


def test_a_dropped_group_is_settled_for_its_filter_and_its_place_is_free() -> None:
    pond = Pond(filters="f", max_lag=0)
    for of in pond.issue(1, 2):
        pond.complete(of)
    assert pond.source.wanted() is None
    pond.source.judged(1, Verdict(reason="filtered:f:easy"))
    pond.source.judged(2, Verdict())
    settle = pond.take_settle()
    assert (settle.reason, settle.tasks.tolist(), len(settle.seqs)) == ("filtered:f:easy", [1], 2)
    books = pond.source.accounting()
    assert books.balanced
    assert books.dropped == {"filtered:f:easy": 2}
    assert pond.source.filtered == 1
    wanted = pond.source.wanted()
    assert wanted is not None
    assert wanted.reissue_of is None, "a prompt that was filtered is not issued again"


def test_reasons_of_filters_are_bounded() -> None:
    pond = Pond(filters="f", steps=1000, max_lag=20, max_refill=1e9)
    for number in range(1, 201):
        (of,) = pond.issue(number)
        pond.complete(of)
        pond.source.judged(number, Verdict(reason=f"filtered:f:{number}"))
        pond.take_settle()
    books = pond.source.accounting()
    assert len(books.settled) <= 65
    assert books.balanced
    assert sum(books.settled.values()) == 200


def test_masked_samples_are_in_the_plan_and_not_trained() -> None:
    pond = Pond(filters="f")
    samples = {}
    for of in pond.issue(1, 2):
        pond.complete(of)
        samples[of.id] = [sample(of, index, ((of.min_version, 3),), reward=float(index)) for index in range(2)]
    pond.source.judged(1, Verdict(masked=frozenset({1})))
    pond.source.judged(2, Verdict())
    plan = pond.take_plan()
    assert plan.masked is not None
    assert plan.masked.tolist() == [2]
    assert plan.schema == MASKED_SAMPLES
    tokens = pond.source.accounting().tokens
    assert (tokens["trained"], tokens["filtered"]) == (9, 3)
    again = decode_record(encode_record(plan))
    assert isinstance(again, Plan)
    assert again.masked is not None
    assert again.masked.tolist() == [2]
    assert chain_of("0" * 64, again) == plan.chain != chain_of("0" * 64, replace(plan, masked=None))
    (batch,) = build_batches(plan, [*samples[1], *samples[2]])
    assert batch.trainable_N.tolist() == [3, 0, 3, 3]
    assert batch.num_tokens == 9
    assert batch.rewards_N.tolist() == [0.0, 1.0, 0.0, 1.0], "a masked sample counts in the baseline of its group"
    assert batch.sampled_N.tolist() == [3, 3, 3, 3]
    for row in batch.micro_batches:
        assert not row.loss_mask_T[row.sample_T == 1].any()
        assert not row.rollout_log_probs_T[row.sample_T == 1].any()


def test_a_plan_that_masks_what_it_does_not_hold_is_refused() -> None:
    pond = Pond(filters="f")
    for of in pond.issue(1, 2):
        pond.complete(of)
        pond.source.judged(of.id, Verdict(masked=frozenset({1})))
    plan = pond.take_plan()
    for wrong in (np.array([99], np.int64), np.zeros(0, np.int64)):
        with refusal(WireError, field="masked"):
            decode_record(encode_record(replace(plan, masked=wrong)))


def test_a_group_without_trained_tokens_is_dropped_for_its_filter() -> None:
    pond = Pond(filters="f")
    (of,) = pond.issue(1)
    pond.complete(of)
    pond.source.judged(1, Verdict(reason="filtered:f", masked=frozenset({0, 1})))
    assert pond.take_settle().reason == "filtered:f"


def test_priority_orders_what_is_young_enough() -> None:
    pond = Pond(filters="f", max_lag=1, groups_per_step=1)
    first, second = pond.issue(1, 2)
    for of, priority in ((first, 0.0), (second, 5.0)):
        pond.complete(of)
        pond.source.judged(of.id, Verdict(priority=priority))
    assert pond.take_plan().tasks.tolist() == [2]
    pond.source.published(1, 1)
    (third,) = pond.issue(3)
    pond.complete(third, (1, 3))
    pond.source.judged(3, Verdict(priority=100.0))
    # Task 1 is of step 0: at step 2 it has lag 1, and at step 3 it would be too old, so no priority comes before it.
    assert pond.take_plan().tasks.tolist() == [1]
    assert pond.take_plan().tasks.tolist() == [3]


@pytest.mark.parametrize("rejected", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize(("max_lag", "over_sampling"), [(0, 0.0), (0, 1.5), (2, 0.5)])
def test_no_share_of_rejected_groups_stops_a_run(rejected: float, max_lag: int, over_sampling: float) -> None:
    chance = random.Random(round(1000 * rejected) + max_lag)
    pond = Pond(
        filters="f",
        steps=STEPS,
        groups_per_step=4,
        max_lag=max_lag,
        over_sampling=over_sampling,
        max_refill=4.0,
        gate="drop",
    )
    issued = dropped = trained = 0
    for _ in range(20_000):
        if pond.source.step == STEPS:
            break
        while (wanted := pond.source.wanted()) is not None:
            issued += 1
            changes = (
                {"reissue_of": wanted.reissue_of, "reissues": wanted.reissues} if wanted.reissue_of is not None else {}
            )
            (of,) = pond.issue(issued, prompt_epoch=wanted.prompt_epoch, offset=wanted.offset, **changes)
            if chance.random() < 0.7:
                pond.complete(of)
        for of in [group.task for group in pond.source.groups.values() if not group.samples]:
            if chance.random() < 0.5:
                pond.complete(of, (pond.source.head[0] if max_lag else of.min_version, 3))  # type: ignore[index]
        for of, _ in pond.source.unjudged():
            pond.source.judged(of.id, Verdict(reason="filtered:f") if chance.random() < rejected else Verdict())
        pond.now += 100
        record = pond.source.plan(pond.now)
        if not isinstance(record, Waits):
            pond.records += 1
            pond.source.apply(record, pond.records)
            dropped += len(record.tasks) * isinstance(record, Settle)
            if isinstance(record, Plan):
                trained += len(record.tasks)
                assert 1 <= len(record.tasks) <= 4
                pond.source.published(record.step, record.step)
        books = pond.source.accounting()
        assert books.balanced
        assert books.issued == trained + dropped + books.open
    assert pond.source.step == STEPS, pond.source.plan(pond.now)
