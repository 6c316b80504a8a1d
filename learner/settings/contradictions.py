"""Settings of the learner that contradict each other; each raises ValueError."""

from typing import TYPE_CHECKING

from tidemill.learner.algorithms.choices import BY_CRITIC, OF_GROUPS, OF_TURNS
from tidemill.learner.settings.backends import FSDP, MEGATRON, NO_MTP, OF_MEGATRON, megatron_settings, refuse_untried
from tidemill.learner.settings.optimizer import FALLING

if TYPE_CHECKING:
    from tidemill.learner.settings.config import LearnerConfig

BY_TRITON = ("fused_log_probs", "fused_rotary")
"""Settings of kernels of our own."""


def refuse_contradictions(learner: "LearnerConfig") -> None:
    """Raise ValueError for settings that contradict each other."""
    if learner.nodes != 1 and learner.colocated:
        raise ValueError(
            f"nodes: want 1 with colocated, whose memory turns are those of one machine, got {learner.nodes}"
        )
    _refuse_other_backends(learner)
    _refuse_sizes(learner)
    refuse_untried(learner.megatron)
    if learner.minibatches > learner.groups_per_step:
        raise ValueError(f"minibatches: want <= groups_per_step = {learner.groups_per_step}, got {learner.minibatches}")
    algorithm = learner.algorithm
    if learner.group_size == 1 and algorithm.advantage in OF_GROUPS and algorithm.loss != "sft":
        raise ValueError(
            f"group_size: want >= 2 with algorithm.advantage: {algorithm.advantage}, which compares the samples of a "
            "group, got 1: every advantage would be 0; raise it, or take advantage: reinforce, reinforce_pp or none"
        )
    if algorithm.advantage == "pass_at_k" and algorithm.pass_at_k.k > learner.group_size:
        raise ValueError(
            f"group_size: want >= algorithm.pass_at_k.k = {algorithm.pass_at_k.k}, got {learner.group_size}: "
            "no k samples can be drawn from a group, and every advantage would be 0; raise it, or lower k"
        )
    _refuse_group_size(learner)
    if learner.bridge and not all(learner.bridge.partition(":")):
        raise ValueError(f"bridge: want module:Class, got {learner.bridge!r}")
    _refuse_credit(learner)
    _refuse_critic(learner)
    _refuse_kernels(learner)
    _refuse_tuning(learner)


def _refuse_other_backends(learner: "LearnerConfig") -> None:
    """Refuse settings of Megatron alone with ``backend: fsdp``."""
    if learner.fsdp_replicas != 1:
        _refuse_copies(learner)
    if learner.mtp_loss_scaling_factor:
        _refuse_heads(learner)
    if learner.family and (learner.backend == MEGATRON or (learner.backend != FSDP and megatron_settings(learner))):
        raise ValueError(f"family: want none where Megatron trains (its setting is bridge), got {learner.family!r}")
    for name, default in megatron_settings(learner).items() if learner.backend == FSDP else ():
        got = getattr(learner, name)
        raise ValueError(f"{name}: want {default!r} with backend: fsdp, where {OF_MEGATRON[name]}, got {got!r}")


def _refuse_heads(learner: "LearnerConfig") -> None:
    """Refuse settings with which heads for further tokens cannot be trained."""
    megatrons, got = list(megatron_settings(learner)), learner.mtp_loss_scaling_factor
    if learner.backend == MEGATRON or (megatrons and learner.backend != FSDP):
        reason = "backend: megatron" if learner.backend == MEGATRON else f"{megatrons[0]} needs it"
        raise ValueError(f"mtp_loss_scaling_factor: want {NO_MTP} ({reason}), got {got}")
    if learner.lora.rank or learner.routing_replay != "none":
        reason = "lora.rank > 0" if learner.lora.rank else f"routing_replay: {learner.routing_replay}"
        raise ValueError(f"mtp_loss_scaling_factor: want 0 with {reason}, got {got}")


def _refuse_copies(learner: "LearnerConfig") -> None:
    """Refuse copies of a model that FSDP does not divide, or that have no equal numbers of ranks."""
    copies, ranks = learner.fsdp_replicas, learner.data_parallel
    if learner.backend != FSDP:
        raise ValueError(
            f"fsdp_replicas: want 1 without backend: fsdp, got {copies}: only FSDP divides the weights of a copy"
        )
    if not learner.fsdp_copies:
        raise ValueError("fsdp_replicas: want a number with nodes: 0, which is known to the agents alone, got 0")
    if ranks % learner.fsdp_copies:
        names = "fsdp_replicas" if copies else "nodes (fsdp_replicas: 0 = a copy on each)"
        raise ValueError(f"{names}: want a divisor of data_parallel = {ranks}, got {learner.fsdp_copies}")


