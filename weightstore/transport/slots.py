"""Two buffers on a device for messages from the host: the next message is copied into one while the other is sent.

    send 1: copy 1 -> A, copy 2 -> B | broadcast A
    send 2:              copy 3 -> A | broadcast B

A broadcast is complete before the next message is sent, so the other buffer is always free to be filled. On a GPU
copies have a stream of their own, and events before the broadcast. Neither stream waits for the default one, on which
the trainer queues its kernels. Has run on one GPU, in a group of one (docs/gpu.md).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
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
        """Return ``flat`` on the device, and queue the copy of ``following``: its bytes must not change until it is
        sent.

        A copy ahead counts for the very next message only: memory that is filled again has the same address and other
        bytes.
        """
        slot, ahead = 1 - self._sent, self._ahead
        if ahead != _Ahead(slot, flat.data_ptr(), flat.numel()):
            self._buffers.copy(slot, flat)
        self._sent, self._ahead = slot, None
        if following is not None:
            self._ahead = _Ahead(1 - slot, following.data_ptr(), following.numel())
            self._buffers.copy(1 - slot, following)
        return self._buffers.ready(slot, flat.numel())


class DeviceBuffers:
    """``Buffers`` on the GPU of a stream. From pinned memory the copies are asynchronous."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """``stream``: of the work that is queued behind a copy."""
        self._stream, self._copies = stream, torch.cuda.Stream(stream.device, priority=-1)
        self._flats = [torch.empty(0, dtype=torch.uint8, device=stream.device) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]

    def copy(self, slot: int, source: Tensor) -> None:
        """Queue the copy on the stream of copies, and the event behind it."""
        with torch.cuda.stream(self._copies):
            if self._flats[slot].numel() < source.numel():
                self._flats[slot] = torch.empty(source.numel(), dtype=torch.uint8, device=self._stream.device)
            self._flats[slot][: source.numel()].copy_(source, non_blocking=True)
            self._copied[slot].record(self._copies)

    def ready(self, slot: int, num_bytes: int) -> Tensor:
        """Let the stream wait for the copy, and return the bytes."""
        self._stream.wait_event(self._copied[slot])
        return self._flats[slot][:num_bytes]
