"""Metrics by step as columns of float32, and their reduction for a chart. Knows no bus.

A step without a value of a metric has NaN there, which becomes null: the line breaks.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Point = list[float | int | None]

MAX_STEPS, MAX_METRICS = 20_000_000, 4096  # Bounds of what a foreign record can make this process keep
BUCKETS = 400  # Default number of buckets of a reduced column: two points in each


_TRAIN = "train/entropy train/grad_norm train/kl_reference train/ppo_clip_fraction train/sft_loss"
_PACE = "train/tokens_per_second train/wait_share train/step_seconds train/mfu"
_SHOWN = {
    "reward": "data/reward_mean train/reward_std data/reward/* eval/* train/zero_variance_group_share",
    "policy": f"{_TRAIN} critic/explained_variance",
    "off-policy": "offpolicy/lag_mean offpolicy/k3 offpolicy/ess offpolicy/weight_mean offpolicy/rejected_tokens",
    "numerics": "offpolicy/fresh_logprob_diff_abs offpolicy/fresh_k3 offpolicy/pearson train/skipped_minibatches",
    "data": f"train/response_length_mean train/truncated_share {_PACE}",
}
"""Metrics that are shown before a search, by heading."""


class MetricColumns:
    """The metrics of a run: a column for each name, a row for each step. A step recorded again replaces its row."""

    def __init__(self) -> None:
        self.first = 0  # Step of row 0; 0 = no step yet
        self.last = 0
        self._columns: dict[str, NDArray[np.float32]] = {}
        self._size = 64
        self._times_s = np.full(self._size, np.nan)

    @property
    def names(self) -> list[str]:
        """Names of the metrics, sorted."""
        return sorted(self._columns)

    def choose(self, names: Sequence[str]) -> list[str]:
        """Return the names, those with an asterisk at their end replaced by the metrics that begin so."""
        known = self.names
        matches = [
            [metric for metric in known if metric.startswith(name[:-1])] if name.endswith("*") else [name]
            for name in names
        ]
        return list(dict.fromkeys(name for metrics in matches for name in metrics))

    def add(self, step: int, metrics: Mapping[str, float], stored_s: float) -> None:
        """Set the row of a step. A step before the first one, or far behind it, which no run records, is ignored."""
        self.first = self.first or max(1, step)
        row = step - self.first
        if not 0 <= row < MAX_STEPS:
            return
        if row >= self._size:
            self._grow(row + 1)
        if step <= self.last:
            for known in self._columns.values():
                known[row] = np.nan
        self.last = max(self.last, step)
        self._times_s[row] = stored_s
        for name, value in metrics.items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MAX_METRICS:
                    continue
                column = self._columns[name] = np.full(self._size, np.nan, np.float32)
            column[row] = value if abs(value) < 3e38 else math.nan

    def _grow(self, rows: int) -> None:
        size = max(rows, 2 * self._size)
        missing = size - self._size
        self._times_s = np.concatenate([self._times_s, np.full(missing, np.nan)])
        padding = np.full(missing, np.nan, np.float32)
        self._columns = {name: np.concatenate([column, padding]) for name, column in self._columns.items()}
        self._size = size

    def values(self, name: str, first: int = 0, last: int = 0) -> NDArray[np.float32]:
        """Return a metric from step ``first`` to ``last`` (0 = all there are); empty without such a metric."""
        column = self._columns.get(name)
        if column is None or not self.first:
            return np.empty(0, np.float32)
        begin, end = self._range(first, last)
        return column[begin:end]

    def times_s(self, first: int = 0, last: int = 0) -> NDArray[np.float64]:
        """Return the times at which the outcomes of steps were stored, as ``values``."""
        begin, end = self._range(first, last)
        return self._times_s[begin:end]

    def newest(self, name: str, steps: int = 1) -> NDArray[np.float32]:
        """Return the defined values of a metric in the last ``steps`` steps."""
        values = self.values(name, max(self.first, self.last - steps + 1))
        return values[~np.isnan(values)]

    def mean(self, name: str, steps: int) -> float | None:
        """Return the mean of a metric over the last ``steps`` steps; None if none has it."""
        values = self.newest(name, steps)
        return float(values.mean(dtype=np.float64)) if len(values) else None

    def at(self, step: int) -> dict[str, float | None]:
        """Return the metrics of one step."""
        row = step - self.first
        if not self.first or not 0 <= row <= self.last - self.first:
            return {}
        values = {name: float(column[row]) for name, column in self._columns.items()}
        return {name: rounded(value) for name, value in values.items() if not math.isnan(value)}

    def points(self, name: str, first: int = 0, last: int = 0, buckets: int = BUCKETS) -> list[Point]:
        """Return a metric as points of a chart (``reduced``)."""
        begin, _ = self._range(first, last)
        return reduced(self.values(name, first, last), self.first + begin, buckets)

    def _range(self, first: int, last: int) -> tuple[int, int]:
        end = (min(last, self.last) if last else self.last) - self.first + 1 if self.first else 0
        return max(0, first - self.first) if first else 0, max(0, end)


def reduced(values: NDArray[np.float32], first_step: int, buckets: int = BUCKETS) -> list[Point]:
    """Return [step, value] of the smallest and the largest value of each bucket, in the order of their steps.

    A bucket without a value, between buckets with values, gives [step, null]. Ends without values are left out.
    """
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return []
    begin, end = int(known[0]), int(known[-1]) + 1
    if end - begin <= 2 * buckets:
        return _points(values, np.arange(begin, end), first_step)
    width = math.ceil((end - begin) / buckets)
    padded = np.full(width * buckets, np.nan, np.float32)
    padded[: end - begin] = values[begin:end]
    table = padded.reshape(buckets, width)
    empty = np.isnan(table)
    starts = begin + np.arange(buckets) * width
    lows = starts + np.where(empty, np.inf, table).argmin(axis=1)
    highs = starts + np.where(empty, -np.inf, table).argmax(axis=1)
    rows = np.unique(np.concatenate([lows, highs]))
    return _points(values, rows[rows < end], first_step)


def _points(values: NDArray[np.float32], rows: NDArray[np.intp], first_step: int) -> list[Point]:
    numbers = all_rounded(values[rows])
    return [[step, number] for step, number in zip((first_step + rows).tolist(), numbers, strict=True)]


def all_rounded(values: NDArray[np.float32]) -> list[float | None]:
    """Return numbers of float32 with the seven digits that they have; None for a number that is not finite.

    A division of whole numbers gives the double nearest to the decimal number, so JSON has no more digits. Numbers
    above 1e7, whose scale is no whole number, may have another last bit.
    """
    numbers = values.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (6 - np.floor(np.log10(np.abs(numbers))))
        numbers = np.where(numbers == 0, 0.0, np.rint(numbers * scale) / scale)
    rounded_numbers: list[float | None] = numbers.tolist()
    for place in np.flatnonzero(~np.isfinite(numbers)).tolist():
        rounded_numbers[place] = None
    return rounded_numbers


def rounded(value: float) -> float | None:
    """Return a number of float32 with the digits that it has; None if it is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def shown_first(columns: MetricColumns) -> list[tuple[str, list[str]]]:
    """Return the metrics of this run that are shown before a search, by heading."""
    known = set(columns.names)
    return [
        (name, [metric for metric in columns.choose(names.split()) if metric in known])
        for name, names in _SHOWN.items()
    ]
