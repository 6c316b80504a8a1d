"""The wire format of single fields: a codec packs a value, and unpacks it again or refuses it. Knows no message."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any

import numpy as np

from tidemill.bus.wire.json_object import JsonObject

MOST_LEVELS = 64
"""Limit of nesting of maps and lists in a field that may hold anything."""


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """A field's format. ``pack`` and ``unpack`` raise TypeError or ValueError for a value that does not fit ``want``, its description."""

    want: str
    pack: Callable[[Any], Any]
    unpack: Callable[[object], Any]
    exact: type | None = None
    """A value of exactly this type is packed and unpacked as it is, without a call."""
    wire: Any = Any
    """The type of the packed value, as msgspec checks it (``tidemill.bus.wire.compiled``)."""
    by_hand: bool = False
    """True when msgspec cannot do all of it: ``unpack`` is called after it, ``plain`` (or else ``pack``) before it."""
    plain: Callable[[object], object] | None = None
    """Like ``pack``, but refuses values that msgspec might write differently from msgpack."""


def _int(value: object) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (float, int, Decimal)):  # Decimal, because msgspec takes it, too
        raise TypeError
    return float(value)


def _bool(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _map(value: object) -> dict[str, object]:
    if type(value) is not dict:
        raise TypeError
    for key, item in value.items():
        if type(key) is not str:
            raise TypeError
        if type(item) not in _SCALARS:
            shallow(item, MOST_LEVELS - 1)
    return value


def _prompt(value: object) -> object:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise TypeError
    return [_map(message) for message in value]


def _same(value: object) -> object:
    if type(value) not in _SCALARS:
        shallow(value)
    return value


def shallow(value: object, levels: int = MOST_LEVELS) -> None:
    """Raise ValueError for a value nested so deeply that it could be decoded, but neither shown nor compared."""
    if isinstance(value, dict | list | tuple):
        if not levels:
            raise ValueError
        for item in value.values() if isinstance(value, dict) else value:
            shallow(item, levels - 1)


def _plain(value: Any, levels: int = MOST_LEVELS) -> object:
    """Return the value, if all of it is of types that every msgpack library writes in one way. Raises ValueError, TypeError."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if not levels:
        raise ValueError
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError
            _plain(item, levels - 1)
    elif kind is list:
        for item in value:
            _plain(item, levels - 1)
    else:
        raise TypeError
    return value


_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})

INT = FieldCodec("an integer", _int, _int, int, int)
FLOAT = FieldCodec("a number", _float, _float, float, float)
BOOL = FieldCodec("true or false", _bool, _bool, bool, bool)
TEXT = FieldCodec("text", _text, _text, str, str)
MAP = FieldCodec("a map with text keys", _map, _map, None, JsonObject, by_hand=True, plain=_plain)
PROMPT = FieldCodec("text or a list of chat messages (maps)", _prompt, _prompt, str, str | list[JsonObject], by_hand=True, plain=_plain)
ANY = FieldCodec("anything msgpack can hold", _same, _same, by_hand=True, plain=_plain)


def optional(codec: FieldCodec) -> FieldCodec:
    """Return a codec that also accepts nil."""

    def or_nil(convert: Callable[[object], object]) -> Callable[[object], object]:
        """Return a function that passes nil on, and converts other values."""
        return lambda value: None if value is None else convert(value)

    return FieldCodec(f"nil or {codec.want}", or_nil(codec.pack), or_nil(codec.unpack), type(None), codec.wire | None)


def many(codec: FieldCodec) -> FieldCodec:
    """Return the codec of a list, which is a tuple in memory."""

    def unpack(value: object) -> tuple[object, ...]:
        """Return the tuple of a list."""
        if not isinstance(value, list):
            raise TypeError
        return tuple([codec.unpack(item) for item in value])

    wire: object = tuple[codec.wire, ...]  # type: ignore[name-defined]
    return FieldCodec(f"a list of {codec.want}", lambda value: [codec.pack(item) for item in value], unpack, None, wire)


def keyed(key: FieldCodec, codec: FieldCodec) -> FieldCodec:
    """Return the codec of a map from one codec to another."""

    def convert(value: object, key_of: Callable[[object], object], value_of: Callable[[object], object]) -> dict[object, object]:
        """Return the map with keys and values converted."""
        if type(value) is not dict:
            raise TypeError
        return {key_of(name): value_of(item) for name, item in value.items()}

    return FieldCodec(
        f"a map from {key.want} to {codec.want}",
        lambda value: convert(value, key.pack, codec.pack),
        lambda value: convert(value, key.unpack, codec.unpack),
        None,
        dict[key.wire, codec.wire],  # type: ignore[name-defined]
    )


def either(first: FieldCodec, second: FieldCodec) -> FieldCodec:
    """Return the codec of one of two. The exact type of the first is taken without a call; other values are tried as the second first."""

    def one_of(convert_first: Callable[[object], object], convert_second: Callable[[object], object]) -> Callable[[object], object]:
        """Return a function that converts a value as the second form, or else as the first."""

        def convert(value: object) -> object:
            """Convert a value that does not have the exact type of the first form."""
            try:
                return convert_second(value)
            except (TypeError, ValueError):
                return convert_first(value)

        return convert

    want, wire = f"{first.want} or {second.want}", first.wire | second.wire
    return FieldCodec(want, one_of(first.pack, second.pack), one_of(first.unpack, second.unpack), first.exact, wire)


def choice(enum: type[StrEnum]) -> FieldCodec:
    """Return the codec of an enumeration's value, as text."""
    members = {str(member.value): member for member in enum}

    def unpack(value: object) -> StrEnum:
        """Return the member with this value."""
        if type(value) is not str or value not in members:
            raise ValueError
        return members[value]

    def pack(value: Any) -> str:
        """Return the value of a member."""
        return str(enum(value).value)

    return FieldCodec(f"one of {', '.join(members)}", pack, unpack, None, enum)


def array(dtype: str) -> FieldCodec:
    """Return the codec of a 1-D array: raw little-endian bytes (``dtype`` as in numpy: ``<i4``), unpacked as a read-only view."""
    wire = np.dtype(dtype)
    native = wire.newbyteorder("=")
    swap = sys.byteorder != "little" and wire.itemsize > 1

    def pack(value: object) -> bytes:
        """Return the bytes of an array of exactly this dtype and one dimension."""
        if not isinstance(value, np.ndarray) or value.dtype != native or value.ndim != 1:
            raise TypeError
        return value.astype(wire).tobytes() if swap else value.tobytes()

    def unpack(value: object) -> object:
        """Return a read-only view of the bytes, or a copy where the machine has the other byte order."""
        if type(value) is not bytes:
            raise TypeError
        found = np.frombuffer(value, dtype=wire)
        return found.astype(native) if swap else found

    return FieldCodec(f"a one-dimensional array of {native.name}, raw little-endian bytes", pack, unpack, by_hand=True)
