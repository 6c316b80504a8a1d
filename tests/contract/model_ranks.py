"""Bodies of one rank of a world of two, for the contracts of bridges and hooks. Each writes ``rank-<r>.json`` for its
test.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import joined
from tests.same_model import AlgorithmConfig, scored_rows, vocabulary, weights_in
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.config import HooksConfig, OptimizerConfig
from tidemill.learner.trainer.backups import OtherModels
from tidemill.learner.trainer.trainer import Trainer


def bridged(model_dir: Path, bridge: str, out: Path) -> None:
    """Load, score and export a model over two tensor-parallel ranks, by which every tensor that can be is split."""
    with joined(tensor_parallel_size=2) as here:
        try:
            policy = build_policy(model_dir, dtype="float32", parallel=here, bridge_class=bridge)
        except ConfigRefused as refused:
            _write(out, {"refused": str(refused)})
            return
        exported, there = dict(policy.export()), weights_in(model_dir)
        differing = [
            name
            for name in exported.keys() | there
            if name not in exported or not _same(exported[name], there.get(name))
        ]
        samples = make_samples(vocab=vocabulary(model_dir), temperature=0.7)
        rows = [
            (number, found_T.tolist()) for number, found_T in scored_rows(policy, samples, max_tokens=100, pad_to=2)
        ]
        _write(out, {"refused": "", "differing": sorted(differing), "rows": rows})


def hooked(model_dir: Path, name: str, path: str, steps: tuple[int, ...], out: Path) -> None:
    """Train steps with a hook on two data-parallel ranks, each with its own half of the samples."""
    with joined() as here:
        policy = build_policy(model_dir, dtype="float32", parallel=here)
        optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=1e-3), steps=20)
        trainer = Trainer(
            policy, optimizer, AlgorithmConfig(), max_lag=2, others=OtherModels(), hooks=HooksConfig(**{name: path})
        )
        for step in steps:
            samples = make_samples(vocab=vocabulary(model_dir), step=step)
            trainer.train(make_batches(samples, step=step, data_parallel=2, minibatches=2)[here.dp_rank])
        _write(out, {"digest": policy.digest()})


def _same(found: torch.Tensor, wanted: torch.Tensor | None) -> bool:
    return wanted is not None and torch.equal(found, wanted.to(found.dtype))


def _write(out: Path, result: dict[str, Any]) -> None:
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))
