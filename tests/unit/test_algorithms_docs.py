"""docs/algorithms.md is complete and true: every preset and setting is in it, all names in it exist, and its examples
work.
"""

import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from tests.algorithm_settings import algorithm_of
from tests.contract import test_custom_algorithms as contract
from tidemill.launch.settings.config_loader import load
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.algorithms.choices import (
    ADVANTAGES,
    AGGREGATIONS,
    BY_CRITIC,
    KL_ESTIMATORS,
    LOSSES,
    PRESETS,
    RUNNING,
    WEIGHTS,
)
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.objective import Objective
from tidemill.learner.algorithms.sections import reject_rule

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/algorithms.md").read_text()
QUOTED = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE))
CHOICES = {
    "correction": tuple(PRESETS),
    "advantage": (*ADVANTAGES, *RUNNING, *BY_CRITIC, "m:f"),
    "loss": LOSSES,
    "aggregation": AGGREGATIONS,
    "weight.level": WEIGHTS,
    "weight.action": ("clip", "truncate", "mask"),
    "anchor": ("proximal", "rollout", "none"),
    "proximal": ("recompute", "loglinear"),
    "kl.estimator": KL_ESTIMATORS,
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def tables() -> Iterator[list[list[str]]]:
    """Yield every table, as rows of cells; the first row is its head."""
    for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        head, _, *rows = block.splitlines()
        yield [cells(head), *map(cells, rows)]


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [content for named, content in fenced if named == language]


def resolves(path: str) -> bool:
    """Check whether a setting has this path, from the root or below learner.algorithm."""

    def under(kind: Any, names: list[str]) -> bool:
        for name in names:
            hints = get_type_hints(kind) if is_dataclass(kind) else {}
            if name not in hints:
                return False
            kind = hints[name]
        return True

    return under(RunConfig, path.split(".")) or under(AlgorithmConfig, path.split("."))


def settings() -> Iterator[str]:
    """Yield the path of every setting of the algorithm."""
    for name, kind in get_type_hints(AlgorithmConfig).items():
        yield from [f"{name}.{inner.name}" for inner in fields(kind)] if is_dataclass(kind) else [name]


def test_every_preset_and_setting_is_explained() -> None:
    said = {re.split(r"[:\s]", quote)[0] for quote in QUOTED}
    wanted = {
        *PRESETS,
        *LOSSES,
        *settings(),
    }
    assert not wanted - said
    here = {quote for table in tables() for row in table[1:] for quote in re.findall(r"`([^`]+)`", row[0])}
    for setting, choices in (
        ("correction", PRESETS),
        ("advantage", (*ADVANTAGES, *RUNNING, *BY_CRITIC)),
        ("aggregation", AGGREGATIONS),
    ):
        assert not {f"{setting}: {choice}" for choice in choices} - here, "no row says what it is called elsewhere"
    assert not {*KL_ESTIMATORS} - {quote for quote in here if quote in KL_ESTIMATORS}


def test_the_table_of_presets_is_what_they_expand_to() -> None:
    head, *rows = next(table for table in tables() if table[0][0] == "preset")
    assert [row[0].strip("`") for row in rows] == list(PRESETS)
    for row in rows:
        config = AlgorithmConfig(correction=row[0].strip("`"))
        wanted = {
            "proximal": "recompute",
            "reject.rules": [],
            "reject.binary_kl": 0,
            "reject.opsm": 0,
            "m2.limit": 0,
            "aggregation": "token_mean",
        }
        for quote in re.findall(r"`([^`]+)`", row[-1]):
            wanted |= yaml.safe_load(quote)
        for name, said in zip(head[1:-1], row[1:-1], strict=True):
            is_clip = name.startswith("clip")
            if said:
                wanted[name] = float(said) if re.match(r"\d", said) else said
            else:
                assert attrgetter(name)(config) == 0 if is_clip else config.weight.level == "none", (
                    config.correction,
                    name,
                )
        assert {
            name: list(found) if isinstance(found := attrgetter(name)(config), tuple) else found for name in wanted
        } == wanted


def test_a_setting_that_is_named_exists() -> None:
    sections = {field.name for field in fields(RunConfig)} | {
        name.partition(".")[0] for name in settings() if "." in name
    }
    paths = [
        match[0]
        for quote in QUOTED
        if (match := re.match(r"[a-z_]+\.[a-z_.]+(?![/\w(])", quote)) and quote.split(".")[0] in sections
    ]
    assert len(paths) > 30
    assert [path for path in paths if not resolves(path)] == []


def test_a_row_begins_with_a_setting_of_ours() -> None:
    rows = [row for table in tables() if table[0][0] == "here" for row in table[1:]]
    assert len(rows) > 40
    for row in rows:
        for quote in re.findall(r"`([^`]+)`", row[0]):
            ((name, value),) = yaml.safe_load(quote).items() if ": " in quote else ((quote, None),)
            assert resolves(name), quote
            if value is not None and name in CHOICES:
                assert value in CHOICES[name], quote
            if name == "reject.rules":
                assert [reject_rule(rule) for rule in value or ()]


def test_a_metric_that_is_named_exists() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "learner/trainer").glob("*.py"))
    metrics = {quote for quote in QUOTED if re.fullmatch(r"(train|offpolicy|critic)/[\w/]+", quote)}
    assert len(metrics) > 10
    assert not {
        metric for metric in metrics if f'"{metric}"' not in sources and not metric.startswith("offpolicy/rejected/")
    }


@pytest.mark.parametrize("number", range(len(blocks("yaml"))))
def test_a_configuration_that_is_shown_is_good(number: int, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(blocks("yaml")[number])
    shown = load(file)
    assert shown.config.learner.algorithm != AlgorithmConfig()
    section = ""
    for line in (
        blocks("")[1].splitlines() if number == 0 else ()
    ):  # the documented output of --print-config for the first
        setting, _, origin = line.partition("#")
        ((name, value),) = yaml.safe_load(setting).items()
        if value is None:
            section = f"{name}."
            continue
        path = section + name if line.startswith(6 * " ") else name
        assert attrgetter(path)(shown.config.learner.algorithm) == value
        assert shown.origins[f"learner.algorithm.{path}"].endswith(origin.strip())


def test_the_functions_that_are_shown_hold_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    for source in blocks("python"):
        (tmp_path / source.splitlines()[0].removeprefix("# ")).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    _, file, *options = next(
        line for block in blocks("") for line in block.splitlines() if line.startswith("pytest ")
    ).split()
    assert (ROOT / file).samefile(contract.__file__)
    paths = dict(zip(options[::2], options[1::2], strict=True))
    given = {
        "objective": Objective(algorithm_of(loss=paths["--loss"], anchor="rollout", weight={"level": "none"})),
        "estimator": Objective(AlgorithmConfig(advantage=paths["--advantage"])),
        "rubbish": math.nan,
    }
    held = 0
    for name, test in vars(contract).items():
        wanted = set(inspect.signature(test).parameters) if name.startswith("test_") else set()
        if wanted & {"objective", "estimator"}:
            test(**{argument: given[argument] for argument in wanted})
            held += 1
    assert held > 8
