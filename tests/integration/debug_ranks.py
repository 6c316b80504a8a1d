"""Body of one rank of a world of two, which trains a recorded step with data parallelism, then with tensor parallelism. Run by the test."""

import os
from pathlib import Path

import torch

from learner.algorithms.config import AlgorithmConfig
from learner.data.batch import StepBatch
from learner.data.batching import build_batches
from learner.data.plans import GENESIS
from learner.debug.collector import Collector, Target
from learner.debug.rollout_file import Packing, load_rollout, planned_again
from learner.layout import parallel
from learner.megatron.activations import parallel_info
from learner.megatron.model import build_policy
from learner.megatron.optimizer import PolicyOptimizer
from learner.megatron.trainer import Trainer
from tests.integration.megatron_ranks import OPTIMIZER
from tests.megatron_world import joined

CPU = torch.device("cpu")


def packed(file: Path, *, data_parallel: int, max_tokens: int, pad_to: int = 1) -> tuple[StepBatch, ...]:
    """Return the batches of a recorded step for a layout."""
    data = load_rollout(file)
    plan = planned_again(data, data.plan.step, Packing(data_parallel=data_parallel, max_tokens=max_tokens, minibatches=1), chain=GENESIS)
    return build_batches(plan, data.samples, pad_to=pad_to, token_limits=data.token_limits)


def main(model_dir: Path, file: Path, out: Path) -> None:
    with joined() as here:
        _train(model_dir, file, out, "dp2", here)
    with joined(tensor_parallel_size=2) as here:
        _train(model_dir, file, out, "tp2", here)
    (out / f"rank-{os.environ['RANK']}.json").write_text("{}")


def _train(model_dir: Path, file: Path, out: Path, name: str, here: parallel.Parallel) -> None:
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    config, info = AlgorithmConfig(), parallel_info(here)
    path = f"{out}/{name}_{{step}}_{{rank}}.safetensors"
    target = Target(path=path, rank=here.rank, parallel_info=info, writes=info["tp_rank"] == 0, anchor=str(config.anchor))
    trainer = Trainer(policy, PolicyOptimizer(policy, OPTIMIZER, steps=10), config, max_lag=2, collector=Collector(target))
    trainer.train(packed(file, data_parallel=here.dp_size, max_tokens=80, pad_to=here.tp_size)[here.dp_rank])
