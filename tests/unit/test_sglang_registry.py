"""Models that an installation of SGLang lacks, and windows that its code ignores, are refused before a server is
started, by check and engine.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.check_kit import write_run
from tests.refusals import refusal
from tidemill.actors.config import EngineConfig, SglangConfig
from tidemill.actors.errors import EngineFailed, UnsupportedModel
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.sglang.engine import SglangEngine
from tidemill.actors.serving.sglang.registry import (
    DEFAULT_WINDOWS,
    LIMITS,
    MORE_MODELS,
    Registry,
    ServerCheck,
    find_refusal,
    read_registry,
    windows_of,
)
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
BACKENDS = {
    "attention_registry": "@register_attention_backend('masks')\ndef masks(runner):\n"
    "    from sglang.srt.layers.attention.masks import Masks\n\n\n"
    "@register_attention_backend('chunks')\ndef chunks(runner):\n"
    "    from sglang.srt.layers.attention.chunks import Chunks\n"
    "    from sglang.srt.hardware_backend.other.masks import Masks\n\n\n"
    "@register_attention_backend('elsewhere')\ndef elsewhere(runner):\n"
    "    from sglang.srt.hardware_backend.other.masks import Masks\n\n\n"
    "@register_attention_backend('plain')\n@deprecated\ndef plain(runner):\n"
    "    from sglang.srt.layers.attention.plain import Plain\n\n\n"
    "@register_attention_backend('texts')\ndef texts(runner):\n"
    "    from sglang.srt.layers.attention.texts import Texts\n",
    "masks": "layer.sliding_window_size\n",
    "chunks": "layer.sliding_window_size, layer.use_irope if config.is_local_attention_model else None\n",
    "plain": "",
    "texts": "# layer.sliding_window_size is ignored\npool.use_sliding_window_kv = 'sliding_window_size'\n",
}
"""Modules of attention backends: one has windows, one chunks, too, but not of every architecture, and two have none."""
OTHER_DEVICE = "layer.use_irope\n"
CHUNKED = "def is_local_attention_model(architectures):\n    return 'EightForCausalLM' in architectures\n"
REGISTERED = {f"{number}ForCausalLM" for number in ("One", "Two", "Four", "Five", "Six", "Eight", "Nine", "Ten")}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Write a package with the layout of SGLang's; return the variables with which this interpreter has it."""
    package = tmp_path / "sglang/lib/python3.11/site-packages"
    (package / "sglang/srt/models").mkdir(parents=True)
    (package / "sglang/__init__.py").write_text("raise ImportError('takes half a minute')")
    for name, text in MODULES.items():
        (package / f"sglang/srt/models/{name}.py").write_text(text)
    (package / "sglang/srt/layers/attention").mkdir(parents=True)
    for name, text in BACKENDS.items():
        (package / f"sglang/srt/layers/attention/{name}.py").write_text(text)
    (package / "sglang/srt/hardware_backend/other").mkdir(parents=True)
    (package / "sglang/srt/hardware_backend/other/masks.py").write_text(OTHER_DEVICE)
    (package / "sglang/srt/configs").mkdir()
    (package / "sglang/srt/configs/model_config.py").write_text(CHUNKED)
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
        ({"sliding_window": 16, "use_sliding_window": None}, 512, None),
        ({"sliding_window": True}, 512, None),
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


@pytest.mark.parametrize(
    ("architecture", "backend", "is_refused"),
    [
        ("EightForCausalLM", "masks", False),
        ("EightForCausalLM", "chunks", False),
        ("EightForCausalLM", "plain", True),
        ("NineForCausalLM", "masks", True),  # its code has chunks, and this backend windows alone
        ("NineForCausalLM", "chunks", True),  # which computes those of other architectures
        ("EightForCausalLM", "texts", True),
        ("EightForCausalLM", "unknown", True),
        ("NineForCausalLM", "elsewhere", False),
        ("NineForCausalLM", None, False),  # not known before the start
    ],
)
def test_a_window_is_refused_where_the_attention_backend_has_none(
    environment: dict[str, str], architecture: str, backend: str | None, *, is_refused: bool
) -> None:
    values = {"architectures": [architecture], "sliding_window": 16}
    for arguments in (
        {"attention-backend": backend},
        {"attention_backend": "masks", "decode_attention_backend": backend},
    ):
        if architecture == "NineForCausalLM" and "decode_attention_backend" in arguments:
            continue
        settings = SglangConfig(python=sys.executable, environment=environment, arguments=arguments)
        refused = find_refusal(values, settings, 17)
        assert bool(refused) == is_refused
        assert refused is None or ("attention_backend" in refused.cure and str(backend) in refused.want)
        assert find_refusal(values, settings, 16) is None


