"""Text of a run made safe for display, cut, and answers as JSON. Knows no bus.

A browser interprets no text that enters by ``textContent``, but a bidirectional control reverses the rest of its line,
and an invisible character hides there: each is replaced by a visible escape.
"""

import re
from typing import Any

import msgspec

MAX_CHARACTERS = 1 << 16  # Characters of one text in one answer; the rest is requested by "show next"

SHORT = 200  # Characters of a name, and of a text in a list

# Control characters but tab and newline; soft hyphen, marks and controls of direction, invisible operators, line and
# paragraph separators, halves of surrogate pairs, annotation and tag characters.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def safe(text: str) -> str:
    """Return text with control, invisible and bidirectional characters as escapes (``\\x1b``, ``\\u202e``)."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def cut(text: str, start: int = 0, size: int = MAX_CHARACTERS) -> tuple[str, int]:
    """Return at most ``size`` characters from ``start`` on, made safe, and the number of characters after them."""
    return safe(text[start : start + size]), max(0, len(text) - start - size)


def ending(text: str, size: int = SHORT) -> str:
    """Return at most ``size`` characters of the end, made safe: chat prompts begin alike, and end with the question."""
    return safe(text if len(text) <= size else f"…{text[1 - size :]}")


def shortened(value: Any) -> Any:
    """Return the first ``SHORT`` characters of a text, and any other value as it is."""
    return value[:SHORT] if isinstance(value, str) else value


def made_safe(value: Any) -> Any:
    """Return a value of maps and lists with all its texts, keys included, made safe."""
    if isinstance(value, str):
        return safe(value)
    if isinstance(value, dict):
        return {safe(str(key)): made_safe(item) for key, item in value.items()}
    return [made_safe(item) for item in value] if isinstance(value, list | tuple) else value


def to_json(value: object) -> bytes:
    """Return JSON of plain values; numbers that are not finite are null."""
    return msgspec.json.encode(value)


def fact(
    name: str, value: object, unit: str = "", note: str = "", *, status: str = "none", metric: str = ""
) -> dict[str, object]:
    """Return a number of the row of facts on top of a page; ``status``: ok, warn or bad, each with a mark, or none."""
    fields = {"name": name, "value": value, "unit": unit, "note": note, "metric": metric}
    return fields | {"status": "none" if value is None else status}
