"""Alarms: each fires at its threshold and not below, scaled by age where numbers grow with it; a stop needs several
steps in a row.
"""

import re
from typing import Any

import pytest

from tests.metric_names import METRICS, undocumented
from tests.refusals import refusal
from tidemill.learner.algorithms.alarms import (
    FLOAT32,
    MIN_GAP,
    MIN_SPREAD,
    MIN_TOKENS,
    THRESHOLDS,
    AlarmConfig,
    AlarmWatch,
    Context,
    check,
    refuse_unknown,
)

HEALTHY = {
    "train/tokens": 1000.0,
    "offpolicy/weight_mean": 1.0,
    "offpolicy/ess": 0.9,
    "offpolicy/pearson": 0.99,
    "offpolicy/prob_std": 0.3,
    "offpolicy/k1": 0.001,
    "offpolicy/lag_max": 2.0,
    "offpolicy/lag_mean": 0.0,
    "offpolicy/entropy_gap": 0.1,
    "offpolicy/entropy_gap_tokens": 1000.0,
}
CONTEXT = Context(max_lag=2, dtype="bfloat16")


def names(
    changes: dict[str, float], config: AlarmConfig | None = None, context: Context = CONTEXT
) -> list[tuple[str, str]]:
    return [(alarm.name, alarm.level) for alarm in check(HEALTHY | changes, config or AlarmConfig(), context)]


def test_a_healthy_step_raises_none() -> None:
    assert names({}) == []


@pytest.mark.parametrize("name", [name for name, row in THRESHOLDS.items() if row.warn != row.error])
def test_each_trips_beyond_its_threshold_and_not_at_it(name: str) -> None:
    row = THRESHOLDS[name]
    beyond = -1e-6 if row.below else 1e-6
    assert names({row.metric: row.warn}) == []
    assert names({row.metric: row.warn + beyond}) == [(name, "warn")]
    assert names({row.metric: row.error}) == [(name, "warn")]
    assert names({row.metric: row.error + beyond}) == [(name, "error")]


def test_a_token_that_is_too_old_is_an_error_unless_the_gate_lets_it_through() -> None:
    assert names({"offpolicy/lag_max": 3.0}) == [("lag", "error")]
    assert names({"offpolicy/lag_max": 3.0}, context=Context(max_lag=2, gate="train")) == []
    assert names({"offpolicy/lag_max": 3.0, "train/tokens": 1.0}) == [("lag", "error")], "however few tokens there are"


def test_a_skipped_minibatch_is_an_error_however_few_tokens_were_trained() -> None:
    assert names({"train/skipped_minibatches": 0.0}) == []
    assert names({"train/skipped_minibatches": 1.0}) == [("skipped", "error")]
    assert [
        alarm.name for alarm in check({"train/skipped_minibatches": 1.0, "train/tokens": 0.0}, AlarmConfig(), CONTEXT)
    ] == ["skipped"]


def test_skipped_steps_in_a_row_can_stop_the_run() -> None:
    watch, skipped = (
        AlarmWatch(AlarmConfig(action="stop", patience=2), CONTEXT),
        {"train/skipped_minibatches": 1.0, "train/tokens": 0.0},
    )
    for metrics in (skipped, HEALTHY | {"train/skipped_minibatches": 0.0}, skipped):
        watch.step(metrics)
        assert watch.stop is None
    watch.step(skipped)
    assert watch.stop is not None and watch.stop.name == "skipped"


def test_a_run_that_trains_nothing_is_stopped_unless_that_is_ignored() -> None:
    """Steps that an earlier start took do not count, as the run has to get past them. A step that is trained in part
    begins anew.
    """
    nothing, part = ({"train/skipped_minibatches": 1.0, "train/tokens": tokens} for tokens in (0.0, 500.0))
    watch = AlarmWatch(AlarmConfig(), CONTEXT)
    for metrics, recorded in (
        [(nothing, False)] * 19 + [(part, False)] + [(nothing, True)] * 30 + [(nothing, False)] * 19
    ):
        watch.step(metrics, recorded=recorded)
        assert watch.stop is None
    watch.step(nothing)
    assert watch.stop is not None and watch.stop.name == "skipped" and "in 20 steps in a row" in str(watch.stop)
    for config in (AlarmConfig(action="off"), AlarmConfig(ignore=("skipped",))):
        watch = AlarmWatch(config, CONTEXT)
        for _ in range(40):
            watch.step(nothing)
        assert watch.stop is None


@pytest.mark.parametrize("name", [name for name, row in THRESHOLDS.items() if row.ages])
def test_what_grows_with_age_is_judged_by_it(name: str) -> None:
    row = THRESHOLDS[name]
    assert names({row.metric: 1.5 * row.error}) == [(name, "error")]
    assert names({row.metric: 1.5 * row.error, "offpolicy/lag_mean": 1.0}) == [(name, "warn")]
    assert names({row.metric: 1.5 * row.warn, "offpolicy/lag_mean": 1.0}) == []


def test_numerics_are_stricter_in_float32() -> None:
    warn, error = FLOAT32["numerics"]
    value = (warn + error) / 2
    assert names({"offpolicy/fresh_logprob_diff_abs": value}) == []
    assert names({"offpolicy/fresh_logprob_diff_abs": value}, context=Context(max_lag=2)) == [("numerics", "warn")]


