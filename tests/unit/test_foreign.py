"""Errors of foreign code become errors of ours: every kind of them, with the line of the user's code."""

import importlib
import re
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from tidemill.bus.system import functions
from tidemill.bus.system.functions import described, errors_as, repr_of, settle, text_of
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.registry import REWARD, Bound


class Ours(Exception):
    """An error of ours."""


class Rude(Exception):
    """An error whose text raises another."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "error",
    [KeyError("a"), SystemExit(3), StopIteration(), RecursionError(), Rude()],
    ids=lambda one: type(one).__name__,
)
def test_every_error_becomes_one_of_ours(error: BaseException) -> None:
    with pytest.raises(Ours) as raised, errors_as(lambda error: Ours(described(error))):
        raise_(error)
    assert raised.value.__cause__ is error
    assert str(raised.value).startswith(type(error).__name__) and f"({__file__}, line " in str(raised.value)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("import json\n\njson.loads('x')\n", r"JSONDecodeError: Expecting value.* \(.*/user_module\.py, line 3\)"),
        ("def f(r)\n    return 1\n", r"SyntaxError: expected ':' \(user_module\.py, line 1\)"),
        (
            "error = ValueError('the message')\nerror.add_note('a note')\nraise error\n",
            r"ValueError: the message \(.*, line 3\)",
        ),
        ("import sys\nsys.exit('no key')\n", r"SystemExit: no key \(.*/user_module\.py, line 2\)"),
    ],
    ids=["in a library", "syntax", "with a note", "exit"],
)
def test_an_import_names_the_line_of_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, wanted: str
) -> None:
    (tmp_path / "user_module.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Ours) as raised, errors_as(lambda error: Ours(described(error))):
        importlib.import_module("user_module")
    assert re.fullmatch(wanted, str(raised.value)), str(raised.value)


RAISES = "def g():\n    raise KeyError\n"


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"mine.py": "def f(r):\n    raise KeyError('a')\n"}, " (mine.py, line 2)"),
        ({"mine.py": "import json\ndef f(r):\n    json.loads('x')\n"}, " (mine.py, line 3)"),
        (
            {"mine.py": "import tidemill.bus.config\ndef f(r):\n    tidemill.bus.config.BusConfig(port=0)\n"},
            " (mine.py, line 3)",
        ),
        ({"mine.py": "import other\ndef f(r):\n    other.g()\n", "site/other.py": RAISES}, " (mine.py, line 3)"),
        ({"site/mine.py": "import json\ndef f(r):\n    json.loads('x')\n"}, " (site/mine.py, line 3)"),
        ({"site/mine.py": "import deep\ndef f(r):\n    deep.g()\n", "site/deep.py": RAISES}, " (site/mine.py, line 3)"),
        ({"mine.py": "f = int\n"}, ""),
    ],
    ids=[
        "own",
        "in Python",
        "in this program",
        "in a package",
        "an installed package",
        "in a package below it",
        "no frame",
    ],
)
def test_the_line_of_the_users_code_that_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], place: str
) -> None:
    monkeypatch.setattr(functions, "_PACKAGES", (f"{tmp_path}/site/",))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    with pytest.raises(RewardFailed) as raised:
        Bound("mine:f", importlib.import_module("mine").f, {}, REWARD).checked(None)
    assert raised.value.reason.replace(f"{tmp_path}/", "") == f"{raised.value.__cause__!r}{place}"


def test_without_a_line_of_the_users_none_is_named() -> None:
    with (
        pytest.raises(Ours, match=r"^ModuleNotFoundError: No module named 'no_such_module'$"),
        errors_as(lambda error: Ours(described(error))),
    ):
        importlib.import_module("no_such_module")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("late")], ids=lambda one: type(one).__name__)
def test_those_that_are_named_and_the_end_of_the_process_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, errors_as(lambda error: Ours(str(error)), but=(TimeoutError,)):
        raise_(error)
    assert raised.value is error


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise SystemExit


def test_an_error_without_a_repr_or_a_text_is_named() -> None:
    assert text_of(Rude()) == "Rude, whose text raises RuntimeError"
    assert repr_of(KeyError("a")) == "KeyError('a')"
    assert repr_of(Unspeakable()) == "Unspeakable, whose repr raises SystemExit"


def test_a_future_gets_the_result_or_the_error() -> None:
    good: Future[int] = Future()
    bad: Future[int] = Future()
    settle(good, lambda: 3)
    settle(bad, lambda: 1 // 0)
    assert good.result() == 3 and isinstance(bad.exception(), ZeroDivisionError)