def _refuse_sizes(learner: "LearnerConfig") -> None:
    groups = learner.num_ranks // learner.tensor_parallel
    if learner.nodes > 1 and groups % learner.nodes:
        names = [
            name for name in ("data_parallel", "pipeline_parallel", "context_parallel") if getattr(learner, name) > 1
        ]
        raise ValueError(
            f"nodes: want a divisor of {' x '.join(names or ['data_parallel'])} = {groups}, so that each has the "
            f"same number of whole tensor-parallel groups, got {learner.nodes}"
        )
    if learner.virtual_pipeline > 1 and learner.pipeline_parallel == 1:
        raise ValueError(
            f"virtual_pipeline: want 1 without a pipeline, got {learner.virtual_pipeline}: it divides the layers of a "
            "stage; raise pipeline_parallel, or remove it"
        )
    for name in ("first_stage_layers", "last_stage_layers"):
        layers = getattr(learner, name)
        if layers and (learner.pipeline_parallel == 1 or learner.virtual_pipeline > 1):
            raise ValueError(
                f"{name}: want 0 without pipeline_parallel > 1, or with virtual_pipeline > 1, got {layers}"
            )
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if learner.virtual_pipeline > 1 and getattr(learner, name) == "always":
            raise ValueError(
                f"{name}: want auto or never with virtual_pipeline, got 'always': "
                "the chunks of a stage would be reduced while others of it still run"
            )
    if learner.sequence_parallel and learner.tensor_parallel == 1:
        raise ValueError(
            "sequence_parallel: want false with tensor_parallel: 1, got true: it divides the tokens over the "
            "tensor-parallel ranks; raise tensor_parallel, or remove it (context_parallel divides rows without it)"
        )
    spread = learner.num_ranks // learner.pipeline_parallel
    if spread % learner.expert_parallel:
        raise ValueError(
            f"expert_parallel: want a divisor of data x tensor x context parallel = {spread}, got "
            f"{learner.expert_parallel}"
        )


def _refuse_group_size(learner: "LearnerConfig") -> None:
    least, algorithm = learner.min_group_size, learner.algorithm
    if least > learner.group_size:
        raise ValueError(f"min_group_size: want <= group_size = {learner.group_size}, got {least}")
    if least == 1 and algorithm.advantage in OF_GROUPS and algorithm.loss != "sft":
        raise ValueError(
            f"min_group_size: want >= 2 with algorithm.advantage: {algorithm.advantage}, which compares "
            "the samples of a group, got 1"
        )
    if algorithm.advantage == "pass_at_k" and 0 < least < algorithm.pass_at_k.k:
        raise ValueError(
            f"min_group_size: want >= algorithm.pass_at_k.k = {algorithm.pass_at_k.k}, got {least}: "
            "no k samples can be drawn"
        )


def _refuse_credit(learner: "LearnerConfig") -> None:
    """Refuse a credit by turn with an estimator that has no form for turns, and a discount without effect."""
    if learner.credit == "episode":
        if learner.credit_gamma != 1.0:
            raise ValueError(
                f"credit_gamma: not used with credit: episode; want credit: turn, or 1.0, got {learner.credit_gamma!r}"
            )
        return
    if learner.algorithm.sft_coef:
        raise ValueError(
            "credit: want episode with algorithm.sft_coef, whose demonstrations have no turns with rewards, got 'turn'"
        )
    if learner.algorithm.loss == "sft":
        raise ValueError("credit: sft has no advantages; want credit: episode, got 'turn'")
    if learner.algorithm.kl.reward_by == "token":
        raise ValueError(
            "credit: want episode with algorithm.kl.reward_by: token, which gives each token its own "
            "advantage, got 'turn'"
        )
    if learner.algorithm.gamma != 1.0:
        raise ValueError(
            "algorithm.gamma: want 1.0 with credit: turn, whose discount is credit_gamma, got "
            f"{learner.algorithm.gamma!r}"
        )
    if learner.algorithm.advantage not in OF_TURNS:
        raise ValueError(
            f"credit: turn needs algorithm.advantage {' | '.join(OF_TURNS)}, got {learner.algorithm.advantage!r}"
        )