@pytest.mark.parametrize(
    "changes",
    [
        {"offpolicy/entropy_gap_sigmas": -50.0, "offpolicy/entropy_gap_tokens": 200.0},
        {"offpolicy/entropy_gap_sigmas": 50.0, "offpolicy/entropy_gap": 0.01},
        {"offpolicy/pearson": 0.0, "offpolicy/prob_std": 0.05},
        {"offpolicy/k3": 9.0, "train/tokens": 100.0},
    ],
    ids=["few uncertain tokens", "a gap of nothing", "probabilities that do not vary", "few tokens"],
)
def test_what_means_nothing_raises_none(changes: dict[str, float]) -> None:
    assert names(changes) == []
    assert names(
        {
            **changes,
            "offpolicy/entropy_gap_tokens": 1000.0,
            "offpolicy/entropy_gap": -0.1,
            "offpolicy/prob_std": 0.3,
            "train/tokens": 1e3,
        }
    )


def test_thresholds_can_be_changed_and_alarms_ignored() -> None:
    bad = {"offpolicy/ess": 0.4}
    assert names(bad) == [("ess", "warn")]
    assert names(bad, AlarmConfig(thresholds={"ess": [0.3, 0.2]})) == []
    assert names(bad, AlarmConfig(thresholds={"ess": [0.9, 0.45]})) == [("ess", "error")]
    assert names(bad, AlarmConfig(ignore=("ess",))) == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ignore": ("nothing",)}, "got 'nothing'"),
        ({"thresholds": {"nothing": [1, 2]}}, "got 'nothing'"),
        ({"thresholds": {"k3": [2, 1]}}, "alarms.thresholds.k3: want [warn, error], error the larger"),
        ({"thresholds": {"ess": [0.1, 0.2]}}, "error the smaller"),
        ({"thresholds": {"k3": 1}}, "want [warn, error]"),
        ({"thresholds": {"k3": ["a", 1]}}, "want [warn, error]"),
    ],
)
def test_what_names_no_alarm_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        refuse_unknown(AlarmConfig(**settings))


def test_stop_waits_for_errors_in_a_row() -> None:
    bad, other = {"offpolicy/ess": 0.1}, {"offpolicy/k3": 9.0}
    watch = AlarmWatch(AlarmConfig(action="stop", patience=3), CONTEXT)
    for changes in (bad, bad, {}, bad, other, bad, bad):
        assert watch.step(HEALTHY | changes) or not changes
        assert watch.stop is None
    watch.step(HEALTHY | bad)
    assert watch.stop is not None
    assert "ess: offpolicy/ess = 0.1" in str(watch.stop)


def test_warnings_never_stop_and_off_is_off() -> None:
    watch = AlarmWatch(AlarmConfig(action="stop", patience=1), CONTEXT)
    watch.step(HEALTHY | {"offpolicy/ess": 0.4})
    assert watch.stop is None
    patient = AlarmWatch(AlarmConfig(action="warn", patience=1), CONTEXT)
    assert patient.step(HEALTHY | {"offpolicy/ess": 0.1})
    assert patient.stop is None
    assert AlarmWatch(AlarmConfig(action="off"), CONTEXT).step(HEALTHY | {"offpolicy/ess": 0.1}) == ()


def test_the_document_lists_every_alarm_and_its_metric() -> None:
    text = METRICS.read_text()
    assert not [name for name in THRESHOLDS if f"`{name}`" not in text]
    assert not undocumented(row.metric for row in THRESHOLDS.values())


def test_thresholds_are_two_numbers_the_worse_one_second() -> None:
    below = next(name for name, row in THRESHOLDS.items() if row.below)
    above = next(name for name, row in THRESHOLDS.items() if not row.below and name != "lag")
    for name, pair in ((below, [0.3, 0.2]), (below, [0.2, 0.2]), (above, [1, 2]), (above, (2, 2))):
        refuse_unknown(AlarmConfig(thresholds={name: pair}))
    for name, pair in (
        (below, [0.2, 0.3]),
        (above, [2, 1]),
        (above, [1, 2, 3]),
        (above, [1]),
        (above, 1),
        (above, ["a", "b"]),
    ):
        with refusal(ValueError, place=f"alarms.thresholds.{name}"):
            refuse_unknown(AlarmConfig(thresholds={name: pair}))


def test_what_is_just_enough_to_mean_something_is_judged() -> None:
    bad = {"offpolicy/ess": 0.0, "offpolicy/pearson": 0.0, "offpolicy/entropy_gap_sigmas": 99.0}
    tripped = [name for name, _ in names(bad)]
    assert set(tripped) == {"ess", "pearson", "entropy_gap"}
    tokens = float(MIN_TOKENS)
    enough = {
        "train/tokens": tokens,
        "offpolicy/entropy_gap_tokens": tokens,
        "offpolicy/entropy_gap": -MIN_GAP,
        "offpolicy/prob_std": MIN_SPREAD,
    }
    assert [name for name, _ in names(bad | enough)] == tripped
    without_gap = [name for name in tripped if name != "entropy_gap"]
    for few in ({"offpolicy/entropy_gap_tokens": tokens - 1}, {"offpolicy/entropy_gap": 0.99 * MIN_GAP}):
        assert [name for name, _ in names(bad | few)] == without_gap


def test_a_step_without_a_lag_metric_is_judged_as_fresh() -> None:
    name = next(name for name, row in THRESHOLDS.items() if row.ages)
    row = THRESHOLDS[name]
    metrics = {key: value for key, value in HEALTHY.items() if key != "offpolicy/lag_mean"} | {
        row.metric: 1.5 * row.error
    }
    assert (name, "error") in [(alarm.name, alarm.level) for alarm in check(metrics, AlarmConfig(), CONTEXT)]
