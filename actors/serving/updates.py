"""The weight updates of an engine: the contract of both kinds of engine, and the part that they share."""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterable, Set
from pathlib import Path

from tidemill.actors.errors import StaleEpoch, UpdateRefused
from tidemill.actors.serving.port import COMMAND_S, Body, Result
from tidemill.weightstore.format.adapters import AdapterHeader
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.format.manifest import Bucket
from tidemill.weightstore.transport.handles import Offered

log = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""Kinds of memory that can be released, under SGLang's names."""
OPEN_S = 60.0
"""Seconds that an engine that catches up waits for a push to end, before it loads a directory instead."""


class Updates(ABC):
    """The weight updates of one engine. Operations are called through ``run_shielded``, and raise UpdateRefused. Then
    the engine serves the weights before the update or, where those were overwritten, none.
    """

    def __init__(self, on_update: Callable[[int, int], None]) -> None:
        """``on_update`` is called with version and epoch when new weights are served."""
        self._on_update = on_update
        self.epoch = 0
        """Highest learner epoch seen."""
        self.begun = 0
        """Number of pushes that have begun. A load that waits for its turn compares it, as one may have begun."""
        self.completed = 0
        self.stall_s = 0.0
        """Sum of the seconds for which updates have held up generation."""
        self.settled = asyncio.Event()
        """Set while no update is open, or after one has broken off."""
        self.settled.set()
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the served weights; -1 = none are complete."""

    @property
    @abstractmethod
    def whole(self) -> bool:
        """True when there are weights to serve."""

    @property
    @abstractmethod
    def released(self) -> frozenset[str]:
        """Kinds of memory that are released: some of ``weights`` and ``kv_cache``."""

    @abstractmethod
    async def join(self, body: Body) -> None:
        """Join the process group that the body of /init_weights_update_group names, after leaving one of that name."""

    @abstractmethod
    async def leave(self, group_name: str) -> None:
        """Leave a process group, and discard an open update as ``sender_left``."""

    @abstractmethod
    async def sender_left(self) -> None:
        """Discard an open update that is sent in messages: there will be no more of them."""

    @abstractmethod
    async def begin(
        self, version: int | None, timeout_s: float = COMMAND_S, adapter: AdapterHeader | None = None
    ) -> None:
        """Open an update; an unfinished one is discarded. Each operation that follows takes at most ``timeout_s``.
        ``adapter``: it has an adapter, and all weights only if the header names no base.
        """

    @abstractmethod
    async def receive_bucket(self, body: Body, version: int | None) -> None:
        """Receive the tensors that the body of /update_weights_from_distributed names."""

    @abstractmethod
    async def read_bucket(self, bucket: Bucket, offered: Offered, *, version: int | None, timeout_s: float) -> None:
        """Read one flat bucket from memory that processes of this host can read."""

    @abstractmethod
    async def end(self, version: int | None) -> float:
        """Serve the weights if every tensor was received once. Returns the seconds for which generation was held up."""

    @abstractmethod
    async def load_directory(self, directory: Path, version: int | None) -> float:
        """Load and serve all weights of a directory, or none. Returns seconds as ``end``."""

    @abstractmethod
    async def serve_directory(self, directory: Path, version: int | None, *, begun: int) -> float | None:
        """Take released memory again, then load and serve a directory. Returns seconds as ``end``, or None, and loads
        nothing, when a push has begun since ``begun`` was read: a load would discard it.
        """

    @abstractmethod
    async def checksums(self) -> dict[str, str]:
        """Return checksums of the served weights by name, as SGLang computes them."""

    @abstractmethod
    async def checksum_report(self, *, of: str) -> tuple[int | None, ChecksumReport]:
        """Return version and checksums ``of`` the weights that are ``served``, of the ``base`` to which their adapter
        is added, or of the open ``update``, which must be complete.
        """

    @abstractmethod
    async def release(self, tags: frozenset[str]) -> None:
        """Release memory, and with the weights discard an open update. Refused while requests run without a pause."""

    @abstractmethod
    async def resume(self, tags: frozenset[str]) -> None:
        """Take released memory again. Weights then need an update; keys and values are usable, and a pause ends."""

    @abstractmethod
    async def pause(self, mode: str) -> None:
        """Pause generation. ``in_place`` keeps the running requests, ``retract`` queues them, ``abort`` ends them."""

    @abstractmethod
    async def continue_generation(self, body: Body) -> None:
        """Continue after a pause."""

    @abstractmethod
    async def close(self) -> None:
        """End the operations under way, and leave the groups that this process has joined."""

    @property
    def under_way(self) -> bool:
        """True while an update is open."""
        return not self.settled.is_set()

    async def between_updates(self, timeout_s: float) -> None:
        """Wait while an update is under way, for ``timeout_s`` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.settled.wait()

    async def arrived_meanwhile(self, version: int) -> bool:
        """Wait up to ``OPEN_S`` seconds for an open update. Returns whether it brought ``version`` or a newer one."""
        if not self.under_way:
            return False
        await self.between_updates(OPEN_S)
        return self.whole and self.version >= version

    def require_current_epoch(self, epoch: int | None, what: str) -> None:
        """Record the epoch. Raises StaleEpoch when a higher one was seen."""
        if epoch is None:
            return
        if epoch < self.epoch:
            raise StaleEpoch(what, epoch, self.epoch)
        self.epoch = epoch

    async def run_shielded(self, operation: Coroutine[object, None, Result]) -> Result:
        """Run an operation to its end even if the caller is cancelled: its thread may still write the weights."""
        return await asyncio.shield(self._start(operation))

    def _start(self, operation: Coroutine[object, None, Result]) -> "asyncio.Task[Result]":
        task = asyncio.create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has received it, or has hung up

    def _record_update(self, version: int, epoch: int, stall_s: float) -> None:
        self.completed += 1
        self.stall_s += stall_s
        log.info("weights updated version=%d epoch=%d stall_s=%.6f", version, epoch, stall_s)
        self._on_update(version, epoch)

    def _require_weight_memory(self) -> None:
        if WEIGHTS in self.released:
            raise UpdateRefused("the memory of the weights is released: want resume_memory_occupation first")


def require_new(names: Iterable[str], model_names: Collection[str], announced: Collection[str]) -> None:
    """Raise UpdateRefused unless the model has tensors of these names, and none was announced before."""
    taken_names = set(announced)
    for name in names:
        if name not in model_names:
            raise UpdateRefused(f"{name}: the model has no tensor of this name")
        if name in taken_names:
            raise UpdateRefused(f"{name}: received twice")
        taken_names.add(name)


def require_all(required: Set[str], received: Set[str], where: str = "") -> None:
    """Raise UpdateRefused unless every required tensor was received. ``where`` begins the message."""
    if missing := required - received:
        raise UpdateRefused(f"{where}{len(missing)} of {len(required)} tensors are missing, among them {min(missing)}")
