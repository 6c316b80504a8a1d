"""Checks before a run of a model that the engine's decoder lacks: transformers runs it in the engine."""

import json
from pathlib import Path

import pytest

from tests.check_kit import write_run
from tests.families import write_family
from tests.forked import completed
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.cli import main
from tidemill.launch.run.feeder_process import model_shape
from tidemill.launch.settings.config_loader import load

ON_CPU = ("learner.device=cpu", "engine.dtype=float32", "engine.max_running=8")
KL = ("learner.algorithm.kl.coef=0.1",)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the child that reads the sizes of rows; tests/contract/test_transformers_runner.py executes it."""
    monkeypatch.setattr("tidemill.actors.serving.builtin.row_sizes.execute", completed)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the settings of a run with a family that the learner has, and the decoder lacks."""
    directory = tmp_path_factory.mktemp("run")
    file = write_run(directory)
    write_family(directory / "model", "glm4_moe")
    config = directory / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}))
    return file


def checked(file: Path, *settings: str) -> Report:
    return check(load(file, (*ON_CPU, *settings)), Purpose())


def test_keys_and_values_have_room_as_with_the_decoder(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = checked(run_file)
    assert not report.errors, report.errors
    tokens = 8 * 512
    assert f"({tokens:,} tokens, engine.kv_tokens)" in report.on("memory")[0]
    (refused,) = checked(run_file, "engine.kv_tokens=100000000000").errors
    assert "engine.kv_tokens: want" in refused.text
    assert main.main(["config", str(run_file), "--memory", *(f"--set={setting}" for setting in ON_CPU)]) == 0
    # Four layers with keys and values of two heads of sixteen elements.
    assert f"{tokens:,} tokens" in (printed := capsys.readouterr().out) and "weights of a push under way" in printed


@pytest.mark.parametrize(
    ("setting", "place"),
    [("engine.runner=decoder", "model_type"), ("learner.routing_replay=rollout", "learner.routing_replay")],
)
def test_what_only_the_decoder_or_sglang_has_is_refused(run_file: Path, setting: str, place: str) -> None:
    (error,) = checked(run_file, setting).errors
    assert place in error.text and "engine.kind: sglang" in error.text


def test_a_reference_with_rotary_positions_by_kind_of_layer_is_compared(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    write_family(tmp_path / "model", "olmo3")
    write_family(tmp_path / "same", "olmo3", seed=1)
    write_family(tmp_path / "other", "olmo2")
    turned = write_family(tmp_path / "turned", "olmo3")
    config = json.loads((turned / "config.json").read_text())
    config["rope_parameters"]["full_attention"]["rope_theta"] = 5.0
    (turned / "config.json").write_text(json.dumps(config))
    errors = {
        name: [error.text for error in checked(file, f"learner.algorithm.kl.reference={tmp_path / name}", *KL).errors]
        for name in ("same", "other", "turned")
    }
    assert errors["same"] == []
    assert "olmo2" in errors["other"][0]
    assert "rope_parameters" in errors["turned"][0]


def test_the_text_of_a_model_with_images_has_the_sizes_of_a_run(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    file = write_run(tmp_path)
    sizes = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4}
    vision = sizes | {"out_hidden_size": 64, "num_position_embeddings": 64}
    text = AutoConfig.from_pretrained(write_family(tmp_path / "text", "qwen3_5")).to_dict()
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    report = checked(file)
    assert not report.errors, report.errors
    assert "512 tokens" in report.on("model")[0]
    assert model_shape(tmp_path / "model") == (512, 512)
