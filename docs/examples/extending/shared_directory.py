"""A transport: weights travel as a snapshot in a directory that learner and engine both mount."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from tidemill.weightstore import Bucket, Payload, Rendezvous, TensorSpec, WeightReceiver, unflatten
from tidemill.weightstore.store import snapshot_files


class SharedDirectory:
    """Implements ``WeightReceiver``: collects the buckets of a push, writes them at ``end`` and has ``engine`` load
    them.
    """

    carries = True
    """No process group: ``bucket`` delivers the bytes itself."""
    adapters = False
    """A run with LoRA sends merged weights."""

    def __init__(self, engine: WeightReceiver, root: Path) -> None:
        self.url, self._engine, self._root = engine.url, engine, root
        self._version, self._tensors = -1, dict[str, Tensor]()

    async def join(self, rendezvous: Rendezvous | None) -> None:
        self._root.mkdir(parents=True, exist_ok=True)

    async def begin(self, version: int, adapter: object = None) -> None:
        self._version, self._tensors = version, {}

    async def bucket(self, specs: Sequence[TensorSpec], flat: Payload) -> None:
        flat = flat if isinstance(flat, Tensor) else await flat.tensor()  # of another rank of the learner
        whole = Bucket(specs=tuple(specs), num_bytes=flat.numel())
        self._tensors |= {name: tensor.clone() for name, tensor in unflatten(whole, flat.cpu())}

    async def checksums(self, of: str = "update") -> None:
        return None

    async def end(self) -> float:
        directory = self._root / f"version-{self._version}"
        await asyncio.to_thread(snapshot_files.write, directory, self._tensors, version=self._version, step=0)
        pause_s = await self._engine.load_snapshot(str(directory), self._version)
        shutil.rmtree(self._root / f"version-{self._version - 1}", ignore_errors=True)
        self._tensors = {}
        return pause_s

    async def leave(self) -> None:
        self._tensors = {}

    async def release(self) -> None:
        await self._engine.release()

    async def resume(self, what: str) -> None:
        await self._engine.resume(what)

    def close(self) -> None:
        self._engine.close()

    async def load_snapshot(self, directory: str, version: int) -> float:
        return await self._engine.load_snapshot(directory, version)
