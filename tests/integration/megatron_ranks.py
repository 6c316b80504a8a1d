"""Body of one rank of a world of two: trains the same steps with data parallelism, then with tensor parallelism. Run by the test."""

import json
import os
import sys
from pathlib import Path

import torch

from bus.ports import KeptPort
from learner.algorithms.config import AlgorithmConfig
from learner.config import OptimizerConfig
from learner.megatron import parallel, state
from learner.megatron.model import WeightBackup, build_policy
from learner.megatron.optimizer import PolicyOptimizer
from learner.megatron.trainer import Trainer
from tests.learner_steps import make_batches, make_samples

VOCAB = 300
STEPS = (3, 4)
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.01, warmup_steps=2)


def train(model_dir: Path, here: parallel.Parallel, *, max_tokens: int, checkpoint: Path | None = None) -> dict[str, object]:
    """Train ``STEPS`` and say what came out; with ``checkpoint``, load it first and train only the last step."""
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    optimizer = PolicyOptimizer(policy, OPTIMIZER, steps=10)
    proximal = WeightBackup(policy)
    trainer = Trainer(policy, optimizer, AlgorithmConfig(entropy_coef=0.01), max_lag=2, proximal=proximal)
    steps = STEPS
    if checkpoint is not None:
        assert state.load(checkpoint, policy=policy, optimizer=optimizer, proximal=proximal)[0] == STEPS[0]
        steps = STEPS[1:]
    metrics = []
    for step in steps:
        batches = make_batches(make_samples(vocab=VOCAB, step=step), step=step, data_parallel=here.dp_size, max_tokens=max_tokens)
        metrics.append(trainer.train(batches[here.dp_rank]))
    return {"metrics": metrics, "digest": policy.digest()}


def main(model_dir: Path, checkpoint: Path, out: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    cpu = torch.device("cpu")
    rank = int(os.environ["RANK"])
    here = parallel.join(tensor_parallel_size=1, device=cpu, seed=0)
    results = {"dp2": train(model_dir, here, max_tokens=60), "dp2_resumed": train(model_dir, here, max_tokens=60, checkpoint=checkpoint)}
    with KeptPort() as kept:
        port = [kept.number]
        torch.distributed.broadcast_object_list(port)
        parallel.leave()
        os.environ["MASTER_PORT"] = str(port[0])
        here = parallel.join(tensor_parallel_size=2, device=cpu, seed=0)
    results |= {"tp2": train(model_dir, here, max_tokens=200), "tp2_resumed": train(model_dir, here, max_tokens=200, checkpoint=checkpoint)}
    parallel.leave()
    (out / f"rank-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
