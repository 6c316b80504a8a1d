"""Messages of feeder and ranks over ZMQ: the first frame is a msgpack map with ``type``; a batch has more frames.

rank -> feeder: hello, next, done, trained (for viewers), published, checkpointed, drain, failed, bye.
feeder -> rank: start, batch, wait (a heartbeat with the reason of the wait), last (the step before was the last), end,
error. Both ways, over a connection of its own: alive (``feed_client.Heartbeats``). Knows no socket.

A batch is a header, the state, then every array as raw bytes; the metadata of the samples, equal for all ranks, is one
more frame for ranks that ask for it. With ``ports`` in the header it has a share instead of rows: the rank fetches its
samples from the readers (``sample_transfer.py``) and packs them.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

import msgpack
import msgspec
import numpy as np

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Plan
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.learner.batch.batch import STEP_DTYPES, TEACHER_ARRAYS, TOKEN_DTYPES, Array, MicroBatch, StepBatch
from tidemill.learner.batch.batching import Share, build_batches, columns_of, shares_of
from tidemill.learner.buffer.sample_index import SampleIndex
from tidemill.learner.errors import FeedError

_FROM_RANKS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "hello": {"rank": (int,), "dp_rank": (int,), "dp_size": (int,), "metadata": (bool,)},
    "next": {"step": (int,), "dp_rank": (int,)},
    "done": {"step": (int,), "metrics": (dict,), "weights_digest": (str, NoneType)},
    "trained": {"values": (bytes,)},
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


Frame = bytes | memoryview | Array
"""One frame of a ZMQ message."""
_SCALARS = (
    *("step", "dp_rank", "recorded", "num_tokens", "num_minibatches", "max_new_tokens", "num_sequences"),
    *("teacher_top_k", "part_names", "routing", "routing_known"),
)
"""Fields of the header, as in a StepBatch."""
_SHARE: msgspec.msgpack.Decoder[Share] = msgspec.msgpack.Decoder(Share)


def encode_batch(batch: StepBatch) -> list[Frame]:
    """Return the ZMQ frames: a msgpack header, the state, then arrays: of the step, and of each micro-batch."""
    return [*_header(batch), batch.state, *_arrays(batch)]


def encode_share(columns: StepBatch, share: Share, ports: Sequence[int]) -> list[Frame]:
    """Return the ZMQ frames of a batch whose rows the rank packs: as of ``encode_batch``, with the share behind the
    state. ``ports``: of the reader of each shard, from which it fetches the samples.
    """
    packed = msgspec.msgpack.encode(share)
    return [*_header(columns, list(ports)), columns.state, packed, *_arrays(columns)]


def step_frames(
    plan: Plan,
    samples: Sequence[SampleIndex],
    token_limits: Mapping[int, int],
    *,
    ports: Sequence[int],
    pad_to: int,
    routed: RoutedShape | None,
    **options: Any,
) -> tuple[StepBatch, list[list[Frame]]]:
    """Return the batch of rank 0 and the frames for each rank; without rows where ranks fetch the samples at ``ports``.

    The other arguments are as for ``build_batches``.
    """
    if not ports:
        contents = [sample.content for sample in samples]
        options |= {"pad_to": pad_to, "routed": routed}
        batches = build_batches(plan, contents, indices=samples, token_limits=token_limits, **options)
        return batches[0], [encode_batch(batch) for batch in batches]
    columns = columns_of(plan, samples, token_limits=token_limits, routed=routed, **options)
    shares = shares_of(plan, samples, pad_to=pad_to, routed=routed)
    return columns, [encode_share(replace(columns, dp_rank=rank), share, ports) for rank, share in enumerate(shares)]


def _header(batch: StepBatch, ports: Sequence[int] = ()) -> list[Frame]:
    header = {"type": "batch"} | {name: getattr(batch, name) for name in _SCALARS}
    return [msgpack.packb(header | {"num_micro_batches": len(batch.micro_batches), "ports": ports})]


def _arrays(batch: StepBatch) -> list[Frame]:
    frames: list[Frame] = []
    frames += [_raw(batch, name, dtype) for name, dtype in STEP_DTYPES.items()]
    frames += [_raw(row, name, dtype) for row in batch.micro_batches for name, dtype in TOKEN_DTYPES.items()]
    return frames


def share_in(header: JsonMapping, frames: list[Frame]) -> Share | None:
    """Take the share out of the frames of a batch, and return it; None where the frames have the rows."""
    return _SHARE.decode(bytes(frames.pop(1))) if header["ports"] else None


def encode_metadata(samples: Sequence[SampleIndex]) -> bytes:
    """Return the frame with the metadata of a step's samples, in the order of its plan."""
    entries = [sample.metadata or msgspec.msgpack.encode(sample.content.metadata) for sample in samples]
    header: bytes = msgpack.Packer().pack_array_header(len(entries))
    return header + b"".join(entries)


