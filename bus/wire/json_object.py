"""Decoded JSON and msgpack values: maps, numbers, and texts of whole characters."""

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

JsonObject = dict[str, Any]  # A decoded map with text keys. Its values are of any type until they are checked.
JsonMapping = Mapping[str, Any]  # A ``JsonObject`` that is only read
_SURROGATE = re.compile("[\ud800-\udfff]")


def with_whole_characters(value: Any) -> Any:
    """Return a JSON value with U+FFFD for each half of a surrogate pair, which has no bytes and no token.

    Programs cut texts within a character, and read files with ``errors="surrogateescape"``.
    """
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {with_whole_characters(name): with_whole_characters(field) for name, field in value.items()}
    return [with_whole_characters(field) for field in value] if isinstance(value, list) else value


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number; true and false, which Python counts as 1 and 0, are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; true and false are none."""
    return isinstance(value, float) or is_integer(value)
