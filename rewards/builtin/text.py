"""Rewards that compare a response as text, with the label or with a form, and rewards for its length.

Sources: ``f1`` SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250): lower case, no punctuation, no articles; yes, no and
noanswer must match exactly, as in HotpotQA's evaluation (Yang et al. 2018). ``format_tags`` the format reward of
DeepSeek-R1 (DeepSeek-AI 2025, arXiv 2501.12948): thoughts between ``<think>`` tags, then the answer. ``overlong`` soft
overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13), which ``learner.algorithm.overlong.buffer``
does in the learner, for rewards of any actor. ``repetition`` the n-gram repetition penalty of "Demystifying Long
Chain-of-Thought Reasoning" (Yeo et al. 2025, arXiv 2502.03373).
"""

import re
import string
from collections import Counter

from tidemill.bus.wire.messages import Status
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest


def exact(request: RewardRequest, *, strip: bool = True, case_sensitive: bool = True) -> float:
    """Return 1.0 if the response equals the label (or one of the labels, if it is a list), else 0.0."""

    def normal(text: object) -> str:
        plain = str(text).strip() if strip else str(text)
        return plain if case_sensitive else plain.casefold()

    labels = request.label if isinstance(request.label, (list, tuple)) else [request.label]
    return float(normal(request.response) in {normal(label) for label in labels})


def digits(request: RewardRequest) -> float:
    """Return the share of positions at which the response equals the label, in 0..1.

    Positions are counted in the longer string, and one more for the end, which is correct when the response stopped by
    itself at the label's length. So only the label itself scores 1.0, and every partial match scores more than none.
    """
    label, response = str(request.label), request.response
    right = sum(got == want for got, want in zip(response, label, strict=False))
    right_end = request.status is Status.COMPLETED and len(response) == len(label)
    return (right + right_end) / (max(len(label), len(response)) + 1)


def regex(request: RewardRequest, *, pattern: str, whole: bool = False, group: str = "") -> float:
    """Return 1.0 if ``pattern`` is found in the response (``whole``: if it describes all of it), else 0.0.

    ``group``: a group whose text in the last match, stripped, must equal the label. Dots match line ends.
    """
    compiled = re.compile(pattern, re.DOTALL)
    if whole:
        match = compiled.fullmatch(request.response)
    else:
        match = None
        for match in compiled.finditer(request.response):  # noqa: B007 - the last one counts
            pass
    if match is None or not group:
        return float(match is not None)
    text = match.group(int(group) if group.isdecimal() else group)
    return float(text is not None and text.strip() == str(request.label).strip())


_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WHOLE = ("yes", "no", "noanswer")


def f1(request: RewardRequest) -> float:
    """Return the F1 of the words, in 0..1; of several labels, the best. Raises RewardFailed for a wrong label."""
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


def format_tags(request: RewardRequest, *, tags: str = "think answer", outside: bool = False) -> float:
    """Return 1.0 if the response is ``<think>...</think><answer>...</answer>`` with text in each, else 0.0.

    ``tags``: their names in order. ``outside``: other text may stand before, between and after them.
    """
    remaining = request.response
    for tag in tags.split():
        opened, closed = f"<{tag}>", f"</{tag}>"
        if request.response.count(opened) != 1 or request.response.count(closed) != 1:
            return 0.0
        before, opening, remaining = remaining.partition(opened)
        inside, closing, remaining = remaining.partition(closed)
        if not opening or not closing or not inside.strip() or (before.strip() and not outside):
            return 0.0
    return float(outside or not remaining.strip())


def length(request: RewardRequest, *, target: int, slope: float = 1.0, shorter: bool = False) -> float:
    """Return minus ``slope`` times the relative excess over ``target`` sampled tokens, at least -1; 0 up to the target.

    ``shorter``: too short responses lose, too (L1-Exact, Aggarwal and Welleck 2025, 2503.04697, in relative terms).
    """
    away = (request.sampled_length - target) / max(1, target)
    return -min(1.0, slope * (abs(away) if shorter else max(0.0, away)))


def overlong(request: RewardRequest, *, max_tokens: int, buffer: int) -> float:
    """Return 0 up to ``max_tokens - buffer`` sampled tokens, then a line to -1 at ``max_tokens``, and -1 beyond."""
    begin = max_tokens - buffer
    if request.sampled_length <= begin:
        return 0.0
    return -min((request.sampled_length - begin) / buffer, 1.0) if buffer > 0 else -1.0


def repetition(request: RewardRequest, *, ngram: int = 3, penalty: float = 1.0) -> float:
    """Return ``-penalty`` times the share of n-grams of words that occurred before."""
    words = request.response.lower().split()
    total = len(words) - ngram + 1
    if total <= 0 or ngram <= 0:
        return 0.0
    distinct = len({tuple(words[place : place + ngram]) for place in range(total)})
    return -penalty * (1 - distinct / total)
