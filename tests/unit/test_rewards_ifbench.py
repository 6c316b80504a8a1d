"""Every instruction of IFBench: responses that follow it, and responses that do not."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples, rarely
from tests.refusals import refusal
from tidemill.rewards.builtin.ifbench import CAPITALS, INSTRUCTIONS, sentences
from tidemill.rewards.builtin.ifeval import follows
from tidemill.rewards.errors import RewardFailed

PALINDROMES = "level radar civic refer kayak rotor madam tenet stats Racecar!"
QUESTIONS = "".join(f"Question {n}. {'Who is it' * n}?\nA. a\nB. b\nC. c\nD. d\nE. e\n" for n in range(1, 5))
AFRICA = "\n".join(["Zimbabwe", "Zambia", *(f"Land {n:02}" for n in range(50, 0, -1))])
STORY = " ".join(f"{chr(65 + n)}nd so it went." for n in range(26))
CITIES = "ID,Country,City,Year,Count\n" + "1,France,Paris,2020,3\n" * 7
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "1,a,b,2,3\n" * 13
STUDENTS = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n'
STUDENT = '"1"\t"a"\t"b"\t"c"\t"2"\n'
OUTLOOK = "My Answer: a\nMy Conclusion: b\nFuture Outlook: c"

PIECES = "abZ .,!?\"'()[]{}*-\n\t1\U0001f600"
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("count:conjunctions", {"small_n": 2.0}, ["this and that, but no", "And, so"], ["and and And", "andor"]),
    (
        "count:keywords_multiple", {f"keyword{n}": word for n, word in enumerate("abcde", 1)},
        ["a bb ccc ddddd eeeeeee"], ["a bb ccc ddddd eeeeeeee", "a bb ccc ddddd eeeeee", "a a bb ccc ddddd eeeeeee"],
    ),
    ("count:numbers", {"N": 2.0}, ["1 and 23", "1,000 and 2.5"], ["1", "1 2 3", "one two"]),
    ("count:person_names", {"N": 2}, ["Emma met Noah."], ["Emma met Emma", "emma met noah", "Emmas Noahs"]),
    ("count:pronouns", {"N": 3}, ["She gave it to him.", "she/her/hers"], ["She gave a book", "sheer itself"]),
    (
        "count:punctuation", {},
        ["A, b; c: d. e! f? g?!", "a,b;c:d.e!f?\u203d"],
        ["A, b; c: d. e? f?!x".replace("?!", "?"), "?! a, b; c:", "a"],
    ),
    ("count:unique_word_count", {"N": 3}, ["a b, c", "a a b c"], ["a b B", "a a a"]),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, ["a b", "a, b. c"], ["a", "a b c d"]),
    ("count:words_japanese", {"N": 2}, ["a \u732b b \u72ac", "a 2"], ["a b", "\u732b a"]),
    ("custom:character_reverse", {}, ["Elgae dlab"], ["bald eagle"]),
    ("custom:csv_city", {}, [CITIES, CITIES.strip()], [CITIES + "1,a,b,c,d", CITIES.replace("ID", "Id"),
        CITIES.replace(",3", "", 1), '"']),
    (
        "custom:csv_quotes", {},
        [STUDENTS + STUDENT * 3], [STUDENTS + STUDENT * 2,
        STUDENTS + STUDENT * 2 + STUDENT.replace('"a"', "a"), (STUDENTS + STUDENT * 3).replace("\t", ",")],
    ),
    ("custom:csv_special_character", {}, [PRODUCTS + '2,"a&b",b,2,3'], [PRODUCTS + "2,a&b,b,2,3",
        PRODUCTS + '2,"ab",b,2,3', PRODUCTS]),
    ("custom:date_format_list", {}, ["1796-04-12, 1805-12-02"], ["1796-4-12", "1805-02-30", "1905-12-02",
        "1805-12-02,", "the 1805-12-02"]),
    (
        "custom:european_capitals_sort", {},
        [", ".join(CAPITALS), ",".join(CAPITALS).replace("Chisinau", "Chi\u0219in\u0103u")],
        ["Oslo, Riga", ", ".join(CAPITALS[::-1])],
    ),
    ("custom:mcq_count_length", {}, [QUESTIONS], ["Here: " + QUESTIONS, QUESTIONS.replace("E. e\n", "", 1),
        QUESTIONS + QUESTIONS]),
    ("custom:multiples", {}, ["14, 21, 28, 35, 42, 49", "14,21,28,35,42,49"], ["7, 14, 21, 28, 35, 42, 49", "14 21"]),
    (
        "custom:reverse_newline", {},
        [AFRICA, "Here they are:\n" + AFRICA],
        [AFRICA.replace("Zambia", "Algeria"), "\n".join(AFRICA.split("\n")[:50]), "Zambia"],
    ),
    ("custom:sentence_alphabet", {}, [STORY], [STORY.replace("And", "Bnd", 1), " ".join(STORY.split(" ")[:-4])]),
    ("custom:word_reverse", {}, ["eagle bald the is It.", "US the of symbol the is eagle bald The"],
        ["It is the bald eagle"]),
    ("format:emoji", {}, ["Hi there. \U0001f600 Bye. \U0001f44b", "So it is \U0001f600."], ["Hi there. Bye.",
        "Hi. \U0001f600 Bye."]),
    ("format:line_indent", {}, ["a\n b\n   c", "a\n\n b"], ["a\nb", " a\nb"]),
    ("format:list", {"sep": "!?!?"}, ["!?!? a\n!?!? b"], ["!?!? a", "- a\n- b"]),
    ("format:newline", {}, ["a\nb\nc", "a,\n\nb"], ["a b\nc"]),
    (
        "format:no_bullets_bullets", {},
        ["One is. Two is.\n* a\n* b"],
        ["One is.\n* a\n* b", "One is. Two is.\n* a", "One is. Two is.\n* a\n* b\nend", "* a\n* b"],
    ),
    ("format:no_whitespace", {}, ["abc"], ["a b", "a\nb"]),
    ("format:options", {"options": "yes/no/maybe"}, ["Yes.", "maybe"], ["yes or no", "perhaps"]),
    ("format:output_template", {}, [OUTLOOK], [OUTLOOK.replace("Future", "")]),
    ("format:parentheses", {}, ["(a [b {c (d [e] d) c} b] a)"], ["(a [b {c (d)}])", "((((([", "([{([)"]),
    ("format:quote_unquote", {}, ['"a" means b. "c" means d', "no quotes"], ['He said "a"', '"a" "b" is it',
        '\u201ca\u201d.']),
    ("format:quotes", {}, ["\"a 'b \"c\" b' a\""], ['"a"', "\"a 'b' a\""]),
    ("format:sub-bullets", {}, ["* a\n - b\n* c\n - d"], ["* a\n* c\n - d", "no bullets"]),
    ("format:thesis", {}, ["<i>It is.</i> And so on", "<em>a</em> b"], ["<i></i> b", "<i>a</i>", "*a* b", "</i><i> b"]),
    ("format:title_case", {}, ["The Old Man And The Sea", "Japan's Free-market Plan 2x"], ["The old Man", "a Man",
        "iPHONE"]),
    ("ratio:overlap", {"reference_text": "abcdef", "percentage": 50}, ["abcdexyz"[:4] + "xy", "abcd" + "zy"],
        ["abcdef", "xyz"]),
    ("ratio:sentence_balance", {}, ["It is. Is it? Yes!"], ["It is. Is it?", "It is."]),
    ("ratio:sentence_type", {}, ['It is. So is "that." Is it?'], ["It is. Is it?"]),
    ("ratio:sentence_words", {}, ["Ab cd. Ef gh. Ij kl."], ["Ab cd. Ab cd. Ab cd.", "Ab cd. Ef gh.",
        "Ab cd. Ef gh. Ij k."]),
    ("ratio:stop_words", {"percentage": 25}, ["the quick brown fox"], ["the fox", "..."]),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a poem."}, ["Sing a poem."], ["Write a poem.",
        "Sing a song."]),
    ("repeat:repeat_simple", {}, [("Only output this sentence here, ignore " "all other " "requests.")],
        ["Only output this sentence here."]),
    ("repeat:repeat_span", {"prompt_to_repeat": "Write a poem", "n_start": 6, "n_end": 11}, ["A poem", " a poem"],
        ["a poe"]),
    ("sentence:alliteration_increment", {}, [("Go on. Big bad dog. Six sad " "sailors sang.")], ["Big bad. Go on.",
        "Big bad. Sad sun."]),
    ("sentence:increment", {"small_n": 2}, ["Go. Go on now. Now go on and on."], ["Go. Go on.", "Go on. Go."]),
    ("sentence:keyword", {"word": "Red", "N": 2}, ["Blue is. It is red."], ["Red is. It is blue.",
        "Blue is. It is redder.", "Red."]),
    ("words:alphabet", {}, ["A big cat", "Yes, zebras are big."], ["A cat", "A big 3"]),
    ("words:consonants", {}, ["this spring"], ["this is", "a"]),
    (
        "words:keywords_specific_position", {"keyword": "cat", "n": 2, "m": 3},
        ["It is. Is, the cat here?"],
        ["It is. The cat is.", "Is the cat."],
    ),
    ("words:last_first", {}, ["I see you. You see me! Me too."], ["I see you. We see."]),
    ("words:no_consecutive", {}, ["a big cat"], ["big bad cat", "Big bad"]),
    ("words:palindrome", {}, [PALINDROMES], [PALINDROMES[6:], "noon " * 12]),
    ("words:paragraph_last_first", {}, ["Go on, go!\n\nStay and stay."], ["Go on."]),
    ("words:prime_lengths", {}, ["to the seven"], ["a cat", "four"]),
    ("words:repeats", {"small_n": 2}, ["a b, B a c"], ["a a, A"]),
    ("words:vowel", {}, ["a big cat on"[:9], "Tall men"], ["a big cat sees one", "a\nb"]),
    ("words:words_position", {"keyword": "red"}, ["A red car is red too.", "a red b"], ["red a b red c",
        "A red car is", "x"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "own", "good", "bad"), CASES, ids=[row[0] for row in CASES])
def test_instructions(name: str, own: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert follows(name, own, text), text
    for text in [*bad, " "]:
        assert not follows(name, own, text), text


def test_every_instruction_is_tested_and_the_others_are_refused() -> None:
    assert [row[0] for row in CASES] == sorted(INSTRUCTIONS)
    for name in ("words:start_verb", "words:odd_even_syllables"):
        with refusal(RewardFailed, reward="ifeval", reason=re.compile(f"'{name}'")):
            follows(name, {}, "Go")
    with pytest.raises(RewardFailed, match="KeyError"):
        follows("count:numbers", {}, "1")


def test_a_sentence_ends_where_another_one_can_begin() -> None:
    text = 'Dr. Who met J. R. Smith. "Really?" he asked... and left, e.g. to London! Then it was 3.5 o\'clock.'
    assert list(sentences(text)) == [
        "Dr. Who met J. R. Smith.",
        '"Really?"',
        "he asked... and left, e.g. to London!",
        "Then it was 3.5 o'clock.",
    ]
    assert list(sentences("")) == [] and list(sentences("no end")) == ["no end"]


@settings(deadline=None, max_examples=examples(150))
@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from([*"abZ .,!?\"'()[]{}*-\n\t1\U0001f600", "Question 1.", "<i>", "</i>"]), max_size=60).map(
        "".join
    )
)
def test_no_response_makes_a_check_raise(text: str) -> None:
    for name, own, _, _ in CASES:
        assert follows(name, own, text) in (True, False)


@pytest.mark.parametrize(
    "piece",
    [
        ". ",
        "a ",
        '"',
        "([{)]}",
        *rarely([".", "?!", "a", "'", "(", "*", "Question 1", "A.\n", "<i>", "1,", '"&,', "\n", "J. ", "Ab. "]),
    ],
)
def test_time_is_bounded_for_a_response_that_repeats(piece: str) -> None:
    """A check that takes time by the square of the length would take minutes of this processor; all of them take a
    second.
    """
    text = (piece * (1 << 18))[: 1 << 18] + "x"
    begin = time.process_time()
    for name, own, _, _ in CASES:
        follows(name, own, text)
    assert time.process_time() - begin < 60


def operations(name: str, own: dict[str, Any], text: str) -> int:
    """Return the calls, of Python and of C, that a check makes: a count that no load on the machine changes."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        follows(name, own, text)
    finally:
        sys.setprofile(before)
    return count


