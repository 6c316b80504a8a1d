r"""Reward for the boxed answer after a chain of thought.

Source: DeepScaleR (Luo et al. 2025), in the form of slime's ``deepscaler``: the text after the last ``</think>``, or after the first
``###Response`` up to the next, must hold ``\boxed{}``.
"""

from tidemill.rewards.boxed import boxed_is_label
from tidemill.rewards.port import RewardRequest


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
    return float(boxed_is_label(solution, request.label))
