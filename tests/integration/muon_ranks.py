"""Muon on both backends, and the body of one rank of a world of two that trains with it in layouts of Megatron. Run by
the test.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

from tests.backend_learner import BackendLearner, open_learner
from tests.examples import rarely
from tests.integration.fsdp_state_ranks import BASE, LORA, OPTIMIZER, VOCAB
from tests.integration.megatron_layouts import projected
from tests.learner_steps import make_samples
from tests.megatron_world import joined
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import LearnerConfig

STEPS = (3, 4)
MUON = replace(BASE, optimizer=replace(OPTIMIZER, name="muon"))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of a learner of two ranks."""

    learner: LearnerConfig
    family: str = "qwen3"
    dtype: str = "float32"

    @property
    def alone(self) -> LearnerConfig:
        """The same settings for one rank of either backend."""
        return replace(MUON, lora=self.learner.lora)

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of ``groups.join``."""
        learner = self.learner
        return {
            "tensor_parallel_size": learner.tensor_parallel,
            "pipeline_parallel_size": learner.pipeline_parallel,
            "expert_parallel_size": learner.expert_parallel,
            "sequence_parallel": learner.sequence_parallel,
        }


SPLIT = {"tensor_parallel": 2, "sequence_parallel": True}
SHARES = {"data_parallel": 2, "distributed_optimizer": True}
RUNS = {
    "tensor parallel": Run(learner=replace(MUON, **SPLIT)),
    **dict(
        rarely(
            {
                "tensor parallel, lora": Run(learner=replace(MUON, **SPLIT, lora=LORA)),
                "pipeline parallel": Run(learner=replace(MUON, pipeline_parallel=2)),
                "replicas": Run(learner=replace(MUON, data_parallel=2)),
                "shares": Run(learner=replace(MUON, **SHARES)),
            }.items()
        )
    ),
    "shares, bfloat16": Run(learner=replace(MUON, **SHARES), dtype="bfloat16"),
    "shares, expert parallel": Run(learner=replace(MUON, **SHARES, expert_parallel=2), family="qwen3_moe"),
}


@contextmanager
def exact() -> Iterator[None]:
    """Let torch's Muon compute in float64: its bfloat16 makes a last digit of a gradient a visible difference."""
    before = _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = _by_newton_schulz
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = before


def _by_newton_schulz(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    x = gradient.double() / gradient.double().norm().clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.to(gradient.dtype)


def opened(model_dir: Path, here: Parallel, learner: LearnerConfig, backend: Any, dtype: str) -> BackendLearner:
    """Return a new learner."""
    return open_learner(backend, model_dir, here, learner, dtype=dtype)


def train(learner: BackendLearner, step: int) -> dict[str, float]:
    """Train a step. Returns its metrics."""
    here = learner.policy.parallel
    samples = make_samples(vocab=VOCAB, step=step)
    return learner.train(step, samples, pad_to=here.tp_size, max_tokens=60 * (3 - here.dp_size))


def weights(learner: BackendLearner) -> dict[str, float]:
    """Return one number for each exported weight."""
    return {name: projected(tensor) for name, tensor in learner.policy.export()}


def whole_run(model_dir: Path, here: Parallel, run: Run, checkpoint: Path) -> dict[str, Any]:
    """Train both steps with a checkpoint between them, and the second again by a learner that has loaded it."""
    first, second = (opened(model_dir, here, run.learner, MegatronBackend(), run.dtype) for _ in range(2))
    metrics = [train(first, STEPS[0])]
    if here.rank == 0:
        checkpoint.mkdir()
    torch.distributed.barrier()
    first.save(checkpoint, STEPS[0])
    metrics.append(train(first, STEPS[1]))
    assert second.load(checkpoint) == STEPS[0]
    train(second, STEPS[1])
    digests = [learner.policy.digest() for learner in (first, second)]
    return {"metrics": metrics, "weights": weights(first), "digests": digests}


def main(models: dict[str, Path], checkpoints: Path, out: Path) -> None:
    results = {}
    with exact():
        for name, run in RUNS.items():
            with joined(**run.sizes) as here:
                results[name] = whole_run(models[run.family], here, run, checkpoints / name)
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
