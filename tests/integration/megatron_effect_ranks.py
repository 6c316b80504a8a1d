"""Body of one rank of a pipeline of two: whether outputs that were sent are freed, by
``deallocate_pipeline_outputs``.
"""

import json
import os
from pathlib import Path

from megatron.core.pipeline_parallel import schedules

from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import joined
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.learner.trainer.trainer import Trainer


def main(model_dir: Path, out: Path) -> None:
    plain, sizes = schedules.deallocate_output_tensor, []

    def noted(output, *arguments):  # type: ignore[no-untyped-def]
        plain(output, *arguments)
        sizes.append(output.numel())

    schedules.deallocate_output_tensor = noted
    results = {}
    with joined(pipeline_parallel_size=2) as here:
        for frees in (False, True):
            sizes.clear()
            kernels = Wanted(megatron={"deallocate_pipeline_outputs": frees})
            policy = build_policy(model_dir, dtype="float32", parallel=here, kernels=kernels)
            trainer = Trainer(
                policy, MegatronOptimizer(policy, OptimizerConfig(lr=1e-3), steps=3), AlgorithmConfig(), max_lag=2
            )
            trainer.train(make_batches(make_samples(vocab=128), max_tokens=90)[0])
            results[str(frees)] = {"digest": policy.digest(), "sent": [size for size in sizes]}
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
