"""Body of one rank of a world of two: trains a mixture of experts in several layouts, saves it in one and goes on in another.

Run by the test. The layouts take turns in the processes, because starting those is most of the cost.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bus.server.ports import KeptPort
from learner.algorithms.config import AlgorithmConfig
from learner.config import OptimizerConfig
from learner.megatron import parallel, state
from learner.megatron.model import Policy, WeightBackup, build_policy
from learner.megatron.optimizer import PolicyOptimizer
from learner.megatron.parallel import Replicas
from learner.megatron.trainer import Trainer
from tests.learner_steps import make_batches, make_samples
from tests.tiny_models import EXPERTS

VOCAB = 300
STEPS = (3, 4, 5)
SAVED = 4
"""Step after which a checkpoint is written."""
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.01)
"""With a smaller eps Adam steps by the sign of gradients that are rounding noise."""
REPLICAS = {"plain": Replicas(), "distributed": Replicas(distributed_optimizer=True)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"expert_parallel_size": 2},
    "DP2": {},
    "TP2": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "TP2 EP2": {"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 2},
    "PP2": {"pipeline_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
    "CP2 EP2": {"context_parallel_size": 2, "expert_parallel_size": 2},
}
RUNS = [
    *((family, layout, "plain") for layout in ("EP2", "DP2", "TP2", "PP2") for family in EXPERTS),
    *(("qwen3_moe", layout, way) for layout, way in (("EP2", "distributed"), ("DP2", "distributed"), ("TP2", "distributed"))),
    *(("qwen3_moe", layout, "plain") for layout in ("TP2 EP2", "CP2", "CP2 EP2")),
    ("deepseek_v3", "CP2", "plain"),
]
"""(family, layout, optimizer)"""
RESUMES = [
    *(
        (f"{layout} {way}", other, way_of_other)
        for layout, way in (("1", "plain"), ("EP2", "plain"), ("EP2", "distributed"))
        for other, way_of_other in (
            ("EP2", "plain"),
            ("EP2", "distributed"),
            ("DP2", "plain"),
            ("DP2", "distributed"),
            ("TP2", "plain"),
            ("PP2", "plain"),
        )
    )
]
"""(layout and optimizer that saved, layout that goes on, its optimizer)"""


@dataclass(frozen=True, slots=True)
class Learner:
    """A policy with its optimizer and its trainer."""

    policy: Policy
    optimizer: PolicyOptimizer
    trainer: Trainer
    proximal: WeightBackup


def learner(model_dir: Path, here: parallel.Parallel, *, replicas: str = "plain", dtype: str = "float32") -> Learner:
    policy = build_policy(model_dir, dtype=dtype, parallel=here, replicas=REPLICAS[replicas])
    optimizer = PolicyOptimizer(policy, OPTIMIZER, steps=10)
    proximal = WeightBackup(policy)
    return Learner(
        policy, optimizer, Trainer(policy, optimizer, AlgorithmConfig(entropy_coef=0.01), max_lag=2, proximal=proximal), proximal
    )


def take(made: Learner, steps: tuple[int, ...], here: parallel.Parallel) -> list[dict[str, float]]:
    """Train these steps. Returns their metrics."""
    found = []
    for step in steps:
        batches = make_batches(
            make_samples(vocab=VOCAB, step=step, groups=6),
            step=step,
            data_parallel=here.dp_size,
            max_tokens=90,
            pad_to=here.tp_size * here.cp_size,
        )
        found.append(made.trainer.train(batches[here.dp_rank]))
    return found


def unbroken(model_dir: Path, here: parallel.Parallel, directory: Path, **more: Any) -> dict[str, Any]:
    """Train all steps, with a checkpoint in between."""
    made = learner(model_dir, here, **more)
    began = made.policy.digest()
    metrics = take(made, tuple(step for step in STEPS if step <= SAVED), here)
    if here.rank == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    state.save(directory, step=SAVED, policy=made.policy, optimizer=made.optimizer, proximal=made.proximal)
    return {"began": began, "metrics": metrics + take(made, tuple(step for step in STEPS if step > SAVED), here)}


def resumed(model_dir: Path, here: parallel.Parallel, directory: Path, **more: Any) -> dict[str, Any]:
    """Go on from a checkpoint."""
    made = learner(model_dir, here, **more)
    step, _ = state.load(directory, policy=made.policy, optimizer=made.optimizer, proximal=made.proximal)
    proximal = {name: float(copy.double().sum()) for name, copy in made.proximal.tensors.items()}
    return {"metrics": take(made, tuple(each for each in STEPS if each > step), here), "proximal": proximal}


def main(model_dirs: dict[str, Path], of_one: Path, out: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    results: dict[str, Any] = {}
    for layout, sizes in LAYOUTS.items():
        here = parallel.join(**({"tensor_parallel_size": 1} | sizes), device=torch.device("cpu"), seed=0)
        for family, of, way in RUNS:
            if of == layout:
                directory = out / f"{family} {layout} {way}"
                results[directory.name] = unbroken(model_dirs[family], here, directory, replicas=way)
        for source, of, way in RESUMES:
            if of == layout:
                directory = of_one if source == "1 plain" else out / f"qwen3_moe {source}"
                results[f"{source} > {layout} {way}"] = resumed(model_dirs["qwen3_moe"], here, directory, replicas=way)
        with KeptPort() as kept:
            port = [kept.number]
            torch.distributed.broadcast_object_list(port)
            parallel.leave()
            os.environ["MASTER_PORT"] = str(port[0])
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
