"""Rows of the key-value buckets, field by field; a row of another shape is refused as it is read.

Fields without a default are required, further fields are ignored. Rows that other rooms describe in full are here as
far as a process must be able to rely on them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tidemill.bus.errors import WireError
from tidemill.bus.wire import subjects
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.message_format import check_open
from tidemill.bus.wire.mismatch import mismatch

MAX_ROW_BYTES = 1 << 20
"""A larger row is refused unread: rows are read every second, by every process."""
_MAX_FLOAT = 1.7976931348623157e308

Text = Annotated[str, Meta(pattern="\\A[^\ud800-\udfff]*\\Z", description="text")]
"""Text without halves of surrogate pairs, which no terminal and no file can take."""
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="an integer of 64 bits")]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1, description="an integer >= 0")]
Number = Annotated[float, Meta(ge=-_MAX_FLOAT, le=_MAX_FLOAT, description="a finite number")]
Gauge = Number | bool
Key = Annotated[str, Meta(pattern=r"\A[!-~]{1,512}\Z", description="1 to 512 visible ASCII characters")]
"""A key as it can stand in a header of HTTP."""
R = TypeVar("R")


MOST_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of an engine to receive weights and to serve them to others; of a learner, its devices alone."""

    single_request_push: bool = False
    """It receives a push in one request; else begin, each bucket and the end have a request each."""
    peer_snapshots: bool = False
    """It serves snapshots of the weights it has to engines that catch up."""
    colocated: bool = False
    """It shares an accelerator with the learner, and releases its memory for each step."""
    ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS, description=f"an integer from 1 to {MOST_RANKS}")] = 1
    """Number of its processes that receive weights: one for each tensor-parallel rank, 1 to ``MOST_RANKS``."""
    devices: tuple[Text, ...] = ()
    """UUIDs of the accelerators on which it computes (``GPU-...``); empty = none, or not known."""
    visible_devices: tuple[Text, ...] = ()
    """UUIDs of the accelerators with memory that it can open, its own among them; empty = none, or not known."""
    nccl: Text = ""
    """NCCL version of the processes that receive weights (``2.29.7``); empty = not known."""
    device_memory_bytes: Natural = 0
    """Memory of its smallest accelerator; 0 = not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    """Liveness row of a process, written with every heartbeat."""

    role: Text
    """bus | engine | actor | scorer | feeder | learner | host | router | up."""
    id: Text
    host: Text
    pid: Whole
    phase: Text
    """starting | joining | catching up | serving | stale | waiting | working | draining | ..."""
    waits_for: Text = ""
    """Condition that it waits for and since when, in words."""
    trouble: Text = ""
    """Repeated failures, in words: how often, and the last reason; empty = none."""
    version: Whole = -1
    epoch: Whole = 0
    load: dict[Text, Gauge] = field(default_factory=dict)
    """Counters and gauges (tokens_generated, waiting_share, in_flight, ...)."""
    capabilities: Capabilities = field(default_factory=Capabilities)
    taking_memory: bool = False
    """A colocated engine is taking memory by itself; a learner that acquires the accelerator waits for it."""
    address: Text = ""
    pool: Text = ""
    """Group of hosts that a host belongs to."""
    handles: Text = ""
    """Address at which an engine receives handles of weights (``ipc://...``), if it does."""
    place: Text = ""
    """Domain of shared memory of an engine that receives handles; engines with equal ones can share memory."""
    unreadable: Text = ""
    """Messages and rows that it passed over (``bus/client/jetstream.py``); empty = none."""
    rollouts: tuple[Text, ...] = ()
    """Rollouts whose tasks an actor leases, ``single_turn`` for those without one; empty = not reported."""
    nonce: Text = ""
    """Random text of an engine's process, which it answers to a call at its ``address``; empty = it answers none."""
    reached: dict[Text, Text] = field(default_factory=dict)
    """Engines that this process has called at their addresses: nonce -> the error; empty = the nonce came back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """One set of weights. Written as ``pushing`` before its push, then head moves to it."""

    version: Natural
    step: Natural
    epoch: Natural
    state: Text = "pushing"
    """pushing | published | failed."""
    digest: Text = ""
    """Digest of the manifest (names, shapes, dtypes)."""
    snapshot: Text = ""
    """URL or directory of a snapshot of these weights, when there is one."""
    after: Whole = -1
    """Last sequence of SAMPLES before any engine could have it, so no sample up to there is of it; -1 = not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRow:
    """The row of a registered reader of SAMPLES."""

    created: Text
    floor: Natural
    """Highest sequence up to which all samples are processed."""
    policy: Text = "wait"
    """Whether trimming waits for it: wait | leave."""
    owner: Text = ""
    """Name of the process that reads; a process that starts takes over."""
    given_up: bool = False
    """True when trimming stopped waiting for it, because the stream was too full."""


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


class _End(msgspec.Struct):
    step: Natural
    reason: Text
    epoch: Natural = 0


class _Settings(msgspec.Struct):
    learner: JsonObject
    weights: JsonObject


class _Holder(msgspec.Struct):
    node: Natural
    url: Text
    held: dict[Text, list[Text]]
    host: Text = ""
    trouble: Text = ""


class _Stored(msgspec.Struct):
    node: Natural
    files: dict[Text, list[Text]]
    whole: dict[Text, Text] = {}
    lacking: dict[Text, list[Text]] = {}
    store: Text = ""
    host: Text = ""
    trouble: Text = ""


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


class _Node(msgspec.Struct):
    node: Natural
    nodes: Natural
    nonce: Text
    phase: Text = ""
    agent: Text = ""
    host: Text = ""
    place: Text = ""
    address: Text = ""
    key: Text = ""
    checkpoint_url: Text = ""
    reason: Text = ""
    waits_for: Text = ""
    epoch: Natural = 0
    pid: Natural = 0
    device_memory_bytes: Natural = 0
    exit_code: Natural = 0
    beats: Natural = 0
    probe_port: Natural = 0
    versions: dict[Text, Text] = {}
    reached: dict[Text, Text] = {}
    devices: list[Text] = []


class _Attempt(msgspec.Struct):
    epoch: Natural
    nonces: list[Text]
    ranks: list[Natural]
    master: Text
    feeder: Text
    feeder_key: Text
    state: Text = ""
    proof: Text = ""
    reason: Text = ""
    exit_code: Natural = 0


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


_ROWS: Mapping[str, Mapping[str, type]] = {
    "run": {
        subjects.EPOCH_KEY: _Epoch,
        subjects.FLOOR_KEY: _TaskFloor,
        "checkpoint": _Checkpoint,
        subjects.BEST_KEY: _Best,
        subjects.END_KEY: _End,
        f"{subjects.SETTINGS_KEY}.*": _Settings,
        "holder.*": _Holder,
        "stored.*": _Stored,
        "config": _Config,
        "api_key": _Secret,
        "refused.*": _RefusedActor,
        "node.*": _Node,
        "attempt": _Attempt,
        "cursor.*": ReaderRow,
    },
    "live": {"*": LiveRow},
    "weights": {"snapshot": VersionRow, "v.*": VersionRow, "want": _WantedVersion, "evicted": _Evicted, "turn": _Turn},
    "keys": {"admin": _Secret},
    "wanted": {"*": _Replicas},
}
"""Types of rows by bucket and key; ``*`` stands for any end."""


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


def row_of(kind: type[R], value: JsonObject) -> R:
    """Return a row of this type from its JSON object. Raises WireError naming the field."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise mismatch(error, value, kind) from None


def _head(value: JsonObject) -> tuple[type, ...]:
    """Return the types that the head has: before the first version, it has the fence alone."""
    return (VersionRow, _Fence) if "version" in value else (_Fence,)


def _kind(bucket: str, key: str) -> type:
    for pattern, kind in _ROWS[bucket].items():
        if key == pattern or (pattern.endswith("*") and key.startswith(pattern[:-1])):
            return kind
    return _Anything
