"""Settings of a run that its onlookers use, from the row ``run/config``, which any client may have written."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tidemill.learner.algorithms.alarms import AlarmConfig, Context, refuse_unknown


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
