"""What feeder and ranks say to each other over ZMQ: the first frame is a msgpack map with ``type``; a batch has more frames.

rank -> feeder: hello, next, done, published, checkpointed, failed, bye. feeder -> rank: start, batch, wait (still there, and what for),
end, error. Knows no socket.
"""

from dataclasses import dataclass
from typing import Any

import msgpack

from learner.errors import FeedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Answer to a rank's hello: where to begin."""

    epoch: int
    checkpoint: str | None
    """Directory to load, verified; None = begin with the model's initial weights."""
    step: int
    """Steps contained in that checkpoint (0 without one); ask for ``step + 1`` first."""
    steps: int
    """Last step of the run."""
    head_version: int
    """Newest published version; -1 = none yet (publish version 0)."""
    head_step: int
    """Step of its weights; -1 = none yet."""
    recorded_until: int
    """Batches up to this step are recorded plans: no push for them, then head + 1. == step when there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last step is done and its checkpoint is committed."""


def pack(kind: str, **values: Any) -> bytes:
    return msgpack.packb({"type": kind, **values})


def unpack(frame: Any, *, where: str) -> dict[str, Any]:
    """The header map of a message. Raises FeedError when it is none."""
    try:
        header = msgpack.unpackb(bytes(frame))
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise FeedError(where, "a msgpack map", f"{bytes(frame)[:40]!r} ({error})") from error
    if not isinstance(header, dict) or "type" not in header:
        raise FeedError(where, "a map with type", header)
    return header
