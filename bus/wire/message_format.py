"""Bytes of a message type: one msgpack map, ``schema`` and ``type`` first, then its dataclass's fields.

msgspec reads and checks the fields by the annotations. This module adds arrays (raw bytes), depth limits, unknown
fields and schema numbers; it knows the names of no message's fields.
"""

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.bus.errors import UnknownSchema, WireError
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import DEMONSTRATIONS, EPISODES, MASKED_SAMPLES, NOT_ON_WIRE, SCHEMA
from tidemill.bus.wire.mismatch import UNFIT, mismatch, shown
from tidemill.bus.wire.routed_experts import RoutedExperts, pack_experts, unpack_experts

MAX_LEVELS = 64  # Limit of nesting in a field that may hold anything: deeper values could be neither shown nor compared
# Newest schema of the types that have more than one
_NEWEST = {"sample": DEMONSTRATIONS, "task": EPISODES, "plan": MASKED_SAMPLES}
_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})

M = TypeVar("M")
Convert = Callable[[Any], Any]
RawFields = dict[str, msgspec.Raw]


def _array(dtype: str) -> tuple[Convert, Convert]:
    """Return functions that pack and unpack a 1-D array of a ``dtype`` as raw little-endian bytes."""
    wire = np.dtype(dtype)
    native = wire.newbyteorder("=")
    swap = sys.byteorder != "little" and wire.itemsize > 1
    want = f"a one-dimensional array of {native.name}, raw little-endian bytes"

    def pack(value: object) -> bytes:
        if not isinstance(value, np.ndarray) or value.dtype != native or value.ndim != 1:
            raise ValueError(want)
        return value.astype(wire).tobytes() if swap else value.tobytes()

    def unpack(value: object) -> object:
        """Return a read-only view of the bytes, or a copy where the machine has the other byte order."""
        if isinstance(value, np.ndarray):
            return value  # a default
        if type(value) is not bytes or len(value) % wire.itemsize:
            raise ValueError(want)
        array = np.frombuffer(value, dtype=wire)
        return array.astype(native) if swap else array

    return pack, unpack


# Functions that pack and unpack the arrays of each annotation
_ARRAYS: Mapping[object, tuple[Convert, Convert]] = {
    NDArray[np.int32]: _array("<i4"),
    NDArray[np.int64]: _array("<i8"),
    NDArray[np.float32]: _array("<f4"),
    NDArray[np.uint8]: _array("u1"),
    RoutedExperts: (pack_experts, unpack_experts),
}


def check_open(value: object, levels: int = MAX_LEVELS) -> None:
    """Check a value that may be anything: depth, and types that come back unchanged. Raises ValueError, TypeError."""
    if type(value) in _SCALARS:
        return
    if isinstance(value, dict | list | tuple):
        if not levels:
            raise ValueError(f"maps and lists nested at most {MAX_LEVELS} deep")
        for item in value.values() if isinstance(value, dict) else value:
            check_open(item, levels - 1)
    elif not isinstance(value, str | int | float | bytes | bytearray | msgspec.msgpack.Ext) and not (
        isinstance(value, datetime) and value.tzinfo is not None
    ):
        raise TypeError(f"a value that msgpack can hold, no {type(value).__name__}")


def _plain(value: object) -> object:
    """Return a value of a subclass of a built-in type, such as numpy.float64, as this type."""
    match value:
        case str():
            return str.__str__(value)
        case float():
            return float(value)
        case int():
            return int(value)
        case bytes():
            return bytes(value)
    raise TypeError(f"a value that msgpack can hold, no {type(value).__name__}")


# A reward function may return a Decimal: a number, not text.
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain, decimal_format="number")
_RAW: msgspec.msgpack.Decoder[RawFields] = msgspec.msgpack.Decoder(RawFields)


class _Conversion(NamedTuple):
    """A field whose value msgspec does not read and write alone: an array, or a value that may be anything."""

    name: str
    pack: Convert
    unpack: Convert
    may_be_nil: bool


