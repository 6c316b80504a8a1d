"""The tokens that end a response: one definition for engines, the learner, recorded answers and alarms. Loads no torch,
and no tokenizer.

config.json, generation_config.json    eos_token_id, one or several
tokenizer_config.json                  eos_token
the chat template                      the token behind an assistant's message (``<|im_end|>``, ``<|eot_id|>``, ...)

A model ends its answers with the token that it was tuned on, whichever of the files was kept up to date: the
eos_token_id of the base often stays in config.json.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tidemill.rewards.model_text.message_template import TRIED_QUESTION, MessageTemplate

_ANSWER = "tried_answer"
"""Content of the message behind which the end of turn is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTokens:
    """The ids by where they come from; None = that file names none."""

    configured: tuple[int, ...] = ()
    """``eos_token_id`` of config.json, then of generation_config.json."""
    tokenizer: int | None = None
    turn: int | None = None
    """The token that the chat template writes behind an assistant's message."""

    @classmethod
    def read(cls, model_dir: Path) -> Self:
        """Return the tokens of a model directory. Raises ValueError that names the file."""
        files = (model_dir / name for name in ("config.json", "generation_config.json"))
        configured = tuple(dict.fromkeys(token_id for file in files for token_id in _eos_ids(file)))
        vocabulary = _json_map(model_dir / "tokenizer.json")
        if not vocabulary:
            return cls(configured=configured)
        added = {str(token["content"]): int(token["id"]) for token in vocabulary.get("added_tokens") or ()}
        return cls(
            configured=configured,
            tokenizer=_id_of(_eos_token(model_dir), added, vocabulary),
            turn=_end_of_turn(MessageTemplate.read(model_dir), added),
        )

    @property
    def named(self) -> tuple[int, ...]:
        """The ids that the files name, which other programs know too."""
        return tuple(dict.fromkeys(token_id for token_id in (*self.configured, self.tokenizer) if token_id is not None))

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids; the first one is put behind a recorded answer of plain text."""
        return self.named if self.turn is None else tuple(dict.fromkeys((*self.named, self.turn)))


def _eos_ids(file: Path) -> Iterator[int]:
    ids = _json_map(file).get("eos_token_id")
    for token_id in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(f"{file}: eos_token_id: want a token id, or a list of some, got {ids!r:.80}")
        yield token_id


def _eos_token(model_dir: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json_map(model_dir / name).get("eos_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str) and token:
            return token
    return None


def _id_of(token: str | None, added: Mapping[str, int], vocabulary: Mapping[str, Any]) -> int | None:
    """Return the id of a token by its text; tokens of the vocabulary are a map, or a list of pairs (Unigram)."""
    if token is None or token in added:
        return None if token is None else added[token]
    tokens = (vocabulary.get("model") or {}).get("vocab") or {}
    if isinstance(tokens, list):
        return next((token_id for token_id, pair in enumerate(tokens) if pair[0] == token), None)
    token_id = tokens.get(token)
    return None if token_id is None else int(token_id)


def _end_of_turn(template: MessageTemplate | None, added: Mapping[str, int]) -> int | None:
    if template is None:
        return None
    try:
        text = template.render([TRIED_QUESTION, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
    except ValueError:  # a template that refuses this chat; its rows are checked one by one
        return None
    _, written, behind = text.rpartition(_ANSWER)
    matches = [token for token in added if written and behind.lstrip().startswith(token)]
    return added[max(matches, key=len)] if matches else None


def _json_map(file: Path) -> Mapping[str, Any]:
    if not file.exists():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: want a JSON map, got {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: want a JSON map, got {values!r:.80}")
    return values
