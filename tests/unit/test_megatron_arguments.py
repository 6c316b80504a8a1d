"""Megatron's own arguments: by the names of the installed Megatron, and none that a setting decides."""

import subprocess
import sys
from typing import Any

import pytest

from learner.settings.config import LearnerConfig
from learner.settings.megatron_arguments import OURS, annotations, refusals


def test_arguments_of_ours_are_megatrons() -> None:
    assert set(OURS) <= set(annotations()), "a name of another release, which would refuse nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_model_parallel_size": 2}, r"megatron\.pipeline_model_parallel_size: .* set by learner\.pipeline_parallel; remove it"),
        ({"moe_router_force_load_balancing": True}, r"force_load_balancing: .* computes another model than the engines serve"),
        ({"hidden_size": 2}, r"megatron\.hidden_size: .* the model's config\.json"),
        ({"window_size": [4, 0]}, r"megatron\.window_size: .* own attention and loss, which do not read it"),
    ],
)
def test_those_that_the_learner_sets_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerConfig(megatron=arguments)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("deallocate_pipline_outputs", True, "did you mean deallocate_pipeline_outputs?"),
        ("nothing_like_it_at_all", 1, "want an argument of Megatron's TransformerConfig, got 'nothing_like_it_at_all'"),
        ("deallocate_pipeline_outputs", 1, "want a value of type bool, got 1"),
        ("cpu_offloading_num_layers", True, "want a value of type int, got True"),
        ("cpu_offloading_num_layers", None, "want a value of type int, got None"),
        ("grad_scale_func", "max", "want a value of type Optional[Callable], got 'max'"),
    ],
)
def test_others_are_those_of_the_installed_megatron(name: str, value: object, message: str) -> None:
    [refused] = refusals({name: value})
    assert str(refused).startswith(f"learner.megatron.{name}: ") and message in str(refused)


def test_values_that_fit() -> None:
    fitting = {"deallocate_pipeline_outputs": True, "wgrad_deferral_limit": 3, "moe_layer_freq": [0, 1], "fp8": "hybrid", "fp4": None}
    assert refusals(fitting) == []


def test_names_are_read_without_megatron() -> None:
    code = "import sys; from learner.settings.megatron_arguments import annotations; print(bool(annotations()), 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True False\n"
