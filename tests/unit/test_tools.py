"""Tools of multi-turn rollouts: schemas, calls, and every failure as a text."""

import asyncio
import datetime
import enum
import json
import math
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusal
from tests.waits import LIMIT_S, turn, until
from tidemill.actors.episodes.programs.tools import (
    MAX_OUTPUT_BYTES,
    MAX_RESULT,
    CallThreads,
    ProcessUnusable,
    calculator,
    tools_of,
)

HERE = "tests.unit.test_tools"


def weather(city: str, days: int = 1, unit: str = "C") -> dict[str, Any]:
    """Forecast the weather.

    Nothing of this is shown.
    """
    return {"city": city, "days": days, "unit": unit}


async def later(word: str) -> str:
    await turn()
    return word * 2


def hangs(seconds: float) -> str:
    raise SystemError("broken") if seconds < 0 else TimeoutError


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def __call__(self) -> int:
        self.count += 1
        return self.count


async def called(use: object, arguments: object, **more: Any) -> str:
    (tool,) = tools_of([use]).values()
    return await tool.call(arguments, **{"seconds": 60.0, "threads": CallThreads(), **more})


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2+3*4", "14"),
        (" (2 + 3) * sqrt(16) / 7 ", "2.857142857142857"),
        ("2^10", "1024"),
        ("10/2", "5"),
        ("7//2 + 7%4", "6"),
        ("-3 - -4", "1"),
        ("max(1, 2, 3) + floor(2.7)", "5"),
        ("1e3", "1000"),
        ("pi", "3.141592653589793"),
        ("0.1+0.2", "0.30000000000000004"),
    ],
)
def test_the_calculator(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "",
            "1+",
            "x",
            "__import__('os')",
            "().__class__",
            "9**9**9",
            "2**100000",
            "(-1)**0.5",
            "[1]",
            "'a'*9",
            "1 if 1 else 2",
        ),
        *("lambda: 1", "f'{1}'", "True", "1/0", "log(-1)", "(" * 500, "1" * 1001, "max(key=1)", "10**4000 * 10**4000"),
    ],
)
async def test_the_calculator_refuses_what_is_no_arithmetic(expression: str) -> None:
    assert (await called("calculator", {"expression": expression})).startswith("Error: ")


@given(st.text(alphabet="0123456789+-*/%^().,e sqrtmaxlog", max_size=30))
def test_the_calculator_ends_for_any_text(expression: str) -> None:
    assert isinstance(asyncio.run(called("calculator", {"expression": expression})), str)


async def test_python_runs_in_the_sandbox() -> None:
    python = {"use": "python", "options": {"seconds": 60.0}}
    assert await called(python, {"code": "print(6 * 7)"}) == "42\n"
    assert (
        await called(python, {"code": "print(1)\nopen('/tmp/x', 'w')"})
        == "1\n\nError: PermissionError: [Errno 13] Permission denied: '/tmp/x'"
    )


async def test_search_finds_the_texts_that_share_rare_words(tmp_path: Path) -> None:
    rows = [
        {"title": "Paris", "text": "the capital of France"},
        {"text": "the capital of Spain is Madrid"},
        {"text": "the the the"},
    ]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    search = {"use": "search", "options": {"path": str(tmp_path / "texts.jsonl"), "results": 1}}
    assert await called(search, {"query": "capital of France?"}) == "Paris\nthe capital of France"
    assert await called(search, {"query": "Spain"}) == "the capital of Spain is Madrid"
    assert await called(search, {"query": "nothing like it"}) == "Nothing found."


async def test_a_function_of_ones_own() -> None:
    own = {"use": f"{HERE}:weather", "options": {"unit": "F"}}
    (tool,) = tools_of([own]).values()
    assert tool.schema["function"] == {
        "name": "weather",
        "description": "Forecast the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["city"],
        },
    }
    assert json.loads(await called(own, {"city": "Bern", "days": 2})) == {"city": "Bern", "days": 2, "unit": "F"}
    assert await called(f"{HERE}:later", {"word": "ab"}) == "abab"
    assert await called({"use": f"{HERE}:Counter", "options": {"start": 4}}, {}) == "5"


