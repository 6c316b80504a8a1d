"""Values of messages as text: for a terminal, which must not interpret them, and as JSON."""

import json
import math
import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Return text that a terminal does not interpret: control characters are shown as ``\\x1b``."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, lines: int, characters: int) -> str:
    """Return beginning and end of a long text, and the amount that is missing between them."""
    rows = text.splitlines()
    if len(rows) > lines:
        text = "\n".join([*rows[: lines // 2], f"… {len(rows) - lines} lines …", *rows[len(rows) - (lines - lines // 2) :]])
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return text


def to_json(value: object) -> str:
    """Return JSON of any value of a message: bytes in hexadecimal, keys as text, numbers that JSON lacks as text."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if isinstance(value, str | int | float | None) else repr(value)
