"""The newest published version: its row, the copy of its weights in this process, and snapshots of versions on the
learner's disk, written on request, served over HTTP, the oldest removed.

Snapshots serve engines that join late, so they are not synced to the disk: readers detect a partial one by its
checksums.
"""

import asyncio
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

from tidemill.bus.client.addresses import HERE, Reach
from tidemill.bus.errors import BusError
from tidemill.bus.http.access import RunAccess
from tidemill.bus.http.listener import Listener
from tidemill.bus.keys import RunKeys
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import VersionRow
from tidemill.weightstore.errors import SnapshotBroken
from tidemill.weightstore.store import snapshot_files
from tidemill.weightstore.store.registry import WANT, VersionRegistry
from tidemill.weightstore.transport.staging import StagedAdapter, StagedModel

_log = logging.getLogger(__name__)

_NAME = re.compile(r"v(\d+)")
_ADAPTER = "-adapter"  # End of the name of a directory with the adapter of a version alone
_SHUTDOWN_S = 1.0  # Time that downloads have to end; an engine resumes an interrupted one later
_POLL_S = 1.0  # Interval at which snapshot requests are read, besides the wake-ups


class SnapshotServer:
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
        """``keys`` of the run, needed at an address that other machines can reach."""
        self.url = ""
        self._directory, self._registry, self._at, self._keys = directory, registry, at, keys
        self._keep, self._model_dir = keep, model_dir
        self.listener: Listener | None = None
        """The HTTP listener; None before the start."""
        self._writing = asyncio.Lock()
        # Versions with a directory of their adapter, in the order in which they were written
        self._adapters: list[int] = []
        # Versions of this registry with a complete directory. A directory of another run may have the same name.
        self._present: set[int] = set()

    async def open(self) -> None:
        """Start to serve. The newest snapshot of an earlier process is served again if it is complete; otherwise its
        row is cleared.

        All other directories are removed: it is not known which run their weights belong to.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.glob("*" + snapshot_files.ASIDE):
            shutil.rmtree(path)
        self.listener = Listener({}, RunAccess(self._keys), files=self._directory, shutdown_s=_SHUTDOWN_S)
        # Any port: engines read the URL from the row of the version.
        self.url = await self.listener.start(self._at.bind, 0, advertise=self._at.advertised, name="weights.host")
        newest = await self._registry.snapshot()
        if newest is not None and newest.snapshot.startswith("http"):
            if await asyncio.to_thread(self._left_over, newest):
                self._present.add(newest.version)
            await self._registry.set_snapshot(newest.version, self.where(newest.version))
        for path in list(self._directory.iterdir()):
            match = _NAME.fullmatch(path.name.removesuffix(_ADAPTER))
            if match and (path.name.endswith(_ADAPTER) or int(match[1]) not in self._present):
                _log.warning("snapshot of an earlier process removed path=%s", path)
                await asyncio.to_thread(shutil.rmtree, path)

    async def close(self) -> None:
        """Stop serving. The directories stay for the next process."""
        if self.listener is not None:
            await self.listener.close()

    def where(self, version: int) -> str:
        """Return the URL of a version's snapshot; "" when there is none."""
        return f"{self.url}/v{version}" if version in self._present else ""

    async def put_adapter(self, copy: StagedAdapter) -> str:
        """Write the adapter of a staged version, remove the oldest, and return its URL. The caller holds the copy and
        records the URL. Raises OSError.
        """
        name = f"v{copy.version}{_ADAPTER}"
        await asyncio.to_thread(snapshot_files.write_adapter, self._directory / name, copy)
        self._adapters.append(copy.version)
        for version in self._adapters[: -self._keep]:
            self._adapters.remove(version)
            await asyncio.to_thread(shutil.rmtree, self._directory / f"v{version}{_ADAPTER}", ignore_errors=True)
        return f"{self.url}/{name}"

    async def put(self, copy: StagedModel | StagedAdapter) -> str:
        """Write the staged version unless it exists, record it, and remove the oldest. Returns its URL. The caller
        holds it.
        """
        async with self._writing:
            if not self.where(copy.version):
                await asyncio.to_thread(self._write, copy)
                self._present.add(copy.version)
            where = self.where(copy.version)
            await self._registry.set_snapshot(copy.version, where)
            await self._prune(copy.version)
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
                    snapshot_files.adopt, self._model_dir, path, version=0, step=row.step, digest=row.digest
                )
                self._present.add(0)
            await self._registry.set_snapshot(0, self.where(0))

    def _write(self, copy: StagedModel | StagedAdapter) -> None:
        path = self._directory / f"v{copy.version}"
        snapshot_files.write(
            path,
            copy.tensors,
            version=copy.version,
            step=copy.step,
            model_dir=self._model_dir,
            durable=False,
            manifest=copy.manifest,
        )
        _log.info("snapshot written version=%d step=%d path=%s", copy.version, copy.step, path)

    async def _prune(self, put: int) -> None:
        older = sorted(self._present - {put})
        for version in older[: max(0, len(older) + 1 - self._keep)]:
            # The row is cleared before the directory is removed, so that no engine is sent to files that are going
            # away.
            self._present.discard(version)
            await self._registry.set_snapshot(version, "")
            await asyncio.to_thread(shutil.rmtree, self._directory / f"v{version}")

    def _left_over(self, row: VersionRow) -> bool:
        """Return whether the directory is complete and has the version, step and digest of the row. Blocking."""
        try:
            info = snapshot_files.verify(self._directory / f"v{row.version}")
        except SnapshotBroken as error:
            _log.warning("newest snapshot not usable version=%d reason=%s", row.version, error)
            return False
        return (info.version, info.step, info.digest) == (row.version, row.step, row.digest)


