"""Models that an installation of SGLang lacks, and windows that its code ignores, are refused before a server is
started, by check and engine.
"""

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
from tidemill.actors.serving.sglang.registry import MORE_MODELS, find_refusal, read_registry
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.settings.config_loader import load

MODULES = {
    "one": "class One:\n    ...\n\n\nEntryClass = OneForCausalLM\n",
    "two": "EntryClass = [\n    TwoForCausalLM,  # not ThreeForCausalLM\n    FourForCausalLM,\n]\n",
    "five": "EntryClass: list = (FiveForCausalLM, SixForCausalLM)\nraise ImportError('no kernels')\n",
    "none": "class SevenForCausalLM:\n    EntryClass = 7\n",
    # Windows: set by a class behind another module; by an assignment; by none of the class's own layers.
    "layers": "class Layer:\n    def __init__(self):\n        self.attn = RadixAttention(sliding_window_size=8)\n\n\n"
    "class Window:\n    def __init__(self, config):\n        RadixAttention(sliding_window_size=config.window)\n",
    "eight": "LAYERS = {'sliding': Window}\n\n\nclass EightForCausalLM:\n    layers = LAYERS\n\n\n"
    "def load():\n    from sglang.srt.models.layers import Window\n\n\nEntryClass = [EightForCausalLM]\n",
    "nine": "class NineForCausalLM:\n    def __init__(self, layer):\n        layer.attn.use_irope = True\n\n\n"
    "EntryClass = NineForCausalLM\n",
    "ten": "from sglang.srt.models.layers import Layer, Window\n\n\nclass TenForCausalLM(Layer): ...\n\n\n"
    "EntryClass = [TenForCausalLM]\n",
}
REGISTERED = {f"{number}ForCausalLM" for number in ("One", "Two", "Four", "Five", "Six", "Eight", "Nine", "Ten")}


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
    assert registry.architectures == REGISTERED
    assert registry.refusal({"architectures": ["ElevenForCausalLM", "SixForCausalLM"]}, context=1) is None
    for values in ({"architectures": ["SevenForCausalLM"]}, {"architectures": None}, {"architectures": "Six"}, {}):
        assert registry.refusal(values, context=1) is not None


@pytest.mark.parametrize(
    ("values", "context", "key"),
    [
        ({"sliding_window": 16}, 17, "sliding_window"),
        ({"sliding_window": 16}, 16, None),
        ({"sliding_window": None}, 512, None),
        ({"sliding_window": 16, "use_sliding_window": False}, 512, None),
        ({"sliding_window": 16, "layer_types": ["full_attention", "full_attention"]}, 512, None),
        ({"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, 512, "sliding_window"),
        ({"attention_chunk_size": 8, "layer_types": ["chunked_attention"]}, 512, "attention_chunk_size"),
        ({"text_config": {"sliding_window": 16}}, 512, "sliding_window"),
    ],
)
def test_a_window_is_refused_where_the_code_of_the_model_has_none(
    environment: dict[str, str], values: JsonObject, context: int, key: str | None
) -> None:
    settings = SglangConfig(python=sys.executable, environment=environment)
    config = {**values, "architectures": ["TenForCausalLM"]}
    window = find_refusal(config, settings, context)
    assert (window and window.key) == key
    for architecture in ("EightForCausalLM", "NineForCausalLM"):
        assert find_refusal({**config, "architectures": [architecture]}, settings, context) is None


def test_an_installation_with_further_models_is_left_to_itself(environment: dict[str, str]) -> None:
    assert read_registry(SglangConfig(python=sys.executable, environment={**environment, MORE_MODELS: "mine"})) is None


@pytest.mark.parametrize("python", [sys.executable, "/bin/true", "/no/python"])
def test_an_interpreter_without_sglang_is_refused(python: str) -> None:
    with pytest.raises(EngineFailed):
        read_registry(SglangConfig(python=python))


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"architectures": ["SevenForCausalLM"]}, "architectures", ["SevenForCausalLM", "engine.runner: transformers"]),
        ({"architectures": ["TenForCausalLM"], "sliding_window": 8}, "sliding_window", ["8", "engine.max_context: 8"]),
    ],
)
def test_check_and_engine_refuse_what_is_not_served(
    environment: dict[str, str], tmp_path: Path, values: JsonObject, key: str, words: list[str]
) -> None:
    file, program = write_run(tmp_path), tmp_path / "sglang/bin/python"
    config, written = tmp_path / "model/config.json", []
    for changed in ({"architectures": ["OneForCausalLM"]}, values):
        config.write_text(json.dumps(json.loads(config.read_text()) | changed))
        settings = ["engine.kind=sglang", f"engine.sglang.python={program}"]
        settings += [f"engine.sglang.environment.{name}={value}" for name, value in environment.items()]
        report = check(load(file, settings), Purpose())
        written.append([error.text for error in report.errors])
    assert written[0] == []
    (error,) = written[1]
    for word in [f"{config}: {key}", "SGLang 0.5.23", *words]:
        assert word in error
    sglang = SglangConfig(python=str(program), environment=environment)
    engine = SglangEngine(
        config.parent, EngineConfig(kind="sglang", sglang=sglang), version=-1, authority=Authority(unguarded=True)
    )
    with refusal(UnsupportedModel, where=f"{config}: {key}"):
        engine.load()
    assert os.environ.get("PYTHONPATH") != environment["PYTHONPATH"]
