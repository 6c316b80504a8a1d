"""The receiving end of a process group: messages in the order requested, one in transit while the one before is written."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weightstore.errors import PeerLost
from weightstore.format.manifest import Bucket


class Group(Protocol):
    """The receiving end of a push (``weightstore.transport.broadcast``)."""

    def receive(self, nbytes: int, timeout_s: float | None = None, into: Tensor | None = None) -> Tensor:
        """Return the next message, received into ``into`` where possible."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message in transit."""

    bucket: Bucket
    joined: "Joined"
    place: Tensor | None
    """Memory of the standby copy into which it is received; None = it is received into memory of the group."""
    future: "asyncio.Future[Tensor]"

    def pass_over(self) -> None:
        """Give the memory of a message back once it is received: the message is not needed."""
        if self.place is None:
            self.future.add_done_callback(self._give_back)

    def _give_back(self, future: "asyncio.Future[Tensor]") -> None:
        if not future.cancelled() and future.exception() is None:
            self.joined.give_back(future.result())


class Joined:
    """A group, and memory for its messages: one is received, in the order requested, while the one before is written."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.receiving = 0
        self._used = asyncio.Lock()
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._free = asyncio.Semaphore(len(self._memory))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="receive weights")

    @asynccontextmanager
    async def in_use(self, timeout_s: float) -> AsyncIterator[None]:
        """Reserve the group for one request at a time. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._used.acquire()
        try:
            yield
        finally:
            self._used.release()

    async def receive(self, num_bytes: int, timeout_s: float, into: Tensor | None) -> "asyncio.Future[Tensor]":
        """Request the next message. Without ``into`` this waits for memory, to be given back (``give_back``) later. Raises PeerLost."""
        loop, lent = asyncio.get_running_loop(), into is None
        if into is None:
            await self._free.acquire()
            into = self._memory.pop()
        try:
            future = loop.run_in_executor(self._thread, self.group.receive, num_bytes, timeout_s, into)
        except RuntimeError as error:  # its thread is shut down
            raise PeerLost("of the push", "receiving", "the group was left meanwhile") from error
        self.receiving += 1
        future.add_done_callback(lambda future: self._received(future, lent=lent))
        return future

    def _received(self, future: "asyncio.Future[Tensor]", *, lent: bool) -> None:
        self.receiving -= 1
        if not lent:
            return
        if future.cancelled() or future.exception() is not None:  # the memory may still be written
            self.give_back(torch.empty(0, dtype=torch.uint8))

    def give_back(self, message: Tensor) -> None:
        self._memory.append(message.new_empty(0).set_(message.untyped_storage()))  # type: ignore[call-overload]
        self._free.release()

    def close(self) -> None:
        self.group.close()
        self._thread.shutdown(wait=False)
