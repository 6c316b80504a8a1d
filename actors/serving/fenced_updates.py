"""The part of weight updates that both engines share: the learner's epoch, operations that outlive their callers, counters."""

import asyncio
from collections.abc import Coroutine

from tidemill.actors.errors import StaleEpoch, UpdateRefused
from tidemill.actors.serving.port import Result

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""Kinds of memory that can be released, under SGLang's names."""


class FencedUpdates:
    """Epoch and operations of one engine's updates."""

    def __init__(self) -> None:
        self.epoch = 0
        """Highest learner epoch seen."""
        self.begun = 0
        """Number of pushes that have begun here. A load that waits for its turn compares it: a push may have begun meanwhile."""
        self.completed = 0
        self.stall_s = 0.0
        """Sum of the seconds for which updates have held up generation."""
        self._tasks: set[asyncio.Task[object]] = set()

    def require_current_epoch(self, epoch: int | None, what: str) -> None:
        """Record the epoch. Raises StaleEpoch when a higher one was seen."""
        if epoch is None:
            return
        if epoch < self.epoch:
            raise StaleEpoch(what, epoch, self.epoch)
        self.epoch = epoch

    async def run_shielded(self, operation: Coroutine[object, None, Result]) -> Result:
        """Run an operation to its end even if the caller is cancelled: the thread that it waits for may still write the weights."""
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

    @staticmethod
    def _require_weight_memory(released: frozenset[str]) -> None:
        if WEIGHTS in released:
            raise UpdateRefused("the memory of the weights is released: want resume_memory_occupation first")
