"""Settings that one backend alone has."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.learner.settings.config import LearnerConfig

MEGATRON, FSDP = "megatron", "fsdp"
BACKENDS = ("auto", MEGATRON, FSDP)
"""Choices of ``learner.backend``."""
OF_MEGATRON = {
    "tensor_parallel": "no matrix is split: data_parallel is the number of ranks",
    "sequence_parallel": "no matrix is split",
    "pipeline_parallel": "every rank runs all layers: data_parallel is the number of ranks",
    "virtual_pipeline": "there are no stages",
    "first_stage_layers": "there are no stages",
    "last_stage_layers": "there are no stages",
    "context_parallel": "a row is on one rank (backend: megatron divides the rows of its families)",
    "expert_parallel": "experts are divided like all other weights, and every rank runs all of them",
    "distributed_optimizer": "weights, gradients and the optimizer's state are always divided over the ranks",
    "overlap_grad_reduce": "FSDP overlaps by itself",
    "overlap_param_gather": "FSDP overlaps by itself",
    "moe_aux_loss_coef": "it has no balancing loss",
    "moe_bias_update_rate": "no bias of a router moves",
    "bridge": "a bridge leads to Megatron's layers",
    "fused_activation": "the layers are those of transformers",
    "grouped_experts": "the experts are those of transformers",
    "recompute": "whole layers are computed again (full), or none",
    "fused_rotary": "the layers are those of transformers",
    "megatron": "these are arguments of Megatron",
}
"""Settings that only Megatron has, and the reason why FSDP has none of them."""

NO_MTP = "0 where Megatron trains, which keeps heads for further tokens as they are"
"""Wanted of ``mtp_loss_scaling_factor`` there."""


def megatron_settings(learner: "LearnerConfig") -> dict[str, object]:
    """Return the settings in use that only Megatron has, with the default of each."""
    defaults = {
        name: default() if callable(default := field.default_factory) else field.default
        for name, field in type(learner).__dataclass_fields__.items()
        if name in OF_MEGATRON
    }
    only = {name: default for name, default in defaults.items() if getattr(learner, name) != default}
    if learner.recompute == "full":  # which both have
        only.pop("recompute", None)
    return only
