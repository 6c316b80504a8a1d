"""The learner's end of a process group, in this process or in one of its own: the backend decides."""

from typing import Protocol

from torch import Tensor

from tidemill.weightstore.transport.broadcast import BroadcastGroup
from tidemill.weightstore.transport.handles import Memory

APART = ("nccl",)
"""Backends with the learner's end in a process of its own. NCCL may end its process, or wait in it without end, when a peer dies. Gloo does
neither, so its groups spare the process."""


class Sender(Protocol):
    """Rank 0 of a group. All calls block, and raise PeerLost; ``close`` may be called from any thread, during any call."""

    name: str
    port: int
    world_size: int
    backend: str

    def meet(self) -> None:
        """Wait until every rank is connected."""

    def send(self, flat: Tensor, timeout_s: float | None = None, following: Tensor | None = None) -> None:
        """Broadcast flat uint8; returns when it has left this machine's memory. ``following``: the tensor of the next call, if known."""

    def close(self) -> None:
        """Close the connections."""


def host(
    address: str,
    name: str,
    world_size: int,
    backend: str,
    timeout_s: float,
    *,
    memory: Memory | None = None,
    gpu: str = "",
    apart: tuple[str, ...] = APART,
) -> Sender:
    """Listen on ``address`` at a free port, as rank 0. Returns the sender, which has no connection yet. Raises PeerLost.

    ``memory``: that of all tensors to be sent, for a process of its own to read; ``gpu``: UUID of the GPU that it uses.
    """
    if backend not in apart:
        return BroadcastGroup.host(address, name, world_size, backend, timeout_s)
    from tidemill.weightstore.transport.sender_process import SenderProcess

    assert memory is not None, "a process of its own reads shared memory only"
    return SenderProcess.host(address, name, world_size, backend, timeout_s, memory=memory, gpu=gpu)
