"""Numbers of a window against numbers worked out by hand, filters and ranges, and text that cannot control a
terminal.
"""

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from tests import data_kit
from tidemill.launch.cli.stats import complete_groups, pass_at_k, summarize
from tidemill.launch.samples.filters import Filter, Headline, Range
from tidemill.launch.samples.search import seconds
from tidemill.launch.samples.text import plain, shortened


def line(task: int, index: int, reward: float, **changes: Any) -> Headline:
    values: dict[str, Any] = {
        "seq": 10 * task + index,
        "stored_s": 100.0,
        "kind": "train",
        "actor": "w1",
        "engine": "e1",
        "group_size": 4,
    }
    values |= {"versions": (3, 4), "status": "completed", "tokens": 10 * task + index, "lag": 1}
    return Headline(task=task, index=index, reward=reward, **(values | changes))


@pytest.mark.parametrize("num", [1, 4, 5])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one(num: int) -> None:
    for right, k in itertools.product(range(num + 1), range(1, num + 1)):
        draws = list(itertools.combinations([True] * right + [False] * (num - right), k))
        assert pass_at_k(num, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_a_window_by_hand() -> None:
    lines = [
        *(line(1, index, reward) for index, reward in enumerate((1.0, 0.0, 0.0, 0.0))),
        *(line(2, index, 0.5, lag=3, actor="w2", engine=None, status="truncated") for index in range(4)),
        *(line(3, index, 1.0) for index in range(3)),  # one is missing
        line(2, 0, 9.0, status="completed"),  # its place is taken
        line(3, 3, 1.0, status="aborted"),  # makes no group complete
    ]
    stats = summarize(lines, 6.5)
    assert stats["samples"] == 13
    assert stats["samples_per_s"] == 2.0
    assert stats["tokens_per_s"] == pytest.approx((46 + 86 + 93 + 20 + 33) / 6.5)
    assert stats["tokens"] == {"mean": pytest.approx(278 / 13), "p50": 21, "p95": 33, "max": 33}
    rewards = [1, 0, 0, 0, 0.5, 0.5, 0.5, 0.5, 1, 1, 1, 9, 1]
    mean = sum(rewards) / 13
    assert stats["reward"] == {
        "mean": pytest.approx(mean),
        "std": pytest.approx((sum((reward - mean) ** 2 for reward in rewards) / 13) ** 0.5),
    }
    assert (stats["groups"], stats["zero_variance_share"]) == (2, 0.5)
    assert stats["pass_at"] == {"1": 0.125, "2": 0.25, "4": 0.5}, (
        "one of four is right in the first group, none in the second"
    )
    assert summarize(lines, 6.5, pass_reward=0.5)["pass_at"] == {"1": 0.625, "2": 0.75, "4": 1.0}
    assert stats["lag"] == {"1": 9, "3": 4}
    assert stats["status"] == {"completed": 8 / 13, "truncated": 4 / 13, "aborted": 1 / 13}
    assert stats["actors"] == {"w1": 9 / 13, "w2": 4 / 13}
    assert stats["engines"] == {"e1": 9 / 13, "?": 4 / 13}


def test_an_empty_window_has_no_numbers() -> None:
    stats = summarize([], 0.0)
    assert (
        stats["samples"],
        stats["samples_per_s"],
        stats["reward"],
        stats["zero_variance_share"],
        stats["pass_at"],
    ) == (
        0,
        None,
        None,
        None,
        {},
    )


def test_evaluation_and_training_are_not_one_group() -> None:
    assert complete_groups([line(1, 0, 0, group_size=2), line(1, 1, 0, group_size=2, kind="eval")]) == []


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
    with pytest.raises(ValueError, match="--reward: want a number"):
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
    assert [seconds("--window", text) for text in ("90s", "10m", "1.5h", "1 d")] == [90, 600, 5400, 86400]
    with pytest.raises(ValueError, match="--window: want a time"):
        seconds("--window", "10")


def test_a_response_cannot_command_the_terminal() -> None:
    assert plain("a\x1b]0;title\x07\r\x9b2J\u202eb\n\tc") == r"a\x1b]0;title\x07\r\x9b2J\u202eb" + "\n\tc"


def test_long_texts_keep_both_ends() -> None:
    assert shortened("a\nb", 4, 10) == "a\nb"
    assert shortened("1\n2\n3\n4\n5\n6", 4, 99) == "1\n2\n… 2 lines …\n5\n6"
    assert shortened("abcdefghij", 4, 6) == "abc … 4 characters … hij"
