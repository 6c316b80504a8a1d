"""The learner's memory on an accelerator that it shares with engines: released between steps and resumed for each."""

import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tidemill.learner.errors import MemoryReleased

log = logging.getLogger(__name__)

KEPT, SCRATCH = "learner", "learner-scratch"
"""Tags of regions: KEPT is restored with its content, SCRATCH without, because it is overwritten before it is read."""


class Memory:
    """Accelerator memory of one rank. ``release`` and ``resume`` alternate. This one is never unmapped."""

    def __init__(self) -> None:
        self.released = False

    @contextmanager
    def region(self, *, scratch: bool = False) -> Iterator[None]:
        """Register allocations for ``release``; with ``scratch`` their content is not kept. Do not nest."""
        self.want("an allocation")
        yield

    def release(self) -> None:
        """Release the memory. Raises MemoryReleased if it is released already."""
        self.want("a release")
        self.released = True

    def resume(self) -> None:
        """Take the memory back and restore every tensor but gradients."""
        assert self.released, "memory that is not released cannot be resumed"
        self.released = False

    def want(self, what: str) -> None:
        """Raise MemoryReleased if ``release`` was the last call of the two."""
        if self.released:
            raise MemoryReleased(what)


@functools.cache
def process_saver() -> Any:
    """Return this process' torch_memory_saver. Its mode can be set only before its first use. Raises ImportError."""
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError as error:
        raise ImportError(
            "learner.colocated on CUDA wants the package torch-memory-saver: pip install 'tidemill[gpu]'"
        ) from error
    torch_memory_saver.hook_mode = (
        "torch"  # an allocator of this process; the default mode needs LD_PRELOAD before it starts
    )
    # One reference too many, so that the interpreter does not free its pools at the end: freed outside of a region,
    # they end the process with status 1 (torch_memory_saver 0.0.10, "only support interesting region").
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch_memory_saver))
    return torch_memory_saver


class SaverMemory(Memory):
    """Device memory managed by torch_memory_saver, which keeps the addresses and frees the pages."""

    def __init__(self) -> None:
        """Raises ImportError, which names the extra to install."""
        super().__init__()
        self._saver = process_saver()

    @contextmanager
    def region(self, *, scratch: bool = False) -> Iterator[None]:
        """Allocate from the saver's pool: with a copy on the host at every release, or with ``scratch`` without one."""
        self.want("an allocation")
        with self._saver.region(tag=SCRATCH if scratch else KEPT, enable_cpu_backup=not scratch):
            yield

    def release(self) -> None:
        """Unmap both regions, and return the allocator's cached blocks to the device."""
        super().release()
        torch.cuda.synchronize()  # kernels under way may still use the memory
        self._saver.pause(KEPT)
        self._saver.pause(SCRATCH)
        torch.cuda.empty_cache()  # temporary tensors of the step, which are in no region
        log.info("memory released still_allocated_bytes=%d", torch.cuda.memory_reserved())

    def resume(self) -> None:
        """Map both regions again at the same addresses."""
        super().resume()
        self._saver.resume(KEPT)
        self._saver.resume(SCRATCH)


def open_memory(*, colocated: bool, device: torch.device) -> Memory:
    """Return the memory for a rank on ``device``. Raises ImportError without torch-memory-saver where it is needed."""
    return SaverMemory() if colocated and device.type == "cuda" else Memory()
