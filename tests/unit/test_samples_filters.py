"""Filters and ranges of samples, and text that cannot control a terminal."""

import re
from dataclasses import replace

import pytest

from tests import data_kit
from tests.refusals import refusal
from tidemill.launch.samples.filters import Filter, Headline, Range
from tidemill.launch.samples.search import seconds
from tidemill.launch.samples.text import plain, shortened


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("<0.5", (0.49, -3), (0.5, 1)),
        ("<=0.5", (0.5,), (0.51,)),
        (">-1", (-0.9,), (-1, -2)),
        (">= 1", (1, 2), (0.99,)),
        ("1", (1,), (0.9, 1.1)),
        ("=.5", (0.5,), (0.4,)),
        ("0.2..0.8", (0.2, 0.5, 0.8), (0.1, 0.81)),
        ("-2..-1", (-1.5,), (-0.5, 1.5)),
        ("..3", (-9, 3), (4,)),
        ("3..", (3, 9), (2,)),
    ],
)
def test_ranges(text: str, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    range = Range.parse("--reward", text)
    assert [number in range for number in (*inside, *outside)] == [True] * len(inside) + [False] * len(outside)


@pytest.mark.parametrize("text", ["", "..", "a", "<", "<<1", "1..2..3", "nan", "1 2"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with refusal(ValueError, place="--reward"):
        Range.parse("--reward", text)


def test_headers_without_a_field_leave_the_match_open() -> None:
    bare = Headline(seq=1, stored_s=0, kind="train", actor="a_b")
    assert Filter().of(bare) is True
    assert Filter(reward=Range(0, 1)).of(bare) is None
    assert Filter(engine="e").of(bare) is None
    assert Filter(reward=Range(0, 1), kind="eval").of(bare) is False, "one thing that is known not to fit is enough"
    assert Filter(actor="a.b").of(bare) is True, "subjects replace what they cannot hold"
    assert Filter(lag=Range(0, 1)).of(bare) is False, "no payload tells a lag"
    assert not Filter(text=re.compile("x")).of_headers and Filter(kind="eval").of_headers


def test_text_is_sought_in_prompt_and_response() -> None:
    sample = replace(
        data_kit.sample(data_kit.task(1), 0), prompt=[{"role": "user", "content": "how many?"}], response="seven"
    )
    assert [
        Filter(text=re.compile(text)).matches_text(sample) for text in ("many", "^seven$", "user: how", "eight")
    ] == [
        True,
        True,
        True,
        False,
    ]


def test_times() -> None:
    assert [seconds("--since", text) for text in ("90s", "10m", "1.5h", "1 d")] == [90, 600, 5400, 86400]
    with refusal(ValueError, place="--since"):
        seconds("--since", "10")


def test_a_response_cannot_command_the_terminal() -> None:
    assert plain("a\x1b]0;title\x07\r\x9b2J\u202eb\n\tc") == r"a\x1b]0;title\x07\r\x9b2J\u202eb" + "\n\tc"


def test_long_texts_keep_both_ends() -> None:
    assert shortened("a\nb", 4, 10) == "a\nb"
    assert shortened("1\n2\n3\n4\n5\n6", 4, 99) == "1\n2\n… 2 lines …\n5\n6"
    assert shortened("abcdefghij", 4, 6) == "abc … 4 characters … hij"
