"""Body of one rank of a world of two, which trains a recorded step in one layout after the other. Run by the test."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from learner.algorithms.config import AlgorithmConfig
from learner.data.batch import StepBatch
from learner.data.batching import build_batches
from learner.data.plans import GENESIS
from learner.debug.collector import Collector
from learner.debug.profile_request import ProfileRequest
from learner.debug.rollout_file import Packing, load_rollout, planned_again
from learner.layout import parallel
from learner.megatron.model import build_policy
from learner.megatron.optimizer import PolicyOptimizer
from learner.megatron.trainer import Trainer
from learner.ranks.debugging import StepMemory
from learner.ranks.step_agreement import agreed
from tests.integration.megatron_ranks import OPTIMIZER
from tests.megatron_world import joined

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2 in sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}


def packed(file: Path, *, data_parallel: int, max_tokens: int, pad_to: int = 1) -> tuple[StepBatch, ...]:
    """Return the batches of a recorded step for a layout."""
    data = load_rollout(file)
    plan = planned_again(data, data.plan.step, Packing(data_parallel=data_parallel, max_tokens=max_tokens, minibatches=1), chain=GENESIS)
    return build_batches(plan, data.samples, pad_to=pad_to, token_limits=data.token_limits)


def main(model_dir: Path, file: Path, out: Path) -> None:
    found: dict[str, Any] = {}
    for name, sizes in LAYOUTS.items():
        with joined(**sizes) as here:
            _train(model_dir, file, out, name, here)
            found["memory"] = StepMemory(here).of_all_ranks()
            found["own memory"] = psutil.Process().memory_info().rss
            request = ProfileRequest(steps=3, memory=True, rank=1) if here.rank == 0 else None
            answers = [agreed(leaves=leaves, request=request, here=here) for leaves in (False, here.rank == 1)]
            found["agreed"] = [(leaves, None if one is None else asdict(one)) for leaves, one in answers]
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def _train(model_dir: Path, file: Path, out: Path, name: str, here: parallel.Parallel) -> None:
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    collector = Collector(f"{out}/{name}_{{step}}_{{rank}}.safetensors", here)
    trainer = Trainer(policy, PolicyOptimizer(policy, OPTIMIZER, steps=10), AlgorithmConfig(), max_lag=2, collector=collector)
    trainer.train(packed(file, data_parallel=here.dp_size, max_tokens=80, pad_to=here.tp_size * here.cp_size)[here.dp_rank])
