"""Messages of feeder and ranks over ZMQ: the first frame is a msgpack map with ``type``; a batch has more frames.

rank -> feeder: hello, next, done, published, checkpointed, drain, failed, bye.
feeder -> rank: start, batch, wait (a heartbeat with the reason of the wait), last (the step before was the last), end,
error. Both ways, over a connection of its own: alive (``feed_client.Heartbeats``). Knows no socket.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType

import msgpack

from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.errors import FeedError

_FROM_RANKS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "hello": {"rank": (int,), "dp_rank": (int,), "dp_size": (int,), "metadata": (bool,)},
    "next": {"step": (int,), "dp_rank": (int,)},
    "done": {"step": (int,), "metrics": (dict,), "weights_digest": (str, NoneType)},
    "published": {"version": (int,), "step": (int,)},
    "checkpointed": {"step": (int,), "directory": (str,)},
    "drain": {},
    "failed": {"rank": (int,), "reason": (str,), "exit_code": (int,)},
    "bye": {},
    "alive": {"rank": (int,)},
}
"""Fields of each message of a rank, with their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedStart:
    """Answer to a rank's hello: the position at which the run starts or continues."""

    epoch: int
    checkpoint: str | None
    """Verified directory to load; None = start with the model's initial weights."""
    step: int
    """Step of that checkpoint (0 without one); the first batch is of ``step + 1``."""
    steps: int
    """Last step of the run."""
    head_version: int
    """Newest published version; -1 = none yet (publish version 0)."""
    head_step: int
    """Step of its weights; -1 = none yet."""
    initial: str | None = None
    """Without ``checkpoint``: verified checkpoint with the initial weights; None = as in the model directory."""
    recorded_until: int
    """Last step with a recorded plan, or ``step``. Up to it only the last step is pushed, as head + 1."""
    settings: Sequence[tuple[int, JsonObject]] = field(default_factory=list)
    """Pairs of a last step and a record of settings, for steps that are executed again; empty = as of this start."""
    manifest: str = ""
    """SHA-256 of the manifest of ``checkpoint``, when it is spread over nodes."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """URLs of the nodes that serve its files, by node (as text)."""
    peer_key: str = field(default="", repr=False)
    """Bearer key of these servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """Answer to the request for ``step + 1``: ``step`` was the last one. A request for the end follows."""

    step: int
    state: bytes
    """State of the data for its checkpoint; empty = the checkpoint is made already, or there is none of this step."""
    drained: bool = False
    """The learner is drained: another start takes the steps behind ``step``, and publishes the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedEnd:
    """End of the run: the last step is done and its checkpoint is committed; or, drained, it is reported."""


def pack(kind: str, **values: object) -> bytes:
    """Return the header frame of a message of this type."""
    return msgpack.packb({"type": kind, **values})


def unpack(frame: bytes | memoryview, *, where: str) -> JsonObject:
    """Return the header map of a message. Raises FeedError for other bytes."""
    try:
        header = msgpack.unpackb(bytes(frame))
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise FeedError(where, "a msgpack map", f"{bytes(frame)[:40]!r} ({error})") from error
    if not isinstance(header, dict) or "type" not in header:
        raise FeedError(where, "a map with type", reprlib.repr(header))
    return header


def unpack_from_rank(frame: bytes, *, where: str) -> JsonObject:
    """Return the header of a rank's message, validated against the fields of its type. Raises FeedError."""
    header = unpack(frame, where=where)
    kind = header["type"]
    fields = _FROM_RANKS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise FeedError(where, f"type: one of {', '.join(_FROM_RANKS)}", reprlib.repr(kind))
    if header.keys() != {"type", *fields}:
        raise FeedError(where, f"{kind} with {', '.join(fields) or 'nothing'}", reprlib.repr(sorted(header)))
    for name, types in fields.items():
        if type(header[name]) not in types:
            want = " or ".join(wanted_type.__name__ for wanted_type in types)
            raise FeedError(where, f"{kind}.{name}: {want}", reprlib.repr(header[name]))
    return header