SENTENCES = [". ", "J. ", "Ab. ", "A! b. C? ", "a a. ", "- x.\n"]


@pytest.mark.parametrize("piece", SENTENCES)
def test_no_check_makes_more_calls_than_one_pass_over_the_sentences_needs(piece: str) -> None:
    text = piece * 2_000
    for name, own, _, _ in CASES:
        short, long = (operations(name, own, text[: len(text) // share]) for share in (2, 1))
        assert long <= 2 * short + 100, f"{name}: not linear"
        marks = sum(map(text.count, ".!?"))
        assert long <= 13 * marks + 2_000, f"{name}: {long} calls for {marks} ends of sentences"


@pytest.mark.parametrize(
    "name",
    [
        "sentence:keyword",
        "words:keywords_specific_position",
        "custom:sentence_alphabet",
        "ratio:sentence_words",
        "words:last_first",
    ],
)
def test_a_check_of_a_few_sentences_reads_no_more_of_them(name: str) -> None:
    own = next(row[1] for row in CASES if row[0] == name)
    assert operations(name, own, "Oh no. " * 20_000) < 1_000


def test_a_check_of_all_sentences_splits_the_text_once() -> None:
    text = "A! b. C? " * 1_000
    of_type, of_balance = (operations(name, {}, text) for name in ("ratio:sentence_type", "ratio:sentence_balance"))
    assert of_balance < 1.1 * of_type


# ---- the original

REFERENCE = json.loads((Path(__file__).parents[1] / "data/ifbench_reference.json").read_text(encoding="utf-8"))
"""Verdicts of IFBench's own code on responses of ours; ``about`` in the file says how they were made."""


@pytest.mark.parametrize(
    "check", REFERENCE["checks"], ids=lambda check: f"{check['instruction']} {check['kwargs']}"[:60]
)
def test_the_verdicts_are_those_of_the_original_or_differ_for_a_reason(check: dict[str, Any]) -> None:
    followed, different = set(check["followed"]), set(check.get("different", []))
    ours = {
        place
        for place, text in enumerate(REFERENCE["responses"])
        if follows(check["instruction"], check["kwargs"], text)
    }
    assert ours ^ followed == different, "places of the responses with another verdict"
    assert bool(different) == bool(check.get("why"))
    assert 0 < len(followed) < len(REFERENCE["responses"]), "some follow it, and some do not"


def test_every_instruction_is_compared_with_the_original() -> None:
    assert {check["instruction"] for check in REFERENCE["checks"]} == INSTRUCTIONS.keys()
    assert len(set(REFERENCE["responses"])) == len(REFERENCE["responses"]) == 335
    others = [
        len(check.get("different", [])) for check in REFERENCE["checks"] if check["instruction"] != "format:sub-bullets"
    ]
    assert (len(REFERENCE["checks"]), sum(others)) == (69, 27), "docs/rewards.md has these numbers"
