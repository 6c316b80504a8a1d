"""Accelerator ownership for colocated runs: the learner owns the memory during a step, the engines until the next
batch.

    batch -> engines release -> all ranks resume -> step, staging -> all ranks release
          -> engines resume, with the new version or the head

Every rank makes the same calls at the same points; only rank 0 sends requests to the engines. Knows no model and no
batch.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from tidemill.learner.megatron.memory import Memory
from tidemill.learner.ranks.pushes import Pushes

log = logging.getLogger(__name__)


class AllTheTime:
    """Ownership of an accelerator that is not shared; with the methods of ``TurnByTurn``."""

    def give(self) -> None:
        """Do nothing: there are no colocated engines."""

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Do nothing: the learner always owns the accelerator."""
        yield

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}


class TurnByTurn:
    """Ownership that alternates with colocated engines. The learner has it at first; ``memory`` is this rank's."""

    def __init__(self, memory: Memory, pushes: Pushes) -> None:
        self._memory, self._pushes = memory, pushes
        self._seconds: dict[str, float] = {}

    def give(self) -> None:
        """Release the memory of all ranks, then have the engines resume with the staged version, or the head."""
        with self._timed("release"):
            self._memory.release()
            self._together()
        with self._timed("engines_resume"):
            self._pushes.give()

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Have the engines release, resume the memory of all ranks, and give it back when the body has succeeded.

        After an exception it is kept: the end of the process frees the memory.
        """
        with self._timed("engines_release"):
            # Rank 0 waits for the engines, the others for rank 0: no rank takes memory that an engine still has.
            self._pushes.take()
            self._together()
        with self._timed("resume"):
            self._memory.resume()
        log.info("turn of the learner engines_release_s=%.3f", self._seconds["engines_release"])
        yield
        self.give()
        log.info("turn of the engines engines_resume_s=%.3f", self._seconds["engines_resume"])

    def metrics(self) -> dict[str, float]:
        """Return ``turn/...`` (docs/metrics.md). Times after the end of a step are in the metrics of the next one."""
        return {f"turn/{name}_seconds": seconds for name, seconds in self._seconds.items()}

    def _together(self) -> None:
        """Wait for all ranks, so that no rank allocates memory that another one, or an engine, has not released yet."""
        if dist.get_world_size() > 1:
            dist.barrier()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - began
