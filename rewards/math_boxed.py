r"""Reward for the boxed answer of a whole response. The file is not called ``math``: a module of Python has that name.

Source: slime's ``math``.
"""

from typing import Literal

from tidemill.rewards.boxed import boxed_and_golds
from tidemill.rewards.math_answer import to_number
from tidemill.rewards.math_equality import plain, same_math
from tidemill.rewards.port import RewardRequest


def math(request: RewardRequest, *, rest: Literal["", "math_verify"] = "") -> float:
    r"""Return 1.0 if the last ``\boxed{}`` of the response equals the label (or one of the labels), else 0.0.

    ``rest``: ask the library math-verify about answers that are not found equal here, unless both are numbers; the reward runs in child
    processes then. Raises RewardFailed for a label that holds no answer, and with ``rest`` ModuleNotFoundError without the library.
    """
    answer, golds = boxed_and_golds(request.response, request.label)
    if answer is None:
        return 0.0
    if any(same_math(answer, gold) for gold in golds):
        return 1.0
    if not rest:
        return 0.0
    from tidemill.rewards.symbolic import same_by_library  # it loads sympy, which a run without the option does not need

    undecided = [gold for gold in golds if not (_is_number(answer) and _is_number(gold))]
    return float(bool(undecided) and same_by_library(answer, undecided))


def _is_number(text: str) -> bool:
    return to_number(plain(text)) is not None
