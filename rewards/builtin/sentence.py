"""Reward for a text that is one English sentence, by a rule that needs no model: its words stand in a dictionary, one
of them is a verb, and none is repeated.

It keeps a model from texts that follow other instructions with words in no order (``"bee"``). A text of known words in
no order passes: the rule judges words, not grammar.
"""

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_ENDING = re.compile(r"(?:n['\u2019]t|['\u2019]\w*)$")
UNKNOWN = 1
"""Words outside the dictionary that a sentence may have: a name, for example."""
SHORT = 3
"""Letters of a word that may stand twice, as *the* and *and* do."""


def sentence(request: RewardRequest, *, words: str, verbs: str) -> dict[str, float]:
    """Return ``score``: 1 for a sentence, else 0; and the three parts of the rule, ``known``, ``verb``, ``once``.

    ``words``, ``verbs``: files with one lower-case word a line. Raises RewardFailed for a file that cannot be read.
    """
    response_words = [_plain(word) for word in _WORD.findall(request.response)]
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
