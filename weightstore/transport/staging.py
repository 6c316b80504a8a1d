"""Copies of the weights in flat buckets on the host, for pushes and for snapshots of the head.

One copy may be the head, which engines that join need snapshots of, while the next one is filled and pushed: so there
are two, and one user more waits. The trainer's thread fills, the publisher's thread reads.

With adapters the base is copied once, and each version copies the matrices of its adapter:

    AdapterBase (frozen weights) --+
    Staging of the adapter's ------+--> StagedAdapter: adapter alone | base and adapter | merged, for other engines
    matrices, one per version

The merged weights of a version are computed when an engine without support for adapters, or a snapshot, needs them.
"""

import asyncio
import threading
from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import BadManifest
from tidemill.weightstore.format.adapters import AdapterHeader, AdapterSettings, MergedTensors, base_digest
from tidemill.weightstore.format.checksums import ChecksumReport, TensorChecksum, differences, report_checksums, sum_of
from tidemill.weightstore.format.manifest import Bucket, Manifest, joined, spec_of, unflatten
from tidemill.weightstore.transport.handles import PAGE, HostMemory, StagingMemory
from tidemill.weightstore.transport.nccl import DeviceEnd
from tidemill.weightstore.transport.parts import PartTensors, Payload, RemotePart, staged
from tidemill.weightstore.transport.port import Deadlines

_ONCE = "every tensor of the manifest once"


class Staging:
    """One copy of the weights in memory that is reused. A reader holds it while it reads."""

    def __init__(
        self,
        manifest: Manifest,
        bucket_bytes: int,
        changed: threading.Condition,
        memory: StagingMemory | None,
        *,
        number: int = 0,
    ) -> None:
        # ``number``: of the copy in its pool; other ranks have copies of their parts with the same numbers
        self.manifest, self.number = manifest, number
        self.users = 0
        self._changed = changed
        buckets = manifest.buckets(bucket_bytes)
        self.buckets: list[tuple[Bucket, Tensor]] = list(zip(buckets, _flats(buckets, memory), strict=True))
        self._views: dict[str, Tensor] = dict(self.tensors())
        self._sums = _FillChecksums(self._views)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for bucket, flat in self.buckets:
            yield from unflatten(bucket, flat)

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all tensors, in any order. Raises BadManifest for the first that is unknown, repeated or missing."""
        missing = set(self._views)
        self._sums = _FillChecksums(self._views)
        for name, tensor in tensors:
            if name not in missing:
                raise BadManifest(name, _ONCE, "it twice" if name in self._views else "one that is not in it")
            want, got = self.manifest.by_name[name], spec_of(name, tensor)
            if want != got:
                raise BadManifest(name, f"{want.dtype}{list(want.shape)}", f"{got.dtype}{list(got.shape)}")
            self._views[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            missing.discard(name)
        if missing:
            raise BadManifest(min(missing), _ONCE, f"{len(missing)} of {len(self._views)} missing")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies from a GPU above are asynchronous

    @property
    def differences(self) -> Callable[[ChecksumReport], list[str]]:
        """A function that returns a line for each difference of an engine's report from this copy. Any thread.

        Get it while the copy is held; a call that ends after the release does not affect the next fill.
        """
        return self._sums.differences

    def hold(self) -> "Staging":
        """Add a user to a copy that is in use, and return the copy."""
        with self._changed:
            assert self.users > 0, "the copy is not held: it may be filled again at any time"
            self.users += 1
            return self

    def release(self) -> None:
        """Remove a user. Without any, the copy may be filled again."""
        with self._changed:
            assert self.users > 0
            self.users -= 1
            self._changed.notify_all()


class _FillChecksums:
    """Checksums of one fill; a late thread cannot mix them with the checksums of the next fill."""

    def __init__(self, views: Mapping[str, Tensor]) -> None:
        self._views = views
        self._computed: dict[tuple[str, tuple[str, ...], str, int], str] = {}
        self._summing = threading.Lock()

    def differences(self, report: ChecksumReport) -> list[str]:
        """Return the lines of ``Staging.differences``; every checksum of this fill is computed once."""
        with self._summing:  # engines with equal reports: computed once
            return differences(report, self._views, lambda part: self._sum(report.scheme, part))

    def _sum(self, scheme: str, part: TensorChecksum) -> str:
        key = (scheme, part.names, part.dtype, part.zeros)
        if key not in self._computed:
            self._computed[key] = sum_of(scheme, part, self._views)
        return self._computed[key]


class StagingPool:
    """A fixed number of copies, handed out and returned. Thread-safe."""

    def __init__(
        self, manifest: Manifest, bucket_bytes: int, *, size: int = 2, memory: StagingMemory | None = None
    ) -> None:
        """``memory``: the memory of the copies; None = memory that only this process can read."""
        self.manifest = manifest
        self._bucket_bytes, self._size, self._memory = bucket_bytes, size, memory
        self._all: list[Staging] = []
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> Staging:
        """Return a copy that is not in use; the caller becomes its only user. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free() is not None or len(self._all) < self._size, timeout_s):
                raise TimeoutError(f"staging: all {self._size} copies are in use after {timeout_s:g} s")
            staging = self._free() or self._new()
            staging.users = 1
            return staging

    def at(self, number: int) -> Staging:
        """Return the copy of this number; another process knows which is in use."""
        with self._changed:
            while len(self._all) <= number:
                self._new()
            return self._all[number]

    def _new(self) -> Staging:
        staging = Staging(self.manifest, self._bucket_bytes, self._changed, self._memory, number=len(self._all))
        self._all.append(staging)
        return staging

    def _free(self) -> Staging | None:
        return next((staging for staging in self._all if not staging.users), None)


