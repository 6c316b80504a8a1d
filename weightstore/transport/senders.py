"""The learner's end of a process group, with its blocking calls in a thread. The backend decides whether it has a
process of its own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from tidemill.bus.client.addresses import Reach, bare
from tidemill.weightstore.errors import PeerLost
from tidemill.weightstore.transport.broadcast import BroadcastGroup
from tidemill.weightstore.transport.handles import StagingMemory
from tidemill.weightstore.transport.sender_process import SenderProcess

APART = ("nccl",)
"""Backends with the learner's end in a process of its own. NCCL may end its process, or wait in it without end, when a
peer dies. Gloo does neither, so its groups spare the process."""
T = TypeVar("T")


GroupEnd = BroadcastGroup | SenderProcess
"""Rank 0 of a group. All calls block, and raise PeerLost; ``close`` may be called from any thread, at any time."""


def host(
    address: str,
    name: str,
    world_size: int,
    backend: str,
    timeout_s: float,
    *,
    memory: StagingMemory | None = None,
    gpu: str = "",
    apart: tuple[str, ...] = APART,
) -> GroupEnd:
    """Listen on ``address`` at a free port, as rank 0, without a connection. Raises PeerLost.

    ``memory``: of all tensors to be sent, for a process of its own; ``gpu``: UUID of the GPU that it uses.
    """
    if backend not in apart:
        return BroadcastGroup.host(address, name, world_size, backend, timeout_s)
    assert memory is not None, "a process of its own reads shared memory only"
    return SenderProcess.host(address, name, world_size, backend, timeout_s, memory=memory, gpu=gpu)


class Sender:
    """The process group of a rank that sends, with a thread of its own, so that a call that hangs delays no other
    group.

    A blocking call cannot be interrupted: after an error it ends by its deadline, and its result is ignored.
    """

    def __init__(self, end: GroupEnd, thread: ThreadPoolExecutor, address: str) -> None:
        """``address``: host at which the members reach the group's port."""
        self._end, self._thread, self.host = end, thread, address
        self.name, self.port, self.world_size, self.backend = end.name, end.port, end.world_size, end.backend

    @classmethod
    async def open(
        cls,
        name: str,
        world_size: int,
        backend: str,
        timeout_s: float,
        *,
        at: Reach,
        memory: StagingMemory | None,
        gpu: str,
        apart: tuple[str, ...] = APART,
    ) -> "Sender":
        """Listen, as ``host`` does. Raises PeerLost."""
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"push {name}")
        try:
            hosting = _run(
                thread, lambda: host(at.bind, name, world_size, backend, timeout_s, memory=memory, gpu=gpu, apart=apart)
            )
            return cls(await hosting, thread, bare(at.advertised))
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def meet(self) -> None:
        """Wait until every rank is connected. Raises PeerLost."""
        await self._call("meeting", self._end.meet)

    async def send(self, flat: Tensor, following: Tensor | None, timeout_s: float) -> None:
        """Broadcast a bucket. ``following``: the tensor of the next call, if known. Raises PeerLost."""
        await self._call("sending", lambda: self._end.send(flat, timeout_s, following))

    def close(self) -> None:
        """Close the group and let its thread end, without waiting for a call under way."""
        self._end.close()
        self._thread.shutdown(wait=False)

    async def _call(self, doing: str, work: Callable[[], T]) -> T:
        try:
            future = _run(self._thread, work)
        except RuntimeError as error:  # the thread has been shut down
            raise PeerLost(self.name, doing, f"the group is closed: {error}") from None
        return await future


def _run(thread: ThreadPoolExecutor, work: Callable[[], T]) -> "asyncio.Future[T]":
    future = asyncio.get_running_loop().run_in_executor(thread, work)
    future.add_done_callback(_retrieve)
    return future


def _retrieve(future: "asyncio.Future[T]") -> None:
    """Mark the exception as retrieved: the caller may have gone."""
    if not future.cancelled():
        future.exception()
