"""Encoding of a training batch as the frames of one ZMQ message: a header, the state, then every array as raw bytes.

The metadata of the samples, equal for all ranks, is one more frame for ranks that ask for it.
"""

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.messages import Sample
from tidemill.learner.batch.batch import DTYPES, STEP_ARRAYS, TEACHER_ARRAYS, TOKEN_ARRAYS, Array, MicroBatch, StepBatch
from tidemill.learner.errors import FeedError

Frame = bytes | memoryview | Array
"""One frame of a ZMQ message."""


def encode(batch: StepBatch) -> list[Frame]:
    """Return the ZMQ frames: a msgpack header, the state, the arrays of the step, then the arrays of each micro-batch,
    as raw bytes.
    """
    header = {
        "type": "batch",
        "step": batch.step,
        "dp_rank": batch.dp_rank,
        "recorded": batch.recorded,
        "num_tokens": batch.num_tokens,
        "num_minibatches": batch.num_minibatches,
        "max_new_tokens": batch.max_new_tokens,
        "num_sequences": batch.num_sequences,
        "teacher_top_k": batch.teacher_top_k,
        "part_names": batch.part_names,
        "routing": batch.routing,
        "routing_known": batch.routing_known,
        "num_micro_batches": len(batch.micro_batches),
    }
    frames: list[Frame] = [msgpack.packb(header), batch.state]
    frames += [_raw(batch, name) for name in STEP_ARRAYS]
    frames += [_raw(micro_batch, name) for micro_batch in batch.micro_batches for name in TOKEN_ARRAYS]
    return frames


def encode_metadata(samples: Sequence[Sample]) -> bytes:
    """Return the frame with the metadata of a step's samples, in the order of its plan."""
    packed: bytes = msgpack.packb([sample.metadata for sample in samples])
    return packed


def decode(header: JsonMapping, frames: Sequence[Frame], *, with_metadata: bool = False) -> StepBatch:
    """Return the batch from its unpacked header and the frames after it; arrays are views of the frames where aligned.

    ``with_metadata``: the last frame has the metadata of the samples. Raises FeedError when frames are missing or
    truncated.
    """
    wanted = 1 + len(STEP_ARRAYS) + header["num_micro_batches"] * len(TOKEN_ARRAYS) + with_metadata
    if len(frames) != wanted:
        raise FeedError(f"batch {header['step']}", f"{wanted} frames", len(frames))
    state, rest = bytes(frames[0]), list(frames[1:])
    packed = rest.pop() if with_metadata else None
    rows = {name: _array(name, rest.pop(0)) for name in STEP_ARRAYS}
    if len(rows["parts_NK"]) != len(rows["rewards_N"]) * len(header["part_names"]):
        raise FeedError(
            f"batch {header['step']}", f"{len(header['part_names'])} parts of each reward", len(rows["parts_NK"])
        )
    layers, top_k = header["routing"]
    groups = [rest[at : at + len(TOKEN_ARRAYS)] for at in range(0, len(rest), len(TOKEN_ARRAYS))]
    return StepBatch(
        step=header["step"],
        dp_rank=header["dp_rank"],
        recorded=header["recorded"],
        num_tokens=header["num_tokens"],
        num_minibatches=header["num_minibatches"],
        max_new_tokens=header["max_new_tokens"],
        num_sequences=header["num_sequences"],
        teacher_top_k=header["teacher_top_k"],
        part_names=tuple(header["part_names"]),
        routing=(layers, top_k),
        routing_known=header["routing_known"],
        micro_batches=tuple(
            _micro_batch(header["step"], group, header["teacher_top_k"], layers * top_k) for group in groups
        ),
        metadata=() if packed is None else _metadata(header["step"], packed, len(rows["rewards_N"])),
        state=state,
        **rows,
    )


def _metadata(step: int, frame: Any, num_samples: int) -> tuple[JsonMapping, ...]:
    try:
        found = msgpack.unpackb(bytes(frame), strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise FeedError(f"batch {step}", f"metadata of {num_samples} samples", str(error)) from error
    if not isinstance(found, list) or len(found) != num_samples or not all(isinstance(one, dict) for one in found):
        got = len(found) if isinstance(found, list) else type(found).__name__
        raise FeedError(f"batch {step}", f"metadata of {num_samples} samples", got)
    return tuple(found)


def _raw(owner: StepBatch | MicroBatch, name: str) -> Array:
    return np.ascontiguousarray(getattr(owner, name), np.dtype(DTYPES[name]))


def _array(name: str, frame: Any) -> Array:
    dtype = np.dtype(DTYPES[name])
    view = memoryview(frame)
    if view.nbytes % dtype.itemsize:
        raise FeedError(f"batch frame {name}", f"a multiple of {dtype.itemsize} bytes", view.nbytes)
    # torch warns about arrays that it may not write. A frame of ZMQ is copied only if its buffer is read-only or not
    # aligned.
    return np.require(np.frombuffer(view, dtype), requirements=["ALIGNED", "WRITEABLE"])


def _micro_batch(step: int, frames: Sequence[Frame], top_k: int, experts: int) -> MicroBatch:
    micro_batch = MicroBatch(**{name: _array(name, frame) for name, frame in zip(TOKEN_ARRAYS, frames, strict=True)})
    lengths = {
        name: len(getattr(micro_batch, name))
        for name in TOKEN_ARRAYS
        if name not in ("cu_seqlens", "experts", *TEACHER_ARRAYS)
    }
    taught = len(micro_batch.teacher_log_probs_T)
    wanted = (taught, taught * top_k, taught * top_k)
    if taught not in (0, lengths["tokens_T"]) or wanted != tuple(
        len(getattr(micro_batch, name)) for name in TEACHER_ARRAYS
    ):
        raise FeedError(
            f"batch {step}", f"scores of a teacher for {lengths['tokens_T']} tokens, {top_k} listed at each", wanted
        )
    if len(micro_batch.experts) != lengths["tokens_T"] * experts:
        raise FeedError(
            f"batch {step}", f"{experts} experts of each of {lengths['tokens_T']} tokens", len(micro_batch.experts)
        )
    if len(set(lengths.values())) != 1 or micro_batch.cu_seqlens[-1] != lengths["tokens_T"]:
        raise FeedError(f"batch {step}", f"arrays of {micro_batch.cu_seqlens[-1]} tokens", lengths)
    return micro_batch
