"""Metrics of a step's episodes, by counting."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from bus.wire.messages import Timings, Turns
from launch.cli.status import episodes_in_words
from learner.feed.episode_metrics import episode_metrics
from tests.bus_kit import make_episode, make_sample
from tests.metric_names import undocumented


def test_single_turns_have_none() -> None:
    assert episode_metrics([make_sample()]) == {}
    assert episodes_in_words({}) == ""


def test_an_episode_without_turns_and_tokens_is_counted() -> None:
    """An actor in another language may send one: its sizes agree, all of them 0."""
    one = make_episode()
    assert one.turns is not None
    turns = {name: value[:0] for name, value in vars_of(one.turns).items() if isinstance(value, np.ndarray | tuple)}
    none = replace(one.turns, **turns)
    found = episode_metrics([replace(one, turns=none, tokens=one.tokens[:0])])
    assert (found["data/turns_mean"], found["data/cut_turns_share"]) == (0, 0)


def vars_of(turns: Turns) -> dict[str, Any]:
    return {field.name: getattr(turns, field.name) for field in fields(turns)}


def test_episodes_are_counted_and_single_turns_beside_them_are_not() -> None:
    first = make_episode()
    assert first.turns is not None
    again = replace(
        first,
        finish_reason="budget.turns",
        metadata={"overridden_sampling": ["top_p"], "malformed_calls": 2},
        timings=Timings(queued_s=1.0, generating_s=2.0, tools_s=3.0, reward_s=4.0),
        turns=replace(first.turns, finish=("stop", "cut", "stop")),
    )
    found = episode_metrics([replace(first, timings=Timings(), metadata={}, finish_reason="stop"), make_sample(), again])
    count = len(first.turns.at)
    sampled = int(first.turns.tokens.sum())
    assert (found["data/episodes"], found["data/turns_mean"], found["data/turns_max"]) == (2, count, count)
    assert found["data/sequences_mean"] == len(first.sizes) == 2
    assert found["data/context_share"] == pytest.approx(1 - sampled / len(first.tokens))
    assert found["data/cut_turns_share"] == pytest.approx(1 / (2 * count))
    assert (found["data/overridden_share"], found["data/malformed_calls_share"]) == (0.5, 0.5)
    parts = [found[f"data/episode_{part}_seconds"] for part in ("queued", "generating", "tools", "reward")]
    assert parts == [0.5, 1.0, 1.5, 2.0]
    assert {name: value for name, value in found.items() if "budget" in name and value} == {"data/budget_share/turns": 0.5}
    assert not undocumented(found)
    words = episodes_in_words(found)
    assert words.startswith(f"2 in the newest step, {count:.1f} turns, 2.0 sequences") and "budget spent: turns 50 %" in words
