"""The tokenizer of a model directory: its tokenizer.json, read with the tokenizers library alone. Knows no model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.errors import BadRequest
from bus.system.foreign import errors_as


class Text:
    """A tokenizer; thread-safe."""

    def __init__(self, tokenizer: Any, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = eos_ids

    @classmethod
    def read(cls, model_dir: Path) -> "Text | None":
        """Return the tokenizer; None when there is no tokenizer.json: the engine then accepts and returns token ids only.

        Raises ValueError for files that do not describe one.
        """
        from tokenizers import Tokenizer

        path = model_dir / "tokenizer.json"
        if not path.exists():
            return None
        # The library raises plain Exception, and the files may have any content.
        with errors_as(lambda error: ValueError(f"{path}: {error}")):
            tokenizer = Tokenizer.from_file(str(path))
            config_path = model_dir / "tokenizer_config.json"
            config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
            eos = config.get("eos_token")
            eos = eos.get("content") if isinstance(eos, dict) else eos
            eos_id = tokenizer.token_to_id(eos) if eos else None
        return cls(tokenizer, () if eos_id is None else (eos_id,))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text; None when the vocabulary has no such token."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        ``add_special``: with the tokens that the tokenizer puts before and after every text (a chat template has them already).
        Raises BadRequest for text with a lone surrogate, which is not valid Unicode; ValueError for text without tokens.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"text: want Unicode text, got a lone surrogate ({text[error.start]!a}) at {error.start}") from error
        # The library raises plain Exception, for a vocabulary without a token for unknown text.
        with errors_as(lambda error: ValueError(f"text: the tokenizer has no tokens for {text[:100]!r}: {error}")):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids; ``skip_special``: without special tokens (end of sequence, padding, ...)."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))


class StopStrings:
    """Finds stop strings at the end of a growing response, decoding only as many tokens as one of them can span."""

    def __init__(self, text: Text, stops: tuple[str, ...]) -> None:
        self._text, self._stops = text, stops
        # In tokens: each visible one has at least one byte; four more cover a character cut at the window's edge.
        self.window = max(len(stop.encode()) for stop in stops) + 4

    def find(self, ids: Sequence[int], begun: Sequence[int] = ()) -> str | None:
        """Return the stop string that the newest token of the response ``begun + ids`` completed, or None."""
        window = ids[-self.window :]
        if begun and (missing := self.window - len(window)):
            window = [*begun[-missing:], *window]
        tail = self._text.decode(window)
        return next((stop for stop in self._stops if stop in tail), None)
