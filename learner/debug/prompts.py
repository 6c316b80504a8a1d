"""Prompts for dumps and scores: token ids in JSON lines. Knows no tokenizer."""

import json
from pathlib import Path

from tidemill.learner.errors import DebugFileRefused

LEAST_TOKENS = 2
"""Tokens of a prompt: the log-prob of the second one is the first that there is."""


def read_prompts(path: Path) -> list[list[int]]:
    """Return the token ids of each line: a JSON list, or a map with ``tokens``. Raises DebugFileRefused."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DebugFileRefused(
            str(path), "a text file with a JSON list of token ids in each line", str(error)
        ) from None
    found = [_tokens(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DebugFileRefused(str(path), "at least one prompt", "none")
    return found


def _tokens(line: str, where: str) -> list[int]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    tokens = value.get("tokens") if isinstance(value, dict) else value
    if (
        not isinstance(tokens, list)
        or len(tokens) < LEAST_TOKENS
        or any(type(token) is not int or token < 0 for token in tokens)
    ):
        raise DebugFileRefused(
            where, f"a JSON list of at least {LEAST_TOKENS} token ids, or a map with tokens", repr(line[:60])
        )
    return list(tokens)
