"""Curriculum by recent pass rate: prompts that were too easy or too hard when they were last asked are left out of the
next passes.

A pure state machine. Its state changes by the records of PLAN and their samples alone, and is part of every checkpoint;
so a start that repeats the records skips the same prompts. Prompts are known by their row number: files do not change
during a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumRules:
    """Settings, as in ``data``."""

    skip_easy: float = 0.0
    """Pass rate at and above which a prompt is left out; 0 = none is."""
    skip_hard: float = -1.0
    """Pass rate at and below which a prompt is left out; negative = none is."""
    skip_passes: int = 3
    """Passes for which it is left out."""
    passes_at: float = 1.0
    """A sample passes with at least this score."""

    @property
    def active(self) -> bool:
        """True if any prompt may be left out."""
        return self.skip_easy > 0 or self.skip_hard >= 0


class Curriculum:
    """The prompts that are left out (see the module)."""

    def __init__(self, rules: CurriculumRules) -> None:
        self.rules = rules
        self._left_out: dict[int, int] = {}
        """Pass in which a prompt was last asked, by its row; only of prompts that are left out."""

    def __len__(self) -> int:
        """Return the number of prompts that were too easy or too hard when they were last asked."""
        return len(self._left_out)

    def note(self, row: int, epoch: int, scores: Sequence[float]) -> None:
        """Register the scores of a complete group of the prompt ``row``, which was issued in pass ``epoch``."""
        if not scores or not self.rules.active:
            return
        rate = float(np.mean([score >= self.rules.passes_at for score in scores]))
        if (self.rules.skip_easy > 0 and rate >= self.rules.skip_easy) or rate <= self.rules.skip_hard:
            self._left_out[row] = epoch
        else:
            self._left_out.pop(row, None)

    def skips(self, row: int, epoch: int) -> bool:
        """Return whether the prompt ``row`` is left out of pass ``epoch``."""
        last = self._left_out.get(row)
        return last is not None and last < epoch <= last + self.rules.skip_passes

    # ---- persist

    def dump(self) -> list[tuple[int, int]]:
        """Return the state for a snapshot, in types of msgpack."""
        return sorted(self._left_out.items())

    def load(self, state: Sequence[Sequence[int]]) -> None:
        """Replace the state by one that ``dump`` has returned."""
        self._left_out = {int(row): int(epoch) for row, epoch in state}
