"""Rewards that compare a response as text, with the label, a choice or a form, and rewards for its length.

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
from functools import lru_cache
from pathlib import Path

from tidemill.bus.wire.json_object import is_integer
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


LETTERS = "ABCDEFGHIJ"
_MARKED = (
    re.compile(r"\\boxed\s{0,3}\{\s{0,3}(?:\\text\s{0,3}\{)?\s{0,3}\(?([A-Za-z])\)?\s{0,3}\}"),
    re.compile(
        r"(?:answer|choice|option)\s{0,3}(?:is|:|=)?\s{0,3}[:*]{0,3}\s{0,3}\(?([A-Za-z])\)?(?![A-Za-z])", re.IGNORECASE
    ),
)
_ALONE = re.compile(r"(?<![A-Za-z0-9])\(?([A-Z])\)?(?![A-Za-z0-9'])")
_WORD = re.compile(r"\w+")


def gpqa(request: RewardRequest) -> float:
    """Return 1.0 if the response has the letter of the right choice, or none but that choice's text alone, else 0.0.

    Raises RewardFailed for a label that names no choice, and for metadata that is no list.
    Source: GPQA (Rein et al. 2023, arXiv 2311.12022), in the form of slime's ``gpqa``: metadata ``choices``,
    ``valid_letters`` and ``correct_letter``; the label is a letter, an index (from 0) or the text of a choice.
    """
    valid = "".join(_texts(request, "valid_letters", LETTERS)).upper()
    gold = _gold(request, valid)
    letter = find_letter(request.response, valid)
    return float((_choice_in(request, valid) if letter is None else letter) == gold)


def find_letter(response: str, valid: str = LETTERS) -> str | None:
    r"""Return the last letter in ``\boxed{}``, else after "answer is", else the last alone; thoughts do not count."""
    text = response.rpartition("</think>")[2]
    for pattern in (*_MARKED, _ALONE):
        letters = [letter.upper() for letter in pattern.findall(text) if letter.upper() in valid]
        if letters:
            return str(letters[-1])
    return None


def _choice_in(request: RewardRequest, valid: str) -> str | None:
    """Return the letter of the one choice that the response has the text of; None for none or several."""
    text = f" {_words(request.response.rpartition('</think>')[2])} "
    choices = map(_words, _texts(request, "choices"))
    letters = [letter for letter, choice in zip(valid, choices, strict=False) if choice and f" {choice} " in text]
    return letters[0] if len(letters) == 1 else None


def _texts(request: RewardRequest, key: str, default: str = "") -> list[str]:
    """Return the texts, or the letters of one text, in the metadata. Raises RewardFailed for any other type."""
    value = request.metadata.get(key, default)
    if not isinstance(value, (str, list, tuple)):
        raise RewardFailed("gpqa", f"metadata.{key}: want a list, got {value!r}"[:300])
    return [str(item) for item in value]


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.casefold()))


def _gold(request: RewardRequest, valid: str) -> str:
    choices = [choice.strip().casefold() for choice in _texts(request, "choices")]
    label = request.metadata.get("correct_letter", request.label)
    index: int | None = None
    if is_integer(label):
        index = label
    elif isinstance(label, str):
        text = label.strip().strip("().").casefold()
        if len(text) == 1 and text.upper() in valid:
            return text.upper()
        if label.strip().casefold() in choices:
            index = choices.index(label.strip().casefold())
    if index is None or not 0 <= index < len(valid):
        want = f"a letter of {valid}, an index, or one of metadata.choices as label"
        raise RewardFailed("gpqa", f"want {want}, got {label!r}"[:300])
    return valid[index]


_SPELLED_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_ENDING = re.compile(r"(?:n['\u2019]t|['\u2019]\w*)$")
UNKNOWN = 1  # Words outside the dictionary that a sentence may have: a name, for example
SHORT = 3  # Letters of a word that may stand twice, as *the* and *and* do


def sentence(request: RewardRequest, *, words: str, verbs: str) -> dict[str, float]:
    """Return ``score``: 1 for a sentence, else 0; and the three parts of the rule, ``known``, ``verb``, ``once``.

    The rule needs no model: the words stand in a dictionary, one is a verb, and none is repeated. It keeps a model
    from texts that follow other instructions with words in no order (``"bee"``); it judges words, not grammar.

    ``words``, ``verbs``: files with one lower-case word a line. Raises RewardFailed for a file that cannot be read.
    """
    response_words = [_plain(word) for word in _SPELLED_WORD.findall(request.response)]
    dictionary = _read(words)
    known = bool(response_words) and sum(word not in dictionary for word in response_words) <= UNKNOWN
    verb = not _read(verbs).isdisjoint(response_words)
    once = all(count == 1 or (count == 2 and len(word) <= SHORT) for word, count in Counter(response_words).items())
    return {"score": float(known and verb and once), "known": float(known), "verb": float(verb), "once": float(once)}


def _plain(word: str) -> str:
    """Return a word in lower case, without the ending of a possessive or a contraction."""
    return _ENDING.sub("", word.lower())


@lru_cache(maxsize=8)
def _read(file: str) -> frozenset[str]:
    """Return the lines of a file, which is read once in a process."""
    try:
        return frozenset(Path(file).read_text(encoding="utf-8").split())
    except (OSError, ValueError) as error:
        raise RewardFailed("sentence", f"{file}: want a file with one word a line, got {error}") from error
