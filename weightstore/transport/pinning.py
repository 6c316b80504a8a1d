"""Memory of the host that a GPU copies into and out of by itself, because its pages are pinned."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Pinning(NamedTuple):
    """Functions that pin memory of the host, so that a GPU copies it by itself, and unpin it by its address."""

    pin: Callable[[Tensor], None]
    """Raises RuntimeError."""
    unpin: Callable[[int], None]


def pin(flat: Tensor) -> None:
    """Let a GPU copy into and out of memory of the host directly. Raises RuntimeError."""
    _check(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0))


def unpin(address: int) -> None:
    """End that for the memory at ``address``. Raises RuntimeError.

    Memory that is unmapped while it is pinned cannot be pinned again at the same address.
    """
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
