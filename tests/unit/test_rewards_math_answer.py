"""Final answers: their place in the text, their equality, and the reward for good form."""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill import launch
from tidemill.bus.wire.messages import Status
from tidemill.rewards.builtin.math_answer import (
    find_answer,
    find_gold,
    format_share,
    math_answer,
    same_answer,
    to_number,
)
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest


def score(response: str, label: object, **options: float) -> dict[str, float]:
    return math_answer(RewardRequest(prompt="q", response=response, label=label, status=Status.COMPLETED), **options)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so it is\n#### 18", "18"),
        ("#### 1\nno, wait\n#### 2", "2"),
        ("#### 18 eggs\nand more 5", "18 eggs"),
        (r"thus \boxed{18} of 20", "18"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{unclosed", "1"),
        (r"first 3 \boxed {4}", "4"),
        ("first 3, then 1,234.", "1,234"),
        ("10-7 = 3", "3"),
        ("7 - 10 = -3.", "-3"),
        ("7-10", "10"),
        ("1,2", "2"),
        ("it costs $5.50!", "$5.50"),
        ("#### ", None),
        ("the answer is 7 ####", "7"),
        ("none", None),
        ("", None),
    ],
)
def test_where_the_answer_stands(response: str, answer: str | None) -> None:
    assert find_answer(response)[0] == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", Fraction(18)),
        (" 1,234,567 ", Fraction(1234567)),
        ("$1,234.50", Fraction(2469, 2)),
        (r"\$5", Fraction(5)),
        ("50%", Fraction(50)),
        (r"50\%", Fraction(50)),
        ("-.5", Fraction(-1, 2)),
        ("+7.", Fraction(7)),
        ("\N{MINUS SIGN}3", Fraction(-3)),
        ("3/4", Fraction(3, 4)),
        (r"-1\frac{3}{4}", Fraction(-7, 4)),
        (r"1\frac{1}{0}", None),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\text{12}", Fraction(12)),
        ("3/0", None),
        (r"\frac{1}{0}", None),
        ("1,23", None),
        ("1e5", 100000),
        ("x", None),
        ("", None),
        ("٣", None),
        ("9" * 5000, None),
    ],
)
def test_numbers_are_read_exactly(text: str, number: Fraction | None) -> None:
    assert to_number(text) == number


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("18.00", "18", True),
        ("0.75", "3/4", True),
        ("$1,000", "1000", True),
        ("18 eggs", "18", True),
        ("x = 18", "18", True),
        ("180", "18", False),
        ("-18", "18", False),
        ("eggs", "18", False),
        ("Paris.", "paris", True),
        (r"\text{Paris}", "Paris", True),
        ("(1,2)", "(12)", False),
        ("18", "x", False),
        (None, "18", False),
        ("", "", False),
    ],
)
def test_same_answer(answer: str | None, gold: str, same: bool) -> None:
    assert same_answer(answer, gold) is same


@pytest.mark.parametrize(
    ("response", "form"),
    [
        ("72", 0.0),
        ("####", 0.5),
        ("#### none", 0.5),
        ("#### 72", 1.0),
        ("48/2=24\n#### 72\n", 1.0),
        ("#### $72.00", 1.0),
        ("#### 72.", 1.0),
        ("#### 72 and so on", 0.75),
        ("#### 72\n#### 72", 0.75),
        ("#### 72 #### x", 0.25),
    ],
)
def test_form_is_shaped(response: str, form: float) -> None:
    assert format_share(response) == form


def test_score_is_the_weighted_sum() -> None:
    assert score("#### 72", "blah\n#### 72") == {"score": 1.1, "correct": 1.0, "format": 1.0}
    assert score("72 72", "72", correct_weight=2.0, format_weight=0.5) == {"score": 2.0, "correct": 1.0, "format": 0.0}
    assert score("#### 7", "72", format_weight=0.2) == {"score": 0.2, "correct": 0.0, "format": 1.0}


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_solution_of_gsm8k_gets_the_full_score_and_no_other_answer_does(split: str) -> None:
    path = Path(launch.__file__).parent / "data" / "gsm8k" / f"{split}.jsonl"
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert len(answers) > 1000
    for answer in answers:
        gold = find_gold(answer)
        assert to_number(gold) is not None, answer
        assert score(answer, gold)["score"] == 1.1, answer
        assert score(f"#### {to_number(gold)}1", answer)["correct"] == 0.0


@settings(deadline=None)
@given(
    st.text(alphabet="0123456789.,/$%#-+\\boxedfrac{}  \n", max_size=80),
    st.text(alphabet="0123456789.,-/", max_size=10),
)
def test_any_text_gets_a_score_in_range(response: str, label: str) -> None:
    parts = score(response, label)
    assert parts["correct"] in (0.0, 1.0)
    assert 0 <= parts["format"] <= 1


@settings(deadline=None)
@given(st.integers(-(10**9), 10**9))
def test_however_an_integer_is_written_it_is_right(number: int) -> None:
    for text in (f"#### {number}", f"#### {number:,}", f"so ${number:,}.00", rf"\boxed{{{number}}}", f"#### {number}%"):
        assert score(text, str(number))["correct"] == 1.0, text


@pytest.mark.parametrize(
    "piece",
    [
        r"\boxed{",
        "{",
        "}",
        "#",
        "####",
        "1,",
        "1/",
        "9",
        "1,111",
        "$",
        "\\",
        r"\text{",
        "-",
        ".",
        "\n",
        " ",
        r"\boxed ",
    ],
)
def test_time_is_linear_in_a_response_that_repeats(piece: str) -> None:
    """A response of 200,000 characters: quadratic time would take minutes here."""
    response = piece * (200_000 // len(piece))
    begin = time.process_time()
    score(response, "18")
    assert time.process_time() - begin < 2.0


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (
            {"ground_truth": "4", "style": "rule"},
            r"got a map with keys \['ground_truth', 'style'\]; name the part .*data\.label_key: COLUMN\.KEY",
        ),
        (["4"], r"want text or a number as label, got a list of 1"),
        (None, r"got none \(data\.label_key names its column\)"),
    ],
)
def test_a_label_that_holds_no_answer_is_an_error_and_not_a_reward_of_0(label: object, message: str) -> None:
    with pytest.raises(RewardFailed, match=message):
        score("#### 4", label)
