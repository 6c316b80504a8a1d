"""The contract of an environment of ``multi_turn``, ours and yours.

pytest tests/contract/test_custom_environments.py --environment my_games:Game --function-options '{"size": 3}' \
    --environment-row '{"prompt": "a maze", "label": null, "metadata": {"seed": 7}}' --environment-actions '["left",
"right"]' \
    --environment-again replay

``--environment-row`` is a data row for which the actions end the episode. With ``replay`` as for
``rollouts.NAME.again`` you say that an episode depends on the row and on the actions alone. ``resume`` is held of every
environment that has ``state`` and ``restore``.
"""

import asyncio
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import web

from tests.contract.played_environment import awaited, made, played
from tests.contract.test_multi_turn import listening
from tests.episode_kit import stage, task
from tests.skips import inapplicable
from tests.tiny_models import write_tiny_model
from tidemill.actors.episodes.children import Children
from tidemill.actors.episodes.programs.multi_turn import MultiTurn
from tidemill.actors.episodes.rollouts import ProgramRollout
from tidemill.actors.rollout_settings import RolloutConfig
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Status

PROGRAM = "tidemill.actors.episodes.programs.multi_turn:MultiTurn"
TEXTS = ("", "7", "so <answer> 7 </answer>", "\u00fc \U0001f30a\n\t\x00 {", "[" * 5000, "7" * 20_000, "-1", "\u0663")
"""Answers as a model gives them at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An environment, and a row that it can begin with."""

    use: str
    options: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any]
    actions: Sequence[str]
    """Answers after which the episode is over; empty = unknown."""
    replays: bool = True

    async def begun(self) -> tuple[Any, Any]:
        """Return a game and its first observation."""
        game = made(self.use, self.options)
        return game, await awaited(game.reset(dict(self.row)))


def row(prompt: str, label: object = None) -> dict[str, Any]:
    return {"prompt": prompt, "label": label, "metadata": {}}


OURS = {
    one.use: one
    for one in (
        Case(use="tidemill.actors.episodes.programs.walk:Walk", row=row("3.6="), actions=("+", "x", "-", *"+++")),
        Case(
            use="docs.examples.extending.my_environment:Guess",
            row=row("A number below 100.", "42"),
            actions=("50", "?", "42"),
        ),
    )
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", [*OURS, *metafunc.config.getoption("--environment")], indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    option = request.config.getoption
    return OURS.get(request.param) or Case(
        use=request.param,
        options=json.loads(option("--function-options")),
        row=row("What is three plus four?", "7") | json.loads(option("--environment-row")),
        actions=json.loads(option("--environment-actions")),
        replays=option("--environment-again") == "replay",
    )


def assert_observation(found: object) -> None:
    """Assert that a text, or messages, can stand in the next request."""
    if not isinstance(found, str):
        assert isinstance(found, list) and found, f"want a text, or a list of messages, got {found!r:.200}"
        assert all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in found), found


async def test_it_answers_whatever_the_model_writes(case: Case) -> None:
    """With an observation, a finite reward and whether it is over; in every game, none of which knows of another."""
    for text in TEXTS:
        game, first = await case.begun()
        assert_observation(first)
        observation, reward, done = await awaited(game.step(text))
        assert isinstance(reward, int | float) and math.isfinite(reward), f"want a number, got {reward!r}"
        assert isinstance(done, bool), f"want True or False, got {done!r}"
        if not done:
            assert_observation(observation)
            assert isinstance(observation, str) is isinstance(first, str), (
                "want texts, or messages, all through an episode"
            )
        if hasattr(game, "close"):
            await awaited(game.close())


async def test_its_actions_end_an_episode(case: Case) -> None:
    if not case.actions:
        inapplicable("--environment-actions: want the answers after which the episode of --environment-row is over")
    found = await played(case.use, case.options, case.row, case.actions)
    assert [one[2] for one in found[1:]] == [False] * (len(case.actions) - 1) + [True]


async def test_the_same_actions_give_the_same_episode_again(case: Case) -> None:
    """In this process and in another one, as the next actor needs it that replays the episode."""
    if not case.replays:
        inapplicable("--environment-again: not replay")
    actions = [*case.actions] or list(TEXTS)
    first = await played(case.use, case.options, case.row, actions)
    assert await played(case.use, case.options, case.row, actions) == first
    given = json.dumps({"use": case.use, "options": case.options, "row": case.row, "actions": actions})
    command = (sys.executable, "-m", "tests.contract.played_environment", given)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert json.loads(output) == json.loads(json.dumps(first))


async def test_a_game_goes_on_behind_every_state(case: Case) -> None:
    """States are JSON values; another instance that has restored one gives what the first game gives."""
    game, _ = await case.begun()
    if not (hasattr(game, "state") and hasattr(game, "restore")):
        inapplicable("it has no state and restore: again: resume is refused for it")
    actions = [*case.actions] or list(TEXTS)
    states, found = [], []
    for action in actions:
        states.append(json.dumps(await awaited(game.state()), allow_nan=False))
        found.append(list(await awaited(game.step(action))))
        if found[-1][2]:
            break
    for number, state in enumerate(states):
        other = made(case.use, case.options)
        await awaited(other.restore(json.loads(state)))
        assert [list(await awaited(other.step(action))) for action in actions[number : len(found)]] == found[number:]


