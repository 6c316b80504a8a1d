"""Rules of ``learner.algorithm.reject.rules``, parsed from their text. Plain numbers; ``rejection.py`` applies them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RejectRule:
    """One entry of ``RejectConfig.rules``."""

    metric: str
    span: str
    low: float
    """Lower bound, for k1 only; 0 = none."""
    high: float

    @property
    def name(self) -> str:
        """Name of the rule in the metrics: ``<metric>_<span>``."""
        return f"{self.metric}_{self.span}"


def by_path(text: str) -> bool:
    """Return whether a rule is the import path of a function (``module:function``)."""
    module, colon, function = text.partition(":")
    return bool(module and colon and function) and not text.split()[1:]


def reject_rule(text: str) -> RejectRule:
    """Return the rule in ``"k3 seq_mean 0.01"`` (metric, span, upper bound) or ``"k1 token 0.5 2"`` (lower and upper
    bound).

    Raises ValueError for any other text, for bounds in the wrong order or not finite, and for bounds of k1 without 1
    between them.
    """
    parts = text.split()
    form = (
        "'METRIC SPAN HIGH' or 'k1 SPAN LOW HIGH' with k1 | k2 | k3 and token | seq_sum | seq_mean | seq_max, or "
        "module:function"
    )
    try:
        metric, span, *bounds = parts
        numbers = [float(bound) for bound in bounds]
        low, high = numbers if len(numbers) == 2 else (0.0, *numbers)
    except ValueError:
        raise ValueError(f"rules: want {form}, got {text!r}") from None
    if (
        metric not in ("k1", "k2", "k3")
        or span not in ("token", "seq_sum", "seq_mean", "seq_max")
        or (low and metric != "k1")
    ):
        raise ValueError(f"rules: want {form}, got {text!r}")
    if not 0 <= low < high < math.inf:
        raise ValueError(f"rules: want 0 <= low < high, finite, got {text!r}")
    if low and span == "seq_max":
        raise ValueError(f"rules: seq_max is of the absolute log-ratio, want one bound, got {text!r}")
    if metric == "k1" and not low <= 1 <= high:
        raise ValueError(f"rules: k1 bounds the ratio pi / mu, 1 for fresh data: want low <= 1 <= high, got {text!r}")
    return RejectRule(metric, span, low, high)
