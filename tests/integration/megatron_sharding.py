"""Body of one rank of a world of two: trains the same steps with every way of keeping the optimizer's state. Run by the
test.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tests.examples import THOROUGH, rarely
from tests.integration.megatron_ranks import skips
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import joined
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.groups import Replicas
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.kernels import logprobs
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.learner.trainer.trainer import Trainer

VOCAB = 300
STEPS = (3, 4)
UNCLIPPED = OptimizerConfig(lr=3e-3, weight_decay=0.01, warmup_steps=2, clip_grad=1e9)
CLIPPED = replace(UNCLIPPED, clip_grad=0.05)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of keeping the optimizer's state."""

    replicas: Replicas | None = None
    offload: bool = False
    chunk: int = logprobs.CHUNK_ELEMENTS
    """Number of logits in memory at once."""


CHUNK = 9_000
"""Logits in memory at once of a way with chunks: of 30 tokens. Of shorter rows all are kept, and the gradient comes
through autograd.
"""
BUCKET = 9_000
"""Elements of a bucket, so that the tiny model has several."""
SHARES = Replicas(distributed_optimizer=True)
WAYS = {
    "plain": Way(),
    "plain, overlap": Way(replicas=Replicas(overlap_grad_reduce=True, bucket_elements=BUCKET)),
    "plain, chunks": Way(chunk=CHUNK),
    "plain, overlap, chunks": Way(replicas=Replicas(overlap_grad_reduce=True, bucket_elements=BUCKET), chunk=CHUNK),
    "distributed": Way(replicas=SHARES),
    "distributed, overlap": Way(
        replicas=replace(SHARES, overlap_grad_reduce=True, overlap_param_gather=True, bucket_elements=BUCKET),
    ),
    "distributed, overlap, chunks": Way(
        replicas=replace(SHARES, overlap_grad_reduce=True, overlap_param_gather=True, bucket_elements=BUCKET),
        chunk=CHUNK,
    ),
    "offload": Way(offload=True),
    "distributed, offload": Way(replicas=SHARES, offload=True),
    "distributed, overlap, offload": Way(
        replicas=replace(SHARES, overlap_grad_reduce=True, overlap_param_gather=True, bucket_elements=BUCKET),
        offload=True,
    ),
}
ALWAYS = {
    "float32": [*WAYS] if THOROUGH else ["plain", "distributed", "distributed, overlap", "distributed, offload"],
    "bfloat16": ["plain", "distributed", "distributed, offload", *rarely(["distributed, overlap, offload"])],
}
"""Ways by dtype. The other ones in bfloat16 are compared by ``make test-all``, where nothing is clipped."""
CASES = [(dtype, way) for dtype, ways in ALWAYS.items() for way in ways]
RARE = [(dtype, way) for dtype in ALWAYS for way in WAYS if (dtype, way) not in CASES]
CLIPPED_CASES = [
    *(("float32", way) for way in ("plain", "distributed", *rarely(["offload"]), "distributed, offload")),
    *rarely(("bfloat16", way) for way in ("plain", "distributed", "distributed, offload")),
]
RESUMES = [
    ("plain", "distributed"),
    ("distributed", "plain"),
    ("distributed", "distributed, overlap"),
    ("plain", "distributed, offload"),
    ("distributed, offload", "distributed"),
    ("offload", "plain"),
]
"""Way that has saved, and way that continues."""


def resumes(dtype: str) -> list[tuple[str, str]]:
    """Return those of which both ways are run for a dtype."""
    return [(one, other) for one, other in RESUMES if {one, other} <= {*ALWAYS[dtype]}]


def learner(
    model_dir: Path, here: Parallel, dtype: str, way: Way, settings: OptimizerConfig
) -> tuple[Trainer, MegatronPolicy, MegatronOptimizer]:
    policy = build_policy(model_dir, dtype=dtype, parallel=here, replicas=way.replicas)
    optimizer = MegatronOptimizer(policy, settings, steps=10, offload=way.offload)
    return Trainer(policy, optimizer, AlgorithmConfig(), max_lag=2), policy, optimizer


