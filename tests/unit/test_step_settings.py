"""Settings of steps: their record, and the differences that a step that is executed again cannot have."""

import copy
import dataclasses
import json
from typing import Any

import pytest

from tests.algorithm_settings import algorithm_of
from tests.refusals import refusal
from tidemill.learner.algorithms.alarms import AlarmConfig
from tidemill.learner.algorithms.choices import PRESETS
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.config import CriticConfig, HooksConfig, LearnerConfig
from tidemill.learner.settings.optimizer import OptimizerConfig
from tidemill.learner.settings.step_settings import StepSettings, flat, record_of, refuse_built_in

CHANGED: dict[str, dict[str, Any]] = {
    "rate": {
        "optimizer": OptimizerConfig(
            lr=3e-4, lr_decay="cosine", warmup_steps=3, beta1=0.8, clip_grad=0.0, reset_at=(4, 9)
        )
    },
    "length": {"steps": 7},
    "loss": {"algorithm": algorithm_of(correction="aipo", entropy={"coef": 0.1}, mask_truncated=True)},
    "turns": {"credit": "turn", "credit_gamma": 0.9, "algorithm": AlgorithmConfig(advantage="rloo")},
    "weights by part": {"algorithm": algorithm_of(advantage="gdpo", gdpo={"weights": {"a": 2.0}})},
    "alarms": {"algorithm": AlgorithmConfig(alarms=AlarmConfig(action="off"))},
}


@pytest.mark.parametrize("name", [*CHANGED, *(f"preset {name}" for name in PRESETS)])
def test_settings_are_read_back_from_their_record(name: str) -> None:
    changes = CHANGED.get(name) or {
        "algorithm": AlgorithmConfig(correction=name.removeprefix("preset "), train_without_correction=True)
    }
    learner = LearnerConfig(**changes)
    record = record_of(learner, push_every=1)
    assert StepSettings.read(json.loads(json.dumps(record))) == StepSettings.of(learner)
    if name in CHANGED:
        assert StepSettings.read(record) != StepSettings.of(LearnerConfig())
        refuse_built_in(record, record_of(LearnerConfig(), push_every=1), 3)
    record["learner"]["algorithm"] = json.loads(json.dumps(flat(learner.algorithm)))
    assert StepSettings.read(record) == StepSettings.of(learner), "a record from before the algorithm had sections"


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("learner.optimizer.name", {"optimizer": OptimizerConfig(name="sgd")}),
        ("learner.optimizer.freeze", {"optimizer": OptimizerConfig(freeze=("embed",))}),
        ("learner.hooks", {"hooks": HooksConfig(before_step="mine:hook")}),
        ("learner.dtype", {"dtype": "bfloat16"}),
        ("learner.bridge", {"bridge": "mine:Bridge"}),
        ("learner.family", {"family": "mine:FAMILY"}),
        ("learner.from_checkpoint", {"from_checkpoint": "/other"}),
        ("learner.moe_aux_loss_coef", {"moe_aux_loss_coef": 0.1}),
        ("learner.routing_replay", {"routing_replay": "old"}),
        ("learner.mtp_loss_scaling_factor", {"mtp_loss_scaling_factor": 0.1}),
        (
            "learner.algorithm.kl.reference_every",
            {"algorithm": AlgorithmConfig(kl=KLConfig(coef=0.1, reference_every=5))},
        ),
        ("learner.critic", {"algorithm": AlgorithmConfig(advantage="gae"), "critic": CriticConfig(value_clip=0.5)}),
        ("learner.algorithm", {"algorithm": AlgorithmConfig(advantage="gae")}),
        ("learner.algorithm", {"algorithm": AlgorithmConfig(kl=KLConfig(coef=0.1))}),
        ("weights.push_every", {}),
    ],
)
def test_what_is_built_into_the_models_is_refused_with_the_cure(path: str, changes: dict[str, Any]) -> None:
    then = record_of(LearnerConfig(**changes), push_every=1 if changes else 2)
    with refusal(ConfigRefused, field=path) as refused:
        refuse_built_in(then, record_of(LearnerConfig(), push_every=1), 3)
    assert refused.value.exit_code == 78 and "step 3" in str(refused.value)


def test_a_record_from_before_heads_were_trained_had_none() -> None:
    """Any other missing setting is an error, not one of 0."""
    now = record_of(LearnerConfig(), push_every=1)
    then = copy.deepcopy(now)
    del then["learner"]["mtp_loss_scaling_factor"]
    refuse_built_in(then, now, 3)
    del then["learner"]["hooks"]
    with pytest.raises(KeyError, match="hooks"):
        refuse_built_in(then, now, 3)


def test_every_setting_of_the_learner_is_one_of_a_step_built_in_or_without_effect_on_its_result() -> None:
    """A new setting has to be put into one of them."""
    known = {field.name for field in dataclasses.fields(StepSettings)} | set(
        record_of(LearnerConfig(), push_every=1)["learner"]
    )
    recorded_in_the_plan = {
        "groups_per_step",
        "group_size",
        "min_group_size",
        "minibatches",
        "max_tokens_per_micro_batch",
        "num_epochs",
    }
    layout = {
        name
        for name in (field.name for field in dataclasses.fields(LearnerConfig))
        if "parallel" in name or "pipeline" in name
    }
    layout |= {
        "fsdp_replicas",
        "first_stage_layers",
        "last_stage_layers",
        "distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
    }
    layout |= {
        "offload_optimizer",
        "device",
        "devices",
        "nodes",
        "nodes_wait_s",
        "insecure_network",
        "threads",
        "colocated",
    }
    kernels = {
        "attention",
        "recompute",
        "fused_activation",
        "grouped_experts",
        "fused_log_probs",
        "fused_rotary",
        "deterministic",
    }
    of_the_run = {"seed", "lora"}  # refused on resume at any step: launch/checks/resume.py
    of_the_run |= {"backend"}  # a checkpoint of the other one is refused: learner/trainer/checkpoint_facts.py
    outside = {
        "checkpoint_every",
        "keep_checkpoints",
        "checkpoint",
        "save_hf_every",
        "keep_hf",
        "prefetch",
        "weights_digest",
    }
    outside |= {"batch_timeout_s", "failing_tasks", "failing_s", "record"}
    named = known | recorded_in_the_plan | layout | kernels | of_the_run | outside
    assert {field.name for field in dataclasses.fields(LearnerConfig)} - named == set()
