"""Translation of msgspec's validation errors into ``WireError``: where, what is wanted, and what was found."""

import re
from collections.abc import Mapping
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from tidemill.bus.errors import WireError

# Errors that a value from outside can cause while msgspec reads or writes it
UNFIT = (msgspec.MsgspecError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"Object (?P<problem>missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected (?P<want>`[^`]*`.*?)(?:, got .*)?", re.DOTALL)
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "bytes": "bytes",
    "array": "a list",
    "object": "a map",
    "null": "nil",
}
_SHOWN = 80


def mismatch(error: Exception, value: object, kind: type) -> WireError:
    """Return the error for ``value``, the map that msgspec refused as a ``kind`` (a dataclass or struct).

    The wanted type of a field is the ``description`` of its annotation, where it has one.
    """
    text = str(error)
    place = _PLACE.search(text)
    path = place["path"] if place else ""
    reason = text[: place.start()] if place else text
    if field := _FIELD.fullmatch(reason):
        name = f"{path}.{field['name']}".removeprefix(".")
        if field["problem"] == "missing required":
            return WireError(name, _described(_hint(kind, name)) or "a value", "nothing")
        return WireError(name, "a known field", shown(_at(value, name)))
    want = _described(_hint(kind, path)) or _translated(reason)
    return WireError(path.replace("[...]", ""), want, shown(_at(value, path)))


def shown(value: object) -> object:
    """Return the value if it is small, else a description: error messages stay readable."""
    try:
        text = repr(value)
    except RecursionError:
        return f"{type(value).__name__} nested too deeply to be shown"
    is_short = len(text) <= 100 and isinstance(value, (int, float, str, type(None)))
    return value if is_short else f"{type(value).__name__} {text[:_SHOWN]}"


def _described(hint: Any) -> str:
    """Return the wanted type in words; empty for one whose words msgspec knows better."""
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.description:
            return str(meta.description)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(str(member.value) for member in hint)}"
    kinds = [_described(kind) for kind in get_args(hint) if kind is not ...]
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(kinds) if all(kinds) else ""
    if origin is list or (origin is tuple and ... in get_args(hint)):
        return f"a list of {kinds[0]}" if kinds[0] else "a list"
    if origin in (dict, Mapping):
        return f"a map from {kinds[0]} to {kinds[1]}" if all(kinds) else "a map"
    return _WORDS.get("null" if hint in (None, type(None)) else getattr(hint, "__name__", ""), "")


def _translated(reason: str) -> str:
    expected = _EXPECTED.fullmatch(reason)
    if expected is None:
        return reason
    return re.sub("`([^`]*)`", lambda kinds: " or ".join(map(_word, kinds[1].split(" | "))), expected["want"])


def _word(name: str) -> str:
    return _WORDS.get(name, name)


def _hint(kind: Any, path: str) -> Any:
    """Return the annotation of the value at a path; Any where the path leads through a union."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        if name:
            is_class = isinstance(kind, type) and not get_args(kind)
            kind = get_type_hints(kind, include_extras=True).get(name, Any) if is_class else Any
        elif index == "..." and get_origin(kind) in (dict, Mapping):
            kind = get_args(kind)[1]
        elif index and get_origin(kind) in (list, tuple):
            kind = get_args(kind)[0]
        else:
            return Any
    return kind


def _at(value: object, path: str) -> object:
    """Return the value at a path such as ``spans[0].version``, or the innermost one that can be found."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if name and isinstance(value, Mapping) and name in value:
            value = value[name]
        elif index and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            break
    return value
