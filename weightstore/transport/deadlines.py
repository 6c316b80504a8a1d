"""Deadlines of a learner's requests to engines. A phase that takes longer with larger weights has one that follows from
measured times."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

BY_SIZE = frozenset({"begin", "bucket", "verify", "end", "resume"})
"""Phases with work on all weights: memory for a second copy (``begin`` or the first bucket), checksums, loading."""
FIRST_BYTES_PER_S = 20e6
"""Minimum speed of an engine in such a phase, until it is measured: a busy laptop computed checksums at 18e6."""
SLOWER = 4.0
"""Factor of the longest time measured: machines and networks are shared."""


class Deadlines:
    """Bounds of the requests of one learner, in seconds. All its engines share the measured times."""

    def __init__(self, phase_s: float, load_s: float = 600.0) -> None:
        """``phase_s``: of a phase without work on the weights. ``load_s``: of a load from disk, the longest phase."""
        self.phase_s, self.load_s = phase_s, load_s
        self.num_bytes = 0
        """Size of the weights of this push."""
        self._longest_s: dict[str, float] = {}

    def of(self, phase: str) -> float:
        """Return the seconds of a phase, whose name may have a detail ("bucket 1 of 3")."""
        kind = phase.partition(" ")[0]
        if kind == "load":
            return self.load_s
        if kind not in BY_SIZE:
            return self.phase_s
        longest_s = self._longest_s.get(kind)
        work_s = self.num_bytes / FIRST_BYTES_PER_S if longest_s is None else SLOWER * longest_s
        return min(self.phase_s + work_s, max(self.phase_s, self.load_s))

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Measure a phase, unless it fails."""
        since = time.perf_counter()
        yield
        kind = phase.partition(" ")[0]
        self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), time.perf_counter() - since)
