"""Arguments of Megatron that the learner passes on have an effect, and what Megatron refuses ends the run once."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.integration import megatron_effect_ranks
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tidemill.bus import exit_codes
from tidemill.learner.backends.megatron.bridges import Qwen3
from tidemill.learner.backends.megatron.layers.kernels import Arguments, Wanted
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.backends import TRIED, refusals


class Offloading(Qwen3):
    """A bridge of a user, with a setting that Megatron refuses."""

    def _arguments(self) -> Arguments:
        return super()._arguments() | {"cpu_offloading": True, "cpu_offloading_num_layers": 9}


class Unbuildable(Qwen3):
    """A bridge whose model Megatron refuses while it builds the layers."""

    def _get_gptmodel_args(self) -> Arguments:
        return super()._get_gptmodel_args() | {"position_embedding_type": "mrope"}


def a_stage_frees_its_outputs(directory: Path) -> None:
    results = run_ranks(
        megatron_effect_ranks.main,
        (write_tiny_model(directory / "model", "qwen3", vocab_size=128),),
        world=2,
        out=directory,
    )
    first, _ = results
    assert {*first["True"]["sent"]} == {1} and min(first["False"]["sent"]) > 1
    assert all(each["True"]["digest"] == each["False"]["digest"] for each in results), "the numbers are the same"


def files_have_the_configuration(directory: Path) -> None:
    model_dir = write_tiny_model(directory / "model", "qwen3", vocab_size=128)
    with one_rank() as here:
        build_policy(
            model_dir,
            dtype="float32",
            parallel=here,
            kernels=Wanted(megatron={"config_logger_dir": str(directory / "log")}),
        )
    assert [file for file in (directory / "log").iterdir() if b"hidden_size" in file.read_bytes()]


EFFECTS: Mapping[str, Callable[[Path], None]] = {
    "deallocate_pipeline_outputs": a_stage_frees_its_outputs,
    "config_logger_dir": files_have_the_configuration,
}


@pytest.mark.parametrize("name", sorted({*TRIED, *EFFECTS}))
def test_an_argument_that_is_passed_on_has_an_effect(name: str, tmp_path: Path) -> None:
    EFFECTS[name](tmp_path)


@pytest.mark.parametrize(
    ("bridge", "reason"),
    [
        ("Offloading", "CPU offloading can be done only for layers less than"),
        ("Unbuildable", "mrope require mrope_section"),
    ],
)
def test_what_megatron_refuses_is_no_crash(here: Any, tmp_path: Path, bridge: str, reason: str) -> None:
    """It ends the rank with 78, after which it is not started again."""
    with refusal(ConfigRefused, field="learner, model.path", got=re.compile(reason)) as refused:
        build_policy(
            write_tiny_model(tmp_path, "qwen3"), dtype="float32", parallel=here, bridge_class=f"{__name__}:{bridge}"
        )
    assert exit_codes.of(refused.value) == exit_codes.CONFIG


@pytest.mark.parametrize("value", [True, False, 0, -1, 3, 0.5, "", "a/b", "tensor", None, [], ["a"], [0]], ids=repr)
@pytest.mark.parametrize("name", sorted(TRIED))
def test_megatron_takes_every_value_that_the_check_accepts(name: str, value: object) -> None:
    """So nothing that Megatron refuses is found only at the start, and ``tidemill check`` need not load torch."""
    if not refusals({name: value}):
        TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=1, **{name: value})
