"""A learner with a critic, and the body of one rank of a world of two that trains it in several layouts. Run by the
test.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.algorithm_settings import algorithm_of
from tests.examples import THOROUGH, rarely
from tests.integration.megatron_ranks import VOCAB
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import joined
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.backends.megatron.groups import Replicas
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.debug.collector import Collector
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import CriticConfig, LearnerConfig, OptimizerConfig
from tidemill.learner.trainer.backups import OtherModels, Reference, open_reference
from tidemill.learner.trainer.critic import Critic, open_critic
from tidemill.learner.trainer.trainer import Trainer

STEPS = (3, 4, 5)
OF_RANKS = STEPS[:2]
"""Steps of ``trained``."""
OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=2, eps=1e-5)
CRITIC = CriticConfig(optimizer=replace(OPTIMIZER, lr=1e-2))
GAE: dict[str, Any] = {"advantage": "gae", "gamma": 0.99, "lam": 0.9}
MOVING = KLConfig(coef=0.1, reference_ema=0.5)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 in sequence, recompute": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel_size": 2},
    **dict(rarely([("tp2", {"tensor_parallel_size": 2}), ("cp2", {"context_parallel_size": 2})])),
    "pp2 vpp2": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
}
DEEP = "pp2 vpp2"
"""The layout of a model of four layers."""
VTRACE: dict[str, Any] = {"advantage": "vtrace", "correction": "tis", "vtrace": {"c": 0.9}, "minibatches": 2}
SHARES = Replicas(
    distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_elements=9_000
)


@dataclass(frozen=True, kw_only=True)
class Built:
    """One rank of a learner with a critic."""

    trainer: Trainer
    policy: MegatronPolicy
    optimizer: MegatronOptimizer
    critic: Critic
    reference: Reference

    @property
    def saved_models(self) -> OtherModels:
        return OtherModels(reference=self.reference.saved, critic=self.critic)

    def train(
        self, step: int, here: Parallel, *, max_tokens: int = 60, minibatches: int = 1, **changes: Any
    ) -> dict[str, float]:
        """Train a step; ``changes`` of the batch."""
        samples = make_samples(vocab=VOCAB, step=step)
        batches = make_batches(
            samples, step=step, data_parallel=here.dp_size, max_tokens=max_tokens, minibatches=minibatches, pad_to=2
        )
        metrics = self.trainer.train(replace(batches[here.dp_rank], **changes))
        self.reference.follow(step)
        return metrics

    def save(self, directory: Path, step: int) -> None:
        write_staged(
            state.stage(directory, step=step, policy=self.policy, optimizer=self.optimizer, others=self.saved_models)
        )

    def load(self, directory: Path) -> int:
        return state.load(directory, policy=self.policy, optimizer=self.optimizer, others=self.saved_models)[0]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the critic's own weights on this rank."""
        return {name: parameter.detach().clone() for name, parameter in self.critic.model.named_weights()}


def build(
    model_dir: Path,
    here: Parallel,
    *,
    replicas: Replicas | None = None,
    dtype: str = "float32",
    learner: LearnerConfig | None = None,
    offload: bool = False,
    recompute: str = "none",
    saves: str = "",
    **algorithm: Any,
) -> Built:
    """Return a learner; without ``learner`` one with these settings of the algorithm over ``GAE``. ``saves``: place of
    dumps.
    """
    learner = learner or LearnerConfig(
        steps=10, optimizer=OPTIMIZER, critic=CRITIC, algorithm=algorithm_of(**(GAE | algorithm))
    )
    learner = replace(learner, offload_optimizer=offload, recompute=recompute)
    policy = build_policy(model_dir, dtype=dtype, parallel=here, replicas=replicas, kernels=Wanted.of(learner))
    optimizer = MegatronOptimizer(policy, learner.optimizer, steps=learner.steps, offload=learner.offload_optimizer)
    reference = open_reference(policy, learner.algorithm)
    collectors = [Collector(saves, here, role=role) if saves else None for role in ("actor", "critic")]
    critic = open_critic(MegatronBackend(), learner, policy, model_dir, collectors[1])
    assert critic is not None
    others = OtherModels(reference=reference.weights, critic=critic)
    trainer = Trainer(policy, optimizer, learner.algorithm, max_lag=2, others=others, collector=collectors[0])
    return Built(trainer=trainer, policy=policy, optimizer=optimizer, critic=critic, reference=reference)


def trained(
    model_dir: Path, here: Parallel, *, checkpoint: Path | None = None, minibatches: int = 1, **settings: Any
) -> dict[str, object]:
    """Train ``OF_RANKS``, or those after the checkpoint. Returns metrics and the policy's digest."""
    built = build(model_dir, here, kl=MOVING, **settings)
    steps = OF_RANKS
    if checkpoint is not None:
        steps = steps[steps.index(built.load(checkpoint)) + 1 :]
    metrics = [built.train(step, here, minibatches=minibatches) for step in steps]
    return {"metrics": metrics, "digest": built.policy.digest()}


def main(model_dir: Path, deep_dir: Path, experts_dir: Path, checkpoint: Path, every: bool, out: Path) -> None:
    """``every``: with the runs that repeat parts of others."""
    with joined() as here:
        results = {
            **({"dp2": trained(model_dir, here)} if THOROUGH else {}),
            "dp2 distributed": trained(model_dir, here, replicas=SHARES),
            "dp2 distributed, offload, resumed": trained(
                model_dir, here, replicas=SHARES, offload=True, checkpoint=checkpoint
            ),
            "dp2 in minibatches": trained(model_dir, here, minibatches=2),
        }
    for name, sizes in LAYOUTS.items():
        with joined(**sizes) as here:
            saves = f"{out}/{name}_{{step}}_{{rank}}.safetensors"
            directory, kind = (deep_dir, " deep") if name == DEEP else (model_dir, "")
            if name not in ("tp2", "pp2") or (every and name == "pp2"):
                results[f"{name} vtrace{kind}"] = trained(directory, here, **VTRACE)
            if name == DEEP:
                if every:
                    results[f"{name}{kind}"] = trained(directory, here)
                continue
            results[name] = trained(model_dir, here, recompute="full" if "recompute" in name else "none", saves=saves)
            if every or name in ("tp2", "pp2"):
                results[f"{name} resumed"] = trained(model_dir, here, checkpoint=checkpoint)
    for name, sizes in {
        "ep2 of experts": {"expert_parallel_size": 2},
        **({"tp2 of experts": {"tensor_parallel_size": 2, "sequence_parallel": True}} if every else {}),
    }.items():
        with joined(**sizes) as here:
            results[name] = trained(experts_dir, here)
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
