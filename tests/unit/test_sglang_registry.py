"""Models that an installation of SGLang lacks are refused before a server is started, by check and engine."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.check_kit import write_run
from tests.refusals import refusal
from tidemill.actors.config import EngineConfig, SglangConfig
from tidemill.actors.errors import EngineFailed, UnsupportedModel
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.sglang.engine import SglangEngine
from tidemill.actors.serving.sglang.registry import MORE_MODELS, read_registry
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.settings.config_loader import load

MODULES = {
    "one": "class One:\n    ...\n\n\nEntryClass = OneForCausalLM\n",
    "two": "EntryClass = [\n    TwoForCausalLM,  # not ThreeForCausalLM\n    FourForCausalLM,\n]\n",
    "five": "EntryClass: list = (FiveForCausalLM, SixForCausalLM)\nraise ImportError('no kernels')\n",
    "none": "class SevenForCausalLM:\n    EntryClass = 7\n",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Write a package with the layout of SGLang's; return the variables with which this interpreter has it."""
    package = tmp_path / "sglang/lib/python3.11/site-packages"
    (package / "sglang/srt/models").mkdir(parents=True)
    (package / "sglang/__init__.py").write_text("raise ImportError('takes half a minute')")
    for name, text in MODULES.items():
        (package / f"sglang/srt/models/{name}.py").write_text(text)
    (package / "sglang-0.5.23.dist-info").mkdir()
    (package / "sglang-0.5.23.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")
    (tmp_path / "sglang/bin").mkdir()
    (tmp_path / "sglang/bin/python").symlink_to(sys.executable)
    return {"PYTHONPATH": str(package)}


def test_the_models_are_those_that_modules_register(environment: dict[str, str]) -> None:
    registry = read_registry(SglangConfig(python=sys.executable, environment=environment))
    assert registry is not None and registry.release == "0.5.23"
    assert registry.architectures == {f"{number}ForCausalLM" for number in ("One", "Two", "Four", "Five", "Six")}
    assert registry.refusal({"architectures": ["EightForCausalLM", "SixForCausalLM"]}) is None
    for values in ({"architectures": ["SevenForCausalLM"]}, {"architectures": None}, {"architectures": "Six"}, {}):
        assert registry.refusal(values) is not None


def test_an_installation_with_further_models_is_left_to_itself(environment: dict[str, str]) -> None:
    assert read_registry(SglangConfig(python=sys.executable, environment={**environment, MORE_MODELS: "mine"})) is None


@pytest.mark.parametrize("python", [sys.executable, "/bin/true", "/no/python"])
def test_an_interpreter_without_sglang_is_refused(python: str) -> None:
    with pytest.raises(EngineFailed):
        read_registry(SglangConfig(python=python))


def test_check_and_engine_refuse_what_is_not_served(environment: dict[str, str], tmp_path: Path) -> None:
    file, program = write_run(tmp_path), tmp_path / "sglang/bin/python"
    config, written = tmp_path / "model/config.json", []
    for architecture in ("OneForCausalLM", "SevenForCausalLM"):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [architecture]}))
        settings = ["engine.kind=sglang", f"engine.sglang.python={program}"]
        settings += [f"engine.sglang.environment.{name}={value}" for name, value in environment.items()]
        report = check(load(file, settings), Purpose())
        written.append([error.text for error in report.errors])
    assert written[0] == []
    (error,) = written[1]
    assert "SGLang 0.5.23" in error and "SevenForCausalLM" in error and "engine.runner: transformers" in error
    sglang = SglangConfig(python=str(program), environment=environment)
    engine = SglangEngine(
        config.parent, EngineConfig(kind="sglang", sglang=sglang), version=-1, authority=Authority(unguarded=True)
    )
    with refusal(UnsupportedModel, where=f"{config}: architectures"):
        engine.load()
    assert os.environ.get("PYTHONPATH") != environment["PYTHONPATH"]
