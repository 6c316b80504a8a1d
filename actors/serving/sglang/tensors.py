"""A bucket of weights in the form in which SGLang's /update_weights_from_tensor reads it: pickled, without the bytes.

On CPU the bucket lies in a file of torch's in /dev/shm, which torch's own manager removes whatever is killed: SGLang opens no other
memory, so the bucket is copied there first. Memory of a GPU is passed on as the learner has shared it. This was not tried on a GPU.
"""

import base64
import io
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tidemill.weightstore.errors import BadManifest
from tidemill.weightstore.format.manifest import Bucket, TensorSpec
from tidemill.weightstore.transport.handles import Offered

STRATEGY = "file_system"
"""Sharing strategy of torch. With the other one, descriptors, the server would need a secret of this process, and end without it."""


SHARED_MEMORY = Path("/dev/shm")


def free_shared_memory() -> int:
    """Return the free bytes of /dev/shm."""
    found = os.statvfs(SHARED_MEMORY)
    return found.f_bavail * found.f_frsize


class SharedBucket:
    """The memory that SGLang reads; used again for every bucket, once the server has answered."""

    def __init__(self, free: Callable[[], int] = free_shared_memory) -> None:
        """``free`` returns the free bytes of shared memory. Raises OSError where there is none."""
        self._flat, self._free = torch.empty(0, dtype=torch.uint8), free

    def payloads(self, specs: Sequence[TensorSpec], offered: Offered, ranks: int) -> list[str]:
        """Return one payload for each process of the server. Raises BadManifest. Blocking."""
        metadata = _metadata(specs)
        if offered.shares is not None:
            return [_pickled({"flattened_tensor": _Share(offered, rank), "metadata": metadata}) for rank in range(ranks)]
        message = offered.tensor()
        if self._flat.numel() < message.numel():
            self._grow(message.numel())
        flat = self._flat[: message.numel()]
        flat.copy_(message)
        return [_pickled({"flattened_tensor": flat, "metadata": metadata}) for _ in range(ranks)]

    def _grow(self, num_bytes: int) -> None:
        """Make room for a bucket. Its file is written when it is pickled: in a full file system that would be SIGBUS, for all pushes."""
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
        """Free the memory."""
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
    whole = Bucket(specs=tuple(specs), num_bytes=sum(spec.num_bytes for spec in specs))
    return [
        SimpleNamespace(
            name=spec.name,
            shape=torch.Size(spec.shape),
            dtype=getattr(torch, spec.dtype),
            start_idx=place.start,
            end_idx=place.stop,
            numel=spec.num_bytes,
        )
        for spec, place in whole.places()
    ]


def _pickled(value: Mapping[str, object]) -> str:
    out, before = io.BytesIO(), torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(STRATEGY)
    try:
        ForkingPickler(out).dump(value)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(out.getvalue()).decode()