def decode_batch(header: JsonMapping, frames: Sequence[Frame], *, with_metadata: bool = False) -> StepBatch:
    """Return the batch of an unpacked header and the frames after it; arrays are views of the frames where aligned.

    ``with_metadata``: the last frame has the metadata of the samples. Raises FeedError when frames are missing or
    truncated.
    """
    where = f"batch {header['step']}"
    num_frames = 1 + len(STEP_DTYPES) + header["num_micro_batches"] * len(TOKEN_DTYPES) + with_metadata
    if len(frames) != num_frames:
        raise FeedError(where, f"{num_frames} frames", len(frames))
    first_row = 1 + len(STEP_DTYPES)
    arrays: dict[str, Any] = {
        name: _array(name, dtype, frame)
        for (name, dtype), frame in zip(STEP_DTYPES.items(), frames[1:first_row], strict=True)
    }
    num_samples, part_names = len(arrays["rewards_N"]), tuple(header["part_names"])
    if len(arrays["parts_NK"]) != num_samples * len(part_names):
        raise FeedError(where, f"{len(part_names)} parts of each reward", len(arrays["parts_NK"]))
    layers, top_k = header["routing"]
    rows = [
        frames[at : at + len(TOKEN_DTYPES)] for at in range(first_row, num_frames - with_metadata, len(TOKEN_DTYPES))
    ]
    values = {name: header[name] for name in _SCALARS} | {"part_names": part_names, "routing": (layers, top_k)}
    return StepBatch(
        micro_batches=tuple(_micro_batch(where, row, header["teacher_top_k"], layers * top_k) for row in rows),
        metadata=_metadata(where, frames[-1], num_samples) if with_metadata else (),
        state=bytes(frames[0]),
        **values,
        **arrays,
    )


def _metadata(where: str, frame: Any, num_samples: int) -> tuple[JsonMapping, ...]:
    want = f"metadata of {num_samples} samples"
    try:  # as samples are decoded: a key may be a list, which another decoder refuses
        metadata = msgspec.msgpack.decode(bytes(frame))
    except msgspec.DecodeError as error:
        raise FeedError(where, want, str(error)) from error
    if not isinstance(metadata, list) or len(metadata) != num_samples:
        raise FeedError(where, want, len(metadata) if isinstance(metadata, list) else type(metadata).__name__)
    if not all(isinstance(entry, dict) for entry in metadata):
        raise FeedError(where, want, len(metadata))
    return tuple(metadata)


def _raw(owner: StepBatch | MicroBatch, name: str, dtype: str) -> Array:
    # ZMQ sends the memory as it lies, and the reader takes it as little-endian values in one piece.
    return np.ascontiguousarray(getattr(owner, name), np.dtype(dtype))


def _array(name: str, dtype: str, frame: Any) -> Array:
    view, size = memoryview(frame), np.dtype(dtype).itemsize
    if view.nbytes % size:
        raise FeedError(f"batch frame {name}", f"a multiple of {size} bytes", view.nbytes)
    # torch warns about arrays that it may not write. A frame of ZMQ is copied only if its buffer is read-only or not
    # aligned.
    return np.require(np.frombuffer(view, dtype), requirements=["ALIGNED", "WRITEABLE"])


def _micro_batch(where: str, frames: Sequence[Frame], top_k: int, experts: int) -> MicroBatch:
    arrays = {
        name: _array(name, dtype, frame) for (name, dtype), frame in zip(TOKEN_DTYPES.items(), frames, strict=True)
    }
    row = MicroBatch(**arrays)
    num_tokens, taught = len(row.tokens_T), len(row.teacher_log_probs_T)
    sizes = (taught, len(row.teacher_top_ids_TK), len(row.teacher_top_log_probs_TK))
    if taught not in (0, num_tokens) or sizes != (taught, taught * top_k, taught * top_k):
        want = f"scores of a teacher for {num_tokens} tokens, {top_k} listed at each"
        raise FeedError(where, want, (taught, taught * top_k, taught * top_k))
    if len(row.experts) != num_tokens * experts:
        raise FeedError(where, f"{experts} experts of each of {num_tokens} tokens", len(row.experts))
    lengths = {
        name: len(array) for name, array in arrays.items() if name not in ("cu_seqlens", "experts", *TEACHER_ARRAYS)
    }
    if len(set(lengths.values())) != 1 or row.cu_seqlens[-1] != num_tokens:
        raise FeedError(where, f"arrays of {row.cu_seqlens[-1]} tokens", lengths)
    return row
