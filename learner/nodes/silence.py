"""Ages of rows by the reader's own clock; time in which the bus cannot be read, or stores nothing, does not count."""

from collections.abc import Hashable, Mapping

GRACE_S = 5.0
"""Seconds after an outage of the bus before ages count again: all agents have to connect and write first."""


class Silences:
    """Seconds since each row changed. A row that is seen for the first time counts as just changed."""

    def __init__(self) -> None:
        self._stamps: dict[int, Hashable] = {}
        self._silent: dict[int, float] = {}
        self._read_s: float | None = None
        """Time of the last reading; None while the bus is away or full."""
        self._count_from_s = float("-inf")

    def lost(self, now: float) -> None:
        """Note that the bus cannot be read, or stores nothing."""
        self._read_s, self._count_from_s = None, float("inf")

    def read(self, stamps: Mapping[int, Hashable], now: float) -> dict[int, float]:
        """Note a reading of all rows; ``stamps`` change with their writes. Returns the seconds for which each has not changed."""
        if self._count_from_s == float("inf"):
            self._count_from_s = now + GRACE_S
        passed = 0.0 if self._read_s is None else max(0.0, now - max(self._read_s, self._count_from_s))
        self._read_s = now
        silent = {}
        for node, stamp in stamps.items():
            same = node in self._stamps and self._stamps[node] == stamp
            silent[node] = self._silent[node] + passed if same else 0.0
        self._stamps, self._silent = dict(stamps), silent
        return dict(silent)
