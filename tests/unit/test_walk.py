"""The text game ``walk``: its moves, rewards and ends."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusal
from tests.unit.test_prepare import SMALL
from tidemill.actors.episodes.programs.walk import LAST, Walk
from tidemill.launch.settings.prepare import PrepareConfig, character_tokenizer, prompts


def begun(prompt: str) -> Walk:
    game = Walk()
    assert game.reset({"prompt": prompt}) == prompt
    return game


def test_the_way_there_gives_one() -> None:
    game = begun("3.5=")
    assert game.step("+") == ("4.5=", 0.5, False)
    assert game.step("-") == ("3.5=", -0.5, False)
    assert game.step("x") == ("3.5=", 0.0, False)
    assert game.step("+") == ("4.5=", 0.5, False)
    assert game.step("+") == ("5.5=", 0.5, True)


@given(st.integers(0, LAST), st.integers(0, LAST), st.lists(st.sampled_from(["+", "-", "9", ""]), max_size=9))
def test_rewards_add_up_to_the_share_of_the_way(at: int, goal: int, moves: list[str]) -> None:
    if at == goal:
        return
    game, total, place = begun(f"{at}.{goal}="), 0.0, at
    for move in moves:
        seen, reward, done = game.step(move)
        total, place = total + reward, int(seen[0])
        assert seen == f"{place}.{goal}=" and done == (place == goal)
        if done:
            break
    assert total == pytest.approx((abs(goal - at) - abs(goal - place)) / abs(goal - at))


def test_a_game_goes_on_from_its_state() -> None:
    game, other = begun("9.2="), Walk()
    game.step("-")
    other.restore(json.loads(json.dumps(game.state())))
    assert other.step("-") == game.step("-") == ("7.2=", pytest.approx(1 / 7), False)


@pytest.mark.parametrize("prompt", ["3.3=", "3-7=", "12.7=", "3.7.1=", "", "²³"])
def test_other_prompts_are_refused(prompt: str) -> None:
    with refusal(ValueError, got=repr(prompt)):
        Walk().reset({"prompt": prompt})


def test_its_prompts_can_be_played_and_tokenised() -> None:
    config: PrepareConfig = replace(SMALL, task="walk")
    rows = list(prompts(config))
    assert rows == list(prompts(config)) and len(rows) == config.count
    tokenizer = character_tokenizer(18)
    for row in rows:
        game = begun(row["prompt"])
        assert game.state()[1] == int(row["label"])
        assert len(tokenizer(row["prompt"] + "+-")["input_ids"]) == 6
