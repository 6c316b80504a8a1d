"""Peer snapshots: the served weights, written as a snapshot when an engine that catches up requests them, and kept
while it is read.

Pushes go on meanwhile, and are not delayed: they fill the standby copy, and only a second one would write into weights
that are being read. That is detected, and the snapshot is discarded. Knows no HTTP and no bus.
"""

import asyncio
import logging
import re
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from tidemill.actors.errors import PeerTransferRefused
from tidemill.actors.serving.builtin.lora import Adapter
from tidemill.actors.serving.builtin.weights import WeightSet
from tidemill.bus.system.files import Scratch
from tidemill.weightstore.format.adapters import MergedTensors
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.store import snapshot_files

log = logging.getLogger(__name__)

KEEP_S = 60.0
"""Seconds without a read after which a snapshot is removed."""
AT_ONCE = 2
"""Maximum number of snapshots on the disk at a time."""
_NAME = re.compile(r"v(\d+)-([0-9a-f]{64})")


class PeerSnapshotServer:
    """Snapshots by name: ``v<version>-<digest of the manifest>``. Used in the loop's thread."""

    def __init__(
        self,
        served: Callable[[], Awaitable[tuple[int, WeightSet, Adapter | None]]],
        model_dir: Path,
        *,
        write: Callable[..., object] = snapshot_files.write,
    ) -> None:
        """``served`` returns a version, its weights, and the adapter that is added to them."""
        self._served, self._model_dir, self._write_snapshot = served, model_dir, write
        self._scratch: Scratch | None = None
        self._making = asyncio.Lock()
        self.last_use_s: dict[str, float] = {}
        """Time of the last request for a file of each snapshot."""
        self._readers: Counter[str] = Counter()
        """Number of files that are being sent, by snapshot."""
        self._writing: dict[str, asyncio.Task[Path]] = {}

    async def file(self, name: str, file: str) -> Path:
        """Return a file of a snapshot. Raises PeerTransferRefused unless it is of the served weights and written."""
        directory = await self._at(name)
        self._use(name)
        if "/" in file or not (directory / file).is_file():
            raise PeerTransferRefused(f"{name}: there is no {file!r}")
        return directory / file

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Keep the snapshot until this context is left."""
        self._readers[name] += 1
        try:
            yield
        finally:
            self._readers[name] -= 1
            self._use(name)

    def _use(self, name: str) -> None:
        self.last_use_s[name] = time.monotonic()
        asyncio.get_running_loop().call_later(KEEP_S + 1, self.prune)

    async def close(self) -> None:
        """Stop writing snapshots and remove all of them."""
        for task in self._writing.values():
            task.cancel()
        await asyncio.gather(*self._writing.values(), return_exceptions=True)
        if self._scratch is not None:
            await asyncio.to_thread(self._scratch.close)

    async def _at(self, name: str) -> Path:
        if name in self.last_use_s:
            assert self._scratch is not None
            return self._scratch.path / name
        if name not in self._writing:
            task = asyncio.create_task(self._write(name), name=f"snapshot {name[:20]}")
            self._writing[name] = task
            task.add_done_callback(lambda done: self._written(name, done))
        # A peer that hangs up does not stop it: the next request finds it written.
        return await asyncio.shield(self._writing[name])

    def _written(self, name: str, task: "asyncio.Task[Path]") -> None:
        del self._writing[name]
        if not task.cancelled():
            task.exception()  # the peer has received it, or has hung up

    async def _write(self, name: str) -> Path:
        match = _NAME.fullmatch(name)
        version, weights, adapter = await self._served()
        if match is None or int(match[1]) != version:
            raise PeerTransferRefused(f"{name}: version {version} is served")
        kinds = (weights.named, weights.with_alias())
        tensors = next((tensors for tensors in kinds if Manifest.of(tensors.items()).digest == match[2]), None)
        if tensors is None:
            raise PeerTransferRefused(f"{name}: it is not kept in these types")
        written: Mapping[str, Tensor] = tensors
        if adapter is not None:
            written = MergedTensors(tensors, adapter.named, adapter.scale)
        self.prune()
        if len(self.last_use_s.keys() | self._writing.keys()) > AT_ONCE:
            raise PeerTransferRefused(f"{name}: {AT_ONCE} others are being read")
        async with self._making:
            if self._scratch is None:
                self._scratch = await asyncio.to_thread(Scratch, "peer-snapshots")
        path, writes = self._scratch.path / name, weights.writes
        await asyncio.to_thread(
            self._write_snapshot, path, written, version=version, step=-1, model_dir=self._model_dir, durable=False
        )
        if weights.writes != writes:
            await asyncio.to_thread(shutil.rmtree, path)
            raise PeerTransferRefused(f"{name}: two pushes were received meanwhile")
        self.last_use_s[name] = time.monotonic()
        log.info("peer snapshot written version=%d path=%s", version, path)
        return path

    def prune(self) -> None:
        """Remove snapshots that are not read any more; a file that is open stays readable."""
        now = time.monotonic()
        unread = [
            name
            for name, last_use_s in self.last_use_s.items()
            if now - last_use_s > KEEP_S and not self._readers[name]
        ]
        for name in unread:
            del self.last_use_s[name], self._readers[name]
            assert self._scratch is not None
            with suppress(OSError):
                shutil.rmtree(self._scratch.path / name)
