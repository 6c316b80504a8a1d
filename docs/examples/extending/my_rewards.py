"""A reward with parts and options: a correct answer, in the requested form."""

import re

from tidemill.rewards import RewardRequest

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def tagged(request: RewardRequest, *, format_bonus: float = 0.1) -> dict[str, float]:
    """1 for the label between answer tags, and ``format_bonus`` for the tags themselves."""
    found = ANSWER.search(request.response)
    correct = float(found is not None and found[1].strip() == str(request.label))
    form = float(found is not None)
    return {"score": correct + format_bonus * form, "correct": correct, "form": form}
