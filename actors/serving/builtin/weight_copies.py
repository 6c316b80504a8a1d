"""The two copies of an engine's weights: the one that requests are answered with, and the standby copy that the next
update is written into.

Neither knows the order of updates: the caller (``weight_updates.py``) holds a lock while a copy is read or written.
Used in the loop's thread; blocking work runs in other threads.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tidemill.actors.errors import UpdateRefused
from tidemill.actors.serving.builtin.lora import Adapter, IncomingAdapter
from tidemill.actors.serving.builtin.receiving import Incoming, JoinedGroup
from tidemill.actors.serving.builtin.weights import (
    WeightSet,
    copy_all,
    finalize,
    load_from_bucket,
    load_from_directory,
)
from tidemill.weightstore.format.adapters import AdapterHeader, MergedTensors, base_digest
from tidemill.weightstore.format.checksums import ChecksumReport, report_checksums, sha256
from tidemill.weightstore.format.manifest import Bucket

T = TypeVar("T")


class ServedWeights:
    """The weights that requests are answered with, the adapter that is added to them, and their checksums."""

    def __init__(self, weights: WeightSet) -> None:
        self._adapter_shape, self._dtype, self._device = weights.adapter_shape, weights.dtype, weights.device
        self.weights: WeightSet | None = weights
        """None while their memory is released."""
        self.adapter: Adapter | None = None
        """None = there is no adapter, or it is merged into the weights."""
        self._base = ""
        """Digest of the weights without the adapter; "" = not computed since they changed."""

    def replace(self, weights: WeightSet | None, adapter: Adapter | None) -> None:
        """Record what is served from now on. ``weights``: the present ones stay where the adapter alone is new; None =
        their memory is released.
        """
        if weights is not self.weights:
            self._base = ""
        self.weights, self.adapter = weights, adapter

    def require(self) -> WeightSet:
        """Return the weights. Raises UpdateRefused while there are none."""
        if self.weights is None:
            raise UpdateRefused(
                "there are no weights: their memory was released, and no complete update has been received since"
            )
        return self.weights

    def incoming_adapter(self, header: AdapterHeader) -> IncomingAdapter:
        """Return an empty adapter to fill. Raises UpdateRefused where the runner of the weights takes none."""
        if self._adapter_shape is None:
            raise UpdateRefused("adapter: want merged weights: the runner of this model takes no adapters beside them")
        return IncomingAdapter(header, self._adapter_shape, dtype=self._dtype, device=self._device)

    async def require_base(self, base: str) -> None:
        """Raise UpdateRefused unless the weights, without their adapter, have this digest."""
        if not self._base:
            await self.report(with_adapter=False)
        if self._base != base:
            raise UpdateRefused(f"adapter: want one of the weights {self._base}, which are served, got one of {base!r}")

    async def checksums(self) -> dict[str, str]:
        """Return checksums by name, as SGLang computes them, with the adapter added."""
        named = self._merged(self.require().named)
        return await asyncio.to_thread(lambda: {name: sha256([tensor]) for name, tensor in named.items()})

    async def report(self, *, with_adapter: bool) -> ChecksumReport:
        """Return the checksums that a push is compared with."""
        tensors = self.require().with_alias()
        if with_adapter:
            return await asyncio.to_thread(report_checksums, self._merged(tensors))
        report = await asyncio.to_thread(report_checksums, tensors)
        self._base = base_digest(report)
        return report

    def _merged(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors if self.adapter is None else MergedTensors(tensors, self.adapter.named, self.adapter.scale)


class Standby:
    """The copy that the next update is written into: by messages received directly into its memory, or by copies."""

    def __init__(self, served: WeightSet) -> None:
        self._empty_copy = served.empty_copy
        self.weights: WeightSet | None = None
        """None before the first update, and after the copy was dropped or abandoned."""
        self.order: tuple[str, ...] = ()
        """Names in the order of the last push: the next copy has this order in memory."""
        self._messages: set[asyncio.Future[Tensor]] = set()
        # Stream of the copies to a GPU.
        self._copying = torch.cuda.Stream(served.device) if served.device.type == "cuda" else None

    @property
    def in_transit(self) -> int:
        """Number of messages that are received directly into the copy, which has no other use while one is late."""
        return sum(not message.done() for message in self._messages)

    async def prepare(self) -> WeightSet:
        """Return a copy to write: a new one for another order of tensors, or if a push may still write the old one."""
        if self.weights is None or self.in_transit or self.weights.order != self.order:
            self.weights, self._messages = None, set()
            self.weights = await asyncio.to_thread(self._empty_copy, self.order)
        return self.weights

    async def receive(self, group: JoinedGroup, bucket: Bucket, timeout_s: float) -> Incoming:
        """Request the next message, into the copy if it has this layout, else into the group's memory."""
        weights = self._prepared()
        place = weights.place(bucket)
        if place is None:
            return await group.receive(bucket, timeout_s)
        weights.writes += 1
        incoming = await group.receive(bucket, timeout_s, place)
        self._messages.add(incoming.future)
        incoming.future.add_done_callback(self._messages.discard)
        return incoming

    def check_arrived(self) -> None:
        """Raise UpdateRefused while a message is received directly into the copy."""
        if self.in_transit:
            raise UpdateRefused(f"{self.in_transit} buckets have not been received completely")

    async def write(self, bucket: Bucket, flat: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Copy a flat bucket. Returns copies of tensors that are tied to others. ``flat`` is called in the thread."""
        weights = self._prepared()
        return await self._in_thread(lambda: self._copy(weights, bucket, flat()))

    def _copy(self, weights: WeightSet, bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
        place = weights.place(bucket)
        if place is None:
            return load_from_bucket(weights, bucket, flat, self._copying)
        weights.writes += 1
        copy_all([(place, flat)], self._copying)  # at once, as the layouts agree
        return {}

    def is_filled_by(self, names: Collection[str]) -> bool:
        """Return whether so many tensors were received that none may be missing."""
        return len(names) >= len(self._prepared().named)

    async def load(self, directory: Path) -> WeightSet:
        """Fill and finalize a copy from a directory. Raises as ``load_from_directory``."""
        weights = await self.prepare()
        await self._in_thread(lambda: load_from_directory(weights, directory))
        return weights

    async def finalized(self) -> WeightSet:
        """Finalize the complete copy unless that is done, and return it."""
        weights = self._prepared()
        if not weights.final:
            await self._in_thread(lambda: finalize(weights))
        return weights

    def exchange(self, old: WeightSet | None, pushed: Iterable[str]) -> None:
        """Take the copy that was served until now. ``pushed``: names in the order of the push, if it was one."""
        self.weights, self.order = old, tuple(pushed) or self.order

    def drop(self) -> None:
        """Free the memory of the copy."""
        self.weights = None

    def _prepared(self) -> WeightSet:
        assert self.weights is not None, "``prepare`` comes first"
        return self.weights

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread. When this is cancelled the copy is abandoned: the thread may still write it."""
        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            self.drop()
            raise
