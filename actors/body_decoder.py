"""Request bodies decoded into structs of msgspec. An error names the path of a value, the values accepted there and the
value received.

A struct is the one description of a body: types and bounds are checked here alone, rules between fields in its
``__post_init__``.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from tidemill.actors.errors import BadRequest
from tidemill.bus.wire.json_object import JsonObject

Shape = TypeVar("Shape")

_PLACED = re.compile(r"(?s)(?P<reason>.*) - at (?:`key` in )?`\$(?P<path>.*)`")
_EXPECTED = re.compile(r"Expected `(?P<types>[^`]*)`(?P<bound>.*?)(?:, got `\w+`)?")
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
"""Errors of msgspec, which has their parts in no other form."""
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "a map",
}
"""Type of msgspec -> the words for it. ``null`` has none: an absent field says the same."""
MAX_SHOWN = 80
"""Maximum number of characters of a refused value that an error shows."""

MAX_NAMES = 20
"""Maximum number of fields that an error about an unknown one lists."""


def decode(body: object, shape: type[Shape], where: str = "") -> Shape:
    """Return ``body``, decoded JSON, as a ``shape``. ``where``: path of ``body`` in errors. Raises BadRequest."""
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        raise BadRequest(_reason(str(error), body, where)) from None
    except UnicodeEncodeError:  # msgspec reads a text as UTF-8 where another type is wanted, too
        raise BadRequest(f"{where or 'body'}: want text of whole characters, got half of a surrogate pair") from None


def need(body: Mapping[str, object], name: str, shape: type[Shape]) -> Shape:
    """Return the field ``name``. Raises BadRequest when it is absent or of another type."""
    return decode(body.get(name), shape, name)


def known_fields(
    body: Mapping[str, object],
    known: Collection[str],
    neutral: Mapping[str, tuple[object, ...]],
    where: str = "",
) -> JsonObject:
    """Return the ``known`` fields that are not null, which means absent. Raises BadRequest for any other field, unless
    it has one of the values at which it has no effect (``neutral``).
    """
    for name, value in body.items():
        if name in known:
            continue
        if name not in neutral:
            raise BadRequest(f"{_joined(where, str(name))}: unknown parameter{_nearest(name, [*known, *neutral])}")
        if value not in neutral[name]:
            want = f"not supported; want {neutral[name][-1]!r}"
            raise BadRequest(f"{_joined(where, name)}: {want}, got {shortened(value)}")
    return {name: value for name, value in body.items() if name in known and value is not None}


def shortened(value: object) -> str:
    """Return a value as an error shows it."""
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + "..."


def _nearest(name: object, names: Sequence[str]) -> str:
    """Return the end of an error, which proposes the nearest name, or shows the names unless they are many."""
    nearest = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if nearest:
        return f"; did you mean {nearest[0]}?"
    return f"; known: {', '.join(sorted(names))}" if len(names) <= MAX_NAMES else ""


def _reason(message: str, body: object, where: str) -> str:
    """Return msgspec's message as path, values accepted and value received."""
    placed = _PLACED.fullmatch(message)
    reason, path = (placed["reason"], placed["path"]) if placed else (message, "")
    place = _joined(where, path.replace("[...]", "").lstrip("." if not where else ""))
    if expected := _EXPECTED.fullmatch(reason):
        words = [_WORDS.get(name, name) for name in expected["types"].split(" | ") if name != "null"]
        bound = re.sub(r"(\d)\.0\b", r"\1", expected["bound"])
        return f"{place or 'body'}: want {' or '.join(words)}{bound}, got {shortened(_value_at(body, path))}"
    if missing := _MISSING.fullmatch(reason):
        return f"{_joined(place, missing['name'])}: want a value, got none"
    if reason == "Number out of range":
        return f"{place}: want a number that 64 bits can hold, got {shortened(_value_at(body, path))}"
    return _joined(place, reason)  # of a __post_init__, whose errors begin with the name of a field


def _joined(place: str, name: str) -> str:
    return f"{place}{'' if not place or not name or name[0] in '.[' else '.'}{name}"


def _value_at(body: object, path: str) -> object:
    """Return the value that msgspec's path leads to, or the map in which the path does not name the key."""
    value = body
    for name, place in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[name] if name else value[int(place)]  # type: ignore[index]
    return value
