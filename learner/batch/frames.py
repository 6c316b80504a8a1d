"""Encoding of a training batch as the frames of one ZMQ message: a header, the state, then every array as raw bytes.

The metadata of the samples, equal for all ranks, is one more frame for ranks that ask for it.
"""

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.messages import Sample
from tidemill.learner.batch.batch import STEP_DTYPES, TEACHER_ARRAYS, TOKEN_DTYPES, Array, MicroBatch, StepBatch
from tidemill.learner.errors import FeedError

Frame = bytes | memoryview | Array
"""One frame of a ZMQ message."""
_SCALARS = (
    *("step", "dp_rank", "recorded", "num_tokens", "num_minibatches", "max_new_tokens", "num_sequences"),
    *("teacher_top_k", "part_names", "routing", "routing_known"),
)
"""Fields of the header, as in a StepBatch."""


def encode(batch: StepBatch) -> list[Frame]:
    """Return the ZMQ frames: a msgpack header, the state, the arrays of the step, then those of each micro-batch."""
    header = {"type": "batch"} | {name: getattr(batch, name) for name in _SCALARS}
    header["num_micro_batches"] = len(batch.micro_batches)
    frames: list[Frame] = [msgpack.packb(header), batch.state]
    frames += [_raw(batch, name, dtype) for name, dtype in STEP_DTYPES.items()]
    frames += [_raw(row, name, dtype) for row in batch.micro_batches for name, dtype in TOKEN_DTYPES.items()]
    return frames


def encode_metadata(samples: Sequence[Sample]) -> bytes:
    """Return the frame with the metadata of a step's samples, in the order of its plan."""
    packed: bytes = msgpack.packb([sample.metadata for sample in samples])
    return packed


def decode(header: JsonMapping, frames: Sequence[Frame], *, with_metadata: bool = False) -> StepBatch:
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
    try:
        metadata = msgpack.unpackb(bytes(frame), strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise FeedError(where, want, str(error)) from error
    if not isinstance(metadata, list) or len(metadata) != num_samples:
        raise FeedError(where, want, len(metadata) if isinstance(metadata, list) else type(metadata).__name__)
    if not all(isinstance(entry, dict) for entry in metadata):
        raise FeedError(where, want, len(metadata))
    return tuple(metadata)


def _raw(owner: StepBatch | MicroBatch, name: str, dtype: str) -> Array:
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
