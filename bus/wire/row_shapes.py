"""Shapes of the rows of each bucket: required and optional fields. A row of another shape is refused."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields

from tidemill.bus.errors import WireError
from tidemill.bus.wire import subjects
from tidemill.bus.wire.fields import MAP, FieldCodec, keyed
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import MOST_RANKS, Capabilities, LiveRow, VersionRow

MAX_ROW_BYTES = 1 << 20
"""A larger row is refused unread: rows are read every second, by every process."""
_LIMIT = 2**63
_LONGEST_KEY = 512


def json_map(data: bytes) -> JsonObject:
    """Return the JSON object in ``data``. Raises WireError."""
    if len(data) > MAX_ROW_BYTES:
        raise WireError("size", f"<= {MAX_ROW_BYTES} bytes", len(data))
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError("", "a JSON object", str(error)) from None
    if not isinstance(value, dict):
        raise WireError("", "a JSON object", type(value).__name__)
    return value


def read_row(bucket: str, key: str, data: bytes) -> JsonObject:
    """Return the row in ``data``. Raises WireError naming the field that is missing or of another type."""
    value, shape = json_map(data), _shape(bucket, key)
    try:
        shape.check(value)
    except WireError as error:
        if shape is _SECRET:  # the message goes to logs and live rows
            raise WireError(error.field, error.want, "another value") from None
        raise
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    value.encode()  # half of a surrogate pair, which no terminal and no file can take, is a ValueError
    return value


def _key(value: object) -> str:
    """Return a key as it can stand in a header of HTTP."""
    if not 1 <= len(text := _text(value)) <= _LONGEST_KEY or not (text.isascii() and text.isprintable()) or " " in text:
        raise ValueError
    return text


def _whole(value: object) -> int:
    if type(value) is not int or not -_LIMIT <= value < _LIMIT:
        raise TypeError
    return value


def _natural(value: object) -> int:
    number = _whole(value)
    if number < 0:
        raise ValueError
    return number


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _texts(value: object) -> list[str]:
    if not isinstance(value, list):
        raise TypeError
    return [_text(item) for item in value]


def _naturals(value: object) -> list[int]:
    if not isinstance(value, list):
        raise TypeError
    return [_natural(item) for item in value]


def _ranks(value: object) -> int:
    number = _whole(value)
    if not 1 <= number <= MOST_RANKS:
        raise ValueError
    return number


def _codec(want: str, check: Callable[[object], object]) -> FieldCodec:
    return FieldCodec(want, check, check)


TEXT, WHOLE, NATURAL = _codec("text", _text), _codec("an integer of 64 bits", _whole), _codec("an integer >= 0", _natural)
TEXTS, NATURALS = _codec("a list of text", _texts), _codec("a list of integers >= 0", _naturals)
_TEXT_BY_KEY = keyed(TEXT, TEXT)
NUMBERS, FLAG = keyed(TEXT, _codec("a finite number", _number)), _codec("true or false", _flag)


@dataclass(frozen=True, slots=True)
class Shape:
    """Required and optional fields by name. Further fields are ignored."""

    required: Mapping[str, FieldCodec]
    optional: Mapping[str, FieldCodec]

    def check(self, value: Mapping[str, object]) -> None:
        """Raise WireError naming the first field that does not fit."""
        for name, codec in {**self.required, **self.optional}.items():
            if name not in value:
                if name in self.required:
                    raise WireError(name, codec.want, "nothing")
                continue
            try:
                codec.unpack(value[name])
            except WireError as error:  # of a field within this one
                raise WireError(f"{name}.{error.field}", error.want, error.got) from None
            except (TypeError, ValueError, OverflowError):
                raise WireError(name, codec.want, f"{type(value[name]).__name__} {str(value[name])[:40]!r}") from None


def _of(row: type, codecs: Mapping[str, FieldCodec]) -> Shape:
    """Return the shape of a row that is a dataclass: the fields without a default are required."""
    required = {field.name for field in fields(row) if field.default is MISSING and field.default_factory is MISSING}
    assert {field.name for field in fields(row)} == set(codecs), row
    mandatory = {name: codec for name, codec in codecs.items() if name in required}
    return Shape(mandatory, {name: codec for name, codec in codecs.items() if name not in required})


def _nested(shape: Shape) -> FieldCodec:
    """Return the codec of a map in a row, which has fields of its own."""

    def check(value: object) -> object:
        """Return the map if it has the shape. Raises WireError naming the field, TypeError for another type."""
        if not isinstance(value, dict):
            raise TypeError
        shape.check(value)
        return value

    return _codec("a map", check)


_ANY = Shape({}, {})
_VERSION = _of(
    VersionRow,
    {
        "version": NATURAL,
        "step": NATURAL,
        "epoch": NATURAL,
        "state": TEXT,
        "digest": TEXT,
        "snapshot": TEXT,
        "after": WHOLE,
    },
)
_CAPABILITIES = _of(
    Capabilities,
    {
        "single_request_push": FLAG,
        "peer_snapshots": FLAG,
        "colocated": FLAG,
        "ranks": _codec(f"an integer from 1 to {MOST_RANKS}", _ranks),
        "devices": TEXTS,
        "visible_devices": TEXTS,
        "nccl": TEXT,
        "device_memory_bytes": NATURAL,
    },
)
_LIVE = _of(
    LiveRow,
    {
        "role": TEXT,
        "id": TEXT,
        "host": TEXT,
        "pid": WHOLE,
        "phase": TEXT,
        "waits_for": TEXT,
        "trouble": TEXT,
        "version": WHOLE,
        "epoch": WHOLE,
        "load": NUMBERS,
        "capabilities": _nested(_CAPABILITIES),
        "taking_memory": FLAG,
        "address": TEXT,
        "pool": TEXT,
        "handles": TEXT,
        "place": TEXT,
        "unreadable": TEXT,
        "rollouts": TEXTS,
        "nonce": TEXT,
        "reached": _TEXT_BY_KEY,
    },
)


class _Head(Shape):
    """A version's row and the newest learner's epoch, or that alone."""

    def check(self, value: Mapping[str, object]) -> None:
        """Check a version only where there is one: before the first, the head has the fence alone."""
        if "version" in value:
            _VERSION.check(value)
        Shape.check(self, value)


_SECRET = Shape({"key": _codec(f"1 to {_LONGEST_KEY} visible ASCII characters", _key)}, {})
_SECTIONS = ("actor", "bus", "data", "engine", "learner", "model", "sampling", "staleness", "up", "weights")
_ROWS: Mapping[str, Mapping[str, Shape]] = {
    "run": {
        subjects.EPOCH_KEY: Shape({"epoch": NATURAL}, {"by": TEXT}),
        subjects.FLOOR_KEY: Shape({"floor": NATURAL}, {}),
        "checkpoint": Shape(
            {"directory": TEXT, "step": NATURAL},
            {"epoch": NATURAL, "chain": TEXT, "manifest": TEXT, "kept": TEXTS, "manifests": keyed(TEXT, TEXT)},
        ),
        subjects.BEST_KEY: Shape(
            {"step": NATURAL, "version": NATURAL, "set": TEXT, "metric": TEXT, "value": _codec("a finite number", _number)},
            {"directory": TEXT, "epoch": NATURAL},
        ),
        subjects.END_KEY: Shape({"step": NATURAL, "reason": TEXT}, {"epoch": NATURAL}),
        f"{subjects.SETTINGS_KEY}.*": Shape({"learner": MAP, "weights": MAP}, {}),
        "holder.*": Shape({"node": NATURAL, "url": TEXT, "held": keyed(TEXT, TEXTS)}, {"host": TEXT, "trouble": TEXT}),
        "stored.*": Shape(
            {"node": NATURAL, "files": keyed(TEXT, TEXTS)},
            {"whole": keyed(TEXT, TEXT), "lacking": keyed(TEXT, TEXTS), "store": TEXT, "host": TEXT, "trouble": TEXT},
        ),
        "config": Shape({}, dict.fromkeys(_SECTIONS, MAP)),
        "api_key": _SECRET,
        "refused.*": Shape({"actor": TEXT}, {"invalid": NATURAL, "reason": TEXT}),
        "node.*": Shape(
            {"node": NATURAL, "nodes": NATURAL, "nonce": TEXT},
            {
                **dict.fromkeys(("phase", "agent", "host", "place", "address", "key", "checkpoint_url", "reason", "waits_for"), TEXT),
                **dict.fromkeys(("epoch", "pid", "device_memory_bytes", "exit_code", "beats", "probe_port"), NATURAL),
                **dict.fromkeys(("versions", "reached"), keyed(TEXT, TEXT)),
                "devices": TEXTS,
            },
        ),
        "attempt": Shape(
            {"epoch": NATURAL, "nonces": TEXTS, "ranks": NATURALS, "master": TEXT, "feeder": TEXT, "feeder_key": TEXT},
            {"state": TEXT, "proof": TEXT, "reason": TEXT, "exit_code": NATURAL},
        ),
        "cursor.*": Shape({"created": TEXT, "floor": NATURAL}, {"policy": TEXT, "owner": TEXT, "given_up": FLAG}),
    },
    "live": {"*": _LIVE},
    "weights": {
        "head": _Head({}, {"fence": NATURAL}),
        "snapshot": _VERSION,
        "v.*": _VERSION,
        "want": Shape({"version": WHOLE}, {"by": TEXT, "nonce": TEXT}),
        "evicted": Shape({"engines": keyed(TEXT, TEXT)}, {}),
        "turn": Shape({"whose": TEXT}, {"epoch": NATURAL}),
    },
    "keys": {"admin": _SECRET},
    "wanted": {"*": Shape({}, {"engine": WHOLE, "actor": WHOLE, "scorer": WHOLE})},
}
"""Shapes by bucket and key; ``*`` stands for any end."""


def _shape(bucket: str, key: str) -> Shape:
    for known, shape in _ROWS[bucket].items():
        if key == known or (known.endswith("*") and key.startswith(known[:-1])):
            return shape
    return _ANY