class StagedModel:
    """The view of a push, and of a snapshot.

    Held and released as the copy of this process is, by which the other ranks go.
    """

    def __init__(
        self,
        local: Staging,
        parts: Sequence[RemotePart],
        deadlines: Deadlines,
        *,
        step: int = -1,
        prepare_s: float = 0.0,
    ) -> None:
        """``deadlines``: the deadline of phase ``verify`` also bounds the comparison of checksums in another rank.

        ``prepare_s``: seconds that the copy has taken.
        """
        self._local, self._parts, self._deadlines = local, tuple(parts), deadlines
        self.step, self.prepare_s = step, prepare_s
        self.version = -1  # Version of the copy; -1 = it has none yet
        self.manifest = joined([local.manifest, *(part.manifest for part in parts)]) if parts else local.manifest

    @property
    def buckets(self) -> list[tuple[Bucket, Payload]]:
        """All buckets, in the order in which they are sent."""
        return [*self._local.buckets, *(bucket for part in self._parts for bucket in part.buckets(self._local.number))]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors by name.

        Those of other ranks are read from there one at a time; blocking, and OSError where that fails.
        """
        parts = [PartTensors(part.place, staged(self._local.number)) for part in self._parts]
        return ChainMap(dict(self._local.tensors()), *parts)  # type: ignore[arg-type]

    @property
    def differences(self) -> Callable[[ChecksumReport], Awaitable[list[str]]]:
        """A function as ``Staging.differences``, of all parts. Get it while the copy is held; it raises PeerLost."""
        differences_here, number, deadline_s = self._local.differences, self._local.number, self._deadlines.of("verify")

        async def compare(report: ChecksumReport) -> list[str]:
            line_lists = await asyncio.gather(
                asyncio.to_thread(differences_here, report),
                *(part.differences(number, report, deadline_s) for part in self._parts),
            )
            return [line for lines in line_lists for line in lines] + self._not_compared(report)

        return compare

    def _not_compared(self, report: ChecksumReport) -> list[str]:
        """Return a line for each checksum over tensors of several ranks: no rank has the bytes of all of them."""
        owners = [self._local.manifest.by_name.keys(), *(part.manifest.by_name.keys() for part in self._parts)]
        return [
            f"{' + '.join(names)}: sent by several ranks of the learner, so their common checksum is not compared"
            for names in (set(part.names) for part in report.parts)
            if names <= self.manifest.by_name.keys() and not any(names <= owner for owner in owners)
        ]

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return self.manifest.num_bytes

    def hold(self) -> "StagedModel":
        self._local.hold()
        return self

    def release(self) -> None:
        self._local.release()


def staging_memory(config: WeightsConfig, end: DeviceEnd) -> StagingMemory | None:
    """Return staging memory for other processes, if ``handles`` or NCCL need it; None = this process's own memory.

    ``end``: the GPU of this process. Raises ValueError for memory of a GPU where there is none.
    """
    if config.transport != "handles" and (config.backend == "gloo" or not end.uuid):
        return None
    if config.staging == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("weights.staging: want host where there is no GPU, got 'cuda'")
        from tidemill.weightstore.transport.cuda_handles import CudaMemory

        return CudaMemory()
    return HostMemory(pin=torch.cuda.is_available())


def _flats(buckets: Sequence[Bucket], memory: StagingMemory | None) -> list[Tensor]:
    """Return flat uint8 for each bucket; in shared memory they are parts of one block."""
    if memory is None:
        return [
            torch.zeros(bucket.num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for bucket in buckets
        ]
    ends = list(accumulate((-(-bucket.num_bytes // PAGE) * PAGE for bucket in buckets), initial=0))
    block = memory.empty(ends[-1])
    return [
        block[start : start + bucket.num_bytes] for start, bucket in zip(ends, buckets, strict=False)
    ]  # ``ends`` has one more


class AdapterBase:
    """The weights that the adapters of a run belong to, and the copies of its versions."""

    def __init__(
        self,
        settings: AdapterSettings,
        new_pool: Callable[[Manifest], StagingPool],
        tensors: Iterable[tuple[str, Tensor]],
        manifest: Manifest,
    ) -> None:
        """Copy the base. ``new_pool`` makes staging memory. Raises BadManifest for tensors that differ from
        ``manifest``.
        """
        self.settings, self._new_pool = settings, new_pool
        self._pool = new_pool(manifest)
        self.staging = self._pool.take(0.0)
        self.staging.fill(tensors)
        self._adapters: StagingPool | None = None
        self._merged: Staging | None = None
        self._merging = threading.Lock()

    @property
    def manifest(self) -> Manifest:
        """The manifest of the base, which merged weights have, too."""
        return self.staging.manifest

    @cached_property
    def digest(self) -> str:
        """The digest of the base, as an engine with the learner's dtype computes it. Blocking."""
        return base_digest(report_checksums(dict(self.staging.tensors())))

    def stage(self, tensors: Iterable[tuple[str, Tensor]], timeout_s: float) -> Staging:
        """Copy the matrices of a version, and return the copy. Raises BadManifest, and TimeoutError as ``take``."""
        tensors = list(tensors)
        if self._adapters is None:
            self._adapters = self._new_pool(Manifest.of(tensors))
        staging = self._adapters.take(timeout_s)
        try:
            staging.fill(tensors)
        except BaseException:
            staging.release()
            raise
        return staging

    def merge(self, tensors: Mapping[str, Tensor]) -> Staging:
        """Fill the one copy for merged weights and return it. Blocking."""
        with self._merging:
            if self._merged is None:
                self._merged = self._pool.take(0.0)
            self._merged.fill(tensors.items())
            return self._merged


