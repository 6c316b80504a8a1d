"""All pages are true: files, settings, commands and messages in them exist, links have targets, and blocks of code can
be read.
"""

import argparse
import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidemill.launch.cli.main import command_parser
from tidemill.launch.settings import reference
from tidemill.launch.settings.config_loader import REMOVED, SettingsError, from_map, load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/decisions").glob("*.md")),
]
SETTINGS = {entry.path: entry for entry in reference.entries()}
SECTIONS = {path for path, entry in SETTINGS.items() if entry.is_section and "." not in path}
SOURCES = "\n".join(
    path.read_text()
    for room in ("bus", "weightstore", "rewards", "actors", "learner", "launch")
    for path in (ROOT / room).rglob("*.py")
)
FOREIGN = (
    "command not found",
    "Loaded weights leave no GPU memory",
    "No space left on device",
    "mismatch",
    "truncated (length)",
)
"""Quoted texts of other programs, and of values."""
PLACES = (
    "feeder waiting (8 more groups ...)",
    "trouble actor-0: ... samples failed",
    "learner.",
    "staleness.",
    "sampling.",
    "weights.",
    "tail",
)
"""Lines of ``tidemill status`` that are assembled from parts, and settings."""


def ids(page: Path) -> str:
    return page.name


def fenced(page: Path, *languages: str) -> list[str]:
    return [
        text
        for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        if kind in languages
    ]


def blocks(*languages: str) -> list[Any]:
    return [
        pytest.param(text, id=f"{page.name}-{number}")
        for page in PAGES
        for number, text in enumerate(fenced(page, *languages))
    ]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings, and those that a page sets itself."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_and_settings_that_are_named_exist(page: Path) -> None:
    for quote in re.findall(r"`([^`\n]+)`", prose(page)):
        if re.fullmatch(r"(bus|weightstore|rewards|actors|learner|launch|tests|docs)/[\w/.-]*\.(py|md|yaml|sh)", quote):
            assert (ROOT / quote).exists(), quote
        name = re.split(r"[:= ]", quote)[0]
        if (
            re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", name)
            and name.split(".")[0] in SECTIONS
            and not _elsewhere(page, quote)
        ):
            assert name in SETTINGS or name in REMOVED or _in_a_map(name) or _other_name(name), quote


def _in_a_map(name: str) -> bool:
    """Check for a key of a setting that is a free map, such as an argument of SGLang."""
    entry = SETTINGS.get(name.rpartition(".")[0])
    return entry is not None and "additionalProperties" in entry.schema


def _other_name(name: str) -> bool:
    """Check for a file, or a function of a module."""
    module = ROOT / name.replace(".", "/")
    return name.endswith((".sh", ".env", ".log")) or module.parent.with_suffix(".py").exists()


def _elsewhere(page: Path, quote: str) -> bool:
    """Check for a setting of another system in the first column of its table, such as ``sampling.max_tokens`` of
    prime-rl.
    """
    return page.name == "coming_from.md" and not any(quote in ours for ours in cells(1))


def cells(column: int) -> Iterator[str]:
    for line in (ROOT / "docs/coming_from.md").read_text().splitlines():
        if line.startswith("| ") and len(row := re.split(r" ?\| ?", line.strip("| "))) > 1:
            yield row[column]


def test_every_counterpart_is_a_setting_with_a_value_that_loads() -> None:
    """In ``coming_from.md`` each row of a system's table names settings of ours, with a value at most, or is
    ``none``.
    """
    text = (ROOT / "docs/coming_from.md").read_text()
    tables = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [table.split("\n")[0] for table in tables] == ["slime", "verl", "TRL", "prime-rl", "AReaL"]
    for table in tables:
        rows = [re.split(r" ?\| ?", line.strip("| ")) for line in table.splitlines() if line.startswith("| ")][1:]
        assert len(rows) > 20
        for row in rows:
            named = re.findall(r"`([^`]+)`", row[1])
            assert named or row[1] == "none", row
            for quote in named:
                assert_setting(quote)


def assert_setting(quote: str) -> None:
    path, given, value = quote.partition(": ")
    assert path in SETTINGS, quote
    assert not SETTINGS[path].is_section, quote
    if given:
        tree: Any = yaml.safe_load(value)
        for key in reversed(path.split(".")):
            tree = {key: tree}
        try:
            from_map(tree, "page")
        except SettingsError as bad:
            pytest.fail(f"{quote}: {bad}")


