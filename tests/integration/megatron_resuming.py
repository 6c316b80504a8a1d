"""Body of one rank of two: saves a checkpoint in every layout, loads each of them in others, and takes the next step.
Run by the test.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.algorithm_settings import algorithm_of
from tests.examples import rarely
from tests.integration.megatron_layouts import Layout
from tests.integration.megatron_ranks import skips
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import joined
from tidemill.learner.backends.megatron import groups, state
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.layout import parallel
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.learner.trainer.backups import OtherModels, WeightBackup
from tidemill.learner.trainer.trainer import Trainer

VOCAB = 300
STEPS = (3, 4)
OPTIMIZER = OptimizerConfig(lr=1e-3, beta2=0.99, eps=1e-4, weight_decay=0.01)
SKIPPING = ("pp2", *rarely(["pp2 vpp2", "cp2"]))
"""Layouts in which one rank has a loss or a gradient that is not finite."""
LAYOUTS: Mapping[str, Layout] = {
    "tp2": Layout(tensor_parallel=2, sequence_parallel=True),
    "pp2": Layout(pipeline_parallel=2),
    "pp2, 1 and 3 layers": Layout(pipeline_parallel=2, first_stage_layers=1),
    "cp2, shares": Layout(context_parallel=2, sharded=True),
    **dict(
        rarely(
            {
                "pp2 vpp2": Layout(pipeline_parallel=2, virtual_pipeline=2),
                "dp2": Layout(data_parallel=2),
                "cp2": Layout(context_parallel=2),
            }.items()
        )
    ),
    "pp2 vpp2, offload": Layout(pipeline_parallel=2, virtual_pipeline=2, offload=True),
}
"""Layouts of two ranks."""


class Learner:
    """A trainer with its checkpoint state."""

    def __init__(self, model_dir: Path, here: parallel.Parallel, layout: Layout | None = None) -> None:
        layout = layout or Layout()
        replicas = groups.Replicas(distributed_optimizer=layout.sharded)
        self.here = here
        self.policy: MegatronPolicy = build_policy(model_dir, dtype="float32", parallel=here, replicas=replicas)
        self.optimizer = MegatronOptimizer(self.policy, OPTIMIZER, steps=10, offload=layout.offload)
        self.proximal = WeightBackup(self.policy)
        self.trainer = Trainer(
            self.policy,
            self.optimizer,
            algorithm_of(entropy={"coef": 0.01}),
            max_lag=2,
            others=OtherModels(proximal=self.proximal),
        )

    def take(self, step: int) -> dict[str, float]:
        return self.trainer.train(self.batch(step))

    def log_probs(self, step: int) -> list[float]:
        """Return the sum over the trainable tokens of each row of this rank."""
        batch = self.batch(step)
        rows = zip(self.trainer.log_probs(batch), batch.micro_batches, strict=True)
        return [float(log_probs_T[torch.from_numpy(row.loss_mask_T)].sum()) for log_probs_T, row in rows]

    def batch(self, step: int) -> StepBatch:
        batches = make_batches(
            make_samples(vocab=VOCAB, step=step),
            step=step,
            data_parallel=self.here.dp_size,
            max_tokens=100,
            pad_to=self.here.tp_size * self.here.cp_size,
        )
        return batches[self.here.dp_rank]

    def save(self, directory: Path) -> None:
        if self.here.rank == 0:
            directory.mkdir(parents=True)
        dist.barrier()
        write_staged(
            state.stage(
                directory,
                step=STEPS[0],
                policy=self.policy,
                optimizer=self.optimizer,
                others=OtherModels(proximal=self.proximal),
            )
        )

    def resume(self, directory: Path) -> dict[str, Any]:
        """Load the checkpoint, and take the second step."""
        assert (
            state.load(
                directory, policy=self.policy, optimizer=self.optimizer, others=OtherModels(proximal=self.proximal)
            )[0]
            == STEPS[0]
        )
        digest = self.policy.digest()
        return {"digest": digest, "metrics": self.take(STEPS[1])}


def saved(learner: Learner, directory: Path) -> dict[str, Any]:
    """Take both steps, with a checkpoint after the first one."""
    first = learner.take(STEPS[0])
    learner.save(directory)
    digest, log_probs = learner.policy.digest(), learner.log_probs(STEPS[0])
    layers = sum(len(chunk.decoder.layers) for chunk in learner.policy.chunks)
    return {
        "metrics": [first],
        "digest": digest,
        "log_probs": log_probs,
        "second": learner.take(STEPS[1]),
        "layers": layers,
    }


def main(model_dir: Path, of_one: Path, every: bool, out: Path) -> None:
    """``of_one``: checkpoint of one rank. ``every``: each layout loads those of all; else its own and that of the one
    before it.
    """
    results: dict[str, dict[str, Any]] = {}
    for name, layout in LAYOUTS.items():
        with joined(**layout.sizes) as here:
            results[f"saved {name}"] = saved(Learner(model_dir, here, layout), out / name)
            results[f"{name} <- 1"] = Learner(model_dir, here, layout).resume(of_one)
            number = [*LAYOUTS].index(name)
            for other in [*LAYOUTS][0 if every else max(0, number - 1) : number + 1]:
                results[f"{name} <- {other}"] = Learner(model_dir, here, layout).resume(out / other)
            if name in SKIPPING:
                results[f"skips {name}"] = skips(model_dir, here)
    for name, layout in LAYOUTS.items() if every else ():
        with joined(**layout.sizes) as here:
            for other in [*LAYOUTS][[*LAYOUTS].index(name) + 1 :]:
                results[f"{name} <- {other}"] = Learner(model_dir, here, layout).resume(out / other)
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
