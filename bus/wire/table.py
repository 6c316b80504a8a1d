"""The fields of one message as a msgpack map: packing, unpacking, schemas and unknown fields. Knows the names of no message's fields."""

import dataclasses
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Self

import msgpack

from tidemill.bus.errors import UnknownSchema, WireError
from tidemill.bus.wire.compiled import Compiled, nested
from tidemill.bus.wire.fields import MOST_LEVELS, FieldCodec, shallow
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import DEMONSTRATIONS, EPISODES, MASKED_SAMPLES, SCHEMA

_FIRST = ("schema", "type")
_MISSING: object = object()
_AS_DATETIME = 3
"""msgpack's number for timestamps as datetime, the type that msgspec decodes them to as well."""
_BAD = (TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors that a value from outside can cause while it is packed or unpacked."""

_NEWEST = {"sample": DEMONSTRATIONS, "task": EPISODES, "plan": MASKED_SAMPLES}
"""Newest schema of the types that have more than one."""


class Table:
    """The fields of one message in wire order."""

    def __init__(self, message: type, name: str, later: tuple[str, ...] = (), **codecs: FieldCodec) -> None:
        """``later``: fields, the last ones, that came after the first release: they are written only where they differ from the default."""
        fields = {field.name: field for field in dataclasses.fields(message)}
        assert set(codecs) <= set(fields), set(codecs) - set(fields)
        assert later == tuple(codecs)[len(codecs) - len(later) :], later
        self.message, self.name = message, name
        self._codecs, self._later = codecs, [(field, fields[field].default) for field in later]
        self._newest = _NEWEST.get(name, SCHEMA)
        self._values = attrgetter(*codecs) if len(codecs) > 1 else lambda value: (attrgetter(*codecs)(value),)
        self._packers = [(field, codec.exact, codec.pack) for field, codec in codecs.items()]
        self._unpackers = [(field, codec.exact, codec.unpack, _required(fields[field])) for field, codec in codecs.items()]
        self._keeps_unknown = "extra" in fields
        self._compiled: Compiled | None = None

    def compile(self) -> Self:
        """Have msgspec encode and decode the messages that have every field and no unknown one. Returns this table.

        It is worth its memory for samples.
        """
        later = {name for name, _ in self._later}
        always = {name: codec for name, codec in self._codecs.items() if name not in later}
        self._compiled = Compiled(self.message, always, {"schema": SCHEMA, "type": self.name})
        return self

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a message. Raises WireError naming the field that cannot be written."""
        unsaid = [name for name, default in self._later if _is(getattr(value, name), default)]
        plain = self._compiled is not None and not value.extra and len(unsaid) == len(self._later)
        if plain and (found := self._compiled.encode(value)) is not None:  # type: ignore[union-attr]
            return found
        packed: dict[str, object] = {"schema": SCHEMA, "type": self.name}
        self._pack(value, packed)
        if self._newest > SCHEMA:
            packed["schema"] = value.schema  # now that its fields have been found to be of their types
        for name in unsaid:
            del packed[name]
        if self._keeps_unknown:
            packed.update({key: unknown for key, unknown in value.extra.items() if key not in self._codecs and key not in _FIRST})
        try:
            return msgpack.packb(packed, datetime=True)
        except _BAD:
            raise self._not_packable(packed) from None

    def read(self, data: bytes) -> Any:
        """Return the message in ``data``. Raises WireError, UnknownSchema."""
        found = None if self._compiled is None else self._compiled.decode(data)
        return self.decode(unpack(data, self.name)) if found is None else found

    def decode(self, fields: Mapping[str, object]) -> Any:
        """Return the message in a map."""
        found = self._take(fields)
        if self._keeps_unknown and len(fields) > len(found) + 2:
            extra = {_name(key): value for key, value in fields.items() if key not in found and key not in _FIRST}
            found["extra"] = self._shallow(extra)
        message = self.message(**found)
        if self._newest > SCHEMA and message.schema > fields["schema"]:  # type: ignore[operator]
            said = ", ".join(name for name, default in self._later if not _is(getattr(message, name), default))
            raise WireError("schema", f"{message.schema} for a {self.name} with {said}", fields["schema"])
        return message

    def _shallow(self, extra: dict[str, object]) -> dict[str, object]:
        try:
            shallow(extra)
        except ValueError:
            raise WireError(self.name, f"unknown fields nested at most {MOST_LEVELS} deep", "deeper ones") from None
        return extra

    def pack(self, value: object) -> dict[str, object]:
        """Return a message as a map, without ``schema`` and ``type``."""
        packed: dict[str, object] = {}
        self._pack(value, packed)
        return packed

    def _pack(self, value: object, packed: dict[str, object]) -> None:
        field = ""
        try:
            for (field, exact, pack), item in zip(self._packers, self._values(value), strict=True):
                # The exact type, not isinstance: a bool is an int for Python, and another type on the wire.
                packed[field] = item if type(item) is exact else pack(item)
        except _BAD as error:
            if isinstance(error, WireError):
                raise WireError(f"{field}.{error.field}", error.want, error.got) from None
            raise WireError(field or self.name, self._codecs[field].want if field else self.message.__name__, _seen(value, field)) from None

    def _take(self, fields: Mapping[str, object]) -> dict[str, object]:
        found: dict[str, object] = {}
        field, value = "", None
        try:
            for field, exact, unpack, required in self._unpackers:
                value = fields.get(field, _MISSING)
                if type(value) is exact:
                    found[field] = value
                elif value is not _MISSING:
                    found[field] = unpack(value)
                elif required:
                    raise WireError("", self._codecs[field].want, "nothing")
        except _BAD as error:
            if isinstance(error, WireError):
                raise WireError(f"{field}.{error.field}".rstrip("."), error.want, error.got) from None
            raise WireError(field, self._codecs[field].want, _short(value)) from None
        return found

    def _not_packable(self, packed: Mapping[str, object]) -> WireError:
        for field, value in packed.items():
            try:
                msgpack.packb(value, datetime=True)
            except _BAD as error:
                return WireError(field, f"a value that msgpack can hold ({error})", _short(value))
        return WireError(self.name, "a value that msgpack can hold", _short(packed))

    def nested(self) -> FieldCodec:
        """Return the codec of this message as a field of another: a map without unknown fields."""

        def unpack(value: object) -> object:
            """Return the message in a map. Raises WireError for an unknown field, which would change the meaning."""
            if type(value) is not dict:
                raise TypeError
            found = self._take(value)
            if len(value) > len(found):
                unknown = next(key for key in value if key not in found)
                raise WireError(str(unknown), f"only fields of {self.message.__name__}", _short(value[unknown]))
            return self.message(**found)

        # msgspec takes no part in messages with arrays inside.
        wire: object = Any if any(codec.by_hand for codec in self._codecs.values()) else nested(self.message, self._codecs)
        return FieldCodec(f"a map ({self.message.__name__})", self.pack, unpack, wire=wire)


def _is(value: object, default: object) -> bool:
    """Return whether a later field has its default, which is None, or an empty text or tuple.

    The type is compared, too: a None for an empty text is refused like any other wrong type.
    """
    return type(value) is type(default) and value == default


def _name(key: object) -> str:
    if type(key) is not str:
        raise WireError("a field name", "text", key)
    return key


def _required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _seen(value: object, field: str) -> object:
    return _short(getattr(value, field, value) if field else value)


def _short(value: object) -> object:
    """Return the value if it is small, else a description: error messages stay readable."""
    try:
        text = repr(value)
    except RecursionError:
        return f"{type(value).__name__} nested too deeply to be shown"
    return value if len(text) <= 100 and isinstance(value, (int, float, str, type(None))) else f"{type(value).__name__} {text[:80]}"


def unpack(data: bytes, *types: str) -> JsonObject:
    """Return the map of a message of one of these types. Raises WireError, UnknownSchema."""
    try:
        # strict_map_key: the keys of ``version_steps`` are integers.
        fields = msgpack.unpackb(data, strict_map_key=False, timestamp=_AS_DATETIME)
    except (*_BAD, msgpack.UnpackException) as error:
        raise WireError("message", "one msgpack map", f"{len(data)} bytes: {error or type(error).__name__}") from None
    if type(fields) is not dict:
        raise WireError("message", "one msgpack map", _short(fields))
    named = isinstance(fields.get("type"), str)
    known = range(SCHEMA, (_NEWEST.get(fields["type"], SCHEMA) if named else SCHEMA) + 1)
    if type(fields.get("schema")) is not int or fields["schema"] not in known:
        raise UnknownSchema("schema", " or ".join(map(str, known)), _short(fields.get("schema", "nothing")))
    if not named or fields["type"] not in types:
        raise WireError("type", " or ".join(types), _short(fields.get("type", "nothing")))
    return fields
