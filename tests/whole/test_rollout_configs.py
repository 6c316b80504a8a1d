"""`make tools` and `make walk` for a few steps: episodes of several turns, from nothing, as the files say."""

from pathlib import Path

import pytest

from tests.whole.running import ROOT, assert_books_balance, up

STEPS = 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most_turns"), [("tools", 2), ("walk", 9)])
def test_a_shipped_run_of_episodes_trains(tmp_path: Path, name: str, most_turns: int) -> None:
    with up(
        tmp_path, f"learner.steps={STEPS}", "up.require_reward=-1", config=ROOT / f"launch/configs/{name}.yaml"
    ) as run:
        assert run.wait() == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert run.summary["books_balance"] and not run.summary["restarts"], run.summary
    assert [step["train/skipped_minibatches"] for step in run.metrics] == [0] * STEPS
    assert all(1 < step["data/turns_mean"] <= step["data/turns_max"] <= most_turns for step in run.metrics), run.metrics
    assert all(step["train/grad_norm"] > 0 for step in run.metrics)
