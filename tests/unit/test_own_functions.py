"""Functions by import path in the ranks: what cannot be called ends the run with its message, and no restart."""

import pytest

from tidemill.bus import exit_codes
from tidemill.learner.algorithms.own_functions import FunctionRefused, asked_for, imported


async def later(a: int) -> int:
    return a


class Kind:
    def __init__(self, a: int) -> None:
        self.a = a


NUMBER = 3
HERE = "tests.unit.test_own_functions"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere:f", "loss: want module:function, got 'nowhere:f': No module named 'nowhere'"),
        (f"{HERE}:nothing", "has no 'nothing'"),
        (f"{HERE}:NUMBER", "a int"),
        (f"{HERE}:later", r"loss: want a function \(a\), got .*: an async function"),
        (f"{HERE}:Kind", "a class"),
        ("math:hypot3", "has no 'hypot3'"),
        ("json:dump", "missing a required argument"),
    ],
)
def test_what_cannot_be_called_is_refused_for_good(path: str, words: str) -> None:
    with pytest.raises(FunctionRefused, match=words) as refused:
        asked_for(imported(path, "loss"), ("a",), (), path=path, what="loss")
    assert exit_codes.of(refused.value) == exit_codes.CONFIG
