"""Checks before a run of a model that the engine's decoder lacks: transformers runs it in the engine."""

from pathlib import Path

import pytest

from tests.check_kit import write_run
from tests.model_families import write_family_model
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.cli import main
from tidemill.launch.settings.config_loader import load

ON_CPU = ("learner.device=cpu", "engine.dtype=float32", "engine.max_running=8")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the settings of a run with a family that the learner has, and the decoder lacks."""
    directory = tmp_path_factory.mktemp("run")
    file = write_run(directory)
    write_family_model(directory / "model", "glm4_moe")
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
