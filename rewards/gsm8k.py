"""Reward for GSM8K: the number after ``####``, or the last number of the response.

Source: GSM8K (Cobbe et al. 2021, arXiv 2110.14168). Numbers are compared exactly: ``1,234``, ``$1234.00`` and ``1234`` are the same.
"""

from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.math_answer import MARKER, find_gold, is_right, to_number
from tidemill.rewards.port import RewardRequest


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
