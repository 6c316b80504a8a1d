"""Checks of the settings that divide a model and its rows over ranks. Sizes of a model: ``megatron/sizes.py``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from learner.config import LearnerConfig


ROLLOUT = "rollout"
REPLAYS = ("none", "old", ROLLOUT)
"""Values of ``learner.routing_replay``."""


def refuse_sizes(learner: "LearnerConfig") -> None:
    """Raise ValueError for sizes that contradict each other."""
    groups = learner.num_ranks // learner.tensor_parallel
    if learner.nodes > 1 and groups % learner.nodes:
        names = [name for name in ("data_parallel", "pipeline_parallel", "context_parallel") if getattr(learner, name) > 1]
        raise ValueError(
            f"nodes: want a divisor of {' x '.join(names or ['data_parallel'])} = {groups}, so that each has the same number of whole "
            f"tensor-parallel groups, got {learner.nodes}"
        )
    if learner.virtual_pipeline > 1 and learner.pipeline_parallel == 1:
        raise ValueError(
            f"virtual_pipeline: want 1 without a pipeline, got {learner.virtual_pipeline}: it divides the layers of a stage; "
            "raise pipeline_parallel, or remove it"
        )
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if learner.virtual_pipeline > 1 and getattr(learner, name) == "always":
            raise ValueError(
                f"{name}: want auto or never with virtual_pipeline, got 'always': "
                "the chunks of a stage would be reduced while others of it still run"
            )
    if learner.sequence_parallel and learner.tensor_parallel == 1:
        raise ValueError(
            "sequence_parallel: want false with tensor_parallel: 1, got true: it divides the tokens over the tensor-parallel ranks; "
            "raise tensor_parallel, or remove it (context_parallel divides rows without it)"
        )


def refuse_experts(learner: "LearnerConfig") -> None:
    """Raise ValueError for settings about mixtures of experts that cannot be."""
    if learner.routing_replay not in REPLAYS:
        raise ValueError(f"routing_replay: want {' or '.join(REPLAYS)}, got {learner.routing_replay!r}")
    if learner.routing_replay != "none" and learner.virtual_pipeline > 1:
        raise ValueError(f"routing_replay: want none with virtual_pipeline > 1, got {learner.routing_replay!r}")
    for name in ("moe_aux_loss_coef", "moe_bias_update_rate"):
        if getattr(learner, name) < 0:
            raise ValueError(f"{name}: want >= 0, got {getattr(learner, name)!r}")
        if getattr(learner, name) and learner.virtual_pipeline > 1:
            why = "whose rows of padding would count"
            raise ValueError(
                f"{name}: want 0 with virtual_pipeline > 1, {why}, got {getattr(learner, name)!r}; lower virtual_pipeline to 1"
            )
    spread = learner.num_ranks // learner.pipeline_parallel
    if spread % learner.expert_parallel:
        raise ValueError(f"expert_parallel: want a divisor of data x tensor x context parallel = {spread}, got {learner.expert_parallel}")
