"""Learners on FSDP2 with everything that a checkpoint stores, and the body of one rank of a world of two. Run by the
test.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.algorithm_settings import algorithm_of
from tests.backend_learner import BackendLearner, open_learner
from tests.examples import THOROUGH
from tests.learner_steps import make_samples, with_random_experts
from tests.megatron_world import joined, not_sent_once
from tests.mtp_models import write_with_heads
from tests.tiny_models import write_tiny_model
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.backends.fsdp.backend import FsdpBackend
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import ROLLOUT, CriticConfig, LearnerConfig, OptimizerConfig
from tidemill.learner.settings.optimizer import LoraConfig

VOCAB = 300
STEPS = (3, 4, 5)
SAVED = STEPS[1]
"""Step after which a checkpoint is saved."""
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, beta2=0.99, eps=1e-4)
MOVING = KLConfig(coef=0.1, reference_ema=0.5)
LORA = LoraConfig(rank=4, targets=("q_proj", "v_proj", "down_proj"))
OF_EXPERTS = LoraConfig(rank=3, targets=("q_proj", "experts.gate_up_proj", "experts.down_proj"))
CRITIC = CriticConfig(optimizer=replace(OPTIMIZER, lr=1e-2))
BASE = LearnerConfig(steps=10, optimizer=OPTIMIZER)

WITH_HEADS = "deepseek_v3"
"""Family whose model has a head for further tokens."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A learner and its batches."""

    learner: LearnerConfig
    family: str = "qwen3"
    proximal: bool = False
    minibatches: int = 1
    dtype: str = "float32"


KINDS = {
    "reference and proximal": Kind(
        learner=replace(BASE, algorithm=algorithm_of(correction="decoupled", kl=MOVING)), proximal=True, minibatches=2
    ),
    "critic": Kind(
        learner=replace(BASE, critic=CRITIC, algorithm=algorithm_of(advantage="gae", gamma=0.99, lam=0.9, kl=MOVING))
    ),
    "sgd": Kind(learner=replace(BASE, optimizer=replace(OPTIMIZER, name="sgd", lr=1e-2))),
    "adam": Kind(learner=replace(BASE, optimizer=replace(OPTIMIZER, name="adam"))),
    "muon": Kind(learner=replace(BASE, optimizer=replace(OPTIMIZER, name="muon"))),
    "muon of experts": Kind(learner=replace(BASE, optimizer=replace(OPTIMIZER, name="muon")), family="qwen3_moe"),
    "state set to 0": Kind(learner=replace(BASE, optimizer=replace(OPTIMIZER, reset_at=STEPS[1:]))),
    "offload": Kind(learner=replace(BASE, offload_optimizer=True)),
    "recompute": Kind(learner=replace(BASE, recompute="full")),
    "lora": Kind(learner=replace(BASE, lora=LORA, algorithm=algorithm_of(kl=KLConfig(coef=0.1)))),
    "lora of experts": Kind(
        learner=replace(BASE, lora=OF_EXPERTS, recompute="full", algorithm=algorithm_of(kl=KLConfig(coef=0.1))),
        family="gpt_oss",
        minibatches=2,
    ),
    "lora of experts, muon": Kind(
        learner=replace(BASE, lora=OF_EXPERTS, optimizer=replace(OPTIMIZER, name="muon")), family="gpt_oss"
    ),
    "frozen": Kind(learner=replace(BASE, optimizer=replace(OPTIMIZER, freeze=("embed_tokens", "mlp")))),
    "experts, replayed": Kind(
        learner=replace(BASE, routing_replay="old", algorithm=algorithm_of(correction="decoupled")),
        family="qwen3_moe",
        minibatches=2,
    ),
    "experts, replayed, recompute": Kind(
        learner=replace(BASE, routing_replay="old", recompute="full", algorithm=algorithm_of(correction="decoupled")),
        family="qwen3_moe",
        minibatches=2,
    ),
    "experts, given": Kind(learner=replace(BASE, routing_replay=ROLLOUT), family="qwen3_moe", minibatches=2),
    "experts in padded rows, replayed": Kind(
        learner=replace(
            BASE, routing_replay="old", recompute="full", algorithm=algorithm_of(correction="decoupled", kl=MOVING)
        ),
        family="deepseek_v32",
        minibatches=2,
    ),
    "experts in padded rows, given": Kind(
        learner=replace(BASE, routing_replay=ROLLOUT), family="deepseek_v32", minibatches=2
    ),
    "bfloat16": Kind(learner=BASE, dtype="bfloat16"),
    "olmo3": Kind(learner=replace(BASE, algorithm=algorithm_of(kl=MOVING)), family="olmo3"),
    "lfm2": Kind(learner=replace(BASE, algorithm=algorithm_of(kl=MOVING)), family="lfm2"),
    "heads for further tokens": Kind(
        learner=replace(BASE, mtp_loss_scaling_factor=0.3, algorithm=algorithm_of(kl=MOVING)),
        family=WITH_HEADS,
        minibatches=2,
    ),
    "gpt_oss": Kind(learner=replace(BASE, algorithm=algorithm_of(kl=MOVING)), family="gpt_oss"),
}
OFTEN = (
    "reference and proximal",
    "critic",
    "muon of experts",
    "offload",
    "lora",
    "lora of experts",
    "experts, replayed, recompute",
    "experts, given",
    "bfloat16",
    "heads for further tokens",
)
"""One of each kind: the others are tried by ``make test-all``."""
TRIED = {name: kind for name, kind in KINDS.items() if THOROUGH or name in OFTEN}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "olmo3": {"head_dim": 16, **_WINDOWS},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "deepseek_v32": {
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 64,
    },
    "gpt_oss": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, **_WINDOWS},
}
"""Families that Megatron does not have, and settings of small models."""


