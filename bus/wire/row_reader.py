"""Reading of the rows of the key-value buckets: the type of each key, and the refusal of a row of another shape."""

import json
from collections.abc import Mapping

import msgspec

from tidemill.bus.errors import WireError
from tidemill.bus.wire import subjects
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.message_format import check_open
from tidemill.bus.wire.rows import (
    Attempt,
    AutoscaleRow,
    EndRow,
    HistoryRow,
    Holder,
    Key,
    LiveRow,
    Natural,
    NodeRow,
    Number,
    ReaderRow,
    Text,
    Uploaded,
    VersionRow,
    Whole,
    row_of,
)

MAX_ROW_BYTES = 1 << 20  # A larger row is refused unread: rows are read every second, by every process


class _Epoch(msgspec.Struct):
    epoch: Natural
    by: Text = ""


class _TaskFloor(msgspec.Struct):
    floor: Natural


class _Checkpoint(msgspec.Struct):
    directory: Text
    step: Natural
    epoch: Natural = 0
    chain: Text = ""
    manifest: Text = ""
    kept: list[Text] = []
    manifests: dict[Text, Text] = {}


class _Best(msgspec.Struct):
    step: Natural
    version: Natural
    set: Text
    metric: Text
    value: Number
    directory: Text = ""
    epoch: Natural = 0


class _Settings(msgspec.Struct):
    learner: JsonObject
    weights: JsonObject


class _Config(msgspec.Struct):
    actor: JsonObject = {}
    bus: JsonObject = {}
    data: JsonObject = {}
    engine: JsonObject = {}
    learner: JsonObject = {}
    model: JsonObject = {}
    sampling: JsonObject = {}
    staleness: JsonObject = {}
    up: JsonObject = {}
    weights: JsonObject = {}


class _Secret(msgspec.Struct):
    key: Key


class _RefusedActor(msgspec.Struct):
    actor: Text
    invalid: Natural = 0
    reason: Text = ""


class _Fence(msgspec.Struct):
    """The head before the first version: the newest learner's epoch alone."""

    fence: Natural = 0


class _WantedVersion(msgspec.Struct):
    version: Whole
    by: Text = ""
    nonce: Text = ""


class _Evicted(msgspec.Struct):
    engines: dict[Text, Text]


class _Turn(msgspec.Struct):
    whose: Text
    epoch: Natural = 0


class _Replicas(msgspec.Struct):
    engine: Whole = 0
    actor: Whole = 0
    scorer: Whole = 0


class _Anything(msgspec.Struct):
    """A row of a key that this release does not know."""


# Types of rows by bucket and key; ``*`` stands for any end
_ROWS: Mapping[str, Mapping[str, type]] = {
    "run": {
        subjects.EPOCH_KEY: _Epoch,
        subjects.FLOOR_KEY: _TaskFloor,
        "checkpoint": _Checkpoint,
        subjects.BEST_KEY: _Best,
        subjects.END_KEY: EndRow,
        subjects.HISTORY_KEY: HistoryRow,
        f"{subjects.SETTINGS_KEY}.*": _Settings,
        "holder.*": Holder,
        "stored.*": Uploaded,
        "config": _Config,
        "api_key": _Secret,
        "refused.*": _RefusedActor,
        "node.*": NodeRow,
        "attempt": Attempt,
        "cursor.*": ReaderRow,
    },
    "live": {"*": LiveRow},
    "weights": {"snapshot": VersionRow, "v.*": VersionRow, "want": _WantedVersion, "evicted": _Evicted, "turn": _Turn},
    "keys": {"admin": _Secret},
    "wanted": {subjects.AUTOSCALE_KEY: AutoscaleRow, "*": _Replicas},
}


def json_map(data: bytes) -> JsonObject:
    """Return the JSON object in ``data``. Raises WireError."""
    if len(data) > MAX_ROW_BYTES:
        raise WireError("size", f"<= {MAX_ROW_BYTES} bytes", len(data))
    try:
        # Not by msgspec, which refuses the infinities that settings may have.
        value = json.loads(data)
        check_open(value)
    except (ValueError, RecursionError) as error:
        raise WireError("", "a JSON object", str(error)) from None
    if not isinstance(value, dict):
        raise WireError("", "a JSON object", type(value).__name__)
    return value


def read_row(bucket: str, key: str, data: bytes) -> JsonObject:
    """Return the row in ``data``. Raises WireError naming the field that is missing or of another type."""
    value = json_map(data)
    kinds = _head(value) if (bucket, key) == ("weights", "head") else (_kind(bucket, key),)
    for kind in kinds:
        try:
            row_of(kind, value)
        except WireError as error:
            if kind is _Secret:  # the message goes to logs and live rows
                raise WireError(error.field, error.want, "another value") from None
            raise
    return value


def _head(value: JsonObject) -> tuple[type, ...]:
    """Return the types that the head has: before the first version, it has the fence alone."""
    return (VersionRow, _Fence) if "version" in value else (_Fence,)


def _kind(bucket: str, key: str) -> type:
    for pattern, kind in _ROWS[bucket].items():
        if key == pattern or (pattern.endswith("*") and key.startswith(pattern[:-1])):
            return kind
    return _Anything
