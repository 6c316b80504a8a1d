"""The reward for sentences: a dictionary, a verb, no repetition."""

from pathlib import Path

import pytest

from tests.refusals import refusal
from tests.unit.test_rewards_house import OPTIONS
from tidemill.bus.wire.messages import Status
from tidemill.rewards.builtin.text import sentence
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest


def parts_of(text: str) -> dict[str, float]:
    request = RewardRequest(prompt="p", response=text, label=None, status=Status.COMPLETED)
    return sentence(request, **OPTIONS["sentence"])


@pytest.mark.parametrize(
    "text",
    [
        '"The ocean brings calm to people every morning."',
        "The river flows gently through the old village today.",
        "Anna's dog doesn't like the rain.",  # one name that no dictionary has
        "The cat and the dog sleep.",  # a short word may stand twice
    ],
)
def test_sentences_have_a_score_of_one(text: str) -> None:
    assert parts_of(text) == {"score": 1, "known": 1, "verb": 1, "once": 1}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("bee", "verb"),
        ("Blue ocean morning together", "verb"),
        ("The blorf zindles run gently", "known"),
        ("The morning is a morning", "once"),
        ("It is the day the way the heart is", "once"),
    ],
)
def test_other_texts_have_none_and_the_part_that_failed(text: str, part: str) -> None:
    parts = parts_of(text)
    assert parts["score"] == 0 and [name for name, value in parts.items() if not value] == ["score", part], parts


@pytest.mark.parametrize("text", ["", '""', "12 34", "\n", "\U0001f600"])
def test_texts_without_words_have_none(text: str) -> None:
    assert parts_of(text)["score"] == 0


def test_every_verb_is_a_word() -> None:
    words, verbs = (Path(OPTIONS["sentence"][name]).read_text().split() for name in ("words", "verbs"))
    assert set(verbs) <= set(words) and len(set(words)) == len(words) > 40_000


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "words.txt"
    if content is not None:
        file.write_bytes(content)
    request = RewardRequest(prompt="p", response="a", label=None, status=Status.COMPLETED)
    with refusal(RewardFailed, reward="sentence", place=str(file)):
        sentence(request, words=str(file), verbs=OPTIONS["sentence"]["verbs"])
