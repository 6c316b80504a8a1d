"""Rewards against a definition of their own in a few lines, or their library: on ``LEAST`` inputs or more each, and on
drawn ones.

``digits``, ``exact``, ``format``, ``length``, ``math_answer``, ``math_verify``, ``regex``, and ``relative_length``, the
reward of groups. The definitions of ``tests/bench/plain_rewards.py`` are those of the papers and libraries that it
names. (``judge``, ``remote`` and
``reward_model``: ``test_rewards_asked.py``.)
"""

import itertools
import random
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.bench import plain_rewards as plain
from tests.unit.test_rewards_house import DIFFERENT, SAME, pairs
from tidemill.bus.wire.messages import Status, score_of
from tidemill.rewards.builtin.math_answer import math_answer
from tidemill.rewards.builtin.math_equality import math_verify
from tidemill.rewards.builtin.text import digits, exact, format_tags, length, regex
from tidemill.rewards.group import GroupRequest, relative_length
from tidemill.rewards.port import RewardRequest

LEAST = 60


def asked(response: str, label: Any = None, tokens: int = 0) -> RewardRequest:
    return RewardRequest(
        prompt="p",
        response=response,
        label=label,
        status=Status.COMPLETED,
        sampled_length=tokens,
        response_length=tokens + 5,
    )


# ---- exact: the same characters, without white space around and with case unless the options say otherwise

TEXTS = [
    "Paris",
    "paris",
    " Paris",
    "Paris\n",
    "PARIS",
    "",
    " ",
    "7",
    "7.0",
    "07",
    "Stra\u00dfe",
    "STRASSE",
    "\tParis  London ",
    "Paris London",
    "\u0130",
    "a b",
]
LABELS: list[Any] = ["Paris", " paris ", 7, 7.0, "", "STRASSE", True, None, ["Paris", "London"], [7, "a b"], ("7",), []]


def exactly(response: str, label: Any, *, strip: bool, case_sensitive: bool) -> float:
    for one in label if isinstance(label, (list, tuple)) else [label]:
        both = [str(one), response]
        both = [re.sub(r"\A\s+|\s+\Z", "", text) for text in both] if strip else both
        both = both if case_sensitive else [text.casefold() for text in both]
        if both[0] == both[1]:
            return 1.0
    return 0.0


@pytest.mark.parametrize("label", LABELS, ids=repr)
@pytest.mark.parametrize(("strip", "case_sensitive"), list(itertools.product([True, False], repeat=2)))
def test_exact_is_its_definition(label: Any, strip: bool, case_sensitive: bool) -> None:
    assert len(TEXTS) * len(LABELS) >= LEAST
    options = {"strip": strip, "case_sensitive": case_sensitive}
    for text in TEXTS:
        assert exact(asked(text, label), **options) == exactly(text, label, **options), text
        if strip and case_sensitive and not isinstance(label, tuple):
            assert exact(asked(text, label)) == plain.exact(asked(text, label)), text


@given(st.text(max_size=5), st.text(max_size=5) | st.integers(), st.booleans(), st.booleans(), st.booleans())
@example("a\x1c", "a", True, True, False)
def test_exact_is_its_definition_on_drawn_texts(
    text: str, label: Any, strip: bool, case_sensitive: bool, same: bool
) -> None:
    text, options = f" {label}\n" if same else text, {"strip": strip, "case_sensitive": case_sensitive}
    assert exact(asked(text, label), **options) == exactly(text, label, **options)


# ---- regex: found, or describes all; the last match's group is the label

PATTERNS = [
    r"(\d+)",
    r"x=(\d*)",
    r"([a-c]+)|z",
    r"(.+)",
    r"^(\w+)$",
    r"#### (\S+)",
    r"(?i)(yes|no)",
    r"\b(\w)\b",
    r"(a)(b)?",
    "()",
]
RESPONSES = [
    "x=1 x=22",
    "abc z",
    "",
    "yes or NO",
    "#### 18\n#### 19",
    "a",
    "ab",
    "one\ntwo",
    " 7 ",
    "z",
    "x= ",
    "caf\u00e9 #### 3",
]


def matched(pattern: str, text: str, label: str, *, whole: bool, group: str) -> float:
    found = list(re.finditer(f"(?s:{pattern})" if "(?i)" not in pattern else f"(?si:{pattern[4:]})", text))
    if whole:  # anchored at both ends, so at most one begins the text and ends it
        again = re.match(f"(?s:{pattern})\\Z" if "(?i)" not in pattern else f"(?si:{pattern[4:]})\\Z", text)
        found = [again] if again else []
    if not found or not group:
        return float(bool(found))
    got = found[-1][int(group)]
    return float(got is not None and got.strip() == label.strip())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regex_is_its_definition(pattern: str) -> None:
    assert len(PATTERNS) * len(RESPONSES) >= LEAST
    scores = set()
    for text, whole, group in itertools.product(RESPONSES, [False, True], ["", "0", "1"]):
        for label in ("22", "7", " NO", "19", ""):
            want = matched(pattern, text, label, whole=whole, group=group)
            assert regex(asked(text, label), pattern=pattern, whole=whole, group=group) == want, (
                text,
                label,
                whole,
                group,
            )
            scores.add(want)
    assert scores == {0.0, 1.0}


