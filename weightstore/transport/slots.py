"""Two buffers on a device for messages from the host: the next message is copied into one while the other is sent. Knows no CUDA.

    send 1: copy 1 -> A, copy 2 -> B | broadcast A
    send 2:              copy 3 -> A | broadcast B

A broadcast is complete before the next message is sent, so the other buffer is always free to be filled.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Buffers(Protocol):
    """Two buffers, 0 and 1, with a queue of copies in the order of the calls."""

    def copy(self, slot: int, source: Tensor) -> None:
        """Queue the copy of flat uint8 into a buffer, which grows to its size."""

    def ready(self, slot: int, num_bytes: int) -> Tensor:
        """Return the first bytes of a buffer, for work that is queued behind its last copy."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Ahead:
    slot: int
    address: int
    num_bytes: int


class DoubleBuffer:
    """Messages copied to a device one ahead of the broadcast."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._sent = 1
        """The buffer of the last message."""
        self._ahead: _Ahead | None = None
        """The message that has been copied before it is sent."""

    def message(self, flat: Tensor, following: Tensor | None = None) -> Tensor:
        """Return ``flat`` on the device, and queue the copy of ``following``: its bytes must not change until it is sent.

        A copy ahead counts for the very next message only: memory that is filled again has the same address and other bytes.
        """
        slot, ahead = 1 - self._sent, self._ahead
        if ahead != _Ahead(slot, flat.data_ptr(), flat.numel()):
            self._buffers.copy(slot, flat)
        self._sent, self._ahead = slot, None
        if following is not None:
            self._ahead = _Ahead(1 - slot, following.data_ptr(), following.numel())
            self._buffers.copy(1 - slot, following)
        return self._buffers.ready(slot, flat.numel())
