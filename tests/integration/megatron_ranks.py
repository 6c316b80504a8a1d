"""Body of one rank of a world of two: trains the same steps with data parallelism, then with tensor parallelism. Run by
the test.
"""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from tests.algorithm_settings import algorithm_of
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import joined
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.policy_losses import LOSS_FUNCTIONS, PolicyLoss
from tidemill.learner.algorithms.tokens import Tokens
from tidemill.learner.backends.megatron import groups, state
from tidemill.learner.backends.megatron.cpu_shim import megatron_device
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.backends.megatron.optimizer_pieces import buffers_of
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.layout import parallel
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.learner.trainer.backups import OtherModels, WeightBackup
from tidemill.learner.trainer.trainer import Trainer

VOCAB = 300
STEPS = (3, 4)
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.01, warmup_steps=2)
MARK = 7.0
"""Reward, and so the advantage, of a step that is invalidated on rank 1."""


def train(
    model_dir: Path, here: parallel.Parallel, *, max_tokens: int, checkpoint: Path | None = None
) -> dict[str, object]:
    """Train ``STEPS`` and return the results; with ``checkpoint``, load it first and train only the last step."""
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    optimizer = MegatronOptimizer(policy, OPTIMIZER, steps=10)
    proximal = WeightBackup(policy)
    trainer = Trainer(
        policy, optimizer, algorithm_of(entropy={"coef": 0.01}), max_lag=2, others=OtherModels(proximal=proximal)
    )
    steps = STEPS
    if checkpoint is not None:
        assert (
            state.load(checkpoint, policy=policy, optimizer=optimizer, others=OtherModels(proximal=proximal))[0]
            == STEPS[0]
        )
        steps = STEPS[1:]
    metrics = []
    for step in steps:
        batches = make_batches(
            make_samples(vocab=VOCAB, step=step), step=step, data_parallel=here.dp_size, max_tokens=max_tokens
        )
        metrics.append(trainer.train(batches[here.dp_rank]))
    return {"metrics": metrics, "digest": policy.digest()}


def spoilt(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """A custom loss that is NaN on rank 1 where an advantage is ``MARK``; its gradient is finite everywhere."""
    made = LOSS_FUNCTIONS["ppo"](log_probs_T, anchor_T, tokens, config)
    bad = dist.get_rank() == 1 and bool((tokens.advantages_T == MARK).any())
    return replace(made, loss_T=made.loss_T + (math.nan if bad else 0.0))


def skips(model_dir: Path, here: parallel.Parallel, replicas: groups.Replicas | None = None) -> dict[str, object]:
    """Train a good step, one with a NaN loss on rank 1, and a good one; then a step with an infinite gradient there.

    That one is in the last buffer of the last chunk, that of its experts where it has some: no other rank has their
    gradients.
    """
    algorithm = algorithm_of(
        loss=f"{__name__}:spoilt", weight={"level": "none"}, anchor="rollout", advantage="reinforce"
    )
    batches = []
    for step in (3, 4, 5):
        samples = [
            replace(sample, reward=MARK if step == 4 else sample.reward)
            for sample in make_samples(vocab=VOCAB, step=step)
        ]
        batches.append(make_batches(samples, step=step, data_parallel=here.dp_size, pad_to=here.cp_size)[here.dp_rank])

    def trained(chosen: list[StepBatch]) -> tuple[list[float], list[str], MegatronOptimizer, MegatronPolicy]:
        policy = build_policy(model_dir, dtype="float32", parallel=here, replicas=replicas)
        optimizer = MegatronOptimizer(policy, OPTIMIZER, steps=10)
        trainer = Trainer(policy, optimizer, algorithm, max_lag=2)
        skipped, digests = [], []
        for batch in chosen:
            skipped.append(trainer.train(batch)["train/skipped_minibatches"])
            digests.append(policy.digest())
        return skipped, digests, optimizer, policy

    skipped, digests, optimizer, policy = trained(batches)
    undisturbed = trained([batches[0], batches[2]])[1][-1]
    buffers = [buffer for ddp in policy.ddps for buffer in buffers_of(ddp)]
    for buffer in buffers:
        buffer.grad_data.fill_(1.0)
    if here.rank == 1:
        buffers[-1].grad_data.fill_(math.inf)
    with megatron_device():
        norm, _ = optimizer.step(6, loss=0.0)
    moved = policy.digest() != digests[-1]
    return {
        "skipped": skipped,
        "digests": digests,
        "undisturbed": undisturbed,
        "norm_of_spoilt_gradient": norm,
        "moved_by_it": moved,
    }


def main(model_dir: Path, checkpoint: Path, out: Path) -> None:
    with joined() as here:
        results = {
            "dp2": train(model_dir, here, max_tokens=60),
            "dp2_resumed": train(model_dir, here, max_tokens=60, checkpoint=checkpoint),
        }
        results["dp2_skips"] = skips(model_dir, here)
    with joined(tensor_parallel_size=2) as here:
        results["tp2"] = train(model_dir, here, max_tokens=200)
        results["tp2_resumed"] = train(model_dir, here, max_tokens=200, checkpoint=checkpoint)
        results["tp2_skips"] = skips(model_dir, here)
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
