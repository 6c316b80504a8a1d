r"""Reward for the last line ``Answer: ...`` of a response: 1 or -1.

Source: DAPO (Yu et al. 2025, arXiv 2503.14476), its scoring of the last 300 characters. A label that is not a number is compared as an
expression or as text; the original raises for it.
"""

import re

from tidemill.rewards.math_answer import find_gold, last_boxed
from tidemill.rewards.math_equality import same_math
from tidemill.rewards.port import RewardRequest

TAIL = 300
"""Characters at the end of a response in which the answer must be."""
_ANSWER = re.compile(r"answer\s{0,20}:\s{0,20}([^\n]+)", re.IGNORECASE)


def dapo(request: RewardRequest) -> dict[str, float]:
    """Return ``score`` (1.0 or -1.0) and ``correct`` (1.0 or 0.0). Raises RewardFailed for a label that holds no answer."""
    gold = find_gold(request.label)
    found = _ANSWER.findall(request.response[-TAIL:])
    answer = found[-1].strip() if found else ""
    answer = last_boxed(answer) or answer
    correct = float(same_math(answer, last_boxed(gold) or gold))
    return {"score": 2 * correct - 1, "correct": correct}
