"""GEM and SkyRL-gym as they are, in an interpreter that has nothing of ours, on a real engine: turns, rewards, masks,
refusals.
"""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.episode_kit import stage, task
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tidemill.actors.engines.responses import GenerationFailed
from tidemill.actors.episodes.children import Children
from tidemill.actors.episodes.port import ProgramFailed
from tidemill.actors.episodes.rollouts import ProgramRollout
from tidemill.actors.rollout_settings import RolloutConfig
from tidemill.bus.section import Sections, read
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Sample, Status

HERE = Path(__file__).parent
COUNT = {"id": "test:Count", "modules": ["gym_games"]}
TALK = {"id": "test_talk", "modules": ["gym_games"], "env_config": {"word": "Talk."}}


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    found = request.config.getoption("--gyms-python")
    if not found:
        pytest.skip("want --gyms-python PYTHON, an interpreter that has gem-llm, skyrl-gym and aiohttp (make test-env)")
    return str(Path(found).absolute())


@pytest.fixture(scope="module", autouse=True)
def games_are_found() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("gyms") / "model", max_position_embeddings=1024)


@asynccontextmanager
async def playing(
    python: str, model_dir: Path, environment: str, options: Any, **more: Any
) -> AsyncIterator[ProgramRollout]:
    """Give the rollout of an environment, with one child."""
    asked = {
        "environment": environment,
        "environment_options": options,
        "max_tokens": 8,
        **more,
    }  # moves, which are whole
    config = read(
        Sections[RolloutConfig], {"it": {"use": "multi_turn", "options": asked, "python": python}}, "rollouts"
    )["it"]

    async def none(client: object) -> None:
        raise AssertionError("no program of this process is played")

    async with stage(model_dir, none) as scene:
        config = replace(config, python=python, processes=1, max_calls_in_flight=4)
        async with Children(config, model=str(model_dir)) as children:
            await children.load()
            yield ProgramRollout(scene.gateway, children, config)


def asking(id: int = 5, **metadata: Any) -> Any:
    return replace(task(), id=id, metadata=metadata)


def contents(sample: Sample, role: str) -> list[str]:
    return [each["content"] for each in sample.transcript if each["role"] == role]


def rewards(sample: Sample) -> list[tuple[int, float]]:
    assert sample.turns is not None
    return list(sample.turns.rewards)


async def test_an_episode_of_gem(python: str, model_dir: Path) -> None:
    """Rewards by turn; members of a group begin alike, also in an environment that is used again; a row has options of
    its own.
    """
    async with playing(python, model_dir, "gem", COUNT, system="Count.") as rollout:
        first = (await rollout.sample(asking(), 0, "a")).sample
        second = (await rollout.sample(asking(), 1, "a")).sample
        other = (await rollout.sample(asking(id=6), 0, "a")).sample
        named = (await rollout.sample(asking(id=7, seed=5, extras={"last": 1, "reward": -2.0}), 0, "a")).sample
    check_sample(first)
    assert first.status is Status.COMPLETED and first.reward == 6.0 and rewards(first) == [(0, 1.0), (1, 2.0), (2, 3.0)]
    start = contents(first, "user")[0]
    assert (
        start.startswith("start ")
        and contents(first, "user") == [start, "seen 1", "seen 2"]
        and contents(first, "system") == ["Count."]
    )
    assert start.endswith("\nsay something") and contents(second, "user")[0] == start != contents(other, "user")[0]
    assert first.turns is not None and int(np.sum(first.loss_mask)) == int(np.sum(first.turns.tokens))
    assert contents(named, "user") == [start] and rewards(named) == [(0, -2.0)]  # the seed is that of task 5


async def test_an_environment_of_gem_as_it_ships(python: str, model_dir: Path) -> None:
    """A model that guesses nothing has the game's penalty for the form of its answer."""
    options = {"id": "game:GuessTheNumber-v0-easy", "first": "{prompt} {observation}"}
    async with playing(python, model_dir, "gem", options) as rollout:
        sample = (await rollout.sample(asking(), 0, "a")).sample
    assert "You are playing Guess The Number." in contents(sample, "user")[0] and contents(sample, "user")[
        0
    ].startswith(task().prompt)
    assert rewards(sample) == [(0, pytest.approx(-0.1))]