# ------------------------------------------------------------------------------------------------ as ``multi_turn``
# calls it


class Watched:
    """An environment around another one. Counts its calls; one step of it may raise, or wait for ever."""

    games: ClassVar[list["Watched"]] = []
    waits: ClassVar[asyncio.Event]

    def __init__(self, use: str, options: Mapping[str, Any], step: int = -1, action: str = "raise") -> None:
        self._game, self._at, self._action = made(use, options), step, action
        self.steps, self.closed = 0, 0
        self.games.append(self)

    async def reset(self, data: dict[str, Any]) -> Any:
        return await awaited(self._game.reset(data))

    async def step(self, text: str) -> Any:
        self.steps += 1
        if self.steps == self._at and self._action == "raise":
            raise RuntimeError("the game is broken")
        if self.steps == self._at:
            self.waits.set()
            await asyncio.Event().wait()
        return await awaited(self._game.step(text))

    async def close(self) -> None:
        self.closed += 1
        if hasattr(self._game, "close"):
            await awaited(self._game.close())


@pytest.fixture(autouse=True)
def _watched() -> None:
    Watched.games, Watched.waits = [], asyncio.Event()


@dataclass(slots=True)
class Play:
    """One episode of a watched environment with scripted answers."""

    case: Case
    how: Mapping[str, Any] = field(default_factory=dict)

    async def run(self, url: str) -> Any:
        """Play it to its end."""
        _, first = await self.case.begun()
        protocol = "text" if isinstance(first, str) else "chat"
        options = {"use": self.case.use, "options": dict(self.case.options), **self.how}
        program = MultiTurn(
            environment=f"{__name__}:Watched",
            environment_options=options,
            protocol=protocol,
            max_turns=len(self.actions) + 1,
        )
        return await program.run(dict(self.case.row), f"{url}/v1", "key")

    @property
    def actions(self) -> list[str]:
        return [*self.case.actions] or ["7", "8", "9"]

    def handlers(self) -> dict[str, Any]:
        """Return the model: its answers are the actions, one after the other."""
        asked: list[str] = []

        async def answer(http: web.Request) -> web.Response:
            said = [*self.actions, "more"][len(asked)]
            asked.append(said)
            chosen = (
                {"message": {"role": "assistant", "content": said}}
                if http.path.endswith("chat/completions")
                else {"text": said}
            )
            return web.json_response({"id": f"turn-{len(asked)}", "choices": [chosen]})

        return {"/v1/chat/completions": answer, "/v1/completions": answer}


async def test_it_is_closed_once_behind_the_last_step(case: Case) -> None:
    play = Play(case)
    async with listening(play.handlers()) as url:
        rewards = await play.run(url)
    [game] = Watched.games
    assert game.closed == 1
    assert list(rewards) == [f"turn-{number + 1}" for number in range(game.steps)], (
        "a reward for each step, and no step behind the end"
    )
    assert game.steps == len(case.actions) or not case.actions


async def test_a_step_that_raises_ends_the_episode_and_closes_it_once(case: Case) -> None:
    play = Play(case, {"step": 2})
    async with listening(play.handlers()) as url:
        with pytest.raises(RuntimeError, match="the game is broken"):
            await play.run(url)
    [game] = Watched.games
    assert (game.steps, game.closed) == (2, 1)


async def test_an_episode_that_is_cancelled_in_a_step_closes_it_once(case: Case) -> None:
    play = Play(case, {"step": 2, "action": "wait"})
    async with listening(play.handlers()) as url:
        playing = asyncio.create_task(play.run(url))
        waiting = asyncio.create_task(Watched.waits.wait())
        await asyncio.wait([playing, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        playing.cancel()
        await asyncio.gather(playing, waiting, return_exceptions=True)
    [game] = Watched.games
    assert playing.cancelled() and (game.steps, game.closed) == (2, 1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_model(tmp_path_factory.mktemp("contract") / "model", max_position_embeddings=1024)


async def test_an_episode_makes_a_sample(model_dir: Path, case: Case) -> None:
    """In a child process, on a real engine: each turn has the reward of its step, and the sample is valid."""

    async def unused(client: object) -> None:
        raise AssertionError("programs of this test run in children")

    _, first = await case.begun()
    protocol = "text" if isinstance(first, str) else "chat"
    given = {
        "environment": case.use,
        "environment_options": dict(case.options),
        "protocol": protocol,
        "max_turns": 3,
        "max_tokens": 4,
    }
    asked = replace(task(), prompt=case.row["prompt"], label=case.row["label"], metadata=case.row["metadata"])
    config = RolloutConfig(use="multi_turn", options=given)
    async with stage(model_dir, unused) as scene, Children(config) as children:
        await children.load()
        rollout = ProgramRollout(scene.gateway, children, config)
        sample = (await rollout.sample(asked, 0, "n0")).sample
    check_sample(sample)
    assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
    assert sample.turns is not None and 1 <= len(sample.turns.at) <= 3
    assert [number for number, _ in sample.turns.rewards] == list(range(len(sample.turns.at)))
    assert sample.score == pytest.approx(sum(reward for _, reward in sample.turns.rewards))