class _Layout:
    """The fields of a dataclass as msgspec reads and writes them: a struct of its annotations, with arrays as bytes."""

    def __init__(
        self, message: type, names: Sequence[str], *, later: Collection[str] = (), head: Sequence[Any] = ()
    ) -> None:
        """``later``: fields that may be left out. ``head``: (name, type, default) of fields before the others."""
        self._names = names
        self._conversions: list[_Conversion] = []
        self._nested: dict[str, _Layout] = {}
        hints = get_type_hints(message)
        defaults = {field.name: _default(field) for field in dataclasses.fields(message)}
        fields = list(head)
        for name in names:
            kind, may_be_nil = _without_none(hints[name])
            kinds = [self._struct_kind(name, kind)]
            kinds += [msgspec.UnsetType] * (name in later) + [None] * may_be_nil
            fields.append((name, reduce(or_, kinds), defaults[name]))
            if pair := self._pair(name, kind):
                self._conversions.append(_Conversion(name, *pair, may_be_nil))
        # gc: such an object is never part of a cycle.
        self.struct = msgspec.defstruct(message.__name__, fields, kw_only=True, gc=False, forbid_unknown_fields=True)

    def _struct_kind(self, name: str, kind: Any) -> Any:
        if dataclasses.is_dataclass(kind):
            self._nested[name] = layout = _Layout(kind, [field.name for field in dataclasses.fields(kind)])  # type: ignore[arg-type]
            return layout.struct
        return Any if kind in _ARRAYS else _with_plain_tuples(kind)

    def _pair(self, name: str, kind: object) -> tuple[Convert, Convert] | None:
        """Return the functions that pack and unpack a field; None where msgspec does it all."""
        if name in self._nested:
            layout = self._nested[name]
            return (layout.pack, layout.unpack) if layout._conversions else None
        return _ARRAYS.get(kind) or ((_checked, _checked) if _is_open(kind) else None)

    def pack(self, wire: Any) -> Any:
        """Replace arrays by their bytes, and return the struct. Raises WireError."""
        for name, convert, _, may_be_nil in self._conversions:
            if (value := getattr(wire, name)) is not None or not may_be_nil:
                try:  # not in a function of its own: both loops run for each sample
                    setattr(wire, name, convert(value))
                except UNFIT as error:
                    raise _named(error, name, value) from None
        return wire

    def unpack(self, wire: Any) -> Any:
        """Replace bytes by arrays, and return the struct. Raises WireError."""
        for name, _, convert, may_be_nil in self._conversions:
            if (value := getattr(wire, name)) is not None or not may_be_nil:
                try:
                    setattr(wire, name, convert(value))
                except UNFIT as error:
                    raise _named(error, name, value) from None
        return wire

    def unchecked(self, value: object) -> JsonObject:
        """Return the fields of a message with values of any type, arrays as bytes. Raises WireError."""
        packs = {field.name: field.pack for field in self._conversions}
        packs |= {name: layout.unchecked for name, layout in self._nested.items()}
        fields = {name: getattr(value, name) for name in self._names}
        packed = {name: _converted(name, packs[name], fields[name]) for name in packs if fields[name] is not None}
        return fields | packed


