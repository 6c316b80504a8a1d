"""Text of token ids, for viewers of samples. Knows no bus."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tidemill.actors.text.text import Text as Tokenizer

_CONTEXT = 8  # Tokens before a token that affect its text: a space at its beginning, the rest of a character


class Vocabulary:
    """Text of token ids; without a tokenizer an id is shown as ``⟨17⟩``."""

    def __init__(self, text: Tokenizer | None) -> None:
        self._text = text

    @classmethod
    def read(cls, places: Sequence[Path]) -> Self:
        """Return the vocabulary of the first model directory with a tokenizer; else one that shows ids."""
        return cls(next((text for place in places if (text := Tokenizer.read(place)) is not None), None))

    def pieces(self, ids: Sequence[int], first: int = 0) -> list[str]:
        """Return the text that each token adds, from place ``first`` on."""
        return [self._piece(ids, place) for place in range(first, len(ids))]

    def _piece(self, ids: Sequence[int], place: int) -> str:
        if self._text is None:
            return f"⟨{ids[place]}⟩"
        before = ids[max(0, place - _CONTEXT) : place]
        shorter = self._text.decode(before, skip_special=False)
        longer = self._text.decode([*before, ids[place]], skip_special=False)
        piece = longer[len(shorter) :] if longer.startswith(shorter) else ""
        return piece if piece and "\ufffd" not in piece else f"⟨{ids[place]}⟩"
