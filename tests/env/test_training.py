"""Four steps of `tidemill up` on environments of other projects: verifiers, OpenEnv, and a generate function of slime."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.env.test_openenv_server import url  # noqa: F401 - a fixture
from tests.env.test_verifiers_tasksets import python, rows, tasksets_are_found  # noqa: F401 - fixtures, and rows
from tests.tiny_models import write_tiny_model
from tests.whole.running import SMOKE, Up, assert_books_balance, up

STEPS, GROUPS, SIZE, NEW_TOKENS = 4, 4, 4, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("training") / "model", max_position_embeddings=512, initializer_range=0.05)


def trained(tmp_path: Path, model: Path, rollout: dict[str, Any], prompts: Sequence[dict[str, Any]], key: str = "") -> Up:
    """Train on a rollout, check the guarantees of every run, and return the run."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    config = tmp_path / "env.yaml"
    settings = {
        "prepare": None,
        "model": {"path": str(model)},
        "data": {"path": str(tmp_path / "prompts.jsonl"), "metadata_key": key, "rollout": "it"},
        "rollouts": {"it": {"processes": 1, "budget": {"context": 300, "total_tokens": 900}, **rollout}},
        "actor": {"reward": "by_rollout"},
        "sampling": {"max_new_tokens": NEW_TOKENS},
        "learner": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "checkpoint_every": 0},
    }
    config.write_text(json.dumps(settings))
    with up(tmp_path, "run=smoke", config=[SMOKE, config], flags=("--fresh",)) as run:
        assert run.wait(150) == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert (run.summary["steps"], run.summary["samples_trained"]) == (STEPS, STEPS * GROUPS * SIZE)
    assert all(math.isfinite(step["train/grad_norm"]) for step in run.metrics), run.metrics
    assert any(step["train/grad_norm"] > 0 for step in run.metrics), run.metrics
    return run


def test_a_taskset_of_verifiers(tmp_path: Path, model: Path, python: str) -> None:  # noqa: F811
    prompts = rows(python, tmp_path, "verifiers_talk", "--count", "16")
    run = trained(tmp_path, model, {"use": "verifiers:verifiers_talk", "python": python}, prompts, key="metadata")
    assert_turns(run, 3)


def test_a_server_of_openenv(tmp_path: Path, model: Path, url: str) -> None:  # noqa: F811
    options = {"environment": "openenv", "environment_options": {"url": url, "observation": "text"}, "max_turns": 2}
    prompts = [{"prompt": f"Count to {n}.", "label": ""} for n in range(10, 26)]
    run = trained(tmp_path, model, {"use": "multi_turn", "options": options}, prompts)
    assert_turns(run, 2)


def test_a_generate_function_of_slime(tmp_path: Path, model: Path) -> None:
    prompts = [{"prompt": f"What is {n}?", "label": ""} for n in range(16)]
    run = trained(tmp_path, model, {"use": "slime:tests.env.slime_letters:generate"}, prompts)
    assert_turns(run, 2)


def assert_turns(run: Up, turns: int) -> None:
    """Check that the tokens of all turns are trained, and that the learner computes the engine's log-probs for tokens without lag."""
    most = GROUPS * SIZE * turns * NEW_TOKENS
    assert "offpolicy/fresh_logprob_diff_abs" in run.metrics[0]
    for step in run.metrics:
        assert 0.75 * most <= step["train/tokens"] <= most, step["train/tokens"]
        assert step.get("offpolicy/fresh_logprob_diff_abs", 0.0) < 1e-4, step
