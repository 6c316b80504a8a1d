"""Learning rates, and settings of optimizer, frozen weights and adapters, without a model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from transformers import get_scheduler

from tests.refusals import refusal
from tests.unit.test_memory_table import SHAPE
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.weights import check_tuning
from tidemill.launch.cli.main import main
from tidemill.launch.devices.memory_table import MemoryRow, memory_rows
from tidemill.launch.devices.shapes import Shapes, fused_experts, trained_tensors
from tidemill.launch.settings.config_loader import load
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.settings.optimizer import DECAYS, FALLING, OptimizerConfig, frozen_names, learning_rate, unmatched


def rates(**settings: Any) -> list[float]:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=2, **settings)
    return [learning_rate(config, step, 12) for step in range(1, 13)]


def test_wsd_is_constant_until_its_last_share() -> None:
    assert rates(lr_decay="wsd", wsd_share=0.4) == pytest.approx([0.5, *[1] * 8, 0.775, 0.55, 0.325])
    assert rates(lr_decay="wsd", wsd_share=1.0) == pytest.approx(rates(lr_decay="linear"))


def test_a_decay_of_fewer_steps_than_the_run_stays_at_its_end() -> None:
    assert rates(lr_decay="linear", lr_decay_steps=5) == pytest.approx([0.5, 1, 1, 0.7, 0.4, *[0.1] * 7])
    assert rates(lr_decay="cosine", lr_decay_steps=12) == rates(lr_decay="cosine")


def test_inverse_sqrt_continues_the_warm_up_without_a_jump() -> None:
    found = rates(lr_decay="inverse_sqrt")
    assert found == pytest.approx([0.5, 1, *[max(0.1, (2 / step) ** 0.5) for step in range(3, 13)]])
    assert learning_rate(OptimizerConfig(lr=1.0, lr_decay="inverse_sqrt", min_lr=0.1), 400, 500) == 0.1


def test_a_schedule_by_tokens_follows_the_tokens_alone() -> None:
    for decay in ("linear", "cosine", "wsd"):
        by_steps = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=2, lr_decay=decay, lr_decay_steps=12)
        by_tokens = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_tokens=2000, lr_decay=decay, lr_decay_tokens=12000)
        wanted = [learning_rate(by_steps, step, 99) for step in range(1, 15)]
        tokens = [(until - 1000, until) for until in range(1000, 15000, 1000)]
        assert [learning_rate(by_tokens, 99, 99, place) for place in tokens] == pytest.approx(wanted)
    root = OptimizerConfig(lr=1.0, warmup_tokens=2000, lr_decay="inverse_sqrt")
    assert [learning_rate(root, 7, 9, (0, until)) for until in (1000, 2000, 8000)] == pytest.approx([0.5, 1, 0.5])
    assert learning_rate(OptimizerConfig(lr=1.0, warmup_tokens=2000), 7, 9, (0, 500)) == 0.25


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("steps", [1, 2, 7, 40])
@pytest.mark.parametrize("decay", DECAYS)
def test_no_step_of_a_run_has_rate_0(decay: str, steps: int, warmup: int) -> None:
    """Its batch would be generated for nothing."""
    config = OptimizerConfig(lr=1.0, lr_decay=decay, warmup_steps=warmup)
    every = [learning_rate(config, step, steps) for step in range(1, steps + 1)]
    assert min(every) > 1e-4 and max(every) <= 1
    assert every[warmup:] == sorted(every[warmup:], reverse=True)
    if decay in FALLING:
        by_tokens = OptimizerConfig(lr=1.0, lr_decay=decay, warmup_tokens=1, lr_decay_tokens=7 * steps)
        assert learning_rate(by_tokens, 3, 9, (7 * (steps - 1), 7 * steps)) > 1e-4, "the step that reaches the end"


@pytest.mark.parametrize("steps", [1, 5, 12])
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_decay_has_the_rates_of_transformers(decay: str, warmup: int, steps: int) -> None:
    """Behind the warm-up, whose first step has rate 0 there."""
    steps += warmup
    schedule = get_scheduler(decay, SGD([torch.zeros(1)], lr=1.0), num_warmup_steps=warmup, num_training_steps=steps)
    theirs = []
    for _ in range(steps):
        theirs.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    ours = [
        learning_rate(OptimizerConfig(lr=1.0, lr_decay=decay, warmup_steps=warmup), step, steps)
        for step in range(1, steps + 1)
    ]
    assert ours[warmup:] == pytest.approx(theirs[warmup:])


def test_a_decay_that_ends_before_the_run_is_refused_at_rate_0() -> None:
    with refusal(ValueError, place="optimizer.lr_decay_steps", got="5"):
        LearnerConfig(steps=10, optimizer=OptimizerConfig(lr_decay="linear", lr_decay_steps=5))
    LearnerConfig(steps=10, optimizer=OptimizerConfig(lr_decay="linear", lr_decay_steps=5, min_lr=1e-7))
    LearnerConfig(steps=10, optimizer=OptimizerConfig(lr_decay="inverse_sqrt", lr_decay_steps=5))


def test_names_are_searched_by_patterns() -> None:
    names = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.11.mlp.up_proj.weight"]
    assert frozen_names((r"layers\.1\.", "^model.embed"), names) == set(names[:2])
    assert unmatched(("embed", "lm_head"), names) == ["lm_head"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": {"name": "lion"}}, "name: want adamw, adam, sgd or muon"),
        ({"optimizer": {"lr_decay": "exp"}}, "lr_decay: want constant, linear, cosine, wsd or inverse_sqrt, got 'exp'"),
        (
            {"optimizer": {"warmup_steps": 5, "lr_decay_steps": 5}},
            "lr_decay_steps: want > warmup_steps = 5, or 0, got 5",
        ),
        (
            {"optimizer": {"warmup_tokens": 5, "warmup_steps": 1}},
            "warmup_steps: want 0 with warmup_tokens or lr_decay_tokens, got 1",
        ),
        (
            {"optimizer": {"lr_decay": "cosine", "warmup_tokens": 5}},
            "lr_decay_tokens: want > warmup_tokens = 5 with lr_decay: cosine, got 0",
        ),
        (
            {"optimizer": {"lr_decay_tokens": 5}},
            "lr_decay_tokens: want 0 with lr_decay: constant, which has no end, got 5",
        ),
        ({"optimizer": {"lr_decay_tokens": -1}}, "lr_decay_tokens: want >= 0, got -1"),
        ({"optimizer": {"reset_at": (0,)}}, "reset_at[0]: want > 0, got 0"),
        ({"optimizer": {"freeze": ("(",)}}, "freeze: want regular expressions, got '(': "),
        (
            {"optimizer": {"name": "sgd"}, "distributed_optimizer": True},
            "distributed_optimizer: want false with optimizer.name: sgd",
        ),
        (
            {"optimizer": {"name": "adam"}, "offload_optimizer": True},
            "offload_optimizer: want false with optimizer.name: adam",
        ),
        ({"optimizer": {"freeze": ("x",)}, "lora": {"rank": 2}}, "optimizer.freeze: want none with lora.rank > 0"),
        ({"lora": {"rank": 2}, "moe_bias_update_rate": 0.1}, "moe_bias_update_rate: want 0 with lora.rank > 0, which"),
        ({"lora": {"rank": 2, "targets": ("lm_head",)}}, "targets[0]: want q_proj, k_proj, "),
        ({"lora": {"rank": 2, "targets": ("q_proj", "q_proj")}}, "targets: want at least one name, each once"),
        ({"lora": {"adapter": "some/where"}}, "adapter: want rank > 0 with it"),
        ({"lora": {"rank": 2, "alpha": 0}}, "alpha: want > 0, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    def made() -> LearnerConfig:
        given = dict(settings)
        optimizer = OptimizerConfig(**given.pop("optimizer", {}))
        return LearnerConfig(optimizer=optimizer, lora=LoraConfig(**given.pop("lora", {})), **given)

    with pytest.raises(ValueError, match=re.escape(message)):
        made()


def test_rank_stabilised_adapters_have_another_scale() -> None:
    assert LoraConfig(rank=16, alpha=32).scale == 2
    assert LoraConfig(rank=16, alpha=32, rslora=True).scale == 8


def test_the_check_names_patterns_that_freeze_nothing_or_everything(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(pattern: str) -> str:
        assert main(["config", "launch/configs/digits.yaml", "--set", f"learner.optimizer.freeze=['{pattern}']"]) == 78
        return capsys.readouterr().err

    assert (
        "learner.optimizer.freeze: want patterns that are found in names of the model's weights, got 'embedding'; use"
        in printed("embedding")
    )
    assert "learner.optimizer.freeze: want weights that are trained, got ['model|lm_head']" in printed("model|lm_head")


def test_the_check_names_adapters_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "learner.lora.rank=4", "--set", "learner.lora.adapter=/no/such"]
    assert main(["config", "launch/configs/digits.yaml", *words]) == 78
    assert "learner.lora.adapter: want a directory with PEFT's adapter_config.json" in capsys.readouterr().err


def test_the_check_names_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed() -> str:
        assert (
            main(["config", "launch/configs/digits.yaml", "--set", f"learner.from_checkpoint={tmp_path / 'there'}"])
            == 78
        )
        return capsys.readouterr().err

    assert (
        "learner.from_checkpoint: want a checkpoint of Tidemill, got" in (found := printed())
        and "no such directory" in found
    )
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "common.pt").touch()
    assert "checkpoints of Megatron itself; make it model.megatron_checkpoint" in printed()
    (tmp_path / "there" / "config.json").touch()
    assert "a model directory; make it model.path, or convert it" in printed()


def rows(*settings: str) -> dict[str, MemoryRow]:
    config = load([], ("learner.dtype=bfloat16", "engine.dtype=bfloat16", *settings)).config
    return {
        re.split(",| of the weights", row.part)[0]: row
        for row in memory_rows(SHAPE, config, cuda=True)
        if row.process == "rank"
    }


def test_only_adapters_have_gradients_and_optimizer_state() -> None:
    """Qwen3-8B with rank 16: 43.6 million parameters of adapters, by PEFT's count."""
    adapters = 36 * 16 * ((4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 3 * (4096 + 12288))
    assert adapters == 43_646_976
    found, all_of_it = rows("learner.lora.rank=16"), rows()
    assert found["gradients"].bytes == 4 * adapters
    assert found["Adam: two moments and main weights"].bytes == 12 * adapters
    assert found["weights"].bytes == all_of_it["weights"].bytes + 2 * adapters
    kl = rows("learner.lora.rank=16", "learner.algorithm.kl.coef=0.1", "weights.push_every=2")
    assert kl["weights of the last version"].bytes == 2 * adapters
    assert 0 < kl["reference model"].bytes < 2 * adapters
    split = rows("learner.lora.rank=16", "learner.tensor_parallel=4")
    by_output = (4096 + 4096 // 4) + 2 * (4096 + 1024 // 4) + 2 * (4096 + 12288 // 4)
    by_input = (4096 // 4 + 4096) + (12288 // 4 + 4096)
    assert split["gradients"].bytes == 4 * 36 * 16 * (by_output + by_input)


def test_frozen_weights_have_neither() -> None:
    frozen, all_of_it = rows("learner.optimizer.freeze=['embed_tokens','lm_head']"), rows()
    tables = 2 * 151936 * 4096
    assert frozen["weights"].bytes == all_of_it["weights"].bytes
    assert all_of_it["gradients"].bytes - frozen["gradients"].bytes == 4 * tables


def test_layers_that_a_model_of_experts_has_no_adapters_for_are_named() -> None:
    """The MLPs of the model are experts: by default they were adapted, which the ranks would refuse later."""
    attention = {f"model.layers.0.self_attn.{one}_proj.weight": (8, 8) for one in "qkvo"}
    experts = {
        f"model.layers.0.mlp.experts.{number}.{one}_proj.weight": (8, 8)
        for number in (0, 1)
        for one in ("gate", "up", "down")
    }
    learner = LearnerConfig(lora=LoraConfig(rank=2))
    assert {name.rpartition(".lora_")[0] for name in trained_tensors(attention | experts, learner)} == {
        name.removesuffix(".weight") for name in attention
    }
    report = Report()
    check_tuning(report, RunConfig(run="r", learner=learner), attention | experts)
    (error,) = (one.text for one in report.errors)
    want = "want layers of this model that can have adapters (k_proj, o_proj, q_proj, v_proj); experts have none"
    assert f"learner.lora.targets: {want}, got down_proj, gate_proj, up_proj" in error


def _tuning_errors(targets: tuple[str, ...], tensors: Shapes, backend: str) -> list[str]:
    """Return the errors of a check of adapters on these layers."""
    report = Report()
    learner = LearnerConfig(lora=LoraConfig(rank=2, targets=targets))
    check_tuning(report, RunConfig(run="r", learner=learner), tensors, backend=backend)
    return [error.text for error in report.errors]


@pytest.mark.parametrize(
    ("names", "present"),
    [
        (("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj"), "gate_up_proj"),
        (("experts.{}.w1", "experts.{}.w3", "experts.{}.w2"), "gate_up_proj"),
        (("experts.{}.up_proj", "experts.{}.down_proj"), "up_proj"),
    ],
)
def test_the_weights_of_experts_are_found_in_files_of_single_ones(names: tuple[str, ...], present: str) -> None:
    """Two experts of 6 in, 4 inside: A [2, 2, in], B [2, out, 2]."""
    attention = {"model.layers.0.self_attn.o_proj.weight": (6, 6)}
    experts = {
        f"model.layers.0.mlp.{name.format(number)}.weight": (6, 4) if name == names[-1] else (4, 6)
        for number in (0, 1)
        for name in names
    }
    targets = (f"experts.{present}", "experts.down_proj")
    learner = LearnerConfig(lora=LoraConfig(rank=2, targets=targets))
    outputs = 8 if present == "gate_up_proj" else 4
    assert trained_tensors(attention | experts, learner, backend="fsdp") == {
        f"model.layers.0.mlp.experts.lora_A.{present}": (2, 2, 6),
        f"model.layers.0.mlp.experts.lora_B.{present}": (2, outputs, 2),
        "model.layers.0.mlp.experts.lora_A.down_proj": (2, 2, 4),
        "model.layers.0.mlp.experts.lora_B.down_proj": (2, 6, 2),
    }
    assert _tuning_errors(targets, attention | experts, "fsdp") == []
    (error,) = _tuning_errors((*targets, "q_proj"), attention | experts, "fsdp")
    assert f"can have adapters (experts.down_proj, experts.{present}, o_proj), got q_proj" in error
    (error,) = _tuning_errors(("o_proj", *targets), attention | experts, "megatron")
    assert "(o_proj); experts have none" in error and "set learner.backend=fsdp" in error


def test_the_weights_of_experts_are_found_in_files_of_all() -> None:
    """Also blocks of MXFP4, of 32 numbers in 16 bytes; experts with names that are not known are left to the ranks."""
    blocks = {
        "model.layers.0.mlp.experts.gate_up_proj_blocks": (2, 8, 3, 16),
        "model.layers.0.mlp.experts.gate_up_proj_scales": (2, 8, 3),
        "model.layers.0.mlp.experts.gate_up_proj_bias": (2, 8),
        "model.layers.0.mlp.experts.down_proj": (2, 6, 4),
    }
    assert fused_experts(blocks) == {
        "model.layers.0.mlp.experts.gate_up_proj": (2, 8, 96),
        "model.layers.0.mlp.experts.down_proj": (2, 6, 4),
    }
    target, dense = ("o_proj", "experts.down_proj"), {"model.layers.0.self_attn.o_proj.weight": (6, 6)}
    assert _tuning_errors(target, {**dense, "model.layers.0.moe.w2_of_all": (2, 6, 4)}, "fsdp") == []
    assert len(_tuning_errors(target, dense, "fsdp")) == 1


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        (
            {"pipeline_parallel": 2, "optimizer": OptimizerConfig(freeze=("embed", r"layers[.][01][.]"))},
            "stage 0 would train nothing",
        ),
        (
            {"pipeline_parallel": 2, "optimizer": OptimizerConfig(freeze=(r"layers[.][23][.]", "norm", "lm_head"))},
            "stage 1 would train",
        ),
        (
            {
                "pipeline_parallel": 2,
                "virtual_pipeline": 2,
                "optimizer": OptimizerConfig(freeze=("embed", r"layers[.][01][.]")),
            },
            "",
        ),
        ({"pipeline_parallel": 4, "lora": LoraConfig(rank=2, targets=("up_proj",))}, "stage 3 would train nothing"),
        ({"pipeline_parallel": 2, "lora": LoraConfig(rank=2, targets=("up_proj",))}, ""),
    ],
)
def test_a_stage_that_would_train_nothing_is_named(settings: dict[str, Any], stage: str) -> None:
    tensors = {"model.embed_tokens.weight": (8, 8), "model.norm.weight": (8,), "lm_head.weight": (8, 8)}
    tensors |= {f"model.layers.{layer}.mlp.{'up_proj' if layer < 3 else 'gate'}.weight": (8, 8) for layer in range(4)}
    report = Report()
    check_tuning(report, RunConfig(run="r", learner=LearnerConfig(**settings)), tensors)
    errors = [error.text for error in report.errors]
    assert len(errors) == bool(stage)
    assert all(stage in text and "lower learner.pipeline_parallel" in text for text in errors)
