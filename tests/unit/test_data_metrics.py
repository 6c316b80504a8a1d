"""Metrics of a step's episodes, by counting."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from tests.bus_kit import make_episode, make_sample, make_turns
from tests.metric_names import undocumented
from tidemill.bus.wire.messages import Plan, Sample, Span, Timings, Turns
from tidemill.launch.cli.status import episodes_in_words
from tidemill.learner.algorithms.alarms import AlarmConfig, Context
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.feed.data_metrics import SHARE, EpisodeAge, episode_metrics


def metrics_of(samples: list[Sample], of: Plan) -> dict[str, float]:
    return episode_metrics([index_of(0, one) for one in samples], of)


def test_single_turns_have_none() -> None:
    assert metrics_of([make_sample()], plan()) == {}
    assert episodes_in_words({}) == ""


def test_an_episode_without_turns_and_tokens_is_counted() -> None:
    """An actor in another language may send one: its sizes agree, all of them 0."""
    one = make_episode()
    assert one.turns is not None
    turns = {name: value[:0] for name, value in vars_of(one.turns).items() if isinstance(value, np.ndarray | tuple)}
    none = replace(one.turns, **turns)
    found = metrics_of([replace(one, turns=none, tokens=one.tokens[:0])], plan())
    assert (found["data/turns_mean"], found["data/cut_turns_share"]) == (0, 0)
    assert (found["data/episode_seconds_p95"], found["data/masked_share_first_turn"]) == (0, 0)


def plan(oldest_step: int | None = None) -> Plan:
    """Return a plan in which version v has the weights of step v."""
    none = np.zeros(0, np.int32)
    return Plan(
        epoch=1,
        step=9,
        tasks=none.astype(np.int64),
        seqs=none.astype(np.int64),
        group_sizes=none,
        ranks=none,
        micro_batches=none,
        version_steps={version: version for version in range(9)},
        oldest_step=oldest_step,
        data_parallel=1,
        num_micro_batches=1,
        config_digest="",
        chain="",
    )


@pytest.mark.parametrize(("oldest", "of_all", "of_first"), [(None, 0, 0), (5, 0, 0), (6, 2 / 6, 1), (7, 1, 1)])
def test_tokens_that_are_too_old_are_counted_for_the_first_turns_alone_too(
    oldest: int | None, of_all: float, of_first: float
) -> None:
    """The example has two sampled tokens of version 5, its first turn, and behind the tool's result four of version
    6.
    """
    found = metrics_of([make_episode(), make_sample()], plan(oldest))
    assert found["data/masked_share_all_turns"] == pytest.approx(of_all)
    assert found["data/masked_share_first_turn"] == pytest.approx(of_first)
    mixed = metrics_of(
        [make_episode(), make_episode(spans=(Span(version=7, num_tokens=6), Span(version=7, num_tokens=2)))],
        plan(oldest),
    )
    assert mixed["data/masked_share_all_turns"] == pytest.approx(of_all / 2)
    assert mixed["data/masked_share_first_turn"] == pytest.approx(of_first / 2)


def seconds(of: float) -> Sample:
    """Return an episode of three turns that takes so long."""
    return make_episode(turns=make_turns(begin_s=np.array([0, 1, of - 1], np.float32), seconds=np.ones(3, np.float32)))


def test_episodes_are_measured_by_the_time_of_steps_and_longer_ones_are_an_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    age = EpisodeAge(AlarmConfig(), Context(max_lag=2))
    metrics = metrics_of([seconds(of) for of in (5.0, *[30.0] * 20)], plan())
    assert metrics["data/episode_seconds_p95"] == 30.0
    assert age.done(metrics, 100.0) == {}, "one step alone has no time"
    assert age.done(metrics, 120.0) == {"data/episode_lag_share_p95": 30 / (2 * 20)} and age.trouble == ""
    assert age.done(metrics, 122.0) == {"data/episode_lag_share_p95": 30 / (2 * 11)}
    assert "long_episodes: data/episode_lag_share_p95 = 1.364, threshold 1 (warn)" in age.trouble
    assert "alarm long_episodes" in caplog.text and "seconds=30.0 step_seconds=11.0" in caplog.text
    assert age.done({}, 124.0) == {} and age.trouble == "", "a step without episodes"
    assert not undocumented(metrics | {SHARE: 1.0})


def test_repeated_steps_and_settings_raise_no_alarm_of_long_episodes() -> None:
    metrics = {"data/episode_seconds_p95": 100.0}
    age = EpisodeAge(AlarmConfig(), Context(max_lag=1))
    for now in (0.0, 0.1, 0.2):
        assert age.done(metrics, now, recorded=True) == {}
    assert age.done(metrics, 1000.2) == {SHARE: 0.1}, "from the last repeated step on"
    for config, context in (
        (AlarmConfig(action="off"), Context(max_lag=1)),
        (AlarmConfig(ignore=("long_episodes",)), Context(max_lag=1)),
        (AlarmConfig(), Context(max_lag=1, gate="train")),
        (AlarmConfig(thresholds={"long_episodes": [100, 200]}), Context(max_lag=1)),
    ):
        age = EpisodeAge(config, context)
        assert [age.done(metrics, now) for now in (0.0, 10.0)] == [{}, {SHARE: 10.0}] and age.trouble == ""
    age = EpisodeAge(AlarmConfig(), Context(max_lag=0))
    assert [age.done(metrics, now) for now in (0.0, 10.0)] == [{}, {}], (
        "without lag no step is taken while an episode runs"
    )


def vars_of(turns: Turns) -> dict[str, Any]:
    return {field.name: getattr(turns, field.name) for field in fields(turns)}


def test_episodes_are_counted_and_single_turns_beside_them_are_not() -> None:
    first = make_episode()
    assert first.turns is not None
    again = replace(
        first,
        finish_reason="budget.turns",
        metadata={
            "overridden_sampling": ["top_p"],
            "malformed_calls": 2,
            "branched_turns": {"forks": 3, "begins": 1},
            "untrained_turns": {"asked": 5, "log_probs": -1, "empty": "many"},
        },
        timings=Timings(queued_s=1.0, generating_s=2.0, tools_s=3.0, reward_s=4.0),
        turns=replace(first.turns, finish=("stop", "cut", "stop")),
    )
    found = metrics_of(
        [replace(first, timings=Timings(), metadata={}, finish_reason="stop"), make_sample(), again], plan()
    )
    count = len(first.turns.at)
    sampled = int(first.turns.tokens.sum())
    assert (found["data/episodes"], found["data/turns_mean"], found["data/turns_max"]) == (2, count, count)
    assert found["data/sequences_mean"] == len(first.sizes) == 2
    assert found["data/context_share"] == pytest.approx(1 - sampled / len(first.tokens))
    assert found["data/cut_turns_share"] == pytest.approx(1 / (2 * count))
    assert (found["data/overridden_share"], found["data/malformed_calls_share"]) == (0.5, 0.5)
    assert (found["data/branched_turns/forks"], found["data/branched_turns/begins"]) == (1.5, 0.5)
    assert [found[f"data/untrained_turns/{why}"] for why in ("asked", "log_probs", "empty")] == [2.5, 0, 0]
    parts = [found[f"data/episode_{part}_seconds"] for part in ("queued", "generating", "tools", "reward")]
    assert parts == [0.5, 1.0, 1.5, 2.0]
    assert {name: value for name, value in found.items() if "budget" in name and value} == {
        "data/budget_share/turns": 0.5
    }
    assert not undocumented(found)
    words = episodes_in_words(found)
    assert (
        words.startswith(f"2 in the newest step, {count:.1f} turns, 2.0 sequences")
        and "budget spent: turns 50 %" in words
    )
