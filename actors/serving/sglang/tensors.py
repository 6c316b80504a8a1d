"""A server's tensors: their layout and checksums, and buckets of weights as SGLang's /update_weights_from_tensor reads
them.

On CPU SGLang returns the SHA-256 of a parameter, which is made of one or several Hugging Face tensors; on GPUs, and for
each of several ranks, a number of its own that is not compared here.

A bucket is sent pickled, without the bytes. On CPU the bucket lies in a file of torch's in /dev/shm, which torch's own
manager removes whatever is killed: SGLang opens no other memory, so the bucket is copied there first. Memory of a GPU
is passed on as the learner has shared it. This was not tried on a GPU.
"""

import base64
import io
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.weightstore.errors import BadManifest
from tidemill.weightstore.format.checksums import ChecksumReport, TensorChecksum
from tidemill.weightstore.format.manifest import Bucket, TensorSpec
from tidemill.weightstore.transport.handles import Offered

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's parameters that hold several tensors, one after the other."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = ("float32", "bfloat16", "float16")
VOCAB_ROWS = 64
"""Embedding and output projection are padded with rows of zeros to a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """Layout of a model's tensors in a server."""

    dtype: str
    padding: int
    """Number of zeros behind the embedding, and behind the output projection."""
    not_comparable: str
    """Why its checksums cannot be compared; "" = they can."""


def layout_of(info: JsonMapping, *, vocab_size: int, hidden_size: int, on_cpu: bool = True) -> ServerLayout:
    """Return the layout by /server_info and the model's configuration. ``on_cpu``: the release has checksums on CPU."""
    reason, dtype = "", str(info.get("dtype"))
    if info.get("device") != "cpu":
        reason = f"on {info.get('device')} SGLang computes them in a way of its own"
    elif not on_cpu:
        reason = f"SGLang {info.get('version')} computes none on CPU"
    elif int(info.get("tp_size") or 1) > 1:
        reason = f"each of {info.get('tp_size')} ranks has a part of every tensor"
    elif dtype not in DTYPES:
        reason = f"want dtype {', '.join(DTYPES)}, got {dtype}"
    return ServerLayout(dtype=dtype, padding=-vocab_size % VOCAB_ROWS * hidden_size, not_comparable=reason)


def report_of(checksums: Mapping[str, str], layout: ServerLayout) -> ChecksumReport:
    """Return the report on the tensors as they were sent, for the checksums of /weights_checker."""
    dtype, padding, sums = layout.dtype, layout.padding, dict(checksums)
    sums.setdefault(HEAD, sums[EMBEDDING])  # tied: one parameter
    parts = [
        TensorChecksum(names=_names(name), dtype=dtype, sum=checksum, zeros=padding if name in (EMBEDDING, HEAD) else 0)
        for name, checksum in sums.items()
    ]
    return ChecksumReport(scheme="sha256", parts=tuple(parts))


def _names(parameter: str) -> tuple[str, ...]:
    before, _, kind = parameter.rpartition(".")
    owner, _, last = before.rpartition(".")
    return tuple(f"{owner}.{name}.{kind}" for name in FUSED[last]) if last in FUSED else (parameter,)


STRATEGY = "file_system"
"""Sharing strategy of torch. With descriptors the server would need a secret of this process, and end without it."""


SHARED_MEMORY = Path("/dev/shm")


def free_shared_memory() -> int:
    """Return the free bytes of /dev/shm."""
    return shutil.disk_usage(SHARED_MEMORY).free


class SharedBucket:
    """The memory that SGLang reads; used again for every bucket, once the server has answered."""

    def __init__(self, free: Callable[[], int] = free_shared_memory) -> None:
        """``free`` returns the free bytes of shared memory. Raises OSError where there is none."""
        self._flat, self._free = torch.empty(0, dtype=torch.uint8), free

    def payloads(self, specs: Sequence[TensorSpec], offered: Offered, ranks: int) -> list[str]:
        """Return one payload for each process of the server. Raises BadManifest. Blocking."""
        metadata = _metadata(specs)
        if offered.shares is not None:
            return [
                _pickled({"flattened_tensor": _Share(offered, rank), "metadata": metadata}) for rank in range(ranks)
            ]
        message = offered.tensor()
        if self._flat.numel() < message.numel():
            self._grow(message.numel())
        flat = self._flat[: message.numel()]
        flat.copy_(message)
        return [_pickled({"flattened_tensor": flat, "metadata": metadata}) for _ in range(ranks)]

    def _grow(self, num_bytes: int) -> None:
        """Make room for a bucket. Its file is written when it is pickled: a full file system would be SIGBUS."""
        self.close()
        try:
            free = self._free()
        except OSError as error:
            raise BadManifest(str(SHARED_MEMORY), f"{num_bytes} bytes free for a bucket", error.strerror) from None
        if free < num_bytes:
            cure = "cure: start the container with a larger --shm-size, or weights.transport: broadcast"
            raise BadManifest(str(SHARED_MEMORY), f"{num_bytes} bytes free for a bucket", f"{free}; {cure}")
        self._flat = torch.empty(num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        self._flat = self._flat.new_empty(0)


class _Share:
    """An object that is pickled as the GPU tensor for one process of the server to open."""

    def __init__(self, offered: Offered, rank: int) -> None:
        self._offered, self._rank = offered, rank

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        from tidemill.weightstore.transport.cuda_handles import arguments

        return rebuild_cuda_tensor, arguments(self._offered.handle, self._rank, str(self._offered.handle["device"]))


def _metadata(specs: Sequence[TensorSpec]) -> list[SimpleNamespace]:
    """Return objects with the attributes of SGLang's FlattenedTensorMetadata."""
    bucket = Bucket(specs=tuple(specs), num_bytes=sum(spec.num_bytes for spec in specs))
    return [
        SimpleNamespace(
            name=spec.name,
            shape=torch.Size(spec.shape),
            dtype=getattr(torch, spec.dtype),
            start_idx=place.start,
            end_idx=place.stop,
            numel=spec.num_bytes,
        )
        for spec, place in bucket.places()
    ]


def _pickled(value: Mapping[str, object]) -> str:
    out, before = io.BytesIO(), torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(STRATEGY)
    try:
        ForkingPickler(out).dump(value)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(out.getvalue()).decode()
