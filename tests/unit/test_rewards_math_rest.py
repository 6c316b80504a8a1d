"""The reward ``math`` with ``rest: math_verify``: its own comparison first, the library for answers that it does not
find equal.
"""

import sys
from typing import Any

import pytest

from tests.refusals import refusal
from tests.unit.test_rewards_house import DIFFERENT, SAME, pairs
from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.messages import Status
from tidemill.rewards.builtin.math_rewards import math
from tidemill.rewards.errors import BadRewardOption, RewardFailed
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import bind, is_unbounded
from tidemill.rewards.scorers import opened


def asked(response: str, label: Any) -> RewardRequest:
    return RewardRequest(prompt="p", response=response, label=label, status=Status.COMPLETED)


BY_LIBRARY = r"""
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
\begin{bmatrix} 1 & 2 \end{bmatrix} | \begin{pmatrix} 1 & 2 \end{pmatrix}
x \geq 3 | x\ge3
3 \le x | x \ge 3
x + y = 1 | y = 1 - x
2x = 4y | x = 2y
5! | 120
\log_2 8 | 3
\binom{5}{2} | 10
|{-3}| | 3
\{1, 2\} \cup \{3\} | \{3, 2, 1\}
5 apples | 5
"""
"""Answers and labels that are equal, and that only math-verify finds equal."""
NEITHER = r"""
\begin{pmatrix} 2 \\ 1 \end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
x \ge 3 | x \le 3
x + y = 1 | y = 2 - x
5! | 121
\log_2 8 | 4
\binom{5}{2} | 20
Paris | London
x | y
"""


def rows(table: str) -> list[tuple[str, str]]:
    return [tuple(line.split(" | ")) for line in table.strip().splitlines()]  # type: ignore[misc]


@pytest.mark.parametrize(("answer", "gold"), rows(BY_LIBRARY))
def test_the_library_finds_equal_what_the_own_comparison_does_not(answer: str, gold: str) -> None:
    request = asked(rf"\boxed{{{answer}}}", gold)
    assert math(request) == 0.0
    assert math(request, rest="math_verify") == 1.0
    assert math(asked(request.response, ["7", gold]), rest="math_verify") == 1.0, "one of several labels"


@pytest.mark.parametrize(("answer", "gold"), rows(NEITHER))
def test_what_differs_is_wrong_with_both(answer: str, gold: str) -> None:
    assert math(asked(rf"\boxed{{{answer}}}", gold), rest="math_verify") == 0.0


@pytest.mark.parametrize(
    ("one", "other", "same"), [(*p, True) for p in pairs(SAME)] + [(*p, False) for p in pairs(DIFFERENT)]
)
def test_what_the_own_comparison_decides_stays(one: str, other: str, same: bool) -> None:
    assert math(asked(rf"\boxed{{{one}}}", other), rest="math_verify") == float(same)


def test_the_library_is_not_asked_where_the_own_comparison_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)  # an import of it raises
    for answer, gold, score in (
        ("1/2", "0.5", 1.0),
        ("18", "19", 0.0),
        ("0.333333333", "1/3", 0.0),
        ("\\sqrt{12}", "2\\sqrt{3}", 1.0),
    ):
        assert math(asked(rf"\boxed{{{answer}}}", gold), rest="math_verify") == score
    assert math(asked("18", "18"), rest="math_verify") == 0.0, "no box"
    assert math(asked(r"\boxed{x}", "y")) == 0.0
    with pytest.raises(ModuleNotFoundError):
        math(asked(r"\boxed{x}", "y"), rest="math_verify")


def test_with_the_rest_it_runs_in_child_processes_and_without_in_the_event_loop() -> None:
    assert not is_unbounded("math") and not is_unbounded("math", {"rest": ""})
    assert (
        is_unbounded("math", {"rest": "math_verify"})
        and is_unbounded("math_verify")
        and not is_unbounded("dapo", {"rest": "math_verify"})
    )


async def test_an_answer_that_takes_the_library_for_ever_ends_with_its_process() -> None:
    async with opened("math", {"rest": "math_verify"}, ProcessLimits(timeout_s=1.0, workers=1)) as score:
        with pytest.raises((TimeoutError, RewardFailed)):
            await score(asked(r"\boxed{9^{9^{9^{9}}} + 1}", r"\int_0^1 x^{x^{x}} dx"))
    async with opened("math", {"rest": "math_verify"}, ProcessLimits(workers=1)) as score:
        assert await score(asked(r"\boxed{5!}", "120")) == 1.0


def test_another_rest_is_refused() -> None:
    with refusal(BadRewardOption, reward="math", option="rest"):
        bind("math", {"rest": "sympy"})
