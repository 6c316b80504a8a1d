"""The two buffers of ``tidemill.weightstore.transport.slots`` on a GPU: copies on a stream of their own, events before the broadcast.

Neither stream waits for the default one, on which the trainer queues its kernels. Has run on one GPU, in a group of one (docs/gpu.md).
"""

import torch
from torch import Tensor


class DeviceBuffers:
    """``tidemill.weightstore.transport.slots.Buffers`` on the GPU of a stream. From pinned memory the copies are asynchronous."""

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
