"""A version as a base and an adapter: the base is copied once, each version copies the matrices of its adapter.

    AdapterBase (frozen weights) --+
    Staging of the adapter's ------+--> StagedAdapter: adapter alone | base and adapter | merged, for other engines
    matrices, one per version

The merged weights of a version are computed when an engine without support for adapters, or a snapshot, needs them.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property

from torch import Tensor

from tidemill.weightstore.format.adapters import AdapterHeader, AdapterSettings, MergedTensors, base_digest
from tidemill.weightstore.format.checksums import ChecksumReport, report_checksums
from tidemill.weightstore.format.manifest import Bucket, Manifest
from tidemill.weightstore.transport.parts import Payload
from tidemill.weightstore.transport.staging import Staging, StagingPool


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
