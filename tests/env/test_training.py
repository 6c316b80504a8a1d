"""Some steps of `tidemill up` on programs as other projects write them: verifiers, OpenEnv, slime, and an agent in
AReaL's shape.
"""

import json
from pathlib import Path

import pytest

from tests.env.test_openenv_server import url  # noqa: F401 - a fixture
from tests.env.test_verifiers_tasksets import (  # noqa: F401 - fixtures, and what they are used with
    HANGMAN,
    python,
    rows,
    tasksets_are_found,
    words,
    write_guessing_model,
)
from tests.episode_runs import GROUPS, NEW_TOKENS, QUESTIONS, SIZE, assert_turns, trained
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a chat template."""
    return write_tiny_model(
        tmp_path_factory.mktemp("training") / "model", max_position_embeddings=512, initializer_range=0.05
    )


def test_a_taskset_of_verifiers(tmp_path: Path, model: Path, python: str) -> None:  # noqa: F811
    prompts = rows(python, tmp_path, "verifiers_talk", "--count", "16")
    run = trained(tmp_path, model, {"use": "verifiers:verifiers_talk", "python": python}, prompts, key="metadata")
    assert_turns(run, 3)


@pytest.mark.usefixtures("words")
def test_a_taskset_that_verifiers_ships(tmp_path: Path, python: str) -> None:  # noqa: F811
    """TextArena's Hangman; the model guesses letters."""
    prompts = rows(python, tmp_path, "textarena", "--count", "16", "--options", json.dumps({"taskset": HANGMAN}))
    rollout = {"use": "verifiers:textarena", "python": python, "options": {"taskset": HANGMAN}}
    budget = {"budget": {"context": 4096, "total_tokens": 60_000}}
    settings = ("learner.max_tokens_per_micro_batch=4096",)
    run = trained(
        tmp_path,
        write_guessing_model(tmp_path / "model"),
        {**rollout, **budget},
        prompts,
        key="metadata",
        settings=settings,
        steps=2,  # a game has many turns, each with all of its guesses before it
    )
    assert "offpolicy/fresh_logprob_diff_abs" in run.metrics[0]
    for step in run.metrics:
        assert step["train/tokens"] > 2 * 3 * GROUPS * SIZE, "more than two guesses of three tokens each"
        assert step.get("offpolicy/fresh_logprob_diff_abs", 0.0) < 1e-4, step
    assert any(step["train/reward_std"] > 0 for step in run.metrics)


def test_a_server_of_openenv(tmp_path: Path, model: Path, url: str) -> None:  # noqa: F811
    options = {"environment": "openenv", "environment_options": {"url": url, "observation": "text"}, "max_turns": 2}
    prompts = [{"prompt": f"Count to {n}.", "label": ""} for n in range(10, 26)]
    run = trained(tmp_path, model, {"use": "multi_turn", "options": options}, prompts)
    assert_turns(run, 2)


def test_a_generate_function_of_slime(tmp_path: Path, model: Path) -> None:
    prompts = [{"prompt": f"What is {n}?", "label": ""} for n in range(16)]
    run = trained(tmp_path, model, {"use": "slime:tests.env.slime_letters:generate"}, prompts)
    assert_turns(run, 2)


def test_an_agent_with_the_client_of_openai(tmp_path: Path, model: Path) -> None:
    """In AReaL's shape, as it is, under the interpreter of the run."""
    run = trained(
        tmp_path, model, {"use": "agent:tests.openai_agent:Asks", "options": {"max_tokens": NEW_TOKENS}}, QUESTIONS
    )
    assert_turns(run, 2)
