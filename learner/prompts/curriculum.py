"""Curriculum by recent pass rate: prompts that were too easy or too hard when they were last asked are left out of the
next passes.

A pure state machine. Its state changes by the records of PLAN and their samples alone, and is part of every checkpoint;
so a start that repeats the records skips the same prompts. Prompts are known by their row number: files do not change
during a run.
"""

from collections.abc import Sequence

import numpy as np

from tidemill.learner.data import DataConfig


class Curriculum:
    """The prompts that are left out (see the module)."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._left_out: dict[int, int] = {}
        """Pass in which a prompt was last asked, by its row; only of prompts that are left out."""

    def __len__(self) -> int:
        """Return the number of prompts that were too easy or too hard when they were last asked."""
        return len(self._left_out)

    @property
    def active(self) -> bool:
        """True if any prompt may be left out."""
        return self._config.skip_easy > 0 or self._config.skip_hard >= 0

    def note(self, row: int, epoch: int, scores: Sequence[float]) -> None:
        """Register the scores of a complete group of the prompt ``row``, which was issued in pass ``epoch``."""
        if not scores or not self.active:
            return
        rate = float(np.mean([score >= self._config.passes_at for score in scores]))
        if (self._config.skip_easy > 0 and rate >= self._config.skip_easy) or rate <= self._config.skip_hard:
            self._left_out[row] = epoch
        else:
            self._left_out.pop(row, None)

    def skips(self, row: int, epoch: int) -> bool:
        """Return whether the prompt ``row`` is left out of pass ``epoch``."""
        last = self._left_out.get(row)
        return last is not None and last < epoch <= last + self._config.skip_passes

    # ---- persist

    def dump(self) -> list[tuple[int, int]]:
        """Return the state for a snapshot, in types of msgpack."""
        return sorted(self._left_out.items())

    def load(self, state: Sequence[Sequence[int]]) -> None:
        """Replace the state by one that ``dump`` has returned."""
        self._left_out = {int(row): int(epoch) for row, epoch in state}
