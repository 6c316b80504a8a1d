"""Reward for an answer that equals the label as mathematics, by the library math-verify (extra ``math``).

It reads LaTeX, and compares by sympy: matrices, intervals, sets, equations, inequalities, units. It can take long, so
it runs in child processes; ``math`` and ``deepscaler`` are faster and stricter.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from tidemill.bus.wire.json_object import is_number
from tidemill.rewards.builtin.math_answer import last_boxed
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest

with contextlib.suppress(
    ImportError
):  # here, too: the keeper of the child processes imports it once for all workers, sympy takes a second
    import math_verify as _preloaded  # noqa: F401


def math_verify(request: RewardRequest, *, boxed: bool = False, precision: int = 6) -> float:
    r"""Return 1.0 if the answer that math-verify finds in the response equals the label (or one of the labels), else
    0.0.

    ``boxed``: only the last ``\boxed{}`` counts. ``precision``: digits behind the point in which numbers must agree.
    Raises RewardFailed for a label in which no answer is found, ModuleNotFoundError without the library.
    """
    labels = request.label if isinstance(request.label, list | tuple) and request.label else [request.label]
    golds = [_gold(label) for label in labels]
    text = request.response
    if boxed:
        boxed_answer = last_boxed(text)
        if boxed_answer is None:
            return 0.0
        text = rf"\boxed{{{boxed_answer}}}"
    return float(_is_one_of(text, golds, precision))


def same_by_library(answer: str, golds: Sequence[str], *, precision: int = 6) -> bool:
    """Return whether math-verify finds an answer equal to one of the labels' answers, as far as it reads them.

    It can take for ever: call it in a process with a limit. Raises ModuleNotFoundError without the library.
    """
    return _is_one_of(rf"\boxed{{{answer}}}", [gold for gold in map(_parsed, golds) if gold], precision)


def _is_one_of(text: str, golds: Sequence[Any], precision: int) -> bool:
    library = _library()
    answer = library.parse(text, parsing_timeout=None)
    return any(library.verify(gold, answer, float_rounding=precision, timeout_seconds=None) for gold in golds)


def _gold(label: object) -> Any:
    if not (isinstance(label, str) or is_number(label)):
        raise RewardFailed("math_verify", f"label: want a text or a number, got {label!r}"[:300])
    gold = _parsed(str(label))
    if not gold:
        raise RewardFailed("math_verify", f"label: no answer found in {str(label)!r}"[:300])
    return gold


def _parsed(label: str) -> Any:
    text = label if "\\boxed" in label or "$" in label else f"${label}$"
    return _library().parse(text, parsing_timeout=None)


def _library() -> Any:
    import math_verify as library

    logger = logging.getLogger("math_verify")
    if logger.level != logging.ERROR:  # it warns that its own time limit is off: the process has one
        logger.setLevel(logging.ERROR)
    return library
