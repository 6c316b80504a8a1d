r"""Reward for multiple choice: the letter of the answer.

Source: GPQA (Rein et al. 2023, arXiv 2311.12022), in the form of slime's ``gpqa``: metadata ``choices``,
``valid_letters`` and ``correct_letter``; the label is a letter, an index (from 0) or the text of a choice.
"""

import re

from tidemill.bus.wire.json_object import is_integer
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest

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