def _refuse_tuning(learner: "LearnerConfig") -> None:
    """Refuse settings of optimizer and adapters that exclude each other, and steps that would train nothing."""
    optimizer = learner.optimizer
    if (
        optimizer.lr_decay in FALLING
        and 0 < optimizer.lr_decay_steps < learner.steps
        and not (optimizer.min_lr or learner.num_epochs)
    ):
        raise ValueError(
            f"optimizer.lr_decay_steps: want >= steps = {learner.steps} (or 0) with min_lr: 0, at which the steps "
            f"behind it train nothing, got {optimizer.lr_decay_steps}; lower steps, or set min_lr"
        )
    if learner.lora.rank and optimizer.freeze:
        raise ValueError(
            "optimizer.freeze: want none with lora.rank > 0, which freezes all weights of the model, got "
            f"{list(optimizer.freeze)}; choose the layers with lora.targets"
        )
    if learner.lora.rank:
        _refuse_with_adapters(learner)
    if optimizer.name == "sgd" and learner.distributed_optimizer:
        raise ValueError(
            "distributed_optimizer: want false with optimizer.name: sgd, whose state is not divided, got true"
        )
    if optimizer.name != "adamw" and learner.offload_optimizer:
        raise ValueError(
            f"offload_optimizer: want false with optimizer.name: {optimizer.name}, or name: adamw, got true"
        )
    if (name := learner.critic.optimizer.name) != "adamw" and learner.offload_optimizer:
        raise ValueError(
            f"offload_optimizer: want false with critic.optimizer.name: {name}, or critic.optimizer.name: "
            "adamw, got true"
        )


def _refuse_with_adapters(learner: "LearnerConfig") -> None:
    """Refuse the settings that a model with trained adapters alone does not support."""
    if learner.moe_bias_update_rate:
        raise ValueError(
            "moe_bias_update_rate: want 0 with lora.rank > 0, which freezes the routers' biases with all weights "
            f"of the model, got {learner.moe_bias_update_rate!r}"
        )
    megatrons = list(megatron_settings(learner))
    if learner.lora.of_experts and (learner.backend == MEGATRON or (megatrons and learner.backend != FSDP)):
        reason = "backend: megatron" if learner.backend == MEGATRON else f"{megatrons[0]} needs it"
        raise ValueError(
            f"lora.targets: want no weights of experts where Megatron trains ({reason}), which has no adapters for "
            f"them, got {list(learner.lora.of_experts)}; set backend: fsdp, or leave them out"
        )
    if learner.algorithm.kl.moves:
        raise ValueError(
            "algorithm.kl.reference_every, reference_ema: want 0 with lora.rank > 0, whose reference is "
            "the model without adapters"
        )


def _refuse_critic(learner: "LearnerConfig") -> None:
    """Refuse settings of a critic where none is trained, and a run that would train nothing else."""
    if not learner.algorithm.by_critic and learner.critic != type(learner.critic)():
        raise ValueError(
            f"critic: not used by algorithm.advantage: {learner.algorithm.advantage}; want advantage: "
            f"{' or '.join(BY_CRITIC)}, or no settings of a critic"
        )
    if learner.critic.warmup_steps >= learner.steps:
        raise ValueError(
            f"critic.warmup_steps: want < steps = {learner.steps}, got {learner.critic.warmup_steps}: no step "
            "trains the policy"
        )


def _refuse_kernels(learner: "LearnerConfig") -> None:
    if learner.overlap_param_gather == "always" and not learner.distributed_optimizer:
        raise ValueError(
            "overlap_param_gather: want auto or never without distributed_optimizer, got 'always': "
            "every replica computes all weights itself, and nothing is gathered"
        )
    for name, forced in (
        ("attention", "varlen"),
        ("attention", "cudnn"),
        ("fused_activation", "always"),
        *((name, "always") for name in BY_TRITON),
    ):
        if getattr(learner, name) == forced and learner.device == "cpu":
            raise ValueError(f"{name}: want auto on the CPU, got {forced!r}: it is a kernel for CUDA")
    if learner.attention in ("varlen", "cudnn") and learner.dtype == "float32":
        raise ValueError(
            f"attention: want auto or sdpa with dtype: float32, got {learner.attention!r}: flash attention "
            "computes in half precision"
        )
    if learner.attention == "cudnn" and learner.deterministic:
        raise ValueError(
            "attention: want auto or varlen with deterministic: true, got 'cudnn': its gradients are not "
            "the same bits each time"
        )
