"""Facts of a run for processes that only read it: settings from the row ``run/config``, which any client may have
written; its pace, and the time that it ran, by the times of its records. The time between two starts does not count.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tidemill.learner.algorithms.alarms import AlarmConfig, Context, refuse_unknown

RECENT_STEPS = 20  # Number of steps over which rates and the time left are computed
_LEAST = 3  # Outcomes that give a pace


class RunSettings:
    """The row, read field by field: a missing or odd value is the default."""

    def __init__(self, row: object = None) -> None:
        self.row = row if isinstance(row, Mapping) else {}

    def get(self, path: str, kind: Any, default: Any = None) -> Any:
        """Return the value at a dotted path if it is of this type."""
        value: object = self.row
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool) else default

    @property
    def steps(self) -> int | None:
        steps: int | None = self.get("learner.steps", int)
        return steps if steps is None or steps > 0 else None

    @property
    def price(self) -> float:
        """Price of a GPU-hour; 0 = not set."""
        return float(self.get("up.gpu_hour_price", int | float, 0.0))

    @cached_property
    def context(self) -> Context:
        max_lag = self.get("staleness.max_lag", int, 1 << 30)
        # Of `auto` only the learner knows what it is: bfloat16 has the wider thresholds.
        dtype = "float32" if self.get("learner.dtype", str) == "float32" else "bfloat16"
        return Context(max_lag=max_lag, gate=self.get("staleness.gate", str, "mask"), dtype=dtype)

    @cached_property
    def alarms(self) -> AlarmConfig:
        """The run's alarms; the default ones where its own cannot be read."""
        row = self.get("learner.algorithm.alarms", Mapping, {})
        try:
            ignore = tuple(str(name) for name in row.get("ignore", ()))
            config = AlarmConfig(
                action=row.get("action", "warn"), ignore=ignore, thresholds=dict(row.get("thresholds", {}))
            )
            refuse_unknown(config)
        except (TypeError, ValueError):
            return AlarmConfig()
        return config


@dataclass(slots=True)
class Pace:
    """The newest outcomes of the learner's present start."""

    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS + 1))  # (step, seconds)
    _epoch: int = -1

    def add(self, epoch: int, step: int, time_s: float) -> None:
        """Add an outcome. Those of another epoch are forgotten, and so are steps that are taken again."""
        if epoch != self._epoch or (self.recent and step <= self.recent[-1][0]):
            self.recent.clear()
        self._epoch = epoch
        self.recent.append((step, time_s))

    @property
    def step_s(self) -> float | None:
        """Seconds of a step by the clock; None while it is unknown."""
        if len(self.recent) < _LEAST:
            return None
        (first, began_s), (last, ended_s) = self.recent[0], self.recent[-1]
        return (ended_s - began_s) / (last - first) if ended_s >= began_s else None  # a clock may be set back

    def left_s(self, steps: int) -> float | None:
        """Return the seconds from the newest outcome to the last step at this pace; None while it is unknown."""
        step_s = self.step_s
        return None if step_s is None else step_s * max(0, steps - self.recent[-1][0])


@dataclass(slots=True)
class RunTime:
    """The seconds that a run ran: of each epoch of its learner, from the first record to the last."""

    newest_s: float = 0.0  # Time of the newest record
    _epoch: int = -1
    _began_s: float = 0.0
    _earlier_s: float = 0.0

    def add(self, epoch: int, time_s: float) -> None:
        """Add a record."""
        if epoch != self._epoch:
            self._earlier_s += self.newest_s - self._began_s
            self._epoch, self._began_s, self.newest_s = epoch, time_s, time_s
        self.newest_s = max(self.newest_s, time_s)

    def seconds(self, now_s: float | None = None) -> float:
        """Return the seconds so far. ``now_s``: time to which the present start has run, if it goes on."""
        end_s = self.newest_s if now_s is None or self._epoch < 0 else max(self.newest_s, now_s)
        return self._earlier_s + end_s - self._began_s
