"""Reward for free text: F1 of its words and the label's.

Source: SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250): lower case, no punctuation, no articles. yes, no and noanswer must match exactly,
as in HotpotQA's evaluation (Yang et al. 2018).
"""

import re
import string
from collections import Counter

from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WHOLE = ("yes", "no", "noanswer")


def f1(request: RewardRequest) -> float:
    """Return the F1 of the words, in 0..1; of several labels, the best. Raises RewardFailed for a label that is no text."""
    labels = request.label if isinstance(request.label, (list, tuple)) else [request.label]
    if not labels or not all(isinstance(label, (str, int, float)) for label in labels):
        raise RewardFailed("f1", f"want text, or a list of texts, as label, got {type(request.label).__name__}")
    answer = words(request.response)
    return max(_f1(answer, words(str(label))) for label in labels)


def words(text: str) -> list[str]:
    """Return the words that are compared."""
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(answer: list[str], gold: list[str]) -> float:
    if answer != gold and any(" ".join(side) in _WHOLE for side in (answer, gold)):
        return 0.0
    if not answer or not gold:
        return float(answer == gold)
    common = sum((Counter(answer) & Counter(gold)).values())
    return 2 * common / (len(answer) + len(gold))