class Head:
    """The head of one publisher, in its event loop. ``snapshots`` are opened and closed by the caller."""

    def __init__(self, registry: VersionRegistry, snapshots: SnapshotServer, *, snapshot_every: int = 0) -> None:
        """``snapshot_every``: a snapshot is written of every n-th version, besides the snapshots that engines request;
        0 = only these."""
        self._registry, self._snapshots, self._snapshot_every = registry, snapshots, snapshot_every
        self.row: VersionRow | None = None
        # Its weights; None where another learner pushed the version, or its weights are a model directory
        self.copy: StagedModel | StagedAdapter | None = None

    async def fence(self, epoch: int) -> None:
        """Fence older learners, and read the head. Raises Fenced, BusUnavailable."""
        self.row = await self._registry.fence(epoch)

    async def publish_initial(self, where: str, epoch: int, digest: str) -> VersionRow:
        """Publish the weights in ``where`` as version 0, unless there is a head. Returns the head. Raises Fenced."""
        self.row = await self._registry.publish_initial(where, epoch, digest=digest)
        return self.row

    async def move(self, row: VersionRow, copy: StagedModel | StagedAdapter) -> None:
        """Make a version the head, and hold its copy until the next head. Raises Fenced, BusUnavailable."""
        if isinstance(copy, StagedAdapter):
            row = replace(row, adapter=await self._write_adapter(copy))
        self.row = await self._registry.publish(row)
        # The copy stays filled as long as it is the head: snapshots of it are written on demand.
        old, self.copy = self.copy, copy.hold()
        if old is not None:
            old.release()
        if self._snapshot_every and row.version % self._snapshot_every == 0:
            await self._write_snapshot()

    async def _write_adapter(self, copy: StagedAdapter) -> str:
        """Write the adapter for engines that join, and return its URL; "" where the disk refuses it."""
        try:
            return await self._snapshots.put_adapter(copy)
        except OSError as error:
            _log.error("adapter of version %d not written: engines that join load all weights: %s", copy.version, error)
            return ""

    async def serve_requests(self, bus: Bus) -> None:
        """Run until cancelled: write a snapshot when an engine requests one by a row, which it writes again while it
        waits."""
        while True:
            try:
                async for row in bus.rows("weights").watch(WANT, _POLL_S):
                    if row is not None:
                        await self._serve_request(row[0]["version"])
            except BusError as error:
                _log.warning("snapshot requests not read error=%s", error)
            await asyncio.sleep(_POLL_S)

    async def _serve_request(self, version: int) -> None:
        if self.copy is not None and self.copy.version >= version:
            await self._write_snapshot()
        elif version == 0 and self.row is not None and self.row.version == 0:
            try:
                await self._snapshots.adopt(self.row)
            except (BusError, OSError) as error:
                _log.error("snapshot of version 0 failed error=%s", error)

    async def _write_snapshot(self) -> None:
        assert self.copy is not None
        copy = self.copy.hold()
        try:
            await self._snapshots.put(copy)
        except (BusError, OSError) as error:
            _log.error("snapshot failed version=%d error=%s", copy.version, error)
        finally:
            copy.release()