async def test_an_episode_of_skyrl(python: str, model_dir: Path) -> None:
    """Several observations a turn; an answer that the environment has changed begins another sequence; the label is the
    ground truth.
    """
    async with playing(python, model_dir, "skyrl_gym", TALK) as rollout:
        sample = (await rollout.sample(asking(), 0, "a")).sample
    check_sample(sample)
    assert (
        sample.status is Status.COMPLETED and rewards(sample) == [(0, 0.5), (1, 1.0), (2, 1.5)] and sample.reward == 3.0
    )
    assert contents(sample, "system") == ["Talk."]
    assert contents(sample, "user") == ["What is three plus four?", "1", "seven", "2", "seven"]
    assert contents(sample, "assistant")[1] == "short" and len(sample.sequences) == 2
    assert sample.turns is not None and int(np.sum(sample.loss_mask)) == int(np.sum(sample.turns.tokens))


async def test_an_environment_of_skyrl_as_it_ships(python: str, model_dir: Path) -> None:
    options = {"id": "gsm8k_multi_turn", "extras": {"max_turns": 2}}
    async with playing(python, model_dir, "skyrl_gym", options) as rollout:
        sample = (await rollout.sample(asking(), 0, "a")).sample
        single = (
            await rollout.sample(asking(env="gsm8k", extras={"reward_spec": {"ground_truth": "7"}}), 0, "b")
        ).sample
    assert rewards(sample) == [(0, 0.0), (1, 0.0)] and "'#### ANSWER'" in contents(sample, "user")[1]
    assert rewards(single) == [(0, 0.0)]


@pytest.mark.parametrize(("environment", "options"), [("gem", COUNT), ("skyrl_gym", TALK)])
async def test_an_environment_that_fails_fails_the_episode(
    python: str, model_dir: Path, environment: str, options: Any
) -> None:
    async with playing(python, model_dir, environment, options) as rollout:
        extras: dict[str, Any] = {"fails_at": 2}
        if environment == "skyrl_gym":
            extras["reward_spec"] = {"ground_truth": "x"}
        with pytest.raises(GenerationFailed, match=r"ValueError: boom"):
            await rollout.sample(asking(extras=extras), 0, "a")
        with refusal(GenerationFailed, place=re.compile(r"\bmetadata\.env$"), got=re.compile(r"^3\b")):
            await rollout.sample(asking(env=3), 0, "b")
        with pytest.raises(GenerationFailed, match=r"metadata\.extras"):
            await rollout.sample(asking(extras=[1]), 0, "c")
        assert (await rollout.sample(asking(), 0, "d")).sample.status is Status.COMPLETED


async def test_a_reward_that_is_no_number_fails_the_episode(python: str, model_dir: Path) -> None:
    async with playing(python, model_dir, "gem", COUNT) as rollout:
        with refusal(GenerationFailed, place=re.compile(r"\breward$"), got=re.compile("^'much'")):
            await rollout.sample(asking(extras={"reward": "much", "last": 1}), 0, "a")


@pytest.mark.parametrize(
    ("environment", "options", "reason"),
    [
        (
            "gem",
            {"id": "game:None"},
            r"environment_options.id: want an environment of GEM \(\d+ are registered\), got 'game:None'",
        ),
        ("gem", {**COUNT, "first": "go"}, r"environment_options.first: want {observation} in it"),
        ("skyrl_gym", {"id": "none"}, r"environment_options.id: want one of aime, .*, got 'none'"),
    ],
)
async def test_what_cannot_be_is_refused_at_the_start(
    python: str, model_dir: Path, environment: str, options: Any, reason: str
) -> None:
    with pytest.raises(ProgramFailed, match=reason):
        async with playing(python, model_dir, environment, options):
            pass
