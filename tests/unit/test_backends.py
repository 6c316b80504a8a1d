"""The backend of a run: which one is chosen, why, and which settings each refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.check_kit import write_run
from tests.refusals import refusal
from tidemill.launch.checks.backends import language_models
from tidemill.launch.checks.model import size_here
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.settings.config_loader import load
from tidemill.learner import trainer
from tidemill.learner.backends.choice import choose_backend
from tidemill.learner.layout.sizes import FAMILIES, StepFlops
from tidemill.learner.settings.backends import OF_MEGATRON, megatron_settings
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.settings.optimizer import OptimizerConfig

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


def test_the_way_to_divide_rows_is_named() -> None:
    with refusal(ValueError, place="context_parallel", got="2"):
        LearnerConfig(backend="fsdp", context_parallel=2)


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


def test_both_backends_have_muon() -> None:
    muon = OptimizerConfig(name="muon")
    assert choose_backend(LearnerConfig(optimizer=muon), {"model_type": "qwen3"}).kind == "megatron"
    LearnerConfig(optimizer=muon, backend="fsdp")
    with refusal(ValueError, place="offload_optimizer", got="true"):
        LearnerConfig(optimizer=muon, offload_optimizer=True)


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


def test_adapters_of_experts_are_trained_by_fsdp() -> None:
    lora = LoraConfig(rank=2, targets=("q_proj", "experts.down_proj"))
    choice = choose_backend(LearnerConfig(lora=lora), {"model_type": "qwen3_moe"})
    assert (choice.kind, choice.reason) == ("fsdp", "learner.lora.targets needs it")
    unused = replace(lora, rank=0)
    assert choose_backend(LearnerConfig(lora=unused), {"model_type": "qwen3_moe"}).kind == "megatron"
    excluded: tuple[dict[str, Any], ...] = ({"backend": "megatron"}, {"data_parallel": 2, "expert_parallel": 2})
    for settings in excluded:
        with refusal(ValueError, place="lora.targets", got="['experts.down_proj']"):
            LearnerConfig(lora=lora, **settings)


def test_the_trainer_names_no_backend() -> None:
    files = [file for root in trainer.__path__ for file in Path(root).rglob("*.py")]
    assert files
    assert [file.name for file in files if re.search("megatron|fsdp", file.read_text(), re.IGNORECASE)] == []


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
    [error], _ = findings(tmp_path / "c", "learner.backend=fsdp", f"model.megatron_checkpoint={tmp_path}")
    assert "model.megatron_checkpoint" in error


def test_a_family_of_ones_own_is_trained_by_fsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brook_family.py").write_text("FAMILY = 'the ranks look at it'")
    monkeypatch.syspath_prepend(tmp_path)
    errors, good = findings(tmp_path / "a", "learner.family=brook_family:FAMILY", family="brook")
    assert errors == [] and "trained by fsdp (learner.family needs it)" in good[0]
    [error], _ = findings(tmp_path / "b", "learner.family=nothere:FAMILY", family="brook")
    assert "learner.family: want a Family, got 'nothere:FAMILY'" in error
    for settings in ({"backend": "megatron"}, {"tensor_parallel": 2}):
        with refusal(ValueError, place="family"):
            LearnerConfig(family="my_family:FAMILY", **settings)  # type: ignore[arg-type]


HEAD = "mtp.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("family", "head", "settings", "want"),
    [
        ("qwen3_5", HEAD, (), None),
        ("qwen3_5_text", HEAD, (), None),
        ("glm4_moe", "model.layers.7.eh_proj.weight", (), None),
        ("qwen3_5", "", (), "learner.mtp_loss_scaling_factor: want 0 for a model without heads"),
        ("glm4_moe", "model.layers.7.embed_tokens.weight", (), "want 0 for a model without heads"),
        ("nemotron_h", HEAD, (), "learner.mtp_loss_scaling_factor: want 0 for nemotron_h, whose heads"),
        ("qwen3_5", HEAD, ("learner.optimizer.freeze=[mtp]",), "learner.optimizer.freeze: want patterns that leave"),
        ("qwen3", HEAD, ("prepare.kind=digits", "model.path="), "want 0 for a model that is made at the start"),
    ],
)
def test_a_check_refuses_heads_that_are_not_trained(
    tmp_path: Path, family: str, head: str, settings: tuple[str, ...], want: str | None
) -> None:
    if head:
        (tmp_path / "model").mkdir()
        save_file({head: np.zeros((2, 2), np.float32)}, tmp_path / "model/heads.safetensors")
    errors, _ = findings(tmp_path, "learner.mtp_loss_scaling_factor=0.2", *settings, family=family)
    of_heads = [error for error in errors if "heads" in error]
    assert len(of_heads) == (want is not None) and all(want in error for error in of_heads if want), errors


def test_a_check_takes_a_reference_without_heads(tmp_path: Path) -> None:
    reference = tmp_path / "reference/model"
    findings(tmp_path / "reference", family="olmo3")
    (tmp_path / "run/model").mkdir(parents=True)
    save_file({HEAD: np.zeros((2, 2), np.float32)}, tmp_path / "run/model/heads.safetensors")
    kl = (f"learner.algorithm.kl.reference={reference}", "learner.algorithm.kl.coef=0.1")
    errors, good = findings(tmp_path / "run", *kl, family="olmo3")
    assert errors == [] and "trained by fsdp" in good[0]


def test_the_size_of_a_model_has_its_trained_heads(tmp_path: Path) -> None:
    """Without their copies of the embedding and the output layer, which no rank has."""
    (tmp_path / "model").mkdir()
    copies = ("model.layers.7.embed_tokens.weight", "model.layers.7.shared_head.head.weight")
    heads = {name: np.zeros((2, 2), np.float32) for name in ("model.layers.7.eh_proj.weight", *copies)}
    save_file(heads, tmp_path / "model/heads.safetensors")
    file = write_run(tmp_path)
    for factor, tensors in ((0.0, []), (0.2, ["model.layers.7.eh_proj.weight"])):
        size = size_here(load(file, [f"learner.mtp_loss_scaling_factor={factor}"]).config)
        assert [name for name in size.tensors if name in heads] == tensors


@pytest.mark.parametrize("writer", ["megatron", "fsdp"])
def test_a_check_refuses_the_beginning_of_the_other_backend(tmp_path: Path, writer: str) -> None:
    other = "fsdp" if writer == "megatron" else "megatron"
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    content = {"sharded_backend": "torch_dist"} | ({"backend": "fsdp"} if writer == "fsdp" else {})
    for name, text in {"metadata.json": json.dumps(content), "manifest.json": "{}", "common.pt": ""}.items():
        (checkpoint / name).write_text(text)
    begins = f"learner.from_checkpoint={checkpoint}"
    [error], _ = findings(tmp_path / "a", f"learner.backend={other}", begins)
    assert (
        f"learner.from_checkpoint: want a checkpoint of learner.backend: {other}, got {checkpoint}, of {writer}"
        in error
    )
    errors, _ = findings(tmp_path / "b", f"learner.backend={writer}", begins)
    assert errors == []


COPIES: dict[str, dict[str, Any]] = {
    "no divisor": {"fsdp_replicas": 3},
    "no divisor, by nodes": {"fsdp_replicas": 0, "nodes": 3},
    "unknown nodes": {"fsdp_replicas": 0, "nodes": 0},
    "Megatron": {"fsdp_replicas": 2, "backend": "auto"},
}


@pytest.mark.parametrize("case", COPIES)
def test_copies_that_fsdp_cannot_make_are_refused(case: str) -> None:
    settings = {"backend": "fsdp", "data_parallel": 4} | COPIES[case]
    with pytest.raises(ValueError, match=r"fsdp_replicas|nodes"):
        LearnerConfig(**settings)


def test_the_copies_are_as_many_as_the_nodes_or_the_setting() -> None:
    four = {"backend": "fsdp", "data_parallel": 4}
    assert LearnerConfig(**four).fsdp_copies == 1
    assert LearnerConfig(**four, fsdp_replicas=4).fsdp_copies == 4
    assert LearnerConfig(**four, fsdp_replicas=0, nodes=2).fsdp_copies == 2


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
