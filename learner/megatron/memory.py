"""The learner's memory on an accelerator that it shares with engines: given up between the steps, taken again for each.

``PlainMemory`` moves nothing, on CPUs and where nobody shares; ``SaverMemory`` (torch_memory_saver) unmaps the device memory and keeps what
was in it in pinned host memory. Both have the same states, so that a use of released memory is an error everywhere.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from learner.errors import MemoryReleased

log = logging.getLogger(__name__)

KEPT, SCRATCH = "learner", "learner-scratch"
"""Tags of regions: what must come back as it was, and what is written anew before it is read."""


class Memory(Protocol):
    """Of one rank. ``release`` and ``resume`` take turns, ``resume`` gives back every tensor as it was (gradients excepted)."""

    def region(self, *, scratch: bool = False) -> AbstractContextManager[None]:
        """What is allocated inside is given up by ``release``; with ``scratch`` its content is not kept. Not to be nested."""
        ...

    def release(self) -> None:
        """Give it up. Raises MemoryReleased when it has been."""

    def resume(self) -> None:
        """Take it again. Raises AssertionError when it is here."""

    def want(self, what: str) -> None:
        """Raise MemoryReleased when it is not here."""


class PlainMemory:
    """Stays where it is."""

    def __init__(self) -> None:
        self.released = False

    @contextmanager
    def region(self, *, scratch: bool = False) -> Iterator[None]:
        self.want("an allocation")
        yield

    def release(self) -> None:
        self.want("a release")
        self.released = True

    def resume(self) -> None:
        assert self.released, "memory that is here cannot be resumed"
        self.released = False

    def want(self, what: str) -> None:
        if self.released:
            raise MemoryReleased(what)


class SaverMemory(PlainMemory):
    """Device memory behind torch_memory_saver: addresses stay, pages go. Not tried on a device yet."""

    def __init__(self) -> None:
        """Raises ImportError, saying what to install."""
        super().__init__()
        try:
            from torch_memory_saver import torch_memory_saver
        except ImportError as error:
            raise ImportError("learner.colocated on CUDA wants the package torch-memory-saver: pip install 'tidemill[gpu]'") from error
        torch_memory_saver.hook_mode = "torch"  # an allocator of this process, instead of a library that must be loaded before it
        self._saver: Any = torch_memory_saver

    @contextmanager
    def region(self, *, scratch: bool = False) -> Iterator[None]:
        self.want("an allocation")
        with self._saver.region(tag=SCRATCH if scratch else KEPT, enable_cpu_backup=not scratch):
            yield

    def release(self) -> None:
        super().release()
        torch.cuda.synchronize()
        self._saver.pause(KEPT)
        self._saver.pause(SCRATCH)
        torch.cuda.empty_cache()  # what a step has left behind
        log.info("memory released still_allocated_bytes=%d", torch.cuda.memory_reserved())

    def resume(self) -> None:
        super().resume()
        self._saver.resume(KEPT)
        self._saver.resume(SCRATCH)


def open_memory(*, colocated: bool, device: torch.device) -> Memory:
    """What a rank on this device needs. Raises ImportError."""
    return SaverMemory() if colocated and device.type == "cuda" else PlainMemory()
