"""The rewards that ship: tables of inputs with their scores, and bounds that hold for any input."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refusal
from tidemill import launch
from tidemill.bus.wire.messages import Status
from tidemill.bus.wire.task_settings import BY_ROLLOUT
from tidemill.rewards.builtin.ifeval import INSTRUCTIONS, follows, ifeval
from tidemill.rewards.builtin.math_equality import same_math
from tidemill.rewards.builtin.math_rewards import dapo, deepscaler, gsm8k, math
from tidemill.rewards.builtin.text import f1, format_tags, gpqa, overlong, regex, repetition
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import TABLE, UNBOUNDED, bind


def request(response: str, label: Any = None, *, length: int = 0, **metadata: Any) -> RewardRequest:
    return RewardRequest(
        prompt="p",
        response=response,
        label=label,
        status=Status.COMPLETED,
        metadata=metadata,
        response_length=length + 9,
        sampled_length=length,
    )


SAME = r"""
18 = 18.0 | 1/2 = 0.5 | \frac12 = 0.5 | \frac{1}{2} = \dfrac{2}{4} | 1,234 = 1234 | \$5 = 5 | 50\% = 50
2\sqrt{3} = \sqrt{12}
-\frac{3}{4} = -0.75 | \frac{-3}{4} = -3/4 | 3\pi = \pi\cdot 3 | x^2+2x+1 = (x+1)^2 | x = 5 ~ 5
\text{Paris} = paris | 90^\circ = 90
(1, 2) = (1,2.0) | \left(1,2\right) = (1,2) | \{1,2\} = \{2,1\} | 1,2 = 2, 1 | [0,1) = [0,1) | 5 \text{ cm} = 5
10 degrees = 10
1\frac{1}{2} = 3/2 | 1 1/2 = 1.5 | 2^{10} = 1024 | 2^3 = 8 | \sqrt[3]{8} = 2
\frac{\sqrt{2}}{2} = \frac{1}{\sqrt{2}} | (x-1)(x+1) = x^2-1
\text{(A)} = (A) | 0.5 = .5 | +3 = 3 | 7. = 7 | \frac{x}{2} = 0.5x | e^2 = e\cdot e | 3 \times 4 = 12 | -(-2) = 2
\infty = \infty
a+b = b+a | 2ab = 2ba | \cos(0) = 1 | \ln(e) = 1 | x \in [1,2] ~ [1,2] | 10\div 4 = 2.5 | (0,\frac{1}{2}) = (0, 0.5)
"""
DIFFERENT = r"""
18 = 19 | 1/2 = 0.51 | \frac12 = 2 | 2\sqrt{3} = \sqrt{11} | x^2 = 2x | (1,2) = (2,1) | (1,2) = [1,2] | 1,2 = 1
\{1,2\} = \{1,3\}
Paris = London | x+1 = x-1 | -3 = 3 | 3\pi = 3 | [0,1) = (0,1) | 1,234 = 1235 | 2^{10} = 1025 | a+b = a-b
\sqrt{4} = 4 | 12 = 1 2
(1,2,3) = (1,2) | \frac{1}{0} = 1 | 7 = seven | \infty = 5 | \text{A} = \text{B} | x = y | 10^{10} = 10^{11}
0.333 = 1/3
"""


def pairs(table: str, sign: str = " = ") -> list[tuple[str, str]]:
    rows = [row for line in table.strip().splitlines() for row in line.split(" | ")]
    return [tuple(row.split(" ~ " if " ~ " in row else sign, 1)) for row in rows]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("one", "other", "same"), [(*p, True) for p in pairs(SAME)] + [(*p, False) for p in pairs(DIFFERENT)]
)
def test_mathematical_answers_are_equal_both_ways(one: str, other: str, same: bool) -> None:
    assert same_math(one, other) is same
    assert same_math(other, one) is same


@pytest.mark.parametrize(
    ("one", "other", "same"), [(*p, True) for p in pairs(SAME)] + [(*p, False) for p in pairs(DIFFERENT)]
)
def test_deepscaler_math_and_dapo_grade_the_answer_in_its_place(one: str, other: str, same: bool) -> None:
    boxed, label = rf"<think>\boxed{{0}}</think> so \boxed{{{one}}}", rf"\boxed{{{other}}}"
    assert deepscaler(request(boxed, other)) == deepscaler(request(boxed, label)) == math(request(boxed, other)) == same
    assert dapo(request(f"thus\nAnswer: {one}", other)) == {"score": 2.0 * same - 1, "correct": float(same)}


def test_an_answer_in_another_place_does_not_count() -> None:
    assert deepscaler(request(r"\boxed{3}", "3")) == 0.0, "no thoughts"
    assert deepscaler(request(r"\boxed{3}", "3"), think=False) == math(request(r"\boxed{3}", ["4", "3"])) == 1.0
    assert deepscaler(request(r"### ###Response \boxed{3}", "3")) == 1.0
    assert deepscaler(request(r"<think>\boxed{3}</think> 3", "3")) == math(request("3", "3")) == 0.0
    assert dapo(request("Answer: 3" + " " * 300, "3"))["score"] == dapo(request("3", "3"))["score"] == -1.0
    assert dapo(request("Answer: 1\nanswer: \\boxed{3}", "3"))["score"] == 1.0


SPLIT = Path(launch.__file__).parent / "data" / "gsm8k" / "test.jsonl"


def test_all_gold_answers_of_gsm8k_in_five_notations_are_right_and_perturbed_ones_wrong() -> None:
    golds = [
        json.loads(line)["answer"].rpartition("####")[2].strip().replace(",", "")
        for line in SPLIT.read_text().splitlines()
    ]
    assert len(golds) == 1319
    for place, gold in enumerate(golds):
        number, wrong = int(gold), (int(gold) + 1, int(gold) * 10 + 1, -int(gold) - 1)[place % 3]
        for write in (
            "#### {}",
            r"so \boxed{{{}}}",
            "The answer is **{}**.",
            "12 / 4 = 3, so ${}.00",
            "#### {:,} eggs",
        ):
            assert gsm8k(request(write.format(number), gold)) == 1.0, (write, gold)
            assert gsm8k(request(write.format(wrong), gold)) == 0.0, (write, gold)


def test_gsm8k_strict_and_labels() -> None:
    assert gsm8k(request("18", "18")) == 1.0
    assert gsm8k(request("18", "x\n#### 18"), strict=True) == 0.0
    assert gsm8k(request("#### 18", 18), strict=True) == 1.0
    with refusal(RewardFailed, reward="gsm8k", got="'x'"):
        gsm8k(request("x", "x"))


TEXTS = ["Paris", "the Paris", "paris!", "city of Paris", "London", "yes", "no", "", "a red, red rose", "red rose"]
F1 = {
    ("Paris", "city of Paris"): 0.5, ("the Paris", "city of Paris"): 0.5, ("paris!", "city of Paris"): 0.5,
    ("a red, red rose", "red rose"): 0.8,
}  # fmt: skip


def test_f1_of_words() -> None:
    alike = {"Paris": 0, "the Paris": 0, "paris!": 0}
    for one in TEXTS:
        for other in TEXTS:
            same = one == other or (one in alike and other in alike)
            want = 1.0 if same else F1.get((one, other), F1.get((other, one), 0.0))
            assert f1(request(one, other)) == pytest.approx(want), (one, other)
    assert f1(request("yes it is", "yes")) == 0.0, "yes must match exactly"
    assert f1(request("b", ["x", "b"])) == 1.0
    with refusal(RewardFailed, reward="f1", got="NoneType"):
        f1(request("x", None))


WAYS = [
    "{}", "({})",
    "The answer is {}.", "answer: ({})", "Answer: **{}**", r"\boxed{{{}}}", r"\boxed{{\text{{{}}}}}",
        "I choose option {}",
    "A or B? The correct choice is {}", "<think>The answer is D</think>\n{}",
    "maybe B. Finally, the answer is ({}).", "{}) because it is so",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_gpqa_finds_the_letter(way: str) -> None:
    choices = ["red", "green", "blue", "grey"]
    for index, letter in enumerate("ABCD"):
        text = way.format(letter)
        for label in (letter, letter.lower(), f"({letter})", index, choices[index]):
            assert gpqa(request(text, label, choices=choices, valid_letters="ABCD")) == 1.0, (text, label)
            assert (
                gpqa(request(text, label, choices=choices, valid_letters="ABCD", correct_letter="ABCD"[index - 1]))
                == 0.0
            )


@pytest.mark.parametrize("label", [None, "purple", 11, -1, True, {}, "Z"])
def test_gpqa_refuses_a_label_that_names_no_choice(label: object) -> None:
    with refusal(RewardFailed, reward="gpqa", got=repr(label)):
        gpqa(request("A", label, choices=["red"], valid_letters="ABCD"))


def test_format_wants_each_tag_once_in_order() -> None:
    good = "<think>a</think><answer>b</answer>"
    pieces = ["<think>", "a", "</think>", "<answer>", "b", "</answer>"]
    assert format_tags(request(good)) == format_tags(request(f" \n{good} ")) == 1.0
    for place in range(len(pieces)):
        for change in ([], [pieces[place]] * 2):
            text = "".join(pieces[:place] + change + pieces[place + 1 :])
            assert format_tags(request(text)) == float(bool(change) and pieces[place] in "ab"), text
        for other in range(place):
            swapped = list(pieces)
            swapped[place], swapped[other] = swapped[other], swapped[place]
            assert format_tags(request("".join(swapped))) == float({pieces[place], pieces[other]} == {"a", "b"}), (
                swapped
            )
    for text in (f"x{good}", f"{good}x", good.replace("><a", ">x<a")):
        assert (format_tags(request(text)), format_tags(request(text), outside=True)) == (0.0, 1.0)
    assert format_tags(request("<x>1</x>"), tags="x") == 1.0


@pytest.mark.parametrize(
    ("response", "options", "want"),
    [
        ("abc", {"pattern": "b"}, 1.0), ("abc", {"pattern": "b", "whole": True}, 0.0), ("a\nc", {"pattern": "a.c",
            "whole": True}, 1.0),
        ("n=1 n=7", {"pattern": r"n=(\d)", "group": "1"}, 1.0), ("n=7 n=1", {"pattern": r"n=(\d)", "group": "1"}, 0.0),
        ("n= 7 ", {"pattern": r"n=(?P<n>.*)", "group": "n"}, 1.0), ("x", {"pattern": "y", "group": "0"}, 0.0),
    ],
)  # fmt: skip
def test_regex(response: str, options: dict[str, Any], want: float) -> None:
    assert regex(request(response, 7), **options) == want


def test_overlong_is_a_line_in_the_buffer() -> None:
    got = [overlong(request("", length=length), max_tokens=100, buffer=20) for length in range(141)]
    assert got == pytest.approx([0.0] * 81 + [-n / 20 for n in range(1, 21)] + [-1.0] * 40)
    assert [overlong(request("", length=length), max_tokens=100, buffer=0) for length in (100, 101)] == [0.0, -1.0]


@pytest.mark.parametrize("ngram", [1, 2, 3, 4])
@pytest.mark.parametrize("times", range(1, 17))
def test_repetition_counts_phrases_that_occurred_before(ngram: int, times: int) -> None:
    total, distinct = 5 * times - ngram + 1, min(5, 5 * times - ngram + 1)
    assert repetition(request("a b c d e " * times), ngram=ngram, penalty=2.0) == pytest.approx(
        -2 * (1 - distinct / total)
    )


LANGUAGE = "language:response_language"
"""The instruction that needs an extra."""
IFEVAL: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 2}, ["A B c",
        "NO, NO"], ["A b", "no"]),
    ("change_case:english_capital", {}, ["HELLO, YOU", "A 1"], ["Hello", "1"]),
    ("change_case:english_lowercase", {}, ["hello 1"], ["Hello"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, ["say it. yes", " Say it."], ["yes. Say it."]),
    ("combination:two_responses", {}, ["a ****** b", "******a******b******"], ["a", "a ****** a", "a******b******c",
        "a ******"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] [b]", "[a][b][c]"], ["[a]", "[a"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["x\nP.S. y", "p. s. y"], ["post"]),
    ("detectable_format:constrained_response", {}, ["My answer is no."], ["no"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n{"a": 1}\n```'], ["{a}", "[" * 100_000]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
        ["Section 1 a Section 2 b"], ["Section 1"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n* b", "- a\n - b"], ["* a", "* a\n* b\n* c",
        "**a**\n**b**"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* **b**"], ["*a*", "** ** * *"]),
    ("detectable_format:title", {}, ["<<a>> text"], ["<<>> text", "<<a text", "title"]),
    ("keywords:existence", {"keywords": ["red", "Blue"]}, ["RED blue"], ["red"]),
    ("keywords:forbidden_words", {"forbidden_words": ["red"]}, ["blue", "redder"], ["so Red."]),
    ("keywords:frequency", {"keyword": "a", "relation": "less than", "frequency": 3}, ["b a a"], ["a a a"]),
    ("keywords:letter_frequency", {"letter": "e", "let_relation": "at least", "let_frequency": 2}, ["Eve"], ["red"]),
    (
        LANGUAGE, {"language": "de"},
        ["Das ist ein kurzer Satz auf Deutsch, und noch einer.", "12 + 34 = 46"], ["This is a sentence in English."],
    ),
    (
        "length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        ['a\n\n"So, it is'], ["so\n\na", "so", "a\n\nso\n\nb"],
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "*** a *** b"], ["a", "a *** *** b"]),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}, ["A b. C d!", "A?! B."],
        ["A b.", "1.5 is"]),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, ["a b", "a, b"], ["a b c"]),
    ("punctuation:no_comma", {}, ["a b"], ["a, b"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ["x the end.", 'x "The end."'], ["The end. x"]),
    ("startend:quotation", {}, ['"a"', ' "a b" '], ['"a', '"']),
]  # fmt: skip


@pytest.mark.parametrize(("name", "own", "good", "bad"), IFEVAL, ids=[row[0] for row in IFEVAL])
def test_instructions(name: str, own: dict[str, Any], good: list[str], bad: list[str]) -> None:
    if name == LANGUAGE:
        pytest.importorskip("langdetect", reason="pip install 'tidemill[language]' (make setup installs it)")
    for text in good:
        assert follows(name, own, text), text
    for text in [*bad, " "]:
        assert not follows(name, own, text), text


def test_every_instruction_is_tested_and_all_must_be_followed() -> None:
    assert {row[0] for row in IFEVAL} == INSTRUCTIONS.keys()
    rules: dict[str, Any] = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{}, None],
    }
    assert ifeval(request('"a"', rules)) == ifeval(request('"a"', **rules)) == {"score": 1.0, "followed": 1.0}
    assert ifeval(request("a", rules)) == {"score": 0.0, "followed": 0.5}
    assert ifeval(request("a", rules), share=True) == {"score": 0.5, "followed": 0.5}
    for wrong, words in (
        ({}, "want a list"), ({"instruction_id_list": ["x"], "kwargs": []}, "want a list of 1 maps"),
        ({"instruction_id_list": ["words:start_verb"], "kwargs": [{}]}, "is not supported"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "KeyError"),
        ({"instruction_id_list": ["keywords:frequency"], "kwargs": [{"keyword": "a", "relation": "more",
            "frequency": 1}]}, "less than"),
    ):  # fmt: skip
        with pytest.raises(RewardFailed, match=words):
            ifeval(request("a", wrong))


def test_a_language_is_detected_the_same_each_time_or_refused_with_the_cure() -> None:
    text = "This is not eine Sprache, sondern two of them, und keine wins."
    if find_spec("langdetect") is None:
        with refusal(RewardFailed, reason=re.compile(r"language:response_language' .*tidemill\[language\]")):
            follows(LANGUAGE, {"language": "en"}, text)
        return
    assert len({follows(LANGUAGE, {"language": "en"}, text) for _ in range(20)}) == 1
    assert follows(LANGUAGE, {"language": "zh-cn"}, "这是一个用中文写的句子。")
    with refusal(RewardFailed, reward="ifeval", got="'xx'"):
        follows(LANGUAGE, {"language": "xx"}, text)


def test_without_the_library_of_languages_the_cure_is_named() -> None:
    """A fresh interpreter in which it is blocked."""
    code = "import sys; sys.modules['langdetect'] = None\nfrom tidemill.rewards.builtin.ifeval import follows\n"
    code += "follows('language:response_language', {'language': 'de'}, 'Das')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "RewardFailed" in ended.stderr and "pip install 'tidemill[language]'" in ended.stderr, ended.stderr


WORDS = Path(__file__).parents[2] / "launch/data/real"
OPTIONS: dict[str, dict[str, Any]] = {
    "overlong": {"max_tokens": 10, "buffer": 4},
    "regex": {"pattern": "a+b"},
    "length": {"target": 5},
    "sentence": {"words": str(WORDS / "words.txt"), "verbs": str(WORDS / "verbs.txt")},
}
BOUNDED = sorted(TABLE.keys() - UNBOUNDED - {BY_ROLLOUT})
"""Rewards that run in the event loop. ``tests/unit/test_rewards_any_input.py`` draws inputs for all of them."""
REPEATED = r"\boxed{ { ( 1, ^ \frac - x <think> #### [ * **a << *** $ \text{"
LONG = [*REPEATED.split(" "), "a ", "A ", ". ", "Answer: ", "\n"]


@pytest.mark.parametrize("name", [*BOUNDED, "ifeval"])
def test_time_is_bounded_for_a_response_that_repeats(name: str) -> None:
    reward: Callable[..., Any] = bind(name, OPTIONS.get(name))
    rows = [row for row in IFEVAL if row[0] != LANGUAGE or find_spec("langdetect") is not None]
    rules: dict[str, Any] = {"instruction_id_list": [row[0] for row in rows], "kwargs": [row[1] for row in rows]}
    begin = time.process_time()
    for piece in LONG:
        text = piece * (60_000 // len(piece))
        for response in (text, rf"</think>\boxed{{{text}}}", f"Answer: {text[:290]}"):
            reward(request(response, "A" if name == "gpqa" else "18", **rules))
    assert time.process_time() - begin < 10, "66 responses of 60,000 characters"


@pytest.mark.parametrize(
    ("label", "response", "score"),
    [
        ("1/2", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{2}", r"so $\frac{2}{4}$", 1.0),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"$\begin{pmatrix}1\\2\end{pmatrix}$", 1.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"$\begin{pmatrix}2\\1\end{pmatrix}$", 0.0),
        ("[1,2)", r"\boxed{[1,2)}", 1.0),
        ("[1,2)", r"\boxed{(1,2)}", 0.0),
        (r"x \geq 3", r"$x \ge 3$", 1.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        (5, "the answer is 5", 1.0),
        (5, "the answer is 6", 0.0),
        (["4", "5"], r"\boxed{5}", 1.0),
        ("3", "", 0.0),
    ],
)
def test_math_verify(label: Any, response: str, score: float) -> None:
    assert bind("math_verify")(request(response, label)) == score


def test_math_verify_may_want_a_box_and_refuses_labels_without_an_answer() -> None:
    boxed = bind("math_verify", {"boxed": True})
    assert boxed(request("the answer is 5", "5")) == 0.0
    assert boxed(request(r"7, no, \boxed{5} and 6", "5")) == 1.0
    for label in ("", None, {"a": 1}, True):
        with refusal(RewardFailed, reward="math_verify", place="label"):
            bind("math_verify")(request("5", label))


@pytest.mark.parametrize(
    ("tokens", "options", "score"),
    [
        (50, {}, 0.0),
        (100, {}, 0.0),
        (150, {}, -0.5),
        (500, {}, -1.0),
        (110, {"slope": 2.0}, -0.2),
        (50, {"shorter": True}, -0.5),
    ],
)
def test_length(tokens: int, options: dict[str, Any], score: float) -> None:
    assert bind("length", {"target": 100, **options})(request("", length=tokens)) == pytest.approx(score)
