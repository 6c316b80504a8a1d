"""Learner and colocated engines take turns: the learner has its memory for a step, the engines have theirs until the next batch.

    batch -> engines release -> all ranks resume -> step, staging -> all ranks release -> engines resume, with the new version or the head

Every rank does the same at the same place; rank 0 alone speaks to the engines. Knows no model and no batch.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

from learner.megatron.memory import Memory
from learner.pushes import Pushes

log = logging.getLogger(__name__)


class Turns(Protocol):
    """Who works when. It begins as the learner's turn."""

    def give(self) -> None:
        """End the learner's turn."""

    @contextmanager
    def mine(self) -> Iterator[None]:
        """While entered it is the learner's turn. An exception leaves it so: the process ends, and the engines take what it leaves."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """``turn/...`` (docs/metrics.md); what comes after a step is told with the next."""
        raise NotImplementedError


class AllTheTime:
    """Nobody shares the accelerator."""

    def give(self) -> None:
        return

    @contextmanager
    def mine(self) -> Iterator[None]:
        yield

    def metrics(self) -> dict[str, float]:
        return {}


class TurnByTurn:
    """``memory`` is this rank's."""

    def __init__(self, memory: Memory, pushes: Pushes) -> None:
        self._memory, self._pushes = memory, pushes
        self._seconds: dict[str, float] = {}

    def give(self) -> None:
        with self._timed("release"):
            self._memory.release()
            self._together()
        with self._timed("engines_resume"):
            self._pushes.give()

    @contextmanager
    def mine(self) -> Iterator[None]:
        with self._timed("engines_release"):
            self._pushes.take()
            self._together()
        with self._timed("resume"):
            self._memory.resume()
        log.info("turn of the learner engines_release_s=%.3f", self._seconds["engines_release"])
        yield
        self.give()
        log.info("turn of the engines engines_resume_s=%.3f", self._seconds["engines_resume"])

    def metrics(self) -> dict[str, float]:
        return {f"turn/{name}_seconds": seconds for name, seconds in self._seconds.items()}

    def _together(self) -> None:
        """No rank takes memory that another one, or an engine, has not given up yet."""
        if dist.get_world_size() > 1:
            dist.barrier()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - began
