"""Rewards that ask a server, against a definition of their own in a few lines: ``LEAST`` answers or more each, from a
server on loopback.

``judge`` reads the last grade of a text; ``remote`` takes the numbers of an answer, as slime's ``remote_rm`` does with
all of it; ``reward_model`` scales, and bounds, one output of a model.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from aiohttp import web

from tests.unit.test_rewards_definitions import LEAST
from tests.unit.test_rewards_http import answering, asking
from tidemill.bus.wire.messages import Status
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.judge import Judge, RewardModel
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.remote import Remote

REQUEST = RewardRequest(prompt="p", response="r", label="l", status=Status.COMPLETED)
FAILED = "failed"


async def rewards_of(reward: type, answers: Sequence[Any], **options: Any) -> list[Any]:
    """Return the reward of each answer of a server, ``FAILED`` for a failed sample. It is asked once."""

    def answer(number: int, asked: Any) -> web.Response:
        return web.Response(text=json.dumps(answers[number - 1]), content_type="application/json")

    found = []
    async with answering(answer) as (url, asked):
        for _ in answers:  # each by a reward of its own, because many failures open its circuit breaker
            async with asking(reward(url=url, retries=0, **options)) as bound:
                try:
                    found.append(await bound(REQUEST))
                except RewardFailed:
                    found.append(FAILED)
    assert len(asked) == len(answers)
    return found


# ---- judge: the number behind the last "Score:", from 0 to 10, as a share

SAID = [
    before + form.format(number)
    for before in ("", "Good.\n", "Score: 3, at first.\n", "7 of 10; Score:")
    for form in ("Score: {}", "Score:\n{} ", "**Score:{}**", "score: {}", "Score: {}/10.", "Score = {}")
    for number in ("0", "10", "7.5", "-1", "11", "nan", "", "1e1", "\u0663", "5.")
]


def graded(text: str) -> float | None:
    """Return the last number that stands behind ``Score:``, read character by character."""
    last = None
    for place in range(len(text)):
        if not text.startswith("Score:", place):
            continue
        rest = text[place + len("Score:") :].lstrip()
        sign, rest = (-1, rest[1:]) if rest.startswith("-") else (1, rest)
        whole = "".join(itertools.takewhile(str.isdecimal, rest))
        behind = rest[len(whole) :]
        part = "".join(itertools.takewhile(str.isdecimal, behind[1:])) if behind.startswith(".") else ""
        if whole:
            last = sign * float(f"{int(whole)}.{int(part) if part else 0}")
    return last


async def test_judge_is_its_definition() -> None:
    assert len(SAID) >= LEAST
    messages = [{"choices": [{"message": {"content": text}}]} for text in SAID]
    found = await rewards_of(Judge, messages, model="m")
    for text, got in zip(SAID, found, strict=True):
        grade = graded(text)
        wanted = FAILED if grade is None or not 0 <= grade <= 10 else {"score": grade / 10, "grade": grade}
        assert got == wanted, text
    kinds = {str(got) for got in found}
    assert FAILED in kinds and len(kinds) >= 6


# ---- remote: a number, a map of numbers, or either one under "reward" or a key of one's own

VALUES: list[Any] = [
    0,
    1,
    -0.5,
    1e300,
    True,
    None,
    "1",
    [],
    [1],
    {},
    {"a": 1},
    {"a": 1, "b": 2.5},
    {"a": True},
    {"a": "x"},
    {"a": {"b": 1}},
]
FRAMES = [
    "{}",
    '{{"reward": {}}}',
    '{{"reward": {}, "log": "text"}}',
    '{{"score": {}}}',
    '{{"mine": {}, "reward": 3}}',
    "[{}]",
]


def numbers(value: Any) -> bool:
    return type(value) in (int, float) or (
        type(value) is dict and bool(value) and all(type(one) in (int, float) for one in value.values())
    )


@pytest.mark.parametrize("key", ["", "mine"])
async def test_remote_is_its_definition(key: str) -> None:
    assert len(VALUES) * len(FRAMES) >= LEAST
    answers = [json.loads(frame.format(json.dumps(value))) for frame, value in itertools.product(FRAMES, VALUES)]
    found = await rewards_of(Remote, answers, key=key)
    for answer, got in zip(answers, found, strict=True):
        if key:
            wanted = answer.get(key) if isinstance(answer, dict) else None
        else:
            wanted = answer if numbers(answer) or not isinstance(answer, dict) else answer.get("reward")
        assert got == (wanted if numbers(wanted) else FAILED), answer
    assert FAILED in found and sum(got != FAILED for got in found) >= 6


async def test_an_answer_of_the_reward_server_that_failed_fails_the_sample() -> None:
    assert await rewards_of(Remote, [{"failed": "no label"}, {"failed": 1}, {"failed": "x", "reward": 1}]) == [
        FAILED,
        {"failed": 1},
        FAILED,
    ]


# ---- reward_model: scale * (output - offset), in bounds

OUTPUTS: list[Any] = [0, 1, -1, 2.5, -7.25, 1e5, -1e9, 1e308, 10**400, True, None, "1", []]
SCALES = [
    (0.0, 1.0, -1e6, 1e6),
    (1.5, 2.0, -3.0, 3.0),
    (-1.0, -0.5, 0.0, 1.0),
    (0.0, 0.0, -1.0, 1.0),
    (100.0, 0.01, -1e6, 1e6),
]


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(("offset", "scale", "low", "high"), SCALES)
async def test_reward_model_is_its_definition(index: int, offset: float, scale: float, low: float, high: float) -> None:
    assert len(OUTPUTS) * len(SCALES) >= LEAST
    answers = [{"embedding": [output, other]} for output, other in zip(OUTPUTS, reversed(OUTPUTS), strict=True)]
    found = await rewards_of(RewardModel, answers, index=index, offset=offset, scale=scale, low=low, high=high)
    for answer, got in zip(answers, found, strict=True):
        output = answer["embedding"][index] if index < 2 else None
        if type(output) not in (int, float) or abs(output) > sys.float_info.max:
            assert got == FAILED
            continue
        wanted = min(max(Fraction(scale) * (Fraction(output) - Fraction(offset)), Fraction(low)), Fraction(high))
        assert got == {"score": pytest.approx(float(wanted)), "output": output}
