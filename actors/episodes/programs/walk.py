"""A small text game of up to nine turns: walk along the digits to a goal. A model learns it from random weights on two
cores.

::

    3.7=     the player is at 3, the goal is 7; the answer is + or -
    4.7=     the next observation, behind +
"""

from collections.abc import Mapping
from typing import Any

LAST = 9
MOVES = {"+": 1, "-": -1}


class Walk:
    """An environment of ``multi_turn``. A move's reward is the share of the way by which it comes nearer: 1 in all."""

    def __init__(self) -> None:
        self._at = self._goal = self._way = 0

    def reset(self, data: Mapping[str, Any]) -> str:
        """Begin at the prompt, ``3.7=``. Raises ValueError for another form."""
        prompt = str(data["prompt"])
        at, _, goal = prompt.removesuffix("=").partition(".")
        if not (len(at) == len(goal) == 1 and (at + goal).isascii() and (at + goal).isdigit() and at != goal):
            raise ValueError(f"want a prompt such as 3.7=, of two different digits, got {prompt!r}")
        self._at, self._goal = int(at), int(goal)
        self._way = abs(self._goal - self._at)
        return self._observation()

    def step(self, text: str) -> tuple[str, float, bool]:
        """Move, and return (observation, reward, done). Other texts, and moves beyond the ends, change nothing."""
        before = abs(self._goal - self._at)
        self._at = min(LAST, max(0, self._at + MOVES.get(text, 0)))
        after = abs(self._goal - self._at)
        return self._observation(), (before - after) / self._way, after == 0

    def state(self) -> list[int]:
        return [self._at, self._goal, self._way]

    def restore(self, state: list[int]) -> None:
        self._at, self._goal, self._way = state

    def _observation(self) -> str:
        return f"{self._at}.{self._goal}="