class StagedAdapter:
    """One version, held and released as the copy of its adapter is."""

    def __init__(self, base: AdapterBase, adapter: Staging, *, step: int = -1, prepare_s: float = 0.0) -> None:
        self.base, self._adapter = base, adapter
        self.step, self.prepare_s = step, prepare_s
        self.version = -1  # Version of the copy; -1 = it has none yet
        self.header = AdapterHeader(scale=base.settings.scale, num_tensors=len(adapter.manifest.specs))
        self._merged: Staging | None = None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the merged weights."""
        return self.base.manifest

    @property
    def num_bytes(self) -> int:
        """Size of the adapter."""
        return self._adapter.manifest.num_bytes

    @property
    def adapter_tensors(self) -> Mapping[str, Tensor]:
        """The matrices of the adapter by PEFT's names."""
        return dict(self._adapter.tensors())

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The merged weights by name; each is computed when it is read."""
        return MergedTensors(dict(self.base.staging.tensors()), self.adapter_tensors, self.header.scale)

    @property
    def adapter_buckets(self) -> Sequence[tuple[Bucket, Payload]]:
        """The buckets of the adapter."""
        return self._adapter.buckets

    @property
    def base_buckets(self) -> Sequence[tuple[Bucket, Payload]]:
        """The buckets of the base."""
        return self.base.staging.buckets

    async def merge(self) -> None:
        """Compute the merged weights for ``buckets`` and ``differences``. Those of another version are overwritten."""
        self._merged = await asyncio.to_thread(self.base.merge, self.tensors)

    @property
    def buckets(self) -> Sequence[tuple[Bucket, Payload]]:
        """The buckets of the merged weights, after ``merge``; none before."""
        return [] if self._merged is None else self._merged.buckets

    @property
    def differences(self) -> Callable[[ChecksumReport], Awaitable[list[str]]]:
        """A function that compares an engine's report with the merged weights, after ``merge``."""
        return _compare(*(() if self._merged is None else (self._merged,)))

    def differences_of(self, *, base: bool, adapter: bool) -> Callable[[ChecksumReport], Awaitable[list[str]]]:
        """Return a function that compares an engine's report with the base, the adapter, or both."""
        return _compare(
            *(staging for staging, is_meant in ((self.base.staging, base), (self._adapter, adapter)) if is_meant)
        )

    def hold(self) -> "StagedAdapter":
        """Add a user, and return the copy."""
        self._adapter.hold()
        return self

    def release(self) -> None:
        """Remove a user. Without any, the copy may be filled again."""
        self._adapter.release()


def _compare(*stagings: Staging) -> Callable[[ChecksumReport], Awaitable[list[str]]]:
    differences = [staging.differences for staging in stagings]

    async def compare(report: ChecksumReport) -> list[str]:
        return [line for find in differences for line in await asyncio.to_thread(find, report)]

    return compare
