"""Staged weights in the memory of a GPU, read by other processes over CUDA IPC. Written after torch's own reductions; not tried yet.

A handle can be opened once by each process for which it was made (torch counts the openings), so each message gets a new one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weightstore.errors import BadManifest

SHARE = 7
"""Items of a share: handle, bytes and offset of the storage; handle and offset of torch's counter; an event, whether to wait for it."""


def pin(flat: Tensor) -> None:
    """Let a GPU copy into and out of memory of the host directly."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0))


def unpin(address: int) -> None:
    """End that for the memory at ``address``. Memory that is unmapped while it is pinned cannot be pinned again at the same address."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


class CudaMemory:
    """``weightstore.transport.handles.Memory`` on this process' GPU."""

    def empty(self, num_bytes: int) -> Tensor:
        """Return flat uint8 [num_bytes] of zeros on the current GPU."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")

    def handle(self, flat: Tensor, ranks: int) -> dict[str, object]:
        """Return the GPU's UUID, the part of its storage, and one share for each of ``ranks`` processes."""
        return {
            "device": _uuid(flat.get_device()),  # not its number: another process may count its GPUs differently
            "start": flat.storage_offset(),
            "num_bytes": flat.numel(),
            "shares": [_share(flat) for _ in range(ranks)],
        }

    def close(self) -> None:
        """Nothing to do: torch frees the memory when its last reader has closed it."""


def opened(handle: Mapping[str, object]) -> Tensor:
    """Return the bytes of a handle, flat uint8 on the same GPU. Raises BadManifest when this process does not see that GPU."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return rebuild_cuda_tensor(*arguments(handle, 0, ordinal(str(handle.get("device")))))


def arguments(handle: Mapping[str, Any], rank: int, device: int | str) -> tuple[object, ...]:
    """Return the arguments of torch's ``rebuild_cuda_tensor`` for one reader. Raises BadManifest."""
    shares = handle["shares"]
    if rank >= len(shares) or len(shares[rank]) != SHARE:
        raise BadManifest("handle: shares", f"one of {SHARE} items for rank {rank}", f"{len(shares)} of them")
    storage, storage_bytes, storage_offset, counter, counter_offset, event, wait = shares[rank]
    # All in the order of the parameters of ``rebuild_cuda_tensor``; the False is ``requires_grad``.
    kinds = (torch.Tensor, torch.Size([handle["num_bytes"]]), (1,), handle["start"], torch.storage.TypedStorage, torch.uint8)
    return *kinds, device, storage, storage_bytes, storage_offset, False, counter, counter_offset, event, wait


def _share(flat: Tensor) -> list[object]:
    from torch.multiprocessing.reductions import reduce_tensor

    _, reduced = reduce_tensor(flat)
    _, _, _, _, _, _, _, storage, storage_bytes, storage_offset, _, counter, counter_offset, event, wait = reduced
    return [storage, storage_bytes, storage_offset, counter, counter_offset, event, bool(wait)]


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def ordinal(uuid: str) -> int:
    """Return the number that this process has for a GPU. Raises BadManifest when it does not see it."""
    seen = [_uuid(device) for device in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise BadManifest("handle: device", f"one of {', '.join(seen) or 'no GPU'}", uuid)
    return seen.index(uuid)
