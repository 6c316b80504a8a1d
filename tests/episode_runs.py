"""Some steps of `tidemill up` on episodes of several turns, and what must hold of each such run."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.whole.running import SMOKE, UP_LIMIT_S, Up, assert_books_balance, up

STEPS, GROUPS, SIZE, NEW_TOKENS = 4, 4, 4, 6
QUESTIONS = [{"prompt": [{"role": "user", "content": f"What is {n}?"}], "label": ""} for n in range(16)]


def trained(
    tmp_path: Path,
    model: Path,
    rollout: dict[str, Any],
    prompts: Sequence[dict[str, Any]],
    key: str = "",
    *,
    overlay: Sequence[Path] = (),
    settings: Sequence[str] = (),
    limit_s: float = UP_LIMIT_S,
    steps: int = STEPS,
) -> Up:
    """Train on a rollout, check the guarantees of every run, and return the run. ``overlay``: configurations of its
    engine.
    """
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    config = tmp_path / "env.yaml"
    written = {
        "prepare": None,
        "model": {"path": str(model)},
        "data": {"path": str(tmp_path / "prompts.jsonl"), "metadata_key": key, "rollout": "it"},
        "rollouts": {"it": {"processes": 1, "budget": {"context": 300, "total_tokens": 900}, **rollout}},
        "actor": {"reward": "by_rollout"},
        "sampling": {"max_new_tokens": NEW_TOKENS},
        "learner": {"steps": steps, "groups_per_step": GROUPS, "group_size": SIZE, "checkpoint_every": 0},
    }
    config.write_text(json.dumps(written))
    with up(tmp_path, "run=smoke", *settings, config=[SMOKE, config, *overlay], flags=("--fresh",)) as run:
        assert run.wait(limit_s) == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert (run.summary["steps"], run.summary["samples_trained"]) == (steps, steps * GROUPS * SIZE)
    assert all(math.isfinite(step["train/grad_norm"]) for step in run.metrics), run.metrics
    assert any(step["train/grad_norm"] > 0 for step in run.metrics), run.metrics
    return run


def assert_turns(run: Up, turns: int) -> None:
    """Check that the tokens of all turns are trained, and that the learner computes the engine's log-probs for tokens
    without lag.
    """
    most = GROUPS * SIZE * turns * NEW_TOKENS
    assert "offpolicy/fresh_logprob_diff_abs" in run.metrics[0]
    for step in run.metrics:
        assert 0.75 * most <= step["train/tokens"] <= most, step["train/tokens"]
        assert step.get("offpolicy/fresh_logprob_diff_abs", 0.0) < 1e-4, step
