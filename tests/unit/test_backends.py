"""The backend of a run: which one is chosen, why, and which settings each refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.check_kit import write_run
from tests.refusals import refusal
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.settings.config_loader import load
from tidemill.learner.layout.backends import choose_backend
from tidemill.learner.layout.sizes import FAMILIES, StepFlops
from tidemill.learner.layout.transformers_models import language_models
from tidemill.learner.settings.backends import NO_MUON, OF_MEGATRON, megatron_settings
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.settings.schedule import OptimizerConfig

IN_USE: dict[str, Any] = {
    "tensor_parallel": 2,
    "sequence_parallel": True,
    "pipeline_parallel": 2,
    "virtual_pipeline": 2,
    "first_stage_layers": 1,
    "last_stage_layers": 1,
    "context_parallel": 2,
    "expert_parallel": 2,
    "distributed_optimizer": True,
    "overlap_grad_reduce": "always",
    "overlap_param_gather": "never",
    "moe_aux_loss_coef": 0.1,
    "moe_bias_update_rate": 0.1,
    "bridge": "my_bridge:Pond",
    "recompute": "selective",
    "fused_activation": "never",
    "grouped_experts": "never",
    "fused_rotary": "never",
    "megatron": {"deallocate_pipeline_outputs": True},
}


def test_every_setting_of_megatron_alone_is_tried() -> None:
    assert set(IN_USE) == set(OF_MEGATRON)


@pytest.mark.parametrize("name", OF_MEGATRON)
def test_fsdp_refuses_what_only_megatron_has(name: str) -> None:
    with refusal(ValueError, place=name, got=repr(IN_USE[name])):
        LearnerConfig(**{"backend": "fsdp", name: IN_USE[name]})


def test_fsdp_takes_what_both_have() -> None:
    learner = LearnerConfig(backend="fsdp", data_parallel=4, recompute="full", offload_optimizer=True, dtype="bfloat16")
    assert megatron_settings(learner) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_trains_its_families(family: str) -> None:
    assert choose_backend(LearnerConfig(), {"model_type": family}).kind == "megatron"
    assert choose_backend(LearnerConfig(backend="fsdp"), {"model_type": family}).kind == "fsdp"


def test_a_setting_decides_where_the_family_does_not() -> None:
    olmo = {"model_type": "olmo3"}
    assert choose_backend(LearnerConfig(), olmo).kind == "fsdp"
    choice = choose_backend(LearnerConfig(context_parallel=2), olmo)
    assert (choice.kind, choice.reason) == ("megatron", "learner.context_parallel needs it")
    choice = choose_backend(LearnerConfig(), olmo, megatron_checkpoint=True)
    assert (choice.kind, choice.reason) == ("megatron", "model.megatron_checkpoint needs it")


def test_muon_is_fsdps() -> None:
    muon = OptimizerConfig(name="muon")
    choice = choose_backend(LearnerConfig(optimizer=muon), {"model_type": "qwen3"})
    assert (choice.kind, choice.reason) == ("fsdp", "learner.optimizer.name needs it")
    for settings in ({"backend": "megatron"}, {"tensor_parallel": 2}):
        with refusal(ValueError, place="optimizer.name", got="'muon'"):
            LearnerConfig(optimizer=muon, **settings)


def test_heads_for_further_tokens_are_trained_by_fsdp() -> None:
    """Neither with adapters, which are all that is trained, nor with replayed experts, which none has recorded."""
    choice = choose_backend(LearnerConfig(mtp_loss_scaling_factor=0.2), {"model_type": "glm4_moe"})
    assert (choice.kind, choice.reason) == ("fsdp", "learner.mtp_loss_scaling_factor needs it")
    excluded: tuple[dict[str, Any], ...] = (
        {"backend": "megatron"},
        {"tensor_parallel": 2},
        {"lora": LoraConfig(rank=2)},
        {"routing_replay": "old"},
    )
    for settings in excluded:
        with refusal(ValueError, place="mtp_loss_scaling_factor", got="0.2"):
            LearnerConfig(mtp_loss_scaling_factor=0.2, **settings)


def findings(directory: Path, *settings: str, family: str = "qwen2") -> tuple[list[str], list[str]]:
    """Return errors and good findings about a model of a family that SGLang serves."""
    file = write_run(directory)
    config = directory / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": family}))
    report = check(load(file, ["engine.kind=sglang", *settings]), Purpose())
    return [error.text for error in report.errors if error.topic == "model"], report.on("model")


def test_a_check_names_the_backend_and_the_reason(tmp_path: Path) -> None:
    errors, good = findings(tmp_path / "a", family="olmo3")
    assert errors == [] and "trained by fsdp (olmo3 is none of Megatron's families)" in good[0]
    errors, good = findings(tmp_path / "b")
    assert errors == [] and "trained by megatron (qwen2 is one of its families)" in good[0]


def test_a_check_refuses_what_transformers_and_fsdp_lack(tmp_path: Path) -> None:
    [error], _ = findings(tmp_path / "a", family="pond")
    assert "model_type" in error and "got pond" in error
    (tmp_path / "prompts.txt").write_text("what is one plus two\n")
    dump = (f"debug.dump_modules.prompts={tmp_path}/prompts.txt", "debug.dump_modules.step=1")
    [error], _ = findings(tmp_path / "b", "learner.backend=fsdp", *dump)
    assert "debug.dump_modules.step" in error
    [error], _ = findings(tmp_path / "c", "learner.backend=fsdp", f"model.megatron_checkpoint={tmp_path}")
    assert "model.megatron_checkpoint" in error


def test_a_check_refuses_muon_where_a_checkpoint_needs_megatron(tmp_path: Path) -> None:
    """No setting of the learner needs Megatron here, but the checkpoint in the settings of the model."""
    begins = (f"model.megatron_checkpoint={tmp_path}", "learner.algorithm.advantage=gae")
    for number, name in enumerate(("learner.optimizer.name", "learner.critic.optimizer.name")):
        errors, _ = findings(tmp_path / str(number), *begins, f"{name}=muon")
        assert any(f"{name}: want {NO_MUON}, got muon" in error for error in errors), errors
        errors, _ = findings(tmp_path / f"{number}, adamw", *begins)
        assert not any(NO_MUON in error for error in errors)


def test_the_language_models_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert language_models() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_operations_of_another_family_are_those_of_its_matrices() -> None:
    values = {
        "model_type": "olmo3",
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 100,
    }
    values |= {"layer_types": ["sliding_attention", "linear_attention"], "num_experts": 4, "num_experts_per_tok": 1}
    tensors = {
        "model.embed_tokens.weight": (100, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.norm.weight": (8,),
        "model.layers.1.mlp.experts.0.up_proj.weight": (16, 8),
    }
    flops = StepFlops.of_tensors(values, tensors)
    assert flops.per_token == 6 * (64 + 128 // 4 + 800) and flops.per_pair == 6 * 2 * 2 * 4
