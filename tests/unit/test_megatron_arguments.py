"""Megatron's own arguments: by the names of the installed Megatron, and none that a setting decides."""

import subprocess
import sys
from typing import Any

import pytest

from tests.refusals import refusal
from tidemill.learner.settings.backends import OURS, TRIED, annotations, refusals
from tidemill.learner.settings.config import LearnerConfig


def test_every_argument_of_megatron_is_passed_on_or_refused_with_a_reason() -> None:
    assert {*OURS, *TRIED} == set(annotations()), "names of another release"
    assert not OURS.keys() & TRIED.keys()


def test_all_but_those_with_a_known_effect_are_refused() -> None:
    for name in sorted({*annotations(), "nothing_of_megatron"} - TRIED.keys()):
        if name not in OURS:
            assert refusals({name: True}), name
        else:
            with refusal(ValueError, place=f"megatron.{name}"):
                LearnerConfig(megatron={name: True})


def test_a_new_argument_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(annotations(), "of_tomorrow", "bool")  # type: ignore[arg-type]
    [refused] = refusals({"of_tomorrow": True})
    assert (
        "learner.megatron.of_tomorrow: want an argument with a known effect (deallocate_pipeline_outputs, "
        "config_logger_dir)"
    ) in str(refused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"pipeline_model_parallel_size": 2},
            {"place": "megatron.pipeline_model_parallel_size"},
        ),
        (
            {"moe_router_force_load_balancing": True},
            {"place": "megatron.moe_router_force_load_balancing"},
        ),
        ({"hidden_size": 2}, {"place": "megatron.hidden_size"}),
        ({"window_size": [4, 0]}, {"place": "megatron.window_size"}),
        (
            {"fp8": "hybrid"},
            {"place": "megatron.fp8"},
        ),
        (
            {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
            {"place": "megatron.cpu_offloading"},
        ),
        (
            {"cuda_graph_impl": "local"},
            {"place": "megatron.cuda_graph_impl"},
        ),
    ],
)
def test_those_that_the_learner_sets_are_refused(arguments: dict[str, Any], message: dict[str, Any]) -> None:
    with refusal(ValueError, **message):
        LearnerConfig(megatron=arguments)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("deallocate_pipline_outputs", True, "did you mean deallocate_pipeline_outputs?"),
        ("nothing_like_it_at_all", 1, "want an argument of Megatron's TransformerConfig, got 'nothing_like_it_at_all'"),
        ("deallocate_pipeline_outputs", 1, "want a value of type bool, got 1"),
        ("config_logger_dir", True, "want a value of type str, got True"),
        ("config_logger_dir", None, "want a value of type str, got None"),
    ],
)
def test_others_are_those_of_the_installed_megatron(name: str, value: object, message: str) -> None:
    [refused] = refusals({name: value})
    assert str(refused).startswith(f"learner.megatron.{name}: ") and message in str(refused)


def test_values_that_fit() -> None:
    assert refusals({"deallocate_pipeline_outputs": True, "config_logger_dir": "runs/x"}) == []


def test_names_are_read_without_megatron() -> None:
    code = (
        "import sys; from tidemill.learner.settings.backends import annotations; "
        "print(bool(annotations()), 'torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "True False\n"
    )
