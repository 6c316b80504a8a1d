"""The receiving end of a process group: messages in the order requested, one in transit while the one before is written."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tidemill.actors.errors import UpdateRefused
from tidemill.actors.http_api import need, port_in, seconds_in
from tidemill.actors.serving.port import COMMAND_S
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.weightstore.errors import PeerLost, WeightstoreError
from tidemill.weightstore.format.manifest import Bucket


class Group(Protocol):
    """The receiving end of a push (``tidemill.weightstore.transport.broadcast``)."""

    def receive(self, nbytes: int, timeout_s: float | None = None, into: Tensor | None = None) -> Tensor:
        """Return the next message, received into ``into`` where possible."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message in transit."""

    bucket: Bucket
    joined: "JoinedGroup"
    place: Tensor | None
    """Memory of the standby copy into which it is received; None = it is received into memory of the group."""
    future: "asyncio.Future[Tensor]"

    def discard(self) -> None:
        """Return the buffer of a message once it is received: the message is not needed."""
        if self.place is None:
            self.future.add_done_callback(self._return_buffer)

    def _return_buffer(self, future: "asyncio.Future[Tensor]") -> None:
        if not future.cancelled() and future.exception() is None:
            self.joined.return_buffer(future.result())


class JoinedGroup:
    """A group, and memory for its messages: one is received, in the order requested, while the one before is written."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.receiving = 0
        self._used = asyncio.Lock()
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._free = asyncio.Semaphore(len(self._memory))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="receive weights")

    @classmethod
    async def join(cls, name: str, body: JsonMapping) -> "JoinedGroup":
        """Join the group that the body of /init_weights_update_group names. Raises BadRequest, UpdateRefused."""
        from tidemill.weightstore.transport.broadcast import BroadcastGroup

        host, port, timeout_s = need(body, "master_address", str), port_in(body, "master_port"), seconds_in(body, "timeout_s", COMMAND_S)
        rank, world_size, backend = need(body, "rank_offset", int), need(body, "world_size", int), body.get("backend", "nccl")
        try:
            return cls(await asyncio.to_thread(BroadcastGroup.join, host, port, rank, world_size, name, backend, timeout_s))
        except (WeightstoreError, ValueError, RuntimeError) as error:
            raise UpdateRefused(f"joining group {name!r} as rank {rank} of {world_size}: {error}") from error

    @asynccontextmanager
    async def in_use(self, timeout_s: float) -> AsyncIterator[None]:
        """Reserve the group until this context is left. Raises TimeoutError when another request has it for more than ``timeout_s``."""
        async with asyncio.timeout(timeout_s):
            await self._used.acquire()
        try:
            yield
        finally:
            self._used.release()

    async def receive(self, num_bytes: int, timeout_s: float, into: Tensor | None) -> "asyncio.Future[Tensor]":
        """Request the next message. Without ``into`` this waits for memory, to be returned (``return_buffer``) later. Raises PeerLost."""
        loop, is_buffer = asyncio.get_running_loop(), into is None
        if into is None:
            await self._free.acquire()
            into = self._memory.pop()
        try:
            future = loop.run_in_executor(self._thread, self.group.receive, num_bytes, timeout_s, into)
        except RuntimeError as error:  # its thread is shut down
            raise PeerLost("of the push", "receiving", "the group was left meanwhile") from error
        self.receiving += 1
        future.add_done_callback(lambda future: self._received(future, is_buffer=is_buffer))
        return future

    def _received(self, future: "asyncio.Future[Tensor]", *, is_buffer: bool) -> None:
        self.receiving -= 1
        if not is_buffer:
            return
        if future.cancelled() or future.exception() is not None:  # the memory may still be written
            self.return_buffer(torch.empty(0, dtype=torch.uint8))

    def return_buffer(self, message: Tensor) -> None:
        """Take back memory for messages: that of a message which has been copied, or is not needed."""
        self._memory.append(message.new_empty(0).set_(message.untyped_storage()))  # type: ignore[call-overload]
        self._free.release()

    def drop_buffers(self) -> None:
        """Free the memory for messages that is not in use."""
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in self._memory]

    def close(self) -> None:
        """Leave the group and end its thread, without a wait for a message in transit."""
        self.group.close()
        self._thread.shutdown(wait=False)
