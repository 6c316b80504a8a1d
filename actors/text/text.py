"""The tokenizer of a model directory: its tokenizer.json, read with the tokenizers library alone. Knows no model."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tidemill.actors.errors import BadRequest
from tidemill.bus.system.functions import errors_as

LONG = 16_384
"""Characters of text above which an event loop does not wait for its tokens: about a thousand take a millisecond."""
T = TypeVar("T")


async def beside_loop(size: int, work: Callable[[], T]) -> T:
    """Return ``work()``, which runs in a thread where it reads more than ``LONG`` characters (``size``)."""
    return work() if size <= LONG else await asyncio.to_thread(work)


def size_of(value: object) -> int:
    """Return the characters of all texts in a JSON value."""
    size, values = 0, [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list | tuple) and not (value and isinstance(value[0], int)):  # token ids
            values += value
    return size


class Text:
    """A tokenizer; thread-safe."""

    def __init__(self, tokenizer: Any, eos_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._max_tokens = self._max_bytes = 0
        """Bounds of a text; 0 = none."""

    def bounded(self, max_tokens: int) -> "Text":
        """Return this tokenizer, which refuses a text that cannot have at most ``max_tokens``, by its length alone."""
        bounded = Text(self.tokenizer, self.eos_ids)
        bounded._max_tokens, bounded._max_bytes = max_tokens, max_tokens * self.longest_token_bytes
        return bounded

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token, as the vocabulary has it."""
        return max((len(token.encode()) for token in self.tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def read(cls, model_dir: Path) -> "Text | None":
        """Return the tokenizer; None without a tokenizer.json: the engine has token ids only. Raises ValueError."""
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
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text; None when the vocabulary has no such token."""
        token_id = self.tokenizer.token_to_id(token)
        return None if token_id is None else int(token_id)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        ``add_special``: with the tokens that the tokenizer puts before and after every text (a chat template has them
        already).
        Raises BadRequest for text with a lone surrogate, which is not valid Unicode, and for one over the bound;
        ValueError for text without tokens.
        """
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"text: want Unicode text, got a lone surrogate ({text[error.start]!a}) at {error.start}"
            ) from error
        if num_bytes > self._max_bytes > 0:
            limit = f"the model's context length ({self._max_tokens} tokens)"
            raise BadRequest(f"The input ({num_bytes} bytes) is longer than {limit} allows.")
        # The library raises plain Exception, for a vocabulary without a token for unknown text.
        with errors_as(lambda error: ValueError(f"text: the tokenizer has no tokens for {text[:100]!r}: {error}")):
            # A batch of one: unlike ``encode`` it lets other threads run meanwhile.
            (encoded,) = self.tokenizer.encode_batch([text], add_special_tokens=add_special)
        return list(encoded.ids)

    async def encoded(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids as ``encode`` does, beside the event loop."""
        return await beside_loop(len(text), lambda: self.encode(text, add_special=add_special))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids; ``skip_special``: without special tokens (end of sequence, padding, ...)."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special))


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