class MessageFormat(Generic[M]):
    """Encoder and decoder of a message type, whose dataclass has the fields in wire order with their types.

    ``later_from``: the first of the fields that came after the first release, which are written only where they differ
    from the default. Unknown fields are kept in ``extra`` where the message has it, and refused inside a field: they
    would change its meaning.
    """

    def __init__(self, message: type[M], name: str, *, later_from: str = "") -> None:
        fields = [field for field in dataclasses.fields(message) if field.metadata != NOT_ON_WIRE]  # type: ignore[arg-type]
        names = [field.name for field in fields]
        self.message, self.name = message, name
        self._later = [(field.name, field.default) for field in fields[names.index(later_from) :]] if later_from else []
        head = (("schema", int, 0), ("type", str, ""))
        self._layout = _Layout(message, names, later=dict(self._later), head=head)
        self._hints, self._newest = get_type_hints(message), _NEWEST.get(name, SCHEMA)
        self._keeps_unknown = "extra" in self._hints
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(self._layout.struct)

    def encode(self, value: M) -> bytes:
        """Return the bytes of a message. Raises WireError naming the field that cannot be written."""
        try:
            return self._encode(value)
        except UNFIT:
            # A wrong value, or a number or text of another type that msgpack can hold, such as numpy.float64 in a
            # reward: reading it back names the one, and makes the other a value of a built-in type.
            return self._encode(self.read(self._unchecked_bytes(value)))

    def read(self, data: bytes) -> M:
        """Return the message in ``data``. Raises WireError, UnknownSchema."""
        try:
            wire = self._decoder.decode(data)
        except UNFIT:
            return self._read_fields(data)
        if wire.type != self.name or not SCHEMA <= wire.schema <= self._newest:
            type_of(data, self.name)
        return self._message(wire)

    def _encode(self, value: Any) -> bytes:
        wire: Any = msgspec.convert(value, self._layout.struct, from_attributes=True)
        wire.schema, wire.type = getattr(value, "schema", SCHEMA), self.name
        self._layout.pack(wire)
        for name, default in self._later:
            if (value_on_wire := getattr(wire, name)) is default or _is(value_on_wire, default):
                setattr(wire, name, msgspec.UNSET)
        if self._keeps_unknown and value.extra:
            fields = {name: item for name, item in msgspec.structs.asdict(wire).items() if item is not msgspec.UNSET}
            return _ENCODER.encode(fields | self._extra(value))
        return _ENCODER.encode(wire)

    def _extra(self, value: Any) -> JsonObject:
        """Return the unknown fields of a message, as they are written again. None of them replaces a known field."""
        field_names = self._layout.struct.__struct_fields__
        return {name: _converted(name, _checked, item) for name, item in value.extra.items() if name not in field_names}

    def _unchecked_bytes(self, value: Any) -> bytes:
        """Return the bytes of an unchecked message, of the newest schema. Raises WireError for a value without any."""
        fields: JsonObject = {"schema": self._newest, "type": self.name, **self._layout.unchecked(value)}
        if self._keeps_unknown:
            fields |= self._extra(value)
        try:
            return _ENCODER.encode(fields)
        except UNFIT:
            raise _unwritable(fields) from None

    def _read_fields(self, data: bytes) -> M:
        """Return a message with unknown fields. Raises WireError naming the wrong field, UnknownSchema."""
        type_of(data, self.name)
        fields = _raw_fields(data)
        unknown = fields.keys() - set(self._layout.struct.__struct_fields__)
        known_bytes = _ENCODER.encode({name: raw for name, raw in fields.items() if name not in unknown})
        try:
            wire = self._decoder.decode(known_bytes)
        except UNFIT as error:
            raise self._refused(error, known_bytes) from None
        message = self._message(wire)
        if not self._keeps_unknown:
            return message
        # In the order in which they stand in the message: it is written again in the same bytes.
        extra = {name: _decoded(name, raw) for name, raw in fields.items() if name in unknown}
        return dataclasses.replace(message, extra=extra)  # type: ignore[type-var]

    def _message(self, wire: Any) -> M:
        self._layout.unpack(wire)
        message = msgspec.convert(wire, self.message, from_attributes=True)
        if self._newest > SCHEMA and message.schema > wire.schema:  # type: ignore[attr-defined]
            newer = ", ".join(name for name, default in self._later if not _is(getattr(message, name), default))
            raise WireError("schema", f"{message.schema} for a {self.name} with {newer}", wire.schema)  # type: ignore[attr-defined]
        return message

    def _refused(self, error: Exception, data: bytes) -> WireError:
        try:
            value: object = msgspec.msgpack.decode(data)
        except UNFIT as malformed:
            return _malformed("message", "one msgpack map", data, malformed)
        return mismatch(error, value, self.message)


