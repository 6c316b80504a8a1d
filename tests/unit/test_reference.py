"""The configuration reference is complete and current, and its JSON Schema accepts and refuses the same files as the
loader.
"""

import dataclasses
import itertools
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.schema_kit import errors
from tidemill.bus.section import derived
from tidemill.launch.cli import main as cli
from tidemill.launch.settings import reference
from tidemill.launch.settings.config_loader import SettingsError, from_map, to_map
from tidemill.launch.settings.run_config import RunConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/configuration.md"
SCHEMA = reference.schema()
FILES = sorted([*ROOT.glob("launch/configs/*.yaml"), *ROOT.glob("docs/examples/**/*.yaml")])
ENTRIES = list(reference.entries())
SETTINGS = [one for one in ENTRIES if not one.is_section]
OF_RUN = [one for one in SETTINGS if ".NAME." not in one.path]
"""The settings with one place; others are those of the entries of maps."""
BOUNDED = [one for one in OF_RUN if {"enum", "minimum", "exclusiveMinimum"} & one.schema.keys()]


def paths(section: type, prefix: str = "") -> Iterator[str]:
    """Yield every setting, found without the module under test."""
    kinds = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        kind, path = kinds[field.name], f"{prefix}{field.name}"
        inner = [one for one in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(one)]
        is_map = isinstance(typing.get_origin(kind), type) and issubclass(typing.get_origin(kind), dict)
        if not field.init:
            continue
        if is_map or not inner:
            yield path
        if inner:
            yield from paths(typing.cast(type, inner[0]), f"{path}.NAME." if is_map else f"{path}.")


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def loads(values: dict[str, Any]) -> str:
    """Return "" if the loader accepts the values, else its error."""
    try:
        from_map(values, "test")
    except SettingsError as bad:
        return str(bad)
    return ""


def test_the_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--reference"]) == 0
    assert PAGE.read_text() == capsys.readouterr().out, "run: tidemill config --reference > docs/configuration.md"


def test_every_setting_has_a_row_and_a_sentence() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = [row[0].strip("| `") for row in rows]
    basic = [one.path for one in SETTINGS if one.is_basic]
    first = next(line for line in PAGE.read_text().splitlines() if line.startswith(reference.BEGIN))
    assert re.findall("`([a-z_.]+)`", first.removeprefix(reference.BEGIN)) == basic and 10 < len(basic) < 20
    repeated = reference.repeated()
    listed_once = {path for path in paths(RunConfig) if path.rpartition(".")[0] in repeated}
    assert sorted(names) == sorted({*paths(RunConfig)} - derived(RunConfig).keys() - listed_once)
    assert not [one.path for one in ENTRIES if len(one.sentence) < 5], "want a string below the field"


def test_defaults_are_those_of_the_dataclasses() -> None:
    defaults = to_map(RunConfig())
    for one in OF_RUN:
        value: Any = defaults
        for key in one.path.split("."):
            value = value and value.get(key)
        if value is not None and one.schema.get("default") is not None:
            assert value == one.schema["default"], one.path


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(SCHEMA))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_shipped_configurations_are_valid(file: Path) -> None:
    assert not list(errors(yaml.safe_load(file.read_text()), SCHEMA))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"learner": {"stepz": 3}}, "learner: unknown key 'stepz'"),
        ({"staleness": {"gate": "maybe"}}, "staleness.gate: want one of"),
        ({"learner": {"steps": "many"}}, "learner.steps: want ['integer']"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature: want minimum 0.01"),
        ({"sampling": {"stop": "word"}}, "sampling.stop: want ['array']"),
        ({"bus": {"cluster": 2}}, "bus.cluster: want one of [1, 3]"),
        ({"learner": {"device": "gpu"}}, "learner.device: want one of"),
    ],
    ids=["unknown-key", "choice", "type", "bound", "list", "number-choice", "device"],
)
def test_broken_files_are_refused_by_schema_and_loader(change: dict[str, Any], where: str) -> None:
    values = yaml.safe_load((ROOT / "launch/configs/digits.yaml").read_text())
    for section, settings in change.items():
        values[section] = {**values.get(section, {}), **settings}
    found = list(errors(values, SCHEMA))
    assert len(found) == 1
    assert found[0].startswith(where)
    assert loads(values)


def test_defaults_pass_and_other_types_do_not() -> None:
    """A value of another type is refused by both: the schema is as strict about types as the loader."""
    for entry in OF_RUN:
        default = entry.schema.get("default")
        assert default is None or not list(errors(nested(entry.path, default), SCHEMA)), entry.path
    for entry, wrong in itertools.product(OF_RUN, ({"a": 1}, [[1]], True, "text", 1.5, 3, None)):
        values = nested(entry.path, wrong)
        if any(errors(values, SCHEMA)):
            assert loads(values), f"the schema refuses {values}, which the loader takes"
        elif "want" in (refused := loads(values)) and "such as" in refused:
            raise AssertionError(f"the loader refuses {values} for its type, which the schema takes: {refused}")


def test_choices_and_bounds_are_those_of_the_loader() -> None:
    for entry in BOUNDED:
        for value in (*entry.schema.get("enum", ()), -1, 0, 1, 2, 0.5, "no such"):
            values = nested(entry.path, value)
            if any(errors(values, SCHEMA)):
                assert entry.path.rpartition(".")[2] in loads(values), (
                    f"the schema refuses {values}, the loader does not name it"
                )
        wrong: Any = "no such" if "enum" in entry.schema else -10
        assert any(errors(nested(entry.path, wrong), SCHEMA)), entry.path
