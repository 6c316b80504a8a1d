"""Weights in memory that another process of the same machine can read: staging memory, handles of it, and the mapping
of a handle.

    learner: HostMemory.empty -> staged bucket -> handle (a map that fits into a message)
    engine:  Offered.tensor <- Mapped <- handle

The memory is a memfd: it has no name in any file system, so it is gone with the last process that maps it, however that
one ends, and the size of /dev/shm does not bound it. An engine opens it as ``/proc/<pid of the learner>/fd/<n>``, which
takes the same user and the same view of processes (``shared_memory_domain``), and no passing of descriptors, which ZMQ
cannot do. Knows no ZMQ.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.weightstore.errors import BadManifest
from tidemill.weightstore.format.manifest import count_of

_log = logging.getLogger(__name__)

# Buckets begin at multiples of this: two buckets that share a page cannot both be pinned
PAGE = max(4096, mmap.PAGESIZE)


def shared_memory_domain() -> str:
    """Return host, boot, namespaces and user: processes with equal ones can open each other's memory; "": no Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        views = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt")]
    except OSError:  # no Linux
        return ""
    return " ".join([socket.gethostname(), f"boot:{boot}", *views, f"uid:{os.getuid()}"])


class StagingMemory(Protocol):
    """Staging memory for other processes. The trainer's thread calls ``empty``, the publisher's ``handle``."""

    def empty(self, num_bytes: int) -> Tensor:
        """Return flat uint8 [num_bytes], of zeros."""
        raise NotImplementedError

    def handle(self, flat: Tensor, ranks: int) -> dict[str, object]:
        """Return a handle of a part of such memory for an engine of ``ranks`` processes."""
        raise NotImplementedError

    def close(self) -> None:
        """No further process can open the memory afterwards."""


class Pinning(NamedTuple):
    """Functions that pin memory of the host, so that a GPU copies it by itself, and unpin it by its address."""

    pin: Callable[[Tensor], None]
    """Raises RuntimeError."""
    unpin: Callable[[int], None]


def pin(flat: Tensor) -> None:
    """Let a GPU copy into and out of memory of the host directly. Raises RuntimeError."""
    _check(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0))


def unpin(address: int) -> None:
    """End that for the memory at ``address``, before it is unmapped: it could not be pinned again. RuntimeError."""
    _check(torch.cuda.cudart().cudaHostUnregister(address))


def _check(status: object) -> None:
    """Raise RuntimeError for an error of CUDA, which its next kernel would report otherwise, once more."""
    try:
        torch.cuda.check_error(status)  # type: ignore[arg-type]
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)  # a kernel's launch reads the last error, and with that forgets it
        raise


PINNING = Pinning(pin, unpin)


