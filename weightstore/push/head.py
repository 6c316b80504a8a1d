"""The newest published version: its row, the copy of its weights in this process, and snapshots on request."""

import asyncio
import logging
from dataclasses import replace

from tidemill.bus.errors import BusError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import VersionRow
from tidemill.weightstore.store.registry import WANT, VersionRegistry
from tidemill.weightstore.store.snapshot_server import SnapshotServer
from tidemill.weightstore.transport.staged_adapter import StagedAdapter
from tidemill.weightstore.transport.staging import StagedModel

_log = logging.getLogger(__name__)

_POLL_S = 1.0  # Interval at which snapshot requests are read, besides the wake-ups


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
