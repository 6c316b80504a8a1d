"""The best version by one score of one evaluation set, and whether later ones still improve on it. A pure state machine.

Its state is a function of the records of PLAN in their order, so a restart that reads them again has the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A version with its score."""

    version: int
    step: int
    value: float


class BestScore:
    """Scores of the evaluated versions, higher is better."""

    def __init__(self, choice: str, *, stop_after: int = 0) -> None:
        """``choice``: SET/METRIC. ``stop_after``: versions without a better score after which ``stopped`` has a text; 0 = never."""
        self.set, _, self.metric = choice.partition("/")
        self._stop_after = stop_after
        self._scored: dict[int, Scored] = {}
        self.stopped = ""
        """The reason to end the run; empty = there is none. It stays: the last version, evaluated at the end, may have a better score."""

    def note(self, dataset: str, version: int, step: int, metrics: Mapping[str, float]) -> bool:
        """Register the scores of one set at one version, which may be repeated. Returns whether they have the score."""
        value = metrics.get(self.metric, math.nan)
        if dataset != self.set or not math.isfinite(value):
            return False
        self._scored[version] = Scored(version=version, step=step, value=value)
        best = self.ranked[0]
        later = sum(other > best.version for other in self._scored)
        if self._stop_after and later >= self._stop_after and not self.stopped:
            self.stopped = (
                f"no {self.set}/{self.metric} above {best.value:.4g} (version {best.version}, step {best.step}) in the {later} "
                "evaluations after it (eval.stop_after)"
            )
        return True

    @property
    def ranked(self) -> Sequence[Scored]:
        """All of them, the best first; of equal ones the earliest."""
        return sorted(self._scored.values(), key=lambda one: (-one.value, one.version))