@pytest.mark.parametrize(
    ("use", "arguments", "words"),
    [
        (f"{HERE}:weather", {}, "TypeError: missing a required argument: 'city'"),
        (f"{HERE}:weather", {"town": "x"}, "TypeError"),
        (f"{HERE}:weather", "Bern", "want a map of arguments, got str"),
        (f"{HERE}:hangs", {"seconds": -1.0}, "SystemError: broken"),
        (f"{HERE}:hangs", {"seconds": 1.0}, "no result within 60 s"),
    ],
)
async def test_a_failure_is_a_text(use: str, arguments: object, words: str) -> None:
    assert (await called(use, arguments)).startswith(f"Error: {words}")


RELEASED = threading.Event()


@pytest.fixture
def released() -> Iterator[None]:
    """End the threads of ``never``."""
    RELEASED.clear()
    yield
    RELEASED.set()


def never(word: str) -> str:
    RELEASED.wait()
    return word


@pytest.mark.usefixtures("released")
async def test_calls_that_hang_delay_no_other() -> None:
    """More of them than asyncio's pool of threads has."""
    threads, count = CallThreads(most_hung=100), min(32, (os.cpu_count() or 1) + 4) + 4
    (tool,) = tools_of([f"{HERE}:never"]).values()
    found = await asyncio.gather(*(tool.call({"word": "a"}, seconds=0.05, threads=threads) for _ in range(count)))
    assert found == ["Error: no result within 0.05 s"] * count and threads.hung == count
    assert await called("calculator", {"expression": "6*7"}, seconds=60.0, threads=threads) == "42"
    RELEASED.set()
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: not threads.hung, every_s=0)  # a call that ends at last is hung no longer


@pytest.mark.usefixtures("released")
async def test_a_process_with_too_many_hung_calls_is_unusable() -> None:
    threads = CallThreads(most_hung=1)
    assert await called(f"{HERE}:hangs", {"seconds": 1.0}, threads=threads) == "Error: no result within 60 s"
    assert threads.hung == 0, "a tool that raises TimeoutError has ended"
    assert (
        await called(f"{HERE}:never", {"word": "a"}, seconds=0.05, threads=threads) == "Error: no result within 0.05 s"
    )
    with refusal(ProcessUnusable, got=re.compile("^2, .*'never'")):
        await called(f"{HERE}:never", {"word": "a"}, seconds=0.05, threads=threads)


