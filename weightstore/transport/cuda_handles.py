"""Staged weights in the memory of a GPU, read by other processes over CUDA IPC. Written after torch's own reductions.

A block (an allocation) is shared once; messages name parts of it. Each share takes an event, and from 1,000 events on
torch waits for the device at every further one. Torch counts a share's openings, and frees shared memory when they are
undone. Here a share is opened by many processes, so that count means nothing: torch keeps the memory until the process
ends, for which it is staged anyway. Source: torch 2.13, torch/csrc/CudaIPCTypes.h (CUDA_IPC_MAXIMUM_EVENTS_TO_USE, an
unsigned counter).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.weightstore.errors import BadManifest
from tidemill.weightstore.format.checksums import beside
from tidemill.weightstore.format.manifest import count_of

# Items of a share: handle, bytes and offset of the storage; handle and offset of a counter; an event, and its wait
SHARE = 7
Share = list[object]


class SharedBlocks:
    """Shared blocks of memory. They stay allocated until ``clear``, so an address belongs to one block."""

    def __init__(self, share: Callable[[Tensor], Share] | None = None) -> None:
        """``share`` makes a share of the storage of a tensor; None = over CUDA IPC."""
        self._make = share or _share
        self._shares: dict[int, tuple[Tensor, Share]] = {}

    def share(self, flat: Tensor) -> Share:
        """Return the share of the block that ``flat`` is a part of."""
        address = flat.untyped_storage().data_ptr()
        if address not in self._shares:
            self._shares[address] = flat, self._make(flat)
        return self._shares[address][1]

    def clear(self) -> None:
        """Forget all shares; the blocks may be freed."""
        self._shares = {}


class CudaMemory:
    """``tidemill.weightstore.transport.handles.Memory`` on this process' GPU."""

    def __init__(self) -> None:
        self._shared = SharedBlocks()

    def empty(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")

    def handle(self, flat: Tensor, ranks: int) -> dict[str, object]:
        """Return the GPU's UUID, the part of its block, and the block's share for each of ``ranks`` processes."""
        return {
            "device": _uuid(flat.get_device()),  # not its number: another process may count its GPUs differently
            "start": flat.storage_offset(),
            "num_bytes": flat.numel(),
            "shares": [self._shared.share(flat)] * ranks,
        }

    def close(self) -> None:
        """Forget the shares. Torch frees the memory when it is no longer used here, and its readers have closed it."""
        self._shared.clear()


def opened(handle: JsonMapping) -> Tensor:
    """Return a handle's whole block, flat uint8 on the same GPU. Raises BadManifest if this process does not see it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    _, num_bytes = block_of(handle)
    block_handle = {**handle, "start": 0, "num_bytes": num_bytes}
    return rebuild_cuda_tensor(*arguments(block_handle, 0, ordinal(str(handle.get("device")))))


def block_of(handle: JsonMapping) -> tuple[tuple[object, ...], int]:
    """Return the identity of a handle's block, equal for all parts of it, and its bytes. Raises BadManifest."""
    share = _share_in(handle, 0)
    num_bytes = count_of(share[1], "handle: shares", "bytes of the block, >= 0")
    name, offset = share[0], share[2]
    if not isinstance(name, bytes) or not isinstance(offset, int):
        raise BadManifest("handle: shares", "a name and an offset of the block", f"{name!r:.60} and {offset!r:.60}")
    return (str(handle.get("device")), name, offset, num_bytes), num_bytes


def _share_in(handle: JsonMapping, rank: int) -> Share:
    shares = handle.get("shares")
    if (
        not isinstance(shares, list)
        or rank >= len(shares)
        or not isinstance(shares[rank], list)
        or len(shares[rank]) != SHARE
    ):
        count = len(shares) if isinstance(shares, list) else "none"
        raise BadManifest("handle: shares", f"one of {SHARE} items for rank {rank}", f"{count} of them")
    return shares[rank]


def arguments(handle: JsonMapping, rank: int, device: int | str) -> tuple[object, ...]:
    """Return the arguments of torch's ``rebuild_cuda_tensor`` for one reader. Raises BadManifest."""
    storage, storage_bytes, storage_offset, counter, counter_offset, event, wait = _share_in(handle, rank)
    # All in the order of the parameters of ``rebuild_cuda_tensor``; the False is ``requires_grad``.
    kinds = (
        torch.Tensor,
        torch.Size([handle["num_bytes"]]),
        (1,),
        handle["start"],
        torch.storage.TypedStorage,
        torch.uint8,
    )
    return *kinds, device, storage, storage_bytes, storage_offset, False, counter, counter_offset, event, wait


def _share(flat: Tensor) -> Share:
    from torch.multiprocessing.reductions import reduce_tensor

    with beside(flat):  # torch records an event, for which each reader waits: here there is nothing before it
        _, reduced = reduce_tensor(flat)
    _, _, _, _, _, _, _, storage, storage_bytes, storage_offset, _, counter, counter_offset, event, wait = reduced
    return [storage, storage_bytes, storage_offset, counter, counter_offset, event, bool(wait)]


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def ordinal(uuid: str) -> int:
    """Return the number that this process has for a GPU. Raises BadManifest when it does not see it."""
    uuids = [_uuid(device) for device in range(torch.cuda.device_count())]
    if uuid not in uuids:
        raise BadManifest("handle: device", f"one of {', '.join(uuids) or 'no GPU'}", uuid)
    return uuids.index(uuid)