class _Mapping(mmap.mmap):
    """A mapping with pinned parts, which it unpins before it ends with the last tensor that views it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._pinned: dict[int, Callable[[int], None]] = {}

    def pin(self, flat: Tensor, pinning: Pinning) -> bool:
        """Pin a part once. Returns False, with a warning in the log, where that is not possible."""
        if flat.data_ptr() not in self._pinned:
            try:
                pinning.pin(flat)
            except RuntimeError as error:
                _log.warning(
                    "%d bytes for pushes are not pinned, so copies between them and the GPU are slower: %s",
                    flat.numel(),
                    error,
                )
                return False
            self._pinned[flat.data_ptr()] = pinning.unpin
        return True

    def __del__(self) -> None:
        pinned = {} if sys.is_finalizing() else getattr(self, "_pinned", {})  # it has none if the mapping failed
        for address, unpin in pinned.items():
            try:
                unpin(address)
            except RuntimeError as error:
                _log.warning("memory of pushes is unmapped while it is pinned: %s", error)


@dataclass(frozen=True, slots=True)
class _Block:
    address: int
    num_bytes: int
    fd: int
    inode: int


class HostMemory:
    """Shared memory of this host; ``pin`` it where the weights are copied from a GPU."""

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin
        self._blocks: list[_Block] = []

    def empty(self, num_bytes: int) -> Tensor:
        """Return flat uint8 [num_bytes] of zeros in a memfd of its own, pinned if this memory is."""
        size = max(num_bytes, 1)  # an empty file cannot be mapped
        fd = os.memfd_create("tidemill-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )  # or a reader could get SIGBUS
        # The tensor keeps the mapping, and with it the memory, after the descriptor is closed.
        mapping = _Mapping(fd, size)
        flat = torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]
        if self._pin and num_bytes:
            mapping.pin(flat, PINNING)
        self._blocks.append(_Block(flat.data_ptr(), num_bytes, fd, os.fstat(fd).st_ino))
        return flat

    def handle(self, flat: Tensor, ranks: int) -> JsonObject:
        """Return process, descriptor and inode of the memfd, and the place of ``flat`` in it, for any ``ranks``."""
        start = flat.data_ptr()
        for block in reversed(self._blocks):  # one that was unmapped may have had the same address
            if block.address <= start and start + flat.numel() <= block.address + block.num_bytes:
                return {
                    "pid": os.getpid(),
                    "fd": block.fd,
                    "inode": block.inode,
                    "size": block.num_bytes,
                    "offset": start - block.address,
                    "num_bytes": flat.numel(),
                }
        raise AssertionError("no memory of this kind: it was not made by empty")

    def close(self) -> None:
        """Close the descriptors; memory that is mapped, here or in an engine, stays until it is unmapped."""
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            os.close(block.fd)


# Opens the whole block of a GPU's memory that a handle is about. Raises BadManifest.
OpenBlock = Callable[[JsonMapping], Tensor]


class Mapped:
    """The learner's memory, mapped until ``close``, so that its pages are present in the next push."""

    def __init__(self, *, pinning: Pinning | None = None, open_block: OpenBlock | None = None) -> None:
        """``pinning``: pin host memory at its first use; None = do not. ``open_block`` opens GPU memory; None = CUDA
        IPC.
        """
        self._pinning, self._open = pinning, open_block
        # Blocks of host memory, with their mappings, and of GPUs, by their identities
        self._blocks: dict[tuple[object, ...], tuple[Tensor, _Mapping | None]] = {}

    def part(self, handle: Mapping[str, object]) -> Tensor:
        """Return the bytes of a handle of ``HostMemory``, flat uint8. Raises BadManifest when it is gone. Blocking."""
        pid, fd, inode, size, offset, num_bytes = (
            _number(handle, name) for name in ("pid", "fd", "inode", "size", "offset", "num_bytes")
        )
        if offset + num_bytes > size:
            raise BadManifest("handle", f"a part of {size} bytes", f"{num_bytes} from {offset}")
        entry = self._blocks.get((pid, fd, inode))
        if entry is None:
            new = _mapped(f"/proc/{pid}/fd/{fd}", inode, size, shared=self._pinning is not None)
            entry = self._blocks[pid, fd, inode] = torch.frombuffer(new, dtype=torch.uint8), new
        block, mapping = entry
        flat = block[offset : offset + num_bytes]
        # Part by part: all of a block at once could take longer than a push may.
        if self._pinning is not None and mapping is not None and num_bytes and not mapping.pin(flat, self._pinning):
            self._pinning = None
        return flat

    def gpu_part(self, handle: JsonMapping) -> Tensor:
        """Return the bytes of a handle of GPU memory, flat uint8. Raises BadManifest. Blocking."""
        from tidemill.weightstore.transport import cuda_handles

        identity, size = cuda_handles.block_of(handle)
        start, num_bytes = _number(handle, "start"), _number(handle, "num_bytes")
        if start + num_bytes > size:
            raise BadManifest("handle", f"a part of {size} bytes", f"{num_bytes} from {start}")
        entry = self._blocks.get(identity)
        if entry is None:
            entry = self._blocks[identity] = (self._open or cuda_handles.opened)(handle), None
        return entry[0][start : start + num_bytes]

    def close(self) -> None:
        """Drop the mappings; each ends with the last tensor that views it."""
        self._blocks = {}


@dataclass(frozen=True, slots=True)
class Offered:
    """One bucket that was sent as a handle."""

    mapped: Mapped
    handle: JsonMapping

    @property
    def num_bytes(self) -> int:
        """Size of the bucket. Raises BadManifest when the handle has none."""
        return _number(self.handle, "num_bytes")

    @property
    def shares(self) -> list[object] | None:
        """Shares of GPU memory, one for each process that reads it. None for host memory."""
        return self.handle.get("shares")

    def tensor(self) -> Tensor:
        """Return the bucket as flat uint8, without a copy. Raises BadManifest. Blocking."""
        if self.shares is None:
            return self.mapped.part(self.handle)
        return self.mapped.gpu_part(self.handle)


def _mapped(path: str, inode: int, size: int, *, shared: bool) -> _Mapping:
    try:
        fd = os.open(path, (os.O_RDWR if shared else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise BadManifest(f"handle {path}", "the learner's memory", error.strerror) from None
    try:
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (inode, max(size, 1)):  # another process has its number by now
            raise BadManifest(
                f"handle {path}", f"inode {inode} of {size} bytes", f"inode {status.st_ino} of {status.st_size}"
            )
        # Private where possible, so that nothing here can write into the learner's memory; pages only read stay the
        # learner's own. Those of a private mapping are copied when they are pinned.
        return _Mapping(fd, status.st_size, flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
    finally:
        os.close(fd)


def _number(handle: Mapping[str, object], name: str) -> int:
    return count_of(handle.get(name), f"handle: {name}")
