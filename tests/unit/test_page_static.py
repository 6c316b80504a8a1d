"""Files of the dashboard's page: functions without a document, run by Node, and what no file may contain."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.npm_kit import node

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "launch/page/static"
MODULES = sorted(STATIC.glob("*.js"))
IMPORT = re.compile(r'^import \{ ([^}]+) \} from "\./([a-z]+\.js)";$')
TOP_LEVEL = re.compile(
    r"^(?:export )?(?:async )?(?:function\*?|class|const|let|var) (\w+|\{[^}]*\}|\[[^\]]*\])", re.MULTILINE
)
FUNCTION = re.compile(r"^( *)(?! |(?:if|for|while|switch) )(?:.*\bfunction\b.*|.*=>|.*\)) \{$")
FORBIDDEN = {
    "text enters by text nodes alone": r"innerHTML|outerHTML|insertAdjacentHTML|document\.write"
    r"|createContextualFragment|DOMParser|srcdoc|setHTML",
    "no text becomes code": r"\beval\(|new Function|setTimeout\(\s*[\"'`]|javascript:",
    "no request leaves the server": r"https?://|\bWebSocket\b|sendBeacon|XMLHttpRequest",
    "nothing of npm": r"\brequire\(|node_modules",
}


def test_functions(tmp_path: Path) -> None:
    for file in (*MODULES, ROOT / "tests/page/functions.mjs"):
        shutil.copy(file, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    done = subprocess.run(
        [node(), "--test", "functions.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"^# pass [1-9]", done.stdout, re.MULTILINE) or re.search(r"pass [1-9]", done.stdout)


@pytest.mark.parametrize("reason", FORBIDDEN)
def test_forbidden(reason: str) -> None:
    pattern = re.compile(FORBIDDEN[reason])
    hits = [f"{file.name}:{number}: {line.strip()}" for file, number, line in _lines() if pattern.search(line)]
    assert hits == [], f"{reason}: {hits}"


def test_page_names_its_own_files_alone() -> None:
    """The policy of the server forbids inline scripts and styles, and every other host."""
    page = (STATIC / "index.html").read_text()
    assert re.findall(r'(?:src|href)="([^"]+)"', page) == ["/static/icon.svg", "/static/app.css", "/static/app.js"]
    assert not re.search(r"<style|style=|\son\w+=|<script(?! type=\"module\" src=)", page)
    assert not re.search(r"url\(|@import", (STATIC / "app.css").read_text())


def test_modules_join_into_one_script() -> None:
    """The export drops imports and ``export`` and puts one file behind the other: no name may be there twice."""
    places: dict[str, str] = {}
    for file in MODULES:
        for name in TOP_LEVEL.findall(file.read_text()):
            assert name not in places, f"{name} in {places[name]} and {file.name}"
            places[name] = file.name
    for file, number, line in _lines():
        if line.startswith("import"):
            match = IMPORT.match(line)
            assert match, f"{file.name}:{number}: want one line: import {{ a, b }} from './x.js'; got {line}"
            for name in match[1].split(", "):
                assert places.get(name) == match[2], f"{file.name}:{number}: {name} is not in {match[2]}"


def test_lines_functions_and_files_are_short() -> None:
    assert [f"{file.name}:{number}" for file, number, line in _lines() if len(line) > 120] == []
    assert [file.name for file in MODULES if len(file.read_text().splitlines()) > 400] == []
    lengths = {name: size for file in MODULES for name, size in _functions(file)}
    assert len(lengths) > 200  # the pattern finds them
    assert {name: size for name, size in lengths.items() if size > 50} == {}


def _functions(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the place and the lines of each function with a body: it ends at the next brace of its indentation."""
    lines = file.read_text().splitlines()
    for begin, line in enumerate(lines):
        if head := FUNCTION.match(line):
            end = next(place for place in range(begin + 1, len(lines)) if lines[place].startswith(f"{head[1]}}}"))
            yield f"{file.name}:{begin + 1}", end - begin + 1


def _lines() -> Iterator[tuple[Path, int, str]]:
    for file in MODULES:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            yield file, number, line
