"""Four steps of `tidemill up` on programs as other projects write them: verifiers, OpenEnv, slime, and an agent in AReaL's shape."""

from pathlib import Path

import pytest

from tests.env.test_openenv_server import url  # noqa: F401 - a fixture
from tests.env.test_verifiers_tasksets import python, rows, tasksets_are_found  # noqa: F401 - fixtures, and rows
from tests.episode_runs import NEW_TOKENS, QUESTIONS, assert_turns, trained
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("training") / "model", max_position_embeddings=512, initializer_range=0.05)


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


def test_an_agent_with_the_client_of_openai(tmp_path: Path, model: Path) -> None:
    """In AReaL's shape, as it is, under the interpreter of the run."""
    run = trained(tmp_path, model, {"use": "agent:tests.openai_agent:Asks", "options": {"max_tokens": NEW_TOKENS}}, QUESTIONS)
    assert_turns(run, 2)
