"""Programs in responses and tests in labels: those found, those refused, and how outputs are compared."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusal
from tidemill.rewards.builtin.code import Case, cases_in, program_in, same_output, same_value
from tidemill.rewards.errors import RewardFailed


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\ntext\n```python3\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```cpp\nint x;\n```", ""),
        ("```python\na\n```\n```cpp\nint x;\n```", "a\n"),
        ("```python\nunfinished", "unfinished"),
        ("no block", ""),
        ("``` Python \r\na\r\n```", "a\r\n"),
        ("```python\n" + "x" * 2_000_000 + "\n```", ""),
    ],
)
def test_the_last_block_of_python_is_the_program(response: str, program: str) -> None:
    assert program_in(response) == program


def test_the_whole_response_may_be_the_program() -> None:
    assert program_in("print(1)", whole=True) == "print(1)"
    assert program_in("text\n```python\nx\n```", whole=True) == "x\n"


@pytest.mark.parametrize(
    ("label", "tests"),
    [
        ("assert f(1) == 2", [Case(code="assert f(1) == 2")]),
        ({"inputs": ["1\n"], "outputs": ["2\n"]}, [Case(stdin="1\n", want="2\n")]),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [Case(stdin="1\n2\n", want="3")]),
        ('{"inputs": ["1"], "outputs": ["2"]}', [Case(stdin="1\n", want="2")]),
        ({"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[3]]}, [Case(call=("f", [1, [2]]), want=3)]),
        ({"fn_name": "f", "inputs": ["1\n[2]"], "outputs": ["3"]}, [Case(call=("f", [1, [2]]), want=3)]),
        ([{"input": "1", "output": "2", "type": "stdin_stdout"}], [Case(stdin="1\n", want="2")]),
        ('[{"input": "1", "output": "2", "fn_name": "f"}]', [Case(call=("f", [1]), want=2)]),
        ("[1, 2]", None),
        ("{broken", [Case(code="{broken")]),
        ("", None),
        (None, None),
        (3, None),
        ({"inputs": ["1"], "outputs": []}, None),
        ({"inputs": "12", "outputs": "34"}, None),
        ([], None),
        ([{"input": "1"}], None),
        ({}, None),
    ],
)
def test_labels(label: Any, tests: list[Case] | None) -> None:
    if tests is None:
        with refusal(RewardFailed, reward="code", place="label"):
            cases_in(label)
    else:
        assert cases_in(label) == tests


def test_humaneval_calls_check() -> None:
    assert cases_in("def check(f): assert f(1)", function="g")[0].code.endswith("check(g)\n")


@pytest.mark.parametrize(
    ("got", "want", "same"),
    [
        ("1\n", "1", True),
        ("1  \n2\n\n\n", "1\n2", True),
        ("1 2", "1  2", True),
        ("1\n\n2", "1\n2", True),
        ("0.3333333", "0.33333334", True),
        ("0.333", "0.3333", False),
        ("1000000000000001", "1000000000000002", False),
        ("1e3", "1000", True),
        ("YES", "yes", False),
        ("1 2", "1\n2", False),
        ("nan", "nan", True),
        ("", "", True),
        ("x", "", False),
        ("007", "7", True),
    ],
)
def test_outputs(got: str, want: str, same: bool) -> None:
    assert same_output(got, want) is same


@pytest.mark.parametrize(
    ("got", "want", "same"),
    [
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (True, 1, True),
        (True, False, False),
        (True, 2, False),
        ([1, [2.0]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, None, True),
        ("a", "a", True),
        (10**20, 10**20 + 1, False),
        (10**400, 1.0, False),
    ],
)
def test_values(got: Any, want: Any, same: bool) -> None:
    assert same_value(got, want) is same


@given(st.text(alphabet='`pyton \n{}[]":,1a'), st.text(alphabet='`pyton \n{}[]":,1a'))
def test_any_text_is_read(response: str, label: str) -> None:
    program_in(response)
    with contextlib.suppress(RewardFailed):
        assert cases_in(label)
    same_output(response, label)
