"""Each promise of a sample, broken once."""

import math
from typing import Any

import numpy as np
import pytest

from tests.bus_kit import make_partial, make_sample
from tests.refusals import refusal
from tidemill.bus.errors import WireError
from tidemill.bus.wire.invariants import MAX_REWARD, MAX_SECONDS, MIN_LOG_PROB, check_partial, check_sample
from tidemill.bus.wire.messages import Span, Timings


def with_value(array: Any, where: int, value: float) -> Any:
    changed = array.copy()
    changed[where] = value
    return changed


SOUND = make_sample()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"task": 0}, "task"),
        ({"task": 2**63}, "task"),
        ({"index": 8}, "index"),
        ({"index": -1}, "index"),
        ({"attempt": ""}, "attempt"),
        ({"response_length": 12}, "response_length"),
        ({"response_length": -1}, "response_length"),
        ({"rollout_log_probs": np.zeros(7, np.float32)}, "rollout_log_probs"),
        ({"loss_mask": np.ones(9, np.uint8)}, "loss_mask"),
        ({"tokens": with_value(SOUND.tokens, 4, -1)}, "tokens[4]"),
        ({"tokens": with_value(SOUND.tokens, 5, 100)}, "tokens[5]"),
        ({"loss_mask": with_value(SOUND.loss_mask, 2, 2)}, "loss_mask[2]"),
        ({"rollout_log_probs": with_value(SOUND.rollout_log_probs, 3, 1e-4)}, "rollout_log_probs[3]"),
        ({"rollout_log_probs": with_value(SOUND.rollout_log_probs, 3, np.nan)}, "rollout_log_probs[3]"),
        ({"rollout_log_probs": with_value(SOUND.rollout_log_probs, 3, -np.inf)}, "rollout_log_probs[3]"),
        ({"rollout_log_probs": with_value(SOUND.rollout_log_probs, 3, np.inf)}, "rollout_log_probs[3]"),
        ({"loss_mask": with_value(SOUND.loss_mask, 6, 0)}, "rollout_log_probs[6]"),
        ({"spans": (Span(version=3, num_tokens=7),)}, "spans"),
        ({"spans": (Span(version=3, num_tokens=8), Span(version=4, num_tokens=0))}, "spans"),
        ({"spans": (Span(version=-1, num_tokens=8),)}, "spans"),
        ({"spans": ()}, "spans"),
        ({"reward": float("nan")}, "reward"),
        ({"reward": {"score": 1.0, "length": float("inf")}}, "reward.length"),
        ({"reward": {}}, "reward"),
        ({"reward": 1.001 * MAX_REWARD}, "reward"),
        ({"reward": -1e39}, "reward"),
        ({"reward": {"score": 1.0, "length": 1e308}}, "reward.length"),
        ({"reward": {"length": 0.6 * MAX_REWARD, "format": 0.6 * MAX_REWARD}}, "reward"),
        ({"rollout_log_probs": with_value(SOUND.rollout_log_probs, 3, -3e38)}, "rollout_log_probs[3]"),
        ({"rollout_log_probs": with_value(SOUND.rollout_log_probs, 7, 1.01 * MIN_LOG_PROB)}, "rollout_log_probs[7]"),
        ({"timings": Timings(reward_s=math.nan)}, "timings.reward_s"),
        ({"timings": Timings(queued_s=-math.inf)}, "timings.queued_s"),
        ({"timings": Timings(generating_s=1e308)}, "timings.generating_s"),
        ({"created_s": math.inf}, "created_s"),
        ({"created_s": 1.01 * MAX_SECONDS}, "created_s"),
    ],
)
def test_a_broken_promise_names_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(WireError) as caught:
        check_sample(make_sample(**change), vocab_size=100)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rollout_log_probs": with_value(SOUND.rollout_log_probs, 3, 1e-6)},
        {
            "loss_mask": with_value(SOUND.loss_mask, 6, 0),
            "rollout_log_probs": with_value(SOUND.rollout_log_probs, 6, 0),
        },
        {"spans": (Span(version=0, num_tokens=3), Span(version=9, num_tokens=5))},
        {"reward": {"score": -1.0}},
        {"reward": -MAX_REWARD},
        {"reward": {"score": MAX_REWARD, "length": -MAX_REWARD}},
        {"rollout_log_probs": with_value(SOUND.rollout_log_probs, 3, MIN_LOG_PROB)},
        {"timings": Timings(queued_s=-0.001, generating_s=MAX_SECONDS), "created_s": 1.8e9},
        {"tokens": with_value(SOUND.tokens, 5, 99)},
    ],
)
def test_what_is_sound_passes(change: dict[str, Any]) -> None:
    check_sample(make_sample(**change), vocab_size=100)


def test_an_empty_response_passes() -> None:
    check_sample(make_sample(length=0), vocab_size=100)


def test_without_a_vocabulary_only_negative_ids_are_refused() -> None:
    check_sample(make_sample(rollout_log_probs=SOUND.rollout_log_probs), vocab_size=None)
    with refusal(WireError, field="tokens[0]"):
        check_sample(make_sample(tokens=with_value(SOUND.tokens, 0, -5)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"task": 0}, "task"),
        ({"index": -1}, "index"),
        ({"attempt": ""}, "attempt"),
        ({"tokens": np.zeros(0, np.int32)}, "sample_seq"),
        ({"sample_seq": 7}, "sample_seq"),
        ({"position": 2}, "position"),
        ({"rollout_log_probs": np.zeros(2, np.float32)}, "rollout_log_probs"),
        ({"tokens": np.array([8, -1, 9], np.int32)}, "tokens"),
        ({"rollout_log_probs": np.array([-1, np.nan, -1], np.float32)}, "rollout_log_probs"),
        ({"rollout_log_probs": np.array([-1, 0.5, -1], np.float32)}, "rollout_log_probs"),
        ({"rollout_log_probs": np.array([-1, -3e38, -1], np.float32)}, "rollout_log_probs[1]"),
        ({"spans": (Span(version=3, num_tokens=2),)}, "spans"),
        ({"timings": Timings(generating_s=math.nan)}, "timings.generating_s"),
    ],
)
def test_a_broken_promise_of_a_partial_is_named(change: dict[str, Any], field: str) -> None:
    check_partial(make_partial())
    with pytest.raises(WireError) as caught:
        check_partial(make_partial(**change))
    assert field in caught.value.field


def test_the_note_of_a_finished_sample_has_no_tokens() -> None:
    nothing = {"tokens": np.zeros(0, np.int32), "rollout_log_probs": np.zeros(0, np.float32), "spans": ()}
    check_partial(make_partial(sample_seq=7, **nothing))
    with pytest.raises(WireError):
        check_partial(make_partial(**nothing))


def test_what_a_step_makes_of_the_largest_reward_is_a_finite_float32() -> None:
    """The squared norm of a gradient, as the docstring of the bound derives it, and the float32 values that remain
    distinct.
    """
    largest_weight = np.float32(np.exp(20.0))
    gradient = np.float32(2 * MAX_REWARD) * largest_weight * np.float32(18_000)
    assert np.isfinite(np.square(gradient, dtype=np.float32))
    assert np.float32(MAX_REWARD) != np.float32(MAX_REWARD - 1)
    assert np.exp(MIN_LOG_PROB) > np.finfo(np.float64).tiny
    assert np.isfinite(1 / np.exp(MIN_LOG_PROB))
