"""A small task for two turns: ask the calculator for a sum, then say it. A model learns it from random weights on two
cores.

::

    4+5=     ->  4+5      the call: an expression, and nothing else
    =009=    ->  009      the answer, behind the calculator's result, which has three digits
"""

from collections.abc import Mapping
from typing import Any

from tidemill.actors.episodes.programs.multi_turn import MultiTurn, Played
from tidemill.actors.episodes.programs.tools import calculator
from tidemill.bus.wire.messages import Status
from tidemill.rewards.builtin.text import digits
from tidemill.rewards.port import RewardRequest

DIGITS = 3
"""Digits of a result."""


def display(expression: str) -> str:
    """Evaluate a sum."""
    return calculator(expression).zfill(DIGITS)


class SumGame(MultiTurn):
    """``multi_turn`` with the calculator, and a dense reward: half for the call, half for the answer behind it."""

    has_fixed_turns = True

    def __init__(self) -> None:
        super().__init__(
            tools=[f"{__name__}:display"],
            protocol="text",
            max_turns=2,
            errors="end",
            call=r"^([0-9+]+)$",
            result="={result}=",
        )

    def reward(self, data: Mapping[str, Any], played: Played) -> dict[str, float]:
        """Return the score and its parts: shares of right positions of the call and of the answer, 0 without a call."""
        expression = str(data["prompt"]).rstrip("=").rstrip(".")
        call = _share(played.answers[0], expression)
        answer = _share(played.answers[1], str(data["label"]).zfill(DIGITS)) if len(played.answers) > 1 else 0.0
        return {"score": (call + answer) / 2, "call": call, "answer": answer}


def _share(response: str, expected: str) -> float:
    return digits(RewardRequest(prompt="", response=response, label=expected, status=Status.COMPLETED))