@given(st.text("ab1 \n", max_size=8), st.text("ab1", max_size=2), st.sampled_from(["", "0", "1"]), st.booleans())
def test_regex_is_its_definition_on_drawn_texts(text: str, label: str, group: str, whole: bool) -> None:
    for pattern in ("(a+)b?", "(.)", r"(\d*)"):
        assert regex(asked(text, label), pattern=pattern, whole=whole, group=group) == matched(
            pattern, text, label, whole=whole, group=group
        )


# ---- length: minus slope times the relative excess (or distance), at least -1

TOKENS, TARGETS, SLOPES = [0, 1, 50, 99, 100, 101, 150, 199, 1_000], [1, 50, 100, 4_096], [0.0, 0.5, 1.0, 3.0]


def excess(tokens: int, target: int, slope: float, shorter: bool) -> float:
    away = Fraction(tokens - target, target)
    lost = abs(away) if shorter else max(Fraction(0), away)
    return -float(min(Fraction(1), Fraction(slope) * lost))


@pytest.mark.parametrize(("tokens", "target"), list(itertools.product(TOKENS, TARGETS)))
def test_length_is_its_definition(tokens: int, target: int) -> None:
    assert len(TOKENS) * len(TARGETS) * len(SLOPES) >= LEAST
    for slope, shorter in itertools.product(SLOPES, [False, True]):
        got = length(asked("", tokens=tokens), target=target, slope=slope, shorter=shorter)
        assert got == pytest.approx(excess(tokens, target, slope, shorter), abs=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.floats(0, 100), st.booleans())
def test_length_is_its_definition_on_drawn_numbers(tokens: int, target: int, slope: float, shorter: bool) -> None:
    got = length(asked("", tokens=tokens), target=target, slope=slope, shorter=shorter)
    assert got == pytest.approx(excess(tokens, target, slope, shorter), abs=1e-9)


# ---- format: DeepSeek-R1's form, by a regular expression

PARTS = ["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n"]


@pytest.mark.parametrize("number", range(7))
def test_format_is_its_definition_on_all_sequences_of_tags_and_texts(number: int) -> None:
    every = map("".join, itertools.product(PARTS[:6], repeat=number))
    scores = [format_tags(asked(text)) == plain.format_tags(asked(text)) for text in every]
    assert all(scores) and len(scores) == 6**number
    good = "<think>a</think><answer>a</answer>"
    assert number < 6 or format_tags(asked(good)) == plain.format_tags(asked(good)) == 1.0


@given(st.lists(st.sampled_from(PARTS) | st.text("<>/aks", max_size=3), max_size=12), st.integers(0, 12))
def test_format_is_its_definition_on_drawn_texts(parts: list[str], place: int) -> None:
    good = ["<think>", "a", "</think>", "<answer>", "b", "</answer>"]
    for text in ("".join(parts), "".join([*good[:place], *parts[:1], *good[place:]])):
        assert format_tags(asked(text)) == plain.format_tags(asked(text)), text


# ---- relative_length: Kimi k1.5's formula

GROUPS = random.Random(7)
"""Makes the groups of the table; the same ones each time."""


def group_of(lengths: list[int], rewards: list[Any]) -> GroupRequest:
    return GroupRequest(samples=tuple(asked("", tokens=tokens) for tokens in lengths), rewards=tuple(rewards))


TABLE = [
    group_of([GROUPS.randrange(1, spread) for _ in range(size)], [float(GROUPS.random() < share) for _ in range(size)])
    for size in (1, 2, 3, 8, 16)
    for spread in (2, 5, 1_000)
    for share in (0.0, 0.3, 0.7, 1.0)
]


def test_relative_length_is_its_definition() -> None:
    assert len(TABLE) >= LEAST
    for request in TABLE:
        found = relative_length(request)
        assert [one["score"] for one in found] == pytest.approx(plain.relative_length(request))
        assert [one["score"] for one in found] == pytest.approx([one["reward"] + one["length"] for one in found])
    found = relative_length(group_of([10, 20, 30], [1.0, 1.0, 0.0]))
    assert [(one["score"], one["reward"], one["length"]) for one in found] == [
        (1.5, 1.0, 0.5),
        (1.0, 1.0, 0.0),
        (-0.5, 0.0, -0.5),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 10**5), st.floats(-2, 2)), min_size=1, max_size=9),
    st.floats(-3, 3),
    st.floats(-2, 2),
)
def test_relative_length_is_its_definition_with_options(
    samples: list[tuple[int, float]], weight: float, right_at: float
) -> None:
    """With an offset and a scale of the rewards, the definition is that with weight 1 and right answers of 1."""
    right = [float(reward >= right_at) for _, reward in samples]
    wanted = plain.relative_length(group_of([tokens for tokens, _ in samples], right))
    found = relative_length(
        group_of([tokens for tokens, _ in samples], [{"score": reward} for _, reward in samples]),
        weight=weight,
        right_at=right_at,
    )
    for one, want, is_right, (_, reward) in zip(found, wanted, right, samples, strict=True):
        assert one["score"] == pytest.approx(reward + weight * (want - is_right), abs=1e-9)
        assert score_of(one) == one["score"]


