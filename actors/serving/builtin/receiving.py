"""The receiving end of a weight update: the tensors announced and received, and the messages of its process group.

Messages come in the order requested, one is in transit while the one before is written.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tidemill.actors.errors import UpdateRefused
from tidemill.actors.http_api import decode
from tidemill.actors.serving.builtin.lora import IncomingAdapter
from tidemill.actors.serving.builtin.weights import WeightSet
from tidemill.actors.serving.command_bodies import JoinBody
from tidemill.actors.serving.updates import require_all, require_new
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.weightstore.errors import PeerLost, WeightstoreError
from tidemill.weightstore.format.adapters import module_of
from tidemill.weightstore.format.manifest import Bucket, TensorSpec

if TYPE_CHECKING:
    from tidemill.weightstore.transport.broadcast import BroadcastGroup


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message in transit."""

    bucket: Bucket
    group: "JoinedGroup"
    place: Tensor | None
    """Memory of the standby copy into which it is received; None = it is received into memory of the group."""
    future: "asyncio.Future[Tensor]"

    def is_in_place(self, message: Tensor) -> bool:
        """Return whether the received message is in the standby copy."""
        return self.place is not None and message.data_ptr() == self.place.data_ptr()

    def return_buffer(self, message: Tensor) -> None:
        """Return the memory of the received message to its group, if it is the group's."""
        if self.place is None:
            self.group.return_buffer(message)

    def discard(self) -> None:
        """Return the buffer of a message once it is received: the message is not needed."""
        self.future.add_done_callback(self._discard_received)

    def _discard_received(self, future: "asyncio.Future[Tensor]") -> None:
        if not future.cancelled() and future.exception() is None:
            self.return_buffer(future.result())


class JoinedGroup:
    """A group, and memory for its messages: one is received while the one before is written."""

    def __init__(self, group: "BroadcastGroup") -> None:
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

        place = decode(body, JoinBody)
        host, port, rank, world_size = place.master_address, place.master_port, place.rank_offset, place.world_size
        try:
            joining = (host, port, rank, world_size, name, place.backend, place.timeout_s)
            return cls(await asyncio.to_thread(BroadcastGroup.join, *joining))
        except (WeightstoreError, ValueError, RuntimeError) as error:
            raise UpdateRefused(f"joining group {name!r} as rank {rank} of {world_size}: {error}") from error

    @asynccontextmanager
    async def in_use(self, timeout_s: float) -> AsyncIterator[None]:
        """Reserve the group. Raises TimeoutError when another request has it for more than ``timeout_s``."""
        async with asyncio.timeout(timeout_s):
            await self._used.acquire()
        try:
            yield
        finally:
            self._used.release()

    async def receive(self, bucket: Bucket, timeout_s: float, place: Tensor | None = None) -> Incoming:
        """Request the next message. Without ``place`` this waits for memory, which ``return_buffer`` takes back."""
        loop, num_bytes, into = asyncio.get_running_loop(), bucket.num_bytes, place
        if into is None:
            await self._free.acquire()
            into = self._memory.pop()
            if into.numel() < num_bytes:  # too small: its memory is freed before the larger one is allocated
                into = into.new_empty(0)
        try:
            future = loop.run_in_executor(self._thread, self.group.receive, num_bytes, timeout_s, into)
        except RuntimeError as error:  # its thread is shut down
            raise PeerLost("of the push", "receiving", "the group was left meanwhile") from error
        self.receiving += 1
        future.add_done_callback(lambda future: self._received(future, is_buffer=place is None))
        return Incoming(bucket, self, place, future)

    def _received(self, future: "asyncio.Future[Tensor]", *, is_buffer: bool) -> None:
        self.receiving -= 1
        if not is_buffer:
            return
        if future.cancelled() or future.exception() is not None:  # the memory may still be written
            self.return_buffer(torch.empty(0, dtype=torch.uint8))

    def return_buffer(self, message: Tensor) -> None:
        """Take back the memory of a message which has been copied, or is not needed."""
        self._memory.append(message.new_empty(0).set_(message.untyped_storage()))  # type: ignore[call-overload]
        self._free.release()

    def drop_buffers(self) -> None:
        """Free the memory for messages that is not in use."""
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in self._memory]

    def close(self) -> None:
        """Leave the group and end its thread, without a wait for a message in transit."""
        self.group.close()
        self._thread.shutdown(wait=False)


