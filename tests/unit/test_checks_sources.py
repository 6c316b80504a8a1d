"""Functions by import path, compared with their call by the source of their module alone."""

import sys
from pathlib import Path

import pytest

from launch.checks.sources import misfit, misfit_class

MINE = """
import functools
import json
from other import fits as renamed, short as too_short
from other import Policy

def fits(log_probs, anchor, tokens, config): return log_probs
def more(a, b, c, d, *, lengths_N, scale=1.0): return a
def needs(a, b, c, d, *, scale): return a
def any_number(*all): return all
async def later(a, b, c, d): return a
class Loss:
    def __call__(self, a, b, c, d): return a
number = 3
text = f"{number}"
table = {"a": 1}
small = lambda a: a
right = lambda a, b, c, d: a
made = functools.partial(fits, 1)
if number:
    def inside(a, b, c, d): return a
else:
    inside = None
"""
OTHER = "def fits(a, b, c, d): return a\ndef short(a): return a\nclass Policy: pass\n"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "other.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", ["fits", "renamed", "more", "any_number", "right", "made", "inside"])
def test_a_function_that_can_be_called(name: str) -> None:
    assert misfit(f"mine:{name}", 4, ("lengths_N",)) == ""
    assert "mine" not in sys.modules, "its module may load torch, and is not imported"


@pytest.mark.parametrize(
    ("path", "defect"),
    [
        ("mine:nothing", "mine has no 'nothing'"),
        ("nowhere:fits", "no module nowhere"),
        ("mine:number", "3, which is no function"),
        ("mine:text", "no function"),
        ("mine:table", "no function"),
        ("mine:json", "a module"),
        ("mine:later", "an async function"),
        ("mine:Loss", "a class"),
        ("mine:Policy", "a class"),
        ("mine:small", "it takes a; it is called with 4 arguments, and may ask for lengths_N"),
        ("mine:too_short", "it takes a; it is called with 4 arguments, and may ask for lengths_N"),
        ("mine:needs", "it takes a, b, c, d, scale; it is called with 4 arguments, and may ask for lengths_N"),
        ("math:sin", "too many positional arguments"),
        ("math:pi", "a float"),
    ],
)
def test_what_cannot_be_called(path: str, defect: str) -> None:
    assert misfit(path, 4, ("lengths_N",)) == defect


def test_a_module_without_a_source_that_is_not_of_python_is_left_to_the_ranks() -> None:
    assert misfit("numpy.linalg._umath_linalg:det", 1, ()) == ""


@pytest.mark.parametrize(("name", "defect"), [("Loss", ""), ("Policy", ""), ("made", ""), ("fits", "no class"), ("number", "no class")])
def test_a_class(name: str, defect: str) -> None:
    assert misfit_class(f"mine:{name}") == defect
    assert misfit_class("math:sin") == "no class"
