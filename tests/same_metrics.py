"""Comparison of the metrics of two learners that train the same, with the largest differences that rounding makes."""

import json
import math
from collections.abc import Mapping

TIMES = frozenset({"train/step_seconds", "train/tokens_per_second"})
"""Metrics that are times."""
OF_LAYOUT = frozenset({"train/shared_tokens"})
"""Metrics that depend on how a step is divided into rows."""
RELATIVE = 1e-5
ABSOLUTE = 1e-6
LOOSER_RELATIVE = {"train/ppo_kl": 5e-5, "offpolicy/sequence_chi2": 5e-5}
"""Means of squares."""
LOOSER_ABSOLUTE = {
    "offpolicy/entropy_gap": 1e-5,
    "offpolicy/entropy_gap_sigmas": 1e-3,
    "offpolicy/sequence_chi2": 4e-5,
    "train/low_entropy_share": 0.01,
}
"""The gap is a mean of differences of two numbers near the logarithm of the vocabulary, each with the rounding of
float32; it, divided by its standard error; and a mean, less 1, of squared ratios, which are exponentials of sums over a
response. Processors round differently. And one token of a step of 102: samples of a group have the same entropy at the
same prefix, and where it is the floor of ``top_entropy``, rounding on another rank puts a token below it.
"""


def different(ours: Mapping[str, float], wanted: Mapping[str, float]) -> dict[str, tuple[float | None, float | None]]:
    """Return the metrics that differ by more than rounding, ours first; without times and counts of a layout."""
    names = (ours.keys() | wanted.keys()) - TIMES - OF_LAYOUT
    return {
        name: (ours.get(name), wanted.get(name))
        for name in sorted(names)
        if not _close(name, ours.get(name), wanted.get(name))
    }


def assert_same(ours: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    """Fail with the metrics that differ by more than rounding."""
    found = different(ours, wanted)
    assert not found, json.dumps(found, indent=1)


def _close(name: str, one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return False
    return math.isclose(
        one, other, rel_tol=LOOSER_RELATIVE.get(name, RELATIVE), abs_tol=LOOSER_ABSOLUTE.get(name, ABSOLUTE)
    )
