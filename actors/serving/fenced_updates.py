"""The order of weight updates that both engines share: the learner's epoch, one update at a time, every tensor once,
operations that outlive their callers, counters."""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterable, Set

from tidemill.actors.errors import StaleEpoch, UpdateRefused
from tidemill.actors.serving.port import Result

log = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""Kinds of memory that can be released, under SGLang's names."""
OPEN_S = 60.0
"""Seconds that an engine that catches up waits for a push to end, before it loads a directory instead."""


class FencedUpdates(ABC):
    """Epoch, order and operations of one engine's updates."""

    def __init__(self, on_update: Callable[[int, int], None]) -> None:
        """``on_update`` is called with version and epoch when new weights are served."""
        self._on_update = on_update
        self.epoch = 0
        """Highest learner epoch seen."""
        self.begun = 0
        """Number of pushes that have begun here. A load that waits for its turn compares it: a push may have begun
        meanwhile."""
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
        """Run an operation to its end even if the caller is cancelled: the thread that it waits for may still write the
        weights."""
        return await asyncio.shield(self._started(operation))

    def _started(self, operation: Coroutine[object, None, Result]) -> "asyncio.Task[Result]":
        task = asyncio.create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has received it, or has hung up

    def _record_update(self, version: int, epoch: int, stall_s: float) -> None:
        """Count and report an update that is served now."""
        self.completed += 1
        self.stall_s += stall_s
        log.info("weights updated version=%d epoch=%d stall_s=%.6f", version, epoch, stall_s)
        self._on_update(version, epoch)

    @staticmethod
    def _require_weight_memory(released: frozenset[str]) -> None:
        if WEIGHTS in released:
            raise UpdateRefused("the memory of the weights is released: want resume_memory_occupation first")


def require_new(names: Iterable[str], known: Collection[str], announced: Collection[str]) -> None:
    """Raise UpdateRefused unless the model has tensors of these names (``known``), and none was announced before."""
    seen = set(announced)
    for name in names:
        if name not in known:
            raise UpdateRefused(f"{name}: the model has no tensor of this name")
        if name in seen:
            raise UpdateRefused(f"{name}: received twice")
        seen.add(name)


def require_all(required: Set[str], received: Set[str], where: str = "") -> None:
    """Raise UpdateRefused unless every required tensor was received. ``where`` begins the message."""
    if missing := required - received:
        raise UpdateRefused(f"{where}{len(missing)} of {len(required)} tensors are missing, among them {min(missing)}")