# ---- math_verify: the library itself, called as its documentation has it; and a table of what is equal

MATH = [(*pair, True) for pair in pairs(SAME)] + [(*pair, False) for pair in pairs(DIFFERENT)]
OTHERWISE = {("1 1/2", "1.5"), ("7.", "7"), ("2ab", "2ba")}
"""Pairs that are equal, and that math-verify does not find equal."""
MATRICES = [
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
    (r"x \geq 3", r"x \ge 3", True),
    (r"x > 3", r"x < 3", False),
    (r"\{1, 2\} \cup \{3\}", r"\{3, 2, 1\}", True),
    (r"5!", "120", True),
    (r"\sin(\pi/6)", r"\frac{1}{2}", True),
    (r"\log_2 8", "3", True),
    (r"x+y=1", r"y=1-x", True),
]


@pytest.mark.parametrize(("one", "other", "same"), MATH + MATRICES)
def test_math_verify_is_its_library_and_right(one: str, other: str, same: bool) -> None:
    assert len(MATH) >= LEAST
    request = asked(rf"so it is \boxed{{{one}}}", other)
    assert math_verify(request) == plain.math_verify(request)
    assert math_verify(request) == float(same and (one, other) not in OTHERWISE)


# ---- digits: the share of right characters, of those of the longer text and its end

STRINGS = ["", "7", "77", "123", "321", "1234", "99 bottles", "caf\u00e9"]


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.TRUNCATED])
@pytest.mark.parametrize("label", STRINGS)
def test_digits_is_its_definition(label: str, status: Status) -> None:
    assert len(STRINGS) ** 2 >= LEAST
    for text in STRINGS:
        padded = itertools.zip_longest([*label, "end"], [*text, "end" if status is Status.COMPLETED else "cut off"])
        right = [one == other for one, other in padded]
        assert digits(RewardRequest(prompt="p", response=text, label=label, status=status)) == sum(right) / len(
            right
        ), text


# ---- math_answer: the answer's value is the label's, wherever it stands and however it is written

VALUES = [
    Fraction(18),
    Fraction(-3),
    Fraction(1_234),
    Fraction(1_000_000),
    Fraction(3, 4),
    Fraction(5, 2),
    Fraction(-1, 8),
    Fraction(0),
]
PLACES = [
    "48/2=24\n#### {}",
    "#### 7\nno:\n#### {}\nas it is",
    "7 of 20, thus \\boxed{{{}}}, not 7",
    "first 7, then {}.",
]
"""An answer behind ``####`` or in a box, or the last number of a response, behind another number."""


def written(value: Fraction) -> list[str]:
    """Return notations of a value: as decimals, with a comma, a currency, a unit or in TeX where it has one, as a
    fraction.
    """
    sign, size = "-" * (value < 0), abs(value)
    decimal = f"{float(size):.10f}".rstrip("0").rstrip(".")
    found = [
        sign + decimal,
        f"{sign}${decimal}",
        f"{sign}{decimal} eggs",
        f"{sign}{decimal}" + ("0" if "." in decimal else ".0"),
    ]
    if size.denominator == 1:
        return [*found, f"{sign}{size.numerator:,}"]
    return [
        *found,
        f"{sign}{size.numerator}/{size.denominator}",
        f"{sign}\\frac{{{size.numerator}}}{{{size.denominator}}}",
    ]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("label", VALUES, ids=str)
def test_math_answer_is_the_equality_of_values(label: Fraction, place: str) -> None:
    assert len(VALUES) * len(PLACES) * 5 >= LEAST
    for answer in (label, label + 1, 10 * label + 1, -label - 1):
        for text, gold in itertools.product(written(answer), written(label)):
            if "frac" in text and "####" not in place and "boxed" not in place:
                continue  # the last number of \\frac{3}{4} is 4
            if "eggs" in gold:
                continue
            got = math_answer(asked(place.format(text), gold))
            assert got["correct"] == float(answer == label), (text, gold)
            assert got["score"] == got["correct"] + 0.1 * got["format"]


@pytest.mark.parametrize("label", VALUES, ids=str)
def test_math_answer_is_gsm8k_for_its_notation_and_math_verify_for_a_box(label: Fraction) -> None:
    for answer in (label, label + 1, -label - 1):
        text, gold = written(answer)[0], written(label)[0]
        assert math_answer(asked(f"#### {text}", gold))["correct"] == plain.gsm8k(asked(f"#### {text}", gold)), text
        for text in written(answer)[:2] + written(answer)[3:]:
            boxed = asked(f"so it is \\boxed{{{text}}}", gold)
            assert math_answer(boxed)["correct"] == plain.math_verify(boxed), text
