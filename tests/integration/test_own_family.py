"""``learner.family``: rules and modules of a user's own for a family that transformers lacks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from tests.families import one_place, place_here, write_family
from tests.forked import completed
from tests.integration.fsdp_family_ranks import different, measured
from tests.mtp_models import files_of, rewrite
from tests.refusals import refusal
from tidemill.actors.config import EngineConfig
from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin.engine import open_model as open_engine
from tidemill.actors.serving.builtin.row_sizes import read_row_sizes
from tidemill.bus.system.functions import FunctionRefused
from tidemill.launch.cli.main import main
from tidemill.learner import Family
from tidemill.learner.backends.fsdp.family import FAMILIES, first_output
from tidemill.learner.backends.fsdp.model import open_model
from tidemill.learner.errors import ConfigRefused

MODULE = "docs.examples.extending.my_family"
FAMILY = f"{MODULE}:FAMILY"
GENERAL, MINIMAX = Family(), FAMILIES["minimax"]
HERE = __name__


@pytest.fixture
def place() -> Iterator[None]:
    with one_place():
        yield


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    """Undo what importing the example registers with transformers."""
    yield
    if (module := sys.modules.pop(MODULE, None)) is not None:
        CONFIG_MAPPING._extra_content.pop("brook")
        MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(module.BrookConfig)


@pytest.fixture
def brook(tmp_path: Path) -> Path:
    """Return the directory of a model of the example's family."""
    directory = write_family(tmp_path / "brook", "qwen2")
    files = files_of(directory)
    queries = {name: tensor for name, tensor in files.items() if name.endswith("q_proj.weight")}
    gates = {name.replace("q_proj", "gate"): 8 * tensor.flip(0).contiguous() for name, tensor in queries.items()}
    rewrite(directory, files | gates, model_type="brook", architectures=["BrookForCausalLM"])
    return directory


@pytest.mark.usefixtures("place")
def test_a_model_that_transformers_lacks_is_trained_with_its_own_modules(brook: Path) -> None:
    """In packed rows, with log-probs and gradients of its class for each sequence alone, and exported as it was."""
    with refusal(ConfigRefused, field="model.path"):
        open_model(brook, dtype="float32", place=place_here())
    model, result = measured(brook, family=FAMILY)
    assert model.findings.packed and "gate" in " ".join(name for name, _ in model.named_weights())
    assert (result["log_probs"] < 5e-5, result["gradients"] < 2e-5, result["export"]) == (True, True, [])


def test_the_engine_serves_it_and_a_check_knows_its_rows(brook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's self-test compares its decoded rows with passes of the same class."""
    monkeypatch.setattr("tidemill.actors.serving.builtin.row_sizes.execute", completed)
    config = EngineConfig(device="cpu", kv_tokens=640)
    with pytest.raises(UnsupportedModel):
        open_engine(brook, config)
    with pytest.raises(UnsupportedModel):
        read_row_sizes(brook)
    assert read_row_sizes(brook, FAMILY).keys() == {"float32", "bfloat16"}
    with pytest.raises(UnsupportedModel) as refused:
        read_row_sizes(brook, f"{MODULE}:FAMILIES")
    assert refused.value.where == "learner.family" and "nearest: 'FAMILY'" in refused.value.reason
    opened = open_engine(brook, EngineConfig(device="cpu", kv_tokens=640, family=FAMILY))
    assert opened.facts.architecture == "BrookForCausalLM"


@pytest.mark.usefixtures("place")
def test_rules_of_a_setting_replace_the_built_in_ones(tmp_path: Path) -> None:
    """``minimax`` has rules, without which its states of a packed row go from one sequence into the next."""
    directory = write_family(tmp_path, "minimax")
    kept = f"{HERE}:MINIMAX"
    for family, packed in ((f"{HERE}:GENERAL", False), (kept, True), ("", True)):
        assert open_model(directory, dtype="float32", place=place_here(), family=family).findings.packed is packed


@pytest.mark.usefixtures("place")
def test_what_is_no_family_is_refused(brook: Path) -> None:
    assert first_output(lambda hidden: (hidden, None), torch.ones(1)) == torch.ones(1)
    with refusal(ConfigRefused, field="learner.family"):
        open_model(brook, dtype="float32", place=place_here(), family=f"{HERE}:HERE")
    with refusal(FunctionRefused, setting="learner.family"):
        open_model(brook, dtype="float32", place=place_here(), family="no_such_module:FAMILY")


def test_a_checkpoint_of_it_becomes_a_model_and_back(
    brook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``tidemill convert``, which takes the family on the command line, where the checkpoint is of no run."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # which the command sets for its process
    checkpoint, there = str(tmp_path / "checkpoint"), str(tmp_path / "there")
    assert main(["convert", str(brook), checkpoint, "--family", FAMILY]) == 0
    assert main(["convert", checkpoint, there, "--model", str(brook), "--family", FAMILY]) == 0
    assert different(files_of(Path(there)), files_of(brook)) == []