def write_model(directory: Path, family: str, **changes: Any) -> Path:
    """Write a small random model of a family of either kind. Returns its directory."""
    if family == WITH_HEADS:
        return write_with_heads(directory, family)
    if family not in OTHER_FAMILIES:
        return write_tiny_model(directory, family, vocab_size=VOCAB, **changes)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **sizes | OTHER_FAMILIES[family] | changes)
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().save_pretrained(directory)
    return directory


def opened(model_dir: Path, here: Parallel, kind: Kind, backend: Any = None) -> BackendLearner:
    """Return a new learner."""
    return open_learner(
        backend or FsdpBackend(), model_dir, here, kind.learner, proximal=kind.proximal, dtype=kind.dtype
    )


def trained(learner: BackendLearner, kind: Kind, steps: tuple[int, ...]) -> list[dict[str, float]]:
    """Train the steps, with a push of weights after each."""
    metrics, given = [], kind.learner.routing_replay == ROLLOUT
    batch: dict[str, Any] = {"minibatches": kind.minibatches}
    shape = RoutedShape.of(json.loads((learner.model_dir / "config.json").read_text())) if given else None
    for step in steps:
        samples = make_samples(vocab=VOCAB, step=step)
        if shape is not None:
            samples, batch = with_random_experts(samples, shape), batch | {"routed": shape}
        metrics.append(learner.train(step, samples, **batch))
        if learner.proximal is not None:
            learner.proximal.refresh()
    return metrics


def whole_run(model_dir: Path, here: Parallel, kind: Kind, checkpoint: Path | None) -> dict[str, Any]:
    """Train all steps, and save on the way where there is a directory. Returns metrics and the digest at the end."""
    learner = opened(model_dir, here, kind)
    metrics = trained(learner, kind, STEPS[:2])
    if checkpoint is not None:
        learner.save(checkpoint, SAVED)
    return {"metrics": [*metrics, *trained(learner, kind, STEPS[2:])], "digest": digest(learner)}


def resumed(model_dir: Path, here: Parallel, kind: Kind, checkpoint: Path) -> dict[str, Any]:
    """Train the steps behind a checkpoint."""
    learner = opened(model_dir, here, kind)
    assert learner.load(checkpoint) == SAVED
    return {"metrics": trained(learner, kind, STEPS[2:]), "digest": digest(learner)}


def digest(learner: BackendLearner) -> list[str]:
    """Return the digest of each model."""
    return [model.digest() for model in (learner.policy, learner.critic and learner.critic.model) if model]


def poisoned(model_dir: Path, here: Parallel) -> dict[str, Any]:
    """Train a step in which the gradient of rank 1 alone is not finite, then one more."""
    learner = opened(model_dir, here, KINDS["sgd"])

    def not_a_number(gradient: Tensor) -> Tensor:
        return gradient * float("nan")

    before, run = learner.policy.digest(), learner.policy.root.forward
    if here.rank == 1:

        def poisoning(*inputs: Any) -> Any:
            """Return a loss with the same value, whose gradient is not a number."""
            loss, result = run(*inputs)
            if loss.requires_grad:
                loss.register_hook(not_a_number)
            return loss, result

        learner.policy.root.forward = poisoning
    samples = make_samples(vocab=VOCAB)
    skipped = learner.train(STEPS[0], samples)["train/skipped_minibatches"]
    stayed = learner.policy.digest() == before
    learner.policy.root.forward = run
    return {"skipped": skipped, "stayed": stayed, "next": learner.train(STEPS[0], samples)["train/skipped_minibatches"]}


def beside_torch(model_dir: Path, here: Parallel) -> float:
    """Return the largest difference of matrices from those of torch's Muon, which gets the same gradients, whole."""
    kind = Kind(learner=replace(BASE, optimizer=replace(OPTIMIZER, name="muon", clip_grad=0.0)))
    learner, config = opened(model_dir, here, kind), kind.learner.optimizer
    weights = [learner.optimizer.parameters[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1)]
    copies = [weight.full_tensor().detach().clone() for weight in weights]
    decay = {"momentum": config.momentum, "weight_decay": config.weight_decay}
    torch_muon = torch.optim.Muon(copies, lr=config.lr, adjust_lr_fn="match_rms_adamw", **decay)
    differences, free = [], learner.optimizer.zero_grad

    def kept() -> None:
        """Copy the gradients before the optimizer frees them."""
        for weight, copy in zip(weights, copies, strict=True):
            copy.grad = copy.grad if weight.grad is None else weight.grad.full_tensor()
        free()

    learner.optimizer.zero_grad = kept
    for step in STEPS:
        trained(learner, kind, (step,))
        torch_muon.step()
        differences += [
            float((weight.full_tensor() - copy).detach().abs().max())
            for weight, copy in zip(weights, copies, strict=True)
        ]
    return max(differences)


def main(models: dict[str, Path], checkpoints: Path, out: Path) -> None:
    with joined() as here:
        results: dict[str, Any] = {"poisoned": poisoned(models["qwen3"], here)}
        results["beside torch"] = beside_torch(models["qwen3"], here)
        results["not sent once"] = not_sent_once(opened(models["qwen3"], here, KINDS["lora"]).policy)
        for name, kind in TRIED.items():
            directory = checkpoints / name
            if here.rank == 0:
                directory.mkdir()
            torch.distributed.barrier()
            whole = whole_run(models[kind.family], here, kind, directory)
            results[name] = {"whole": whole, "resumed": resumed(models[kind.family], here, kind, directory)}
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
