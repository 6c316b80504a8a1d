r"""Rewards for the final answer to a mathematical question: ``math``, ``deepscaler``, ``dapo`` and ``gsm8k``. None
loads sympy.

Sources: ``math`` is slime's. ``deepscaler`` DeepScaleR (Luo et al. 2025), in the form of slime's ``deepscaler``: the
text after the last ``</think>``, or after the first ``###Response`` up to the next, must hold ``\boxed{}``. ``dapo``
DAPO (Yu et al. 2025, arXiv 2503.14476), its scoring of the last 300 characters; a label that is not a number is
compared as an expression or as text, where the original raises. ``gsm8k`` GSM8K (Cobbe et al. 2021, arXiv 2110.14168);
numbers are compared exactly: ``1,234``, ``$1234.00`` and ``1234`` are the same.
"""

import re
from typing import Literal

from tidemill.rewards.builtin.math_answer import MARKER, find_gold, is_right, last_boxed, to_number
from tidemill.rewards.builtin.math_equality import plain, same_math
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest


def boxed_and_golds(text: str, label: object) -> tuple[str | None, list[str]]:
    r"""Return the content of the last ``\boxed{}`` (or None), and the answers in a label or in a list of labels.

    Raises RewardFailed for a label that holds no answer.
    """
    labels = label if isinstance(label, (list, tuple)) and label else [label]
    golds = [find_gold(item) for item in labels]
    return last_boxed(text), [last_boxed(gold) or gold for gold in golds]


def boxed_is_label(text: str, label: object) -> bool:
    r"""Return whether the last ``\boxed{}`` equals a label. Raises as ``boxed_and_golds``."""
    answer, golds = boxed_and_golds(text, label)
    return answer is not None and any(same_math(answer, gold) for gold in golds)


def math(request: RewardRequest, *, rest: Literal["", "math_verify"] = "") -> float:
    r"""Return 1.0 if the last ``\boxed{}`` of the response equals the label (or one of the labels), else 0.0.

    ``rest``: ask math-verify about answers that are not found equal here, unless both are numbers; the reward runs in
    child processes then. Raises RewardFailed for a label that holds no answer, ModuleNotFoundError without the library.
    """
    answer, golds = boxed_and_golds(request.response, request.label)
    if answer is None:
        return 0.0
    if any(same_math(answer, gold) for gold in golds):
        return 1.0
    if not rest:
        return 0.0
    from tidemill.rewards.builtin.math_equality import (
        same_by_library,
    )  # it loads sympy, which a run without the option does not need

    undecided = [gold for gold in golds if not (_is_number(answer) and _is_number(gold))]
    return float(bool(undecided) and same_by_library(answer, undecided))


def _is_number(text: str) -> bool:
    return to_number(plain(text)) is not None


def deepscaler(request: RewardRequest, *, think: bool = True) -> float:
    r"""Return 1.0 if the last ``\boxed{}`` of the solution equals the label (or one of the labels), else 0.0.

    ``think``: without ``</think>`` or ``###Response`` it is 0. Raises RewardFailed for a label that holds no answer.
    """
    _, marker, solution = request.response.rpartition("</think>")
    if not marker:
        _, marker, behind_header = request.response.partition("###Response")
        solution = behind_header.partition("###Response")[0]
    if not marker:
        if think:
            return 0.0
        solution = request.response
    return float(boxed_is_label(solution, request.label))


TAIL = 300  # Characters at the end of a response in which the answer must be
_ANSWER = re.compile(r"answer\s{0,20}:\s{0,20}([^\n]+)", re.IGNORECASE)


def dapo(request: RewardRequest) -> dict[str, float]:
    """Return ``score`` (1.0 or -1.0) and ``correct``. Raises RewardFailed for a label that holds no answer."""
    gold = find_gold(request.label)
    answers = _ANSWER.findall(request.response[-TAIL:])
    answer = answers[-1].strip() if answers else ""
    answer = last_boxed(answer) or answer
    correct = float(same_math(answer, last_boxed(gold) or gold))
    return {"score": 2 * correct - 1, "correct": correct}


def gsm8k(request: RewardRequest, *, strict: bool = False) -> float:
    """Return 1.0 for the right number, else 0.0. ``strict``: a response without ``####`` scores 0.

    The label is a number, or a solution that ends in ``#### number``. Raises RewardFailed for any other.
    """
    gold = find_gold(request.label)
    if to_number(gold) is None:
        raise RewardFailed("gsm8k", f"want a number as label, got {gold[:80]!r}")
    if strict and MARKER not in request.response:
        return 0.0
    return float(is_right(request.response, gold))