def take(trainer: Trainer, step: int, here: Parallel) -> dict[str, float]:
    samples = make_samples(vocab=VOCAB, step=step)
    return trainer.train(
        make_batches(samples, step=step, data_parallel=here.dp_size, max_tokens=50, minibatches=2)[here.dp_rank]
    )


def trained(
    model_dir: Path, here: Parallel, case: tuple[str, str], settings: OptimizerConfig, out: Path | None
) -> dict[str, object]:
    """Train ``STEPS``; with ``out``, save a checkpoint after the first. Returns metrics and digests of each step."""
    way = WAYS[case[1]]
    trainer, policy, optimizer = learner(model_dir, here, case[0], way, settings)
    metrics, digests, before = [], [], logprobs.CHUNK_ELEMENTS
    logprobs.CHUNK_ELEMENTS = way.chunk
    for step in STEPS:
        metrics.append(take(trainer, step, here))
        digests.append(policy.digest())
        if out is not None and step == STEPS[0]:
            saved(out / f"{case[0]} {case[1]}", policy, optimizer)
    logprobs.CHUNK_ELEMENTS = before
    return {
        "metrics": metrics,
        "digests": digests,
        "buckets": sum(len(buffer.buckets) for buffer in policy.ddp.buffers),
    }


def saved(directory: Path, policy: MegatronPolicy, optimizer: MegatronOptimizer) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    write_staged(state.stage(directory, step=STEPS[0], policy=policy, optimizer=optimizer))
    return directory


def resumed(model_dir: Path, here: Parallel, dtype: str, names: tuple[str, str], out: Path) -> dict[str, object]:
    """Load the checkpoint of one way into another, and take the second step."""
    trainer, policy, optimizer = learner(model_dir, here, dtype, WAYS[names[1]], UNCLIPPED)
    assert state.load(out / f"{dtype} {names[0]}", policy=policy, optimizer=optimizer)[0] == STEPS[0]
    return {"metrics": take(trainer, STEPS[1], here), "digest": policy.digest()}


def passed_on(model_dir: Path, here: Parallel, dtype: str, way: Way, checkpoint: Path, to: Path) -> None:
    """Load a checkpoint and save it again."""
    _, policy, optimizer = learner(model_dir, here, dtype, way, UNCLIPPED)
    state.load(checkpoint, policy=policy, optimizer=optimizer)
    saved(to, policy, optimizer)


def rare(model_dir: Path, out: Path) -> None:
    """Train the rare ways, and the plain one of their dtype."""
    with joined() as here:
        results = {
            " ".join(case): trained(model_dir, here, case, UNCLIPPED, None) for case in (*RARE, ("bfloat16", "plain"))
        }
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))


def main(model_dir: Path, of_one: Path, out: Path) -> None:
    """``of_one``: directory with a checkpoint of one rank for each dtype."""
    with joined() as here:
        results: dict[str, object] = {" ".join(case): trained(model_dir, here, case, UNCLIPPED, out) for case in CASES}
        results |= {
            f"clipped {' '.join(case)}": trained(model_dir, here, case, CLIPPED, None) for case in CLIPPED_CASES
        }
        for dtype in ("float32", "bfloat16"):
            results |= {
                f"{dtype} {one} > {other}": resumed(model_dir, here, dtype, (one, other), out)
                for one, other in resumes(dtype)
            }
            for name in ("distributed", "distributed, overlap, offload"):
                passed_on(model_dir, here, dtype, WAYS[name], of_one / dtype, out / f"of one, {dtype} {name}")
        results["skips"] = skips(model_dir, here, SHARES)
    with joined(tensor_parallel_size=2) as here:
        for dtype in ("float32", "bfloat16"):
            passed_on(
                model_dir, here, dtype, WAYS["plain"], out / f"{dtype} distributed", out / f"split, {dtype} plain"
            )
            passed_on(
                model_dir, here, dtype, WAYS["offload"], out / f"{dtype} distributed", out / f"split, {dtype} offload"
            )
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