async def test_long_results_and_errors_have_their_beginning_and_end() -> None:
    result = await called(f"{HERE}:later", {"word": "x" * (MAX_RESULT - 1) + "y"})
    assert (
        result
        == f"{'x' * (MAX_RESULT // 2)}\n... [{MAX_RESULT} characters left out] ...\n{'x' * (MAX_RESULT // 2 - 1)}y"
    )
    assert await called(f"{HERE}:later", {"word": "x" * (MAX_RESULT // 2)}) == "x" * MAX_RESULT
    error = await called(f"{HERE}:raises", {"text": "x" * MAX_RESULT + "y"})
    assert error.startswith("Error: ValueError: xxx") and error.endswith("xxxy") and len(error) < MAX_RESULT + 50


class Color(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: float
    color: Color


NESTED: list[Any] = []
NESTED.append(NESTED)
RESULTS: dict[str, Any] = {
    '{"city": "Zürich", "八": "😀"}': {"city": "Zürich", "八": "😀"},
    "[null, null, null, 0.5]": [math.nan, math.inf, -math.inf, 0.5],
    '{"x": null, "color": "red"}': Point(math.nan, Color.RED),
    '{"red": ["red"], "1": null}': {Color.RED: (Color.RED,), 1: None},
    '["a"]': {"a"},
    '"2026-01-02"': datetime.date(2026, 1, 2),
    '"0.10"': Decimal("0.10"),
    '"/a/b"': PurePosixPath("/a/b"),
    '"\ufffda"': b"\xffa",
    "[[1.0, 2.0], [null, 4.0]]": np.array([[1, 2], [math.nan, 4]]),
    "7": np.int64(7),
    "true": np.bool_(True),
    "null": None,
    "Error: TypeError: want a text, or values of JSON, as the tool's result, got object": [object()],
    "Error: TypeError: want a text, or values of JSON, as the tool's result, got generator": (number for number in ()),
    "Error: RecursionError": NESTED,
}


def made(number: int) -> Any:
    return list(RESULTS.values())[number]


def raises(text: str) -> Any:
    raise ValueError(text)


def told(color: Color, point: Point | None = None) -> str:
    assert color is Color.RED and (point is None or point.color is Color.RED)
    return f"{color} {point}"


@pytest.mark.parametrize("wanted", RESULTS)
async def test_results_are_json_with_their_letters(wanted: str) -> None:
    result = await called(f"{HERE}:made", {"number": list(RESULTS).index(wanted)})
    assert result.startswith(wanted) if wanted.startswith("Error") else result == wanted
    if not wanted.startswith("Error"):
        json.loads(result)


async def test_arguments_are_of_the_annotated_types() -> None:
    assert await called(f"{HERE}:told", {"color": "red"}) == "Color.RED None"
    assert (
        await called(f"{HERE}:told", {"color": "red", "point": {"x": 1.5, "color": "red"}})
        == f"Color.RED {Point(1.5, Color.RED)}"
    )
    assert (await called(f"{HERE}:told", {"color": "green"})).startswith(
        "Error: ValueError: 'green' is not a valid Color"
    )


async def test_python_shows_how_a_program_ended_and_both_ends_of_its_output() -> None:
    python = {"use": "python", "options": {"seconds": 60.0}}
    assert await called(python, {"code": "print(1)\nraise SystemExit(3)"}) == "1\n\nError: exit code 3"
    assert (
        await called(python, {"code": "import os, sys\nprint(1)\nsys.stdout.flush()\nos._exit(4)"})
        == "1\n\nError: exit code 4"
    )
    assert await called(python, {"code": "raise SystemExit"}) == ""
    long = await called(python, {"code": "for n in range(100_000): print(n)"})
    assert (
        long.startswith("0\n1\n2\n")
        and long.endswith("99998\n99999\n")
        and "characters left out" in long
        and "Error" not in long
    )
    endless = await called(python, {"code": "print('begin')\nwhile True: print('x' * 1000)"})
    assert endless.startswith("begin\nxxx") and "characters left out" in endless and len(endless) <= MAX_RESULT
    assert endless.endswith(f"Error: the program was ended after {MAX_OUTPUT_BYTES} bytes of output")
    slow = await called(
        {"use": "python", "options": {"seconds": 0.3}}, {"code": "print('begin', flush=True)\nwhile True: pass"}
    )
    assert slow.endswith("Error: the program was ended after 0.3 s")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (["calculater"], {"place": "tools[0]", "got": "'calculater'"}),
        ([{"use": "calculator", "option": {}}], {"place": "tools[0]"}),
        ([3], {"place": "tools[0]"}),
        (["nosuch.module:f"], {"path": "nosuch.module:f", "defect": "module", "setting": "tools[0]"}),
        ([f"{HERE}:nothing"], {"path": "tests.unit.test_tools:nothing", "defect": "name", "setting": "tools[0]"}),
        (["calculator", "calculator"], {"place": "tools", "got": "'calculator' twice"}),
    ],
)
def test_bad_tools_are_refused(wanted: list[object], words: dict[str, Any]) -> None:
    with refusal(ValueError, **words):
        tools_of(wanted)


async def test_a_call_that_ends_in_the_instant_of_its_cancellation_does_not_hang() -> None:
    threads = CallThreads()
    release = threading.Event()
    call = asyncio.create_task(threads.run(release.wait))
    await turn()
    call._fut_waiter.set_result(1)  # type: ignore[attr-defined]  # as its thread does
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert threads.hung == 0
    release.set()
