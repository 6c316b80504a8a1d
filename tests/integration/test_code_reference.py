"""The reward ``code`` against LiveCodeBench's judge: programs and tests of ours, and where the verdicts differ, the
reason.

``reference`` is the verdict of its ``run_test`` and ``extract_code`` at 28fef95e, with 2 s for a test.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.bus.wire.messages import Status
from tidemill.rewards.builtin.code import code
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.sandbox import Bounds, run

ROWS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/code_references.jsonl").read_text().splitlines()
]
NEEDS_NONE = """class Solution:
    def f(self, nums: List[int]) -> Optional[int]:
        return Counter(nums).most_common(1)[0][0] + math.floor(pi)
"""


def judged(row: dict[str, Any], **options: Any) -> float:
    request = RewardRequest(prompt="", response=row["response"], label=row["label"], status=Status.COMPLETED)
    right = row.get("ours", row.get("reference", 1))
    limit = {"seconds": 60.0 if right else 4.0}  # a right program ends, however busy the machine is
    return code(request, **(limit | options))["score"]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))])
def test_verdicts_are_those_of_the_reference_or_differ_for_a_reason(part: int) -> None:
    wrong = [(row, got) for row in ROWS[part::6] if (got := judged(row)) != row.get("ours", row["reference"])]
    assert not wrong, wrong


def test_there_are_right_programs_and_wrong_ones_and_every_difference_has_a_reason() -> None:
    assert len(ROWS) >= 60
    assert sum(row["reference"] for row in ROWS) > 40 and sum(1 - row["reference"] for row in ROWS) > 30
    assert all(("ours" in row) == ("why" in row) and row.get("ours") != row["reference"] for row in ROWS)


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (NEEDS_NONE, True),
        (
            "from typing import *\nfrom collections import Counter\nimport math\nfrom math import pi\n" + NEEDS_NONE,
            False,
        ),
    ],
)
def test_names_of_the_judges_modules_need_no_import_unless_that_is_off(program: str, names: bool) -> None:
    row = {
        "response": f"```python\n{program}\n```",
        "label": {"fn_name": "f", "inputs": ["[1, 2, 2]"], "outputs": ["5"]},
    }
    assert judged(row) == 1.0
    assert judged(row, imports=False) == (not names)


@pytest.mark.parametrize(
    ("program", "output"),
    [
        (
            "print(datetime.datetime is datetime.datetime, random.choice([1]), bisect.bisect([1, 2], 1))",
            "True 1 1\n",
        ),  # the modules
        ("print(pow(2, 3), open is io.open)", "8 True\n"),  # Python's own names stay
        ("print(sys.modules.keys() >= {'statistics'})", "False\n"),  # nothing is imported for a name of a module
        ("Counter = 3\nprint(Counter)", "3\n"),
        ("def f(gcd): return gcd\nprint(f(4))", "4\n"),
        ("print(gcd(12, 18), mean([1, 2]), sep=' ')", "6 1.5\n"),
        ("import re as regex\nprint(regex.sub('a', 'b', 'aa'))", "bb\n"),
        ("match [1, 2]:\n    case [deque, *rest]:\n        print(deque, rest)", "1 [2]\n"),
    ],
)
def test_names_that_a_program_reads_and_does_not_bind(program: str, output: str) -> None:
    assert run(program, Bounds(seconds=20.0), imports=True).output == output


def test_a_name_that_no_module_has_is_missing() -> None:
    assert run("print(nowhere)", Bounds(seconds=20.0), imports=True).reason.startswith("NameError")
    assert run("def f(:", Bounds(seconds=20.0), imports=True).reason.startswith("SyntaxError")
