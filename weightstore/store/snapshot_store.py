"""Snapshots of published versions on the learner's disk: written on demand, served over HTTP, the oldest removed.

Snapshots serve engines that join late, so they are not synced to the disk: readers detect a partial one by its
checksums.
"""

import asyncio
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from tidemill.bus.client.addresses import HERE, Reach
from tidemill.bus.http.access import RunAccess
from tidemill.bus.http.listener import Listener
from tidemill.bus.liveness.keys import RunKeys
from tidemill.bus.wire.rows import VersionRow
from tidemill.weightstore.errors import SnapshotBroken
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.store import snapshot
from tidemill.weightstore.store.registry import VersionRegistry

_log = logging.getLogger(__name__)

_NAME = re.compile(r"v(\d+)")
_SHUTDOWN_S = 1.0
"""Time that downloads have to end; an engine resumes an interrupted one later."""


class StagedVersion(Protocol):
    """A staged copy of the weights of a version."""

    @property
    def version(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def manifest(self) -> Manifest:
        """All its tensors."""
        ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Its tensors by name, read one at a time; raises OSError for one in another process that cannot be read."""
        ...


class SnapshotStore:
    """Directories ``v<version>``. ``open`` in the loop that serves them; ``url`` is known then."""

    def __init__(
        self,
        directory: Path,
        registry: VersionRegistry,
        *,
        keep: int,
        model_dir: Path | None,
        at: Reach = HERE,
        keys: RunKeys | None = None,
    ) -> None:
        """``keys``: those of the run, needed at an address that other machines can reach."""
        self.url = ""
        self._directory, self._registry, self._at, self._keep, self._model_dir = (
            directory,
            registry,
            at,
            keep,
            model_dir,
        )
        self._keys = keys
        self._listener: Listener | None = None
        self._writing = asyncio.Lock()
        self._here: set[int] = set()
        """Versions of this registry with a complete directory. A directory of another run may have the same name."""

    async def open(self) -> None:
        """Start to serve. The newest snapshot of an earlier process is served again if it is complete; otherwise its
        row is cleared.

        All other directories are removed: it is not known which run their weights belong to.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.glob("*" + snapshot.ASIDE):
            shutil.rmtree(path)
        self._listener = Listener({}, RunAccess(self._keys), files=self._directory, shutdown_s=_SHUTDOWN_S)
        # Any port: engines read the URL from the row of the version.
        self.url = await self._listener.start(self._at.bind, 0, advertise=self._at.advertised, name="weights.host")
        newest = await self._registry.snapshot()
        if newest is not None and newest.snapshot.startswith("http"):
            if await asyncio.to_thread(self._left_over, newest):
                self._here.add(newest.version)
            await self._registry.set_snapshot(newest.version, self.where(newest.version))
        for path in list(self._directory.iterdir()):
            if (found := _NAME.fullmatch(path.name)) and int(found[1]) not in self._here:
                _log.warning("snapshot of an earlier process removed path=%s", path)
                await asyncio.to_thread(shutil.rmtree, path)

    async def close(self) -> None:
        """Stop serving. The directories stay for the next process."""
        if self._listener is not None:
            await self._listener.close()

    def where(self, version: int) -> str:
        """Return the URL of a version's snapshot; "" when there is none."""
        return f"{self.url}/v{version}" if version in self._here else ""

    async def put(self, staging: StagedVersion) -> str:
        """Write the staged version unless it exists, record it, and remove the oldest. Returns its URL. The caller
        holds it.
        """
        async with self._writing:
            if not self.where(staging.version):
                await asyncio.to_thread(self._write, staging)
                self._here.add(staging.version)
            where = self.where(staging.version)
            await self._registry.set_snapshot(staging.version, where)
            await self._prune(staging.version)
            return where

    async def adopt(self, row: VersionRow) -> None:
        """Serve the model directory itself as version 0, for an engine that has no such directory."""
        assert row.version == 0
        if self._model_dir is None:
            _log.error("a snapshot of version 0 was requested, but this publisher has no model directory")
            return
        async with self._writing:
            if not self.where(0):
                path = self._directory / "v0"
                await asyncio.to_thread(
                    snapshot.adopt, self._model_dir, path, version=0, step=row.step, digest=row.digest
                )
                self._here.add(0)
            await self._registry.set_snapshot(0, self.where(0))

    def _write(self, staging: StagedVersion) -> None:
        path, of = self._directory / f"v{staging.version}", staging.manifest
        snapshot.write(
            path,
            staging.tensors,
            version=staging.version,
            step=staging.step,
            model_dir=self._model_dir,
            durable=False,
            manifest=of,
        )
        _log.info("snapshot written version=%d step=%d path=%s", staging.version, staging.step, path)

    async def _prune(self, put: int) -> None:
        """Remove the oldest snapshots, but not the one that has just been put."""
        others = sorted(self._here - {put})
        for version in others[: max(0, len(others) + 1 - self._keep)]:
            # The row is cleared before the directory is removed, so that no engine is sent to files that are going
            # away.
            self._here.discard(version)
            await self._registry.set_snapshot(version, "")
            await asyncio.to_thread(shutil.rmtree, self._directory / f"v{version}")

    def _left_over(self, row: VersionRow) -> bool:
        """Return whether the directory is complete and has the version, step and digest of the row. Blocking."""
        try:
            info = snapshot.verify(self._directory / f"v{row.version}")
        except SnapshotBroken as error:
            _log.warning("newest snapshot not usable version=%d reason=%s", row.version, error)
            return False
        return (info.version, info.step, info.digest) == (row.version, row.step, row.digest)
