r"""Reward for multiple choice: the letter of the answer.

Source: GPQA (Rein et al. 2023, arXiv 2311.12022), in the form of slime's ``gpqa``: metadata ``choices``, ``valid_letters`` and
``correct_letter``; the label is a letter, an index (from 0) or the text of a choice.
"""

import re

from rewards.errors import RewardFailed
from rewards.port import RewardRequest

LETTERS = "ABCDEFGHIJ"
_MARKED = (
    re.compile(r"\\boxed\s{0,3}\{\s{0,3}(?:\\text\s{0,3}\{)?\s{0,3}\(?([A-Za-z])\)?\s{0,3}\}"),
    re.compile(r"(?:answer|choice|option)\s{0,3}(?:is|:|=)?\s{0,3}[:*]{0,3}\s{0,3}\(?([A-Za-z])\)?(?![A-Za-z])", re.IGNORECASE),
)
_ALONE = re.compile(r"(?<![A-Za-z0-9])\(?([A-Z])\)?(?![A-Za-z0-9'])")


def gpqa(request: RewardRequest) -> float:
    """Return 1.0 if the response chooses the right letter, else 0.0. Raises RewardFailed for a label that names no choice."""
    valid = "".join(request.metadata.get("valid_letters", LETTERS)).upper()
    gold = _gold(request, valid)
    return float(find_letter(request.response, valid) == gold)


def find_letter(response: str, valid: str = LETTERS) -> str | None:
    r"""Return the last letter in ``\boxed{}``, else after "answer is", else the last that stands alone. Thoughts do not count."""
    text = response.rpartition("</think>")[2]
    for pattern in (*_MARKED, _ALONE):
        found = [letter.upper() for letter in pattern.findall(text) if letter.upper() in valid]
        if found:
            return str(found[-1])
    return None


def _gold(request: RewardRequest, valid: str) -> str:
    choices = [str(choice).strip().casefold() for choice in request.metadata.get("choices", ())]
    label = request.metadata.get("correct_letter", request.label)
    index: int | None = None
    if isinstance(label, int) and not isinstance(label, bool):
        index = label
    elif isinstance(label, str):
        text = label.strip().strip("().").casefold()
        if len(text) == 1 and text.upper() in valid:
            return text.upper()
        if label.strip().casefold() in choices:
            index = choices.index(label.strip().casefold())
    if index is None or not 0 <= index < len(valid):
        raise RewardFailed("gpqa", f"want a letter of {valid}, an index, or one of metadata.choices as label, got {label!r}"[:300])
    return valid[index]
