"""An environment: the model guesses a number, and each answer is followed by a hint."""

from collections.abc import Mapping
from typing import Any


class Guess:
    """The row's label is the number. The right guess gives 1 and ends the game, as does the last of ``tries``
    guesses.
    """

    def __init__(self, tries: int = 5) -> None:
        self._tries, self._left, self._number = tries, tries, 0

    def reset(self, data: Mapping[str, Any]) -> str:
        """Begin a game; return the first observation."""
        self._number, self._left = int(data["label"]), self._tries
        return f"{data['prompt']}\n"

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the next observation, the reward of this answer, and whether the game is over."""
        guess, self._left = text.strip(), self._left - 1
        if not (guess.isdecimal() and len(guess) < 10):
            return "\nWrite a number.\n", 0.0, self._left == 0
        right = int(guess) == self._number
        return "\nHigher.\n" if int(guess) < self._number else "\nLower.\n", float(right), right or self._left == 0

    def state(self) -> list[int]:
        """Return a JSON value from which ``restore`` goes on, for ``again: resume``."""
        return [self._number, self._left]

    def restore(self, state: list[int]) -> None:
        """Go on where a game was."""
        self._number, self._left = state