@dataclass(slots=True)
class Update:
    """An open update."""

    epoch: int
    version: int | None
    received: dict[str, None] = field(default_factory=dict)
    """Names of the tensors received, in order of arrival."""
    announced: set[str] = field(default_factory=set)
    """Names of the tensors requested so far."""
    aliases: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that were sent although they are tied to others; kept to be compared."""
    is_sent: bool = True
    """True when the tensors are sent in messages, not read from a directory."""
    adapter: IncomingAdapter | None = None
    """The adapter that the update has; None = it has weights alone."""

    @property
    def has_weights(self) -> bool:
        """False when the update has an adapter alone, which is added to the served weights."""
        return self.adapter is None or not self.adapter.header.base

    def adapter_of(self, bucket: Bucket) -> IncomingAdapter | None:
        """Return the adapter if the bucket belongs to it; None for a bucket of weights."""
        # A bucket has matrices of an adapter alone, or none.
        return self.adapter if bucket.specs and module_of(bucket.specs[0].name) is not None else None

    def check_new(self, specs: Sequence[TensorSpec], sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UpdateRefused unless these tensors have names and shapes of the model (``sizes``) or of its adapter,
        and are new.
        """
        if self.adapter is not None:
            of_weights = [spec for spec in specs if self.has_weights and module_of(spec.name) is None]
            matrices = [spec for spec in specs if not self.has_weights or module_of(spec.name) is not None]
            self.adapter.check_new(matrices, self.announced)
            specs = of_weights
        require_new((spec.name for spec in specs), sizes, self.announced)
        for spec in specs:
            if spec.shape != sizes[spec.name]:
                raise UpdateRefused(f"{spec.name}: want shape {sizes[spec.name]}, got {spec.shape}")
            if not getattr(torch, spec.dtype).is_floating_point:
                raise UpdateRefused(f"{spec.name}: want floating-point numbers, got {spec.dtype}")

    def announce(self, specs: Sequence[TensorSpec], sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Record tensors that are requested. Raises as ``check_new``."""
        self.check_new(specs, sizes)
        self.announced.update(spec.name for spec in specs)

    def record(self, bucket: Bucket) -> None:
        """Record the tensors of a bucket as received."""
        self.received.update(dict.fromkeys(spec.name for spec in bucket.specs))

    def check_complete(self, weights: WeightSet | None) -> None:
        """Raise UpdateRefused unless every tensor of ``weights``, and of the adapter, was received."""
        if self.adapter is not None:
            self.adapter.check_complete()
        if not self.has_weights:
            return
        assert weights is not None
        require_all(weights.named.keys(), self.received.keys())
        for name, alias in self.aliases.items():
            tied_to = weights.aliases[name]
            if not torch.equal(alias.to(weights.device), weights.named[tied_to]):
                raise UpdateRefused(f"{name}: differs from {tied_to}, to which the model's configuration ties it")

    def check_version(self, served: int) -> None:
        """Raise UpdateRefused unless the version is known and not older than the served one."""
        if self.version is None:
            raise UpdateRefused("weight_version: want the version of these weights, got none")
        if self.version < served:
            raise UpdateRefused(f"weight_version: want >= {served}, which is served, got {self.version}")


def bucket_of(specs: Sequence[TensorSpec]) -> Bucket:
    """Return the flat bucket of these tensors, without gaps between them."""
    return Bucket(specs=tuple(specs), num_bytes=sum(spec.num_bytes for spec in specs))
