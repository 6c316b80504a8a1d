r"""Comparison of the last ``\boxed{}`` of a text with a label: the common part of the rewards ``math`` and ``deepscaler``.

Equality is ``tidemill.rewards.math_equality``, without sympy.
"""

from tidemill.rewards.math_answer import find_gold, last_boxed
from tidemill.rewards.math_equality import same_math


def boxed_and_golds(text: str, label: object) -> tuple[str | None, list[str]]:
    r"""Return the content of the text's last ``\boxed{}`` (None without one), and the answers in the label, which may be a list of labels.

    Raises RewardFailed for a label that holds no answer.
    """
    labels = label if isinstance(label, (list, tuple)) and label else [label]
    golds = [find_gold(one) for one in labels]
    return last_boxed(text), [last_boxed(gold) or gold for gold in golds]


def boxed_is_label(text: str, label: object) -> bool:
    r"""Return whether the text's last ``\boxed{}`` equals the label, or one of the labels. Raises RewardFailed as ``boxed_and_golds``."""
    answer, golds = boxed_and_golds(text, label)
    return answer is not None and any(same_math(answer, gold) for gold in golds)
