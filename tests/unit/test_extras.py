"""Each role's extra: the table matches pyproject.toml, a base install imports its modules, and a missing extra is one
clear error.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tidemill.bus import exit_codes
from tidemill.launch.cli import main as cli
from tidemill.launch.settings import extras

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORT_NAMES = {
    "pyzmq": "zmq",
    "megatron-core": "megatron",
    "math-verify": "math_verify",
    "prometheus-client": "prometheus_client",
}
"""Distributions with modules of another name."""
NOT_IN_BASE = sorted({package for packages in extras.EXTRAS.values() for package in packages})

BASE_PACKAGES = (
    "tidemill.bus",
    "tidemill.rewards",
    "tidemill.launch",
    "tidemill.actors.actor",
    "tidemill.actors.engines",
    "tidemill.actors.text",
    "tidemill.actors.openai",
    "tidemill.actors.router",
)

OF_LEARNER = {"tidemill.launch.run.learner_nodes", "tidemill.launch.deploy.rank_parents"}
"""Imported by `tidemill learner` alone, which wants its extra."""


def test_the_table_of_extras_is_that_of_pyproject() -> None:
    declared = {
        extra: {IMPORT_NAMES.get(name, name) for name in (re.split(r"[^\w-]", line)[0] for line in lines)}
        for extra, lines in PYPROJECT["optional-dependencies"].items()
        if extra not in ("all", "docs", "gpu", "test")
    }
    assert {extra: set(packages) for extra, packages in extras.EXTRAS.items()} == declared


def test_all_names_every_role_and_the_tests_install_all() -> None:
    """Ray is not among them: a cluster has its own, whose version decides."""
    (everything,) = PYPROJECT["optional-dependencies"]["all"]
    assert set(re.findall(r"\w+", everything)) == {"tidemill", *extras.EXTRAS} - {"ray"}
    assert "tidemill[all]" in PYPROJECT["optional-dependencies"]["test"]


def test_a_base_install_imports_the_bus_the_actor_and_the_commands() -> None:
    """A fresh interpreter in which every package of every extra is blocked."""
    modules = _base_modules()
    assert {
        "tidemill.actors.actor.process",
        "tidemill.bus.streams.bus",
        "tidemill.launch.cli.tail",
        "tidemill.rewards.registry",
    } <= set(modules)
    code = (
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({NOT_IN_BASE!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def _base_modules() -> list[str]:
    files = [
        file
        for package in BASE_PACKAGES
        for file in (ROOT / package.replace(".", "/").removeprefix("tidemill/")).rglob("*.py")
    ]
    files += (ROOT / "actors").glob("*.py")
    names = {
        f"tidemill.{file.relative_to(ROOT).with_suffix('')}".replace("/", ".")
        for file in files
        if not file.stem.startswith("__")
    }
    return sorted(names - OF_LEARNER)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["up", "launch/configs/digits.yaml"], "engine"),
        (["engine", "--bus", "nats://127.0.0.1:1", "--wait", "0.1"], "engine"),
        (["host", "--bus", "nats://127.0.0.1:1", "engines=1"], "engine"),
        (["learner", "--config", "launch/configs/digits.yaml", "--bus", "nats://127.0.0.1:1"], "learner"),
        (["prepare", "launch/configs/digits.yaml"], "learner"),
        (["router", "--worker", "http://127.0.0.1:1", "--exact", "model"], "router"),
    ],
)
def test_a_command_without_its_extra_names_the_extra_to_install(
    words: list[str], extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = extras.EXTRAS[extra][0]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(ROOT)
    assert cli.main(words) == exit_codes.CONFIG
    error = capsys.readouterr().err
    assert error.startswith(
        f"tidemill {words[0]}: want the packages of tidemill[{extra}], got none of the name {package}; "
    )
    assert f"pip install 'tidemill[{extra}]'" in error
    assert error.count("\n") == 1


def test_a_module_missing_in_the_middle_of_a_command_is_explained() -> None:
    explained = extras.explain(ModuleNotFoundError("No module named 'pyarrow.parquet'", name="pyarrow.parquet"))
    assert explained is not None
    assert (explained.extra, explained.packages) == ("learner", ("pyarrow",))
    assert extras.explain(ModuleNotFoundError("No module named 'mine'", name="mine")) is None
