r"""Reward for an answer that equals the label as mathematics, by the library math-verify (extra ``math``).

It reads LaTeX and expressions, and compares them by sympy: matrices, intervals, sets, equations, inequalities, units. It can take long, so
it runs in child processes; ``math`` and ``deepscaler`` are faster and stricter.
"""

import logging
from typing import Any

from rewards.errors import RewardFailed
from rewards.math_answer import last_boxed
from rewards.port import RewardRequest


def math_verify(request: RewardRequest, *, boxed: bool = False, precision: int = 6) -> float:
    r"""Return 1.0 if the answer that math-verify finds in the response equals the label (or one of a list of labels), else 0.0.

    ``boxed``: only the last ``\boxed{}`` counts. ``precision``: digits behind the point in which numbers must agree. Raises RewardFailed
    for a label in which no answer is found, ModuleNotFoundError without the library.
    """
    import math_verify as library

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off: the process has one
    labels = request.label if isinstance(request.label, list | tuple) and request.label else [request.label]
    golds = [_gold(library, label) for label in labels]
    text = request.response
    if boxed:
        found = last_boxed(text)
        if found is None:
            return 0.0
        text = rf"\boxed{{{found}}}"
    answer = library.parse(text, parsing_timeout=None)
    return float(any(library.verify(gold, answer, float_rounding=precision, timeout_seconds=None) for gold in golds))


def _gold(library: Any, label: object) -> Any:
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise RewardFailed("math_verify", f"label: want a text or a number, got {label!r}"[:300])
    text = str(label)
    gold = (
        library.parse(text, parsing_timeout=None) if "\\boxed" in text or "$" in text else library.parse(f"${text}$", parsing_timeout=None)
    )
    if not gold:
        raise RewardFailed("math_verify", f"label: no answer found in {text!r}"[:300])
    return gold