def unpack(data: bytes, *types: str) -> JsonObject:
    """Return the map of a message of one of these types. Raises WireError, UnknownSchema."""
    type_of(data, *types)
    return {name: _decoded(name, raw) for name, raw in _raw_fields(data).items()}


def type_of(data: bytes, *types: str) -> str:
    """Return the type of a message, one of ``types``. Raises WireError; UnknownSchema also for an unknown type."""
    fields = _raw_fields(data)
    name, schema = (_decoded(field, fields[field]) if field in fields else "nothing" for field in ("type", "schema"))
    schemas = range(SCHEMA, (_NEWEST.get(name, SCHEMA) if isinstance(name, str) else SCHEMA) + 1)
    if type(schema) is not int or schema not in schemas:
        raise UnknownSchema("schema", " or ".join(map(str, schemas)), shown(schema))
    if name not in types:
        raise WireError("type", " or ".join(types), shown(name))
    return str(name)


def _raw_fields(data: bytes) -> RawFields:
    try:
        return _RAW.decode(data)
    except UNFIT as error:
        raise _malformed("message", "one msgpack map", data, error) from None


def _malformed(field: str, want: str, data: bytes, error: Exception) -> WireError:
    return WireError(field, want, f"{len(data)} bytes: {error or type(error).__name__}")


def _decoded(field: str, raw: msgspec.Raw) -> object:
    """Return the value of a field that may hold anything. Raises WireError."""
    try:
        value: object = msgspec.msgpack.decode(raw)
    except UNFIT as error:
        raise _malformed(field, "a value of msgpack", bytes(raw), error) from None
    return _converted(field, _checked, value)


def _named(error: Exception, name: str, value: object) -> WireError:
    """Return the error of a field's value, or of a field within it."""
    if isinstance(error, WireError):
        return WireError(f"{name}.{error.field}", error.want, error.got)
    return WireError(name, str(error), shown(value))


def _converted(name: str, convert: Convert, value: object) -> Any:
    try:
        return convert(value)
    except UNFIT as error:
        raise _named(error, name, value) from None


def _checked(value: object) -> object:
    check_open(value)
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass's field as msgspec has it."""
    if field.default_factory is not dataclasses.MISSING:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.NODEFAULT if field.default is dataclasses.MISSING else field.default


def _unwritable(fields: JsonObject) -> WireError:
    for name, value in fields.items():
        try:
            _ENCODER.encode(value)
        except UNFIT:
            if isinstance(value, dict):
                return _named(_unwritable(value), name, value)
            return WireError(name, "a value that msgpack can hold", shown(value))
    return WireError("message", "a value that msgpack can hold", shown(fields))


def _without_none(hint: object) -> tuple[Any, bool]:
    """Return the type of a field without None, and whether None is allowed."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    value_kinds = tuple(kind for kind in kinds if kind is not type(None))
    return reduce(or_, value_kinds), len(value_kinds) < len(kinds)


def _with_plain_tuples(hint: Any) -> Any:
    """Return a type with plain tuples for named ones: msgspec would take an instance of a named one unchecked."""
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return tuple[tuple(get_type_hints(hint).values())]  # type: ignore[misc]
    arguments = tuple(_with_plain_tuples(argument) for argument in get_args(hint))
    if not arguments or arguments == get_args(hint):
        return hint
    return reduce(or_, arguments) if get_origin(hint) in (Union, UnionType) else get_origin(hint)[arguments]  # type: ignore[index]


def _is_open(hint: object) -> bool:
    """Return whether a field may hold anything, in all of it or in its values."""
    return hint is Any or any(_is_open(kind) for kind in get_args(hint))


def _is(value: object, default: object) -> bool:
    """Return whether a later field has its default, which is None, False, or an empty text or tuple.

    The type is compared, too: a None for an empty text is refused like any other wrong type.
    """
    return type(value) is type(default) and value == default