def test_every_term_is_defined_once() -> None:
    lines = (ROOT / "docs/concepts.md").read_text().splitlines()
    rows = [re.split(r" *\| *", line.strip())[1:-1] for line in lines if line.startswith("| ")]
    terms = [row[0] for row in rows if row[0] != "term"]
    assert len(terms) > 70
    assert len(set(terms)) == len(terms)
    for row in rows:
        assert len(row) == 3, row
        assert row[2], row


def blocks_of_commands() -> list[tuple[str, str]]:
    """Return the commands of all blocks: behind a prompt, variables and a program that runs them, up to a pipe or a
    redirection.
    """
    texts = [(page.name, block.replace("\\\n", " ")) for page in PAGES for block in fenced(page, "", "sh", "bash")]
    lines = [(name, line) for name, text in texts for line in text.splitlines()]
    shown = [(name, re.sub(r"^(\$ )?((export )?\w+=\S+ )*", "", line.strip())) for name, line in lines]
    return [(name, re.split(r" [|>&]+ ", line)[0]) for name, line in shown if line.startswith("tidemill ")]


COMMAND_LINE = command_parser()


def test_commands_parse(capsys: pytest.CaptureFixture[str]) -> None:
    for page, line in blocks_of_commands():
        try:
            assert COMMAND_LINE.parse_args(shlex.split(line, comments=True)[1:])
        except SystemExit:
            pytest.fail(f"{page}: {line}: {capsys.readouterr().err}")


def inline_commands() -> list[tuple[str, str]]:
    """Return the commands in sentences; ``tidemill api key`` in ``wire.md`` is no command but a text."""
    quotes = [
        (page.name, quote) for page in PAGES for quote in re.findall(r"(?<!`)`tidemill ([a-z]+[^`]*)`", prose(page))
    ]
    return [(name, quote) for name, quote in quotes if quote != "api key"]


def test_commands_in_sentences_have_the_options_that_are_named() -> None:
    for page, line in inline_commands():
        command, *words = line.split()
        for name in command.split("|"):
            parser = _below(COMMAND_LINE, name)
            assert parser is not None, (page, line)
            for word in words:
                parser = _below(parser, word) or parser
            options = {word.split("=")[0] for word in words if word.startswith("-")}
            assert options <= set(re.findall(r"--?[\w-]+", parser.format_help())), (page, line)


def _below(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser | None:
    """Return the parser of a command below another one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and name in action.choices:
            return action.choices[name]  # type: ignore[no-any-return]
    return None


def test_every_example_of_extending_is_shown_or_named() -> None:
    page = ROOT / "docs/extending.md"
    shown, text = fenced(page, "python"), page.read_text()
    files = {path.name: path.read_text() for path in (ROOT / "docs/examples/extending").glob("*.py")}
    assert len(files) == 15
    assert set(shown) <= set(files.values())
    assert [
        name for name, code in files.items() if code not in shown and f"(examples/extending/{name})" not in text
    ] == []


@pytest.mark.parametrize("block", blocks("yaml"))
def test_settings_load(block: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(block)
    assert load(tmp_path / "run.yaml").config


@pytest.mark.parametrize("block", blocks("json"))
def test_each_line_of_data_is_json(block: str) -> None:
    assert [json.loads(line) for line in block.splitlines()]


@pytest.mark.parametrize("block", blocks("python"))
def test_code_can_be_compiled(block: str) -> None:
    assert compile(block, "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)


def test_the_navigation_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    folder = ROOT / "docs"
    pages = sorted(str(path.relative_to(folder)) for path in (*folder.glob("*.md"), *folder.glob("decisions/*.md")))
    assert sorted(re.findall(r"[\w/-]+\.md", nav)) == pages


def quoted_symptoms() -> list[str]:
    lines = (ROOT / "docs/troubleshooting.md").read_text().splitlines()
    first = [line.split(" | ")[0] for line in lines if line.startswith("| ") and not line.startswith("| seen")]
    return [quote for cell in first for quote in re.findall(r"`([^`]+)`", cell) if not quote.startswith(PLACES)]


@pytest.mark.parametrize("quote", quoted_symptoms())
def test_a_message_of_troubleshooting_is_one_of_the_code(quote: str) -> None:
    """Messages are compared piece by piece: numbers and the text for ``...`` differ."""
    code = re.sub(r'"\s*\n\s*f?"', "", SOURCES)
    pieces = [piece.strip(" :;,") for piece in re.split(r"\.\.\.|\d+|: ", quote)]
    for piece in pieces:
        assert len(piece) < 5 or piece in code or piece in SETTINGS or any(foreign in quote for foreign in FOREIGN), (
            piece
        )
