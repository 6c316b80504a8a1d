"""Functions that read a model's text take time linear in it: every degenerate text at two lengths, by processor time of
the thread.

A policy that has collapsed writes runs of one piece up to its limit. The longer text has four times the length: a
linear function takes four times as long, one with the square sixteen times. Times below ``FLOOR_S`` are noise, and fast
enough.
"""

import contextlib
import gc
import time
from collections.abc import Callable
from functools import partial

import pytest

from tests.examples import THOROUGH
from tests.unit.test_rewards_any_input import HERE, ROWS
from tests.unit.test_rewards_house import LANGUAGE, OPTIONS
from tidemill.actors.episodes.programs.multi_turn import MultiTurn
from tidemill.actors.text import tool_calls
from tidemill.bus.wire.messages import Status
from tidemill.rewards.builtin.code import cases_in, program_in, same_output
from tidemill.rewards.builtin.ifeval import follows
from tidemill.rewards.builtin.math_answer import find_answer, format_share, last_boxed, same_answer
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import bind

SHORT, TIMES, MOST_RATIO = 4_000, 4, 9.0
FLOOR_S = 0.05
"""Processor time that is enough for 16,000 characters, and too little for a step for each two of them."""
MARKS = (
    r"` ``` ```python ```a [ ( { ] ) } [] {{ ' \" \\ * ** *a - . ! ? ?! , 1, 1,000, 1. 1/ .1 0 9 -1 +- $ $1 % ^ "
    r"9^ _ = # #### < @"
)
LATEX = r"\boxed \boxed{ \boxed{} \boxed{1} \frac{ \frac \sqrt{ \text{ \text{} \text \left( {,} \, \! << *** ******"
TAGS = "<think> </think> <call> <call></call> <tool_call> </tool_call> <tool_call></tool_call> <<a>> <i> <em></i> &amp;"
WORDS = (
    """<tool_call>{"name":"a"}</tool_call> {"name":"a"}; {"a": Answer: answer:1 Question Section P.S. a A aa A. a'"""
)
PIECES = " ".join((MARKS, LATEX, TAGS, WORDS)).split()
BLANKS = [" ", "\n", "\t", "\r\n", " \n", "\n\n", "\u2028", "\u200b"]
LINES = ["a ", "A ", "a\n", "a. ", "1 ", "1\n", "- a\n", "* a\n", "``` ", "```\n", "# a\n", "a, "]
BEGINNINGS = [
    "```",
    "```python",
    "\\boxed{",
    "#### ",
    "Answer: ",
    "<call>",
    "<tool_call>",
    "{",
    "1",
    "[",
    '"',
    "</think>",
    "<<",
    "*",
]
BEHIND = [" ", "\n", "1", "a", "(", "{", "\\", " a"]
TEXTS: dict[str, Callable[[int], str]] = {
    **{
        f"{piece!r} again": lambda length, piece=piece: (piece * length)[:length]
        for piece in [*PIECES, *BLANKS, *LINES]
    },
    **{
        f"{begin!r} and {piece!r}": lambda length, begin=begin, piece=piece: begin + (piece * length)[:length]
        for begin in BEGINNINGS
        for piece in BEHIND
    },
    "nested boxes": lambda length: "\\boxed{" * (length // 8) + "1" + "}" * (length // 8),
    "nested brackets": lambda length: "(" * (length // 2) + ")" * (length // 2),
}
"""Texts by name: functions of the length."""
TRIED = TEXTS if THOROUGH else dict(list(TEXTS.items())[::4])


def reward_of(name: str) -> Callable[[str], object]:
    reward = bind(name, OPTIONS.get(name))
    label = "A" if name == "gpqa" else "18"
    return lambda text: reward(RewardRequest(prompt="p", response=text, label=label, status=Status.COMPLETED))


FUNCTIONS: dict[str, Callable[[str], object]] = {
    **{f"reward {name}": reward_of(name) for name in HERE},
    **{f"instruction {name}": partial(follows, name, own) for name, own in ROWS.items() if name != LANGUAGE},
    "program of a response": program_in,
    "output of a program": lambda text: same_output(text, text + "1"),
    "tests of a label": cases_in,
    "box": last_boxed,
    "answer": find_answer,
    "answer against label": lambda text: same_answer(text, "18"),
    "format": format_share,
    "calls in tags": lambda text: tool_calls.read(text, "tags", finished=True),
    "growing calls in tags": lambda text: tool_calls.read(text, "tags", finished=False),
    "calls as JSON": lambda text: tool_calls.read(text, "json", finished=True),
    "call of an episode": lambda text: MultiTurn()._call.search(text),
}


def seconds(function: Callable[[str], object], text: str) -> float:
    """Return the processor time of a call: the lesser of two, where one is long."""
    took = []
    while not took or (len(took) < 2 and took[0] >= FLOOR_S):
        begin = time.thread_time()
        with contextlib.suppress(RewardFailed):
            function(text)
        took.append(time.thread_time() - begin)
    return min(took)


def growth(function: Callable[[str], object], text: Callable[[int], str]) -> float:
    """Return the time at the long length over that at the short one; 0 where the long one takes next to none."""
    long_s = seconds(function, text(SHORT * TIMES))
    return 0.0 if long_s < FLOOR_S else long_s / max(seconds(function, text(SHORT)), 1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_time_is_linear_in_a_degenerate_text(name: str) -> None:
    gc.disable()
    try:
        factors = {text: growth(FUNCTIONS[name], make) for text, make in TRIED.items()}
    finally:
        gc.enable()
    assert not {text: factor for text, factor in factors.items() if factor > MOST_RATIO}, (
        f"{TIMES} times the length takes so many times"
    )
