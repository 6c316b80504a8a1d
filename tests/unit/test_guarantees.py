"""docs/guarantees.md is true: every test that it names exists, and is in the suite that it names."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guarantees.md").read_text()
NAMED = re.findall(r"(\*all\* )?`(tests/[\w/]+\.py)::(\w+)`", PAGE)


@functools.cache
def _tests(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef | None]:
    """Return the tests of a module by name: functions, and test cases that are assigned (None)."""
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | None] = {}
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.ClassDef):
            found.update(
                dict.fromkeys(
                    [node.name] if isinstance(node, ast.ClassDef) else [ast.unparse(each) for each in node.targets]
                )
            )
    return found


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 50


def test_each_named_test_exists_in_its_suite() -> None:
    for all_only, file, name in NAMED:
        tests = _tests(file)
        assert name in tests, f"docs/guarantees.md: {file} has no {name}"
        node = tests[name]
        marks = [] if node is None else [ast.unparse(each) for each in node.decorator_list]
        assert ("pytest.mark.slow" in marks) is bool(all_only), f"docs/guarantees.md: is {name} in make test? {marks}"


def test_every_run_and_every_storm_holds_a_guarantee() -> None:
    """A test of a whole run that no row of the page names holds a promise that no reader finds."""
    files = {
        str(path.relative_to(ROOT))
        for folder in ("whole", "chaos")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
    }
    assert len(files) > 20
    assert sorted(files - {file for _, file, _ in NAMED}) == []
