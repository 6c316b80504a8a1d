r"""Reward for the boxed answer after a chain of thought.

Source: DeepScaleR (Luo et al. 2025), in the form of slime's ``deepscaler``: the text after the last ``</think>``, or after the first
``###Response`` up to the next, must hold ``\boxed{}``. Equality is ``rewards.math_equality``, without sympy.
"""

from rewards.math_answer import find_gold, last_boxed
from rewards.math_equality import same_math
from rewards.port import RewardRequest


def deepscaler(request: RewardRequest, *, think: bool = True) -> float:
    r"""Return 1.0 if the last ``\boxed{}`` of the solution equals the label (or one of the labels), else 0.0.

    ``think``: a response without ``</think>`` or ``###Response`` scores 0. Raises RewardFailed for a label that holds no answer.
    """
    _, ended, solution = request.response.rpartition("</think>")
    if not ended:
        _, ended, rest = request.response.partition("###Response")
        solution = rest.partition("###Response")[0]
    if not ended:
        if think:
            return 0.0
        solution = request.response
    return _boxed_is_label(solution, request)


def math(request: RewardRequest) -> float:
    r"""Return 1.0 if the last ``\boxed{}`` of the whole response equals the label, else 0.0. Source: slime's ``math``."""
    return _boxed_is_label(request.response, request)


def _boxed_is_label(solution: str, request: RewardRequest) -> float:
    answer = last_boxed(solution)
    labels = request.label if isinstance(request.label, (list, tuple)) and request.label else [request.label]
    golds = [find_gold(label) for label in labels]
    return float(answer is not None and any(same_math(answer, last_boxed(gold) or gold) for gold in golds))