@pytest.mark.parametrize(
    ("windowed", "at_fault"), [({}, "the code of SGLang 1 for A"), ({"A": frozenset()}, "every attention backend")]
)
def test_a_refusal_says_whether_code_or_backends_ignore_the_window(
    windowed: dict[str, frozenset[str]], at_fault: str
) -> None:
    registry = Registry(release="1", architectures=frozenset("A"), windowed=windowed)
    found = registry.refusal({"architectures": ["A"], "sliding_window": 16}, context=17)
    assert found is not None and at_fault in found.want


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"use_sliding_window": True},
        {"num_hidden_layers": 80},
        {"use_sliding_window": True, "num_hidden_layers": 80},
        {"use_sliding_window": True, "num_hidden_layers": 80, "max_window_layers": 80},
        {"sliding_window": None},
        {"use_sliding_window": None},
        {"use_sliding_window": False},
    ],
)
def test_a_missing_key_has_the_value_that_transformers_gives_it(values: JsonObject) -> None:
    """Values of transformers' own configurations, made from the same settings, of every family but ``OTHER_KEYS``."""
    compared, refused = set(), set()
    for family in sorted((MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | DEFAULT_WINDOWS.keys()) - OTHER_KEYS):
        try:
            kind = CONFIG_MAPPING[family]().get_text_config()
            config = type(kind)(**values)
        except (StrictDataclassError, ValueError, ZeroDivisionError, NotImplementedError):  # transformers refuses them
            refused.add(family)
            continue
        if config.model_type in OTHER_KEYS:
            continue
        compared.add(config.model_type)
        of_text = values | {"num_hidden_layers": getattr(config, "num_hidden_layers", 1)}
        of_text |= {"model_type": config.model_type} if values else {}  # which not all releases have
        is_text = config.model_type == family
        written = {"model_type": family} | (of_text if is_text else {"text_config": of_text})
        assert windows_of(written) == _windows(config), written
    assert DEFAULT_WINDOWS.keys() - OTHER_KEYS <= compared | (refused if None in values.values() else set())
    assert len(compared) > 100


OTHER_KEYS = {
    *("deepseek_v4", "inkling_text", "inkling2_text", "inkling2_loop_text", "recurrent_gemma"),
    *("dots3_note", "dots3_note_text", "gemma4_assistant", "gemma4_unified_assistant"),
}
"""Families with other kinds of layers, another key, or another meaning of null; drafts of other models."""


def _windows(config: Any) -> dict[str, int]:
    """Return the windows of a configuration of transformers, which has every value."""
    kinds = getattr(config, "layer_types", None)
    found = {key: getattr(config, key, None) for kind, key in LIMITS if not kinds or kind in kinds}
    return {key: window for key, window in found.items() if window}


class Server(NamedTuple):
    """What a server that runs reports."""

    info: JsonObject
    model: JsonObject | None


@pytest.mark.parametrize(
    ("server", "architecture", "words"),
    [
        (Server({"version": "0.5.23", "attention_backend": "masks"}, None), "EightForCausalLM", ""),
        (Server({"version": "0.5.23", "attention_backend": "plain"}, None), "EightForCausalLM", "sliding_window"),
        (Server({"version": "0.5.23"}, {"architectures": ["TenForCausalLM"]}), "TenForCausalLM", "sliding_window"),
        (Server({"version": "0.5.23", "context_length": 16}, {}), "TenForCausalLM", ""),
        (Server({"version": "0.5.24"}, {"architectures": ["TenForCausalLM"]}), "TenForCausalLM", "not known"),
        (Server({"version": "0.5.23"}, {"architectures": ["OneForCausalLM"]}), "SixForCausalLM", "another arch"),
    ],
)
def test_a_server_that_runs_is_refused_by_what_is_certain(
    environment: dict[str, str],
    server: Server,
    architecture: str,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server that was not started here has the code of this machine where the release is the same."""
    values = {"architectures": [architecture]}
    values |= {} if architecture == "SixForCausalLM" else {"sliding_window": 16}
    url = "" if server.model is None else "http://127.0.0.1:9"
    settings = SglangConfig(python=sys.executable, environment=environment, url=url)
    check = ServerCheck.before(Path("config.json"), values, settings, 17)
    if words == "sliding_window":
        with refusal(UnsupportedModel, where="config.json: sliding_window"):
            check.of_server(url, server.info, server.model)
    else:
        check.of_server(url, server.info, server.model)
    assert (words in caplog.text) == (words != "sliding_window")
    assert bool(caplog.text) == (words not in ("", "sliding_window"))


def test_a_server_elsewhere_needs_no_installation_here() -> None:
    settings = SglangConfig(python="/no/python", url="http://127.0.0.1:9")
    check = ServerCheck.before(Path("config.json"), {"architectures": ["SixForCausalLM"]}, settings, 17)
    assert check.registry is None


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
        (
            {"model_type": "phi3", "architectures": ["TenForCausalLM"], "sliding_window": 8},
            "sliding_window",
            ["8", "engine.max_context: 8"],
        ),
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
