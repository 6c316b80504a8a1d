"""Reward for a response with a program that passes the tests of the label."""

import contextlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.sandbox import Bounds, run
from tidemill.rewards.sandbox import obstacle as obstacle  # for the registry

# Possessive: blanks behind a fence are read once, however many there are.
BLOCK = re.compile(r"```[ \t]*+([A-Za-z0-9_+-]*+)[ \t]*+\r?\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "python3", "py", "")
MAX_PROGRAM = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One test: standard input, or a call of a function, and the expected result; or code that raises."""

    stdin: str = ""
    call: tuple[str, list[Any]] | None = None
    want: Any = None
    code: str = ""


def code(
    request: RewardRequest,
    *,
    seconds: float = 6.0,
    total_seconds: float = 25.0,
    memory_mb: int = 1024,
    max_tests: int = 0,
    share: bool = False,
    whole: bool = False,
    function: str = "",
    imports: bool = True,
    python: str = "",
) -> dict[str, float]:
    """Return ``score`` 1 if the response's program passes all tests, else 0, with ``passed`` and ``tests``, their
    numbers.

    The program is the last block of Python in the response; ``whole``: without one, all of the response. The label is
    one of

    - code with assertions (MBPP, HumanEval); with a ``check`` function and ``function``, it is called with that;
    - ``{"inputs": [...], "outputs": [...]}``, with ``fn_name`` for calls instead of standard input (APPS, TACO);
    - a list of ``{"input": ..., "output": ...}``, or JSON text of the last two.

    ``seconds`` and ``memory_mb`` are limits of one test, ``total_seconds`` of all: a test that is not done by then is
    not passed. Keep it below ``actor.reward_timeout_s``, past which the sample of a slow program would fail.
    ``max_tests``: only so many, those with the longest input (0 = all). ``share``: the score is the share of tests
    passed, and all are run; else the first failure ends them.
    ``imports``: names of typing, collections, math and other modules (``jail.MODULES``) need no import, as with the
    judges that such tests come from. Raises RewardFailed for a label without tests.
    """
    tests = cases_in(request.label, function=function)
    if max_tests and len(tests) > max_tests:
        tests = sorted(tests, key=lambda test: -len(test.stdin) - len(repr(test.call)))[:max_tests]
    program = program_in(request.response, whole=whole)
    passed = 0
    end_s = time.monotonic() + total_seconds
    for test in tests if program else ():
        bounds = Bounds(seconds=min(seconds, end_s - time.monotonic()), memory_mb=memory_mb)
        passed += (good := bounds.seconds > 0 and passes(program, test, bounds, imports=imports, python=python))
        if not good and not share:
            break
    score = passed / len(tests) if share else float(passed == len(tests))
    return {"score": score, "passed": float(passed), "tests": float(len(tests))}


def program_in(response: str, *, whole: bool = False) -> str:
    """Return the last block of Python in a response; empty without one, unless ``whole``."""
    blocks = [text for language, text in BLOCK.findall(response) if language.lower() in PYTHON]
    program = blocks[-1] if blocks else response if whole else ""
    return program if len(program) <= MAX_PROGRAM else ""


def passes(program: str, test: Case, bounds: Bounds, *, imports: bool = True, python: str = "") -> bool:
    """Return whether a program passes one test. Raises RewardFailed where no sandbox can be had."""
    outcome = run(program, bounds, stdin=test.stdin, call=test.call, tests=test.code, imports=imports, python=python)
    if not outcome.passed:
        return False
    if test.code:
        return True
    if test.call is not None:
        return same_value(outcome.value, test.want)
    return same_output(outcome.output, str(test.want))


def same_output(got: str, want: str) -> bool:
    """Compare lines without blanks at their ends and empty lines at the end; numbers may differ by 1e-6."""
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (got, want)]
    if lines[0] == lines[1]:
        return True
    words = [[line.split() for line in text if line.strip()] for text in lines]
    if [len(line) for line in words[0]] != [len(line) for line in words[1]]:
        return False
    return all(_same_word(a, b) for ours, theirs in zip(*words, strict=True) for a, b in zip(ours, theirs, strict=True))


def _same_word(got: str, want: str) -> bool:
    if got == want:
        return True
    try:
        # Whole numbers are compared digit by digit: 1e-6 of a large one would be many.
        if got.lstrip("+-").isdecimal() and want.lstrip("+-").isdecimal():
            return int(got) == int(want)
        return math.isclose(float(got), float(want), rel_tol=1e-6, abs_tol=1e-6)
    except (ValueError, OverflowError):
        return False


def same_value(got: Any, want: Any) -> bool:
    """Compare results as JSON has them; floats that differ by 1e-6 are equal, and so are True and 1, as in Python."""
    if isinstance(got, int | float) and isinstance(want, int | float):
        return got == want or (not (isinstance(got, int) and isinstance(want, int)) and _close(got, want))
    if isinstance(got, list) and isinstance(want, list):
        return len(got) == len(want) and all(same_value(a, b) for a, b in zip(got, want, strict=True))
    if isinstance(got, dict) and isinstance(want, dict):
        return got.keys() == want.keys() and all(same_value(got[key], want[key]) for key in got)
    return bool(got == want)


def _close(got: float, want: float) -> bool:
    try:
        return math.isclose(got, want, rel_tol=1e-6, abs_tol=1e-6)
    except OverflowError:  # a whole number beyond floats
        return False


def cases_in(label: object, *, function: str = "") -> list[Case]:
    """Return the tests of a label. Raises RewardFailed where it has none."""
    if isinstance(label, str) and label.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):  # code may begin with a bracket, too
            label = json.loads(label)
    if isinstance(label, str) and label.strip():
        return [Case(code=label + (f"\ncheck({function})\n" if function else ""))]
    cases: list[Case] = []
    if isinstance(label, Mapping):
        name, inputs, outputs = label.get("fn_name"), label.get("inputs"), label.get("outputs")
        if isinstance(inputs, list | tuple) and isinstance(outputs, Sequence) and len(inputs) == len(outputs):
            cases = [_test(name, stdin, want) for stdin, want in zip(inputs, outputs, strict=True)]
    elif isinstance(label, list | tuple) and all(map(_is_case, label)):
        cases = [_test(case.get("fn_name"), case["input"], case["output"]) for case in label]
    if not cases:
        want = "code with assertions, {inputs, outputs} of the same number, or a list of {input, output}"
        raise RewardFailed("code", f"label: want {want}, got {label!r}"[:500])
    return cases


def _is_case(value: object) -> bool:
    return isinstance(value, Mapping) and {"input", "output"} <= value.keys()


def _test(name: object, arguments: Any, want: Any) -> Case:
    if not isinstance(name, str) or not name:
        lines = ["\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in (arguments, want)]
        return Case(stdin=lines[0] if lines[0].endswith("\n") else lines[0] + "\n", want=lines[1])
    if isinstance(arguments, str):  # one argument a line, as JSON
        arguments = [_json(line) for line in arguments.splitlines()]
        want = _json(want) if isinstance(want, str) else want
    elif isinstance(want, list) and len(want) == 1 and isinstance(arguments, list):
        want = want[0]  # as APPS has results
    return Case(call=(name, list(arguments) if isinstance(arguments, list) else [arguments]), want=want)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
