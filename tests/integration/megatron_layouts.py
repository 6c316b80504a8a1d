"""Body of one rank: trains every case of ``tests.algorithm_cases`` for two steps in one layout. Run by the test."""

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.algorithm_cases import (
    CASES,
    EQUAL_REWARDS,
    EVERY_TERM,
    EVERYWHERE,
    FRESH,
    OWN_TEMPERATURES,
    SHOWN_GROUPS,
    TRIED,
    algorithm,
)
from tests.algorithm_settings import algorithm_of
from tests.cuda_kernels import RaisingOnCuda
from tests.examples import THOROUGH
from tests.integration.gradients import PLAIN, save, taken
from tests.learner_steps import make_batches, make_samples, with_long_prompts
from tests.megatron_world import joined, not_sent_once
from tidemill.bus.wire.messages import Sample, Span, Status
from tidemill.learner.backends.megatron import groups
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.kernels import logprobs
from tidemill.learner.layout import parallel
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.learner.trainer.backups import OtherModels, WeightBackup
from tidemill.learner.trainer.trainer import Trainer

VOCAB = 300
STEPS = (3, 4)
OPTIMIZER = OptimizerConfig(lr=1e-3, beta2=0.99, eps=1e-4)
ROWS = {"as the layout packs them": 0, "unpacked": 1}
"""Rows of the steps with gradients: tokens of a micro-batch at most; 0 = those of the layout."""
WITH_GRADIENTS = algorithm_of(sft_coef=0.5, entropy={"coef": 0.01})
"""The algorithm of those steps."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The split of a step over ranks and micro-batches."""

    data_parallel: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1
    first_stage_layers: int = 0
    context_parallel: int = 1
    sharded: bool = False
    """Distributed optimizer."""
    overlap: bool = False
    """Collectives of the replicas beside forward and backward passes."""
    offload: bool = False
    """Optimizer in host memory."""
    recompute: str = "none"
    dtype: str = "float32"
    model: str = "flat"
    """Name of the model."""
    reference: str = ""
    """Layout with which it is compared; empty = one row on one rank."""
    max_tokens: int = 1 << 20
    """Number of tokens of a micro-batch at most."""
    chunk: int = logprobs.CHUNK_ELEMENTS
    """Number of logits in memory at once."""
    watched: bool = False
    """Record the operations that would raise on CUDA; it costs time."""
    every: int = 1
    """Stride over the cases: 1 = all. Where not all are tried, six times 2, and of more than 2 none but those of every
    layout.
    """
    first: int = 0
    """The first of them."""

    @property
    def cases(self) -> list[str]:
        if not THOROUGH and self.every > 2:
            return list(EVERYWHERE)
        stride = self.every if THOROUGH or self.every == 1 else 6 * self.every
        return list(dict.fromkeys([*TRIED[self.first :: stride], *EVERYWHERE]))

    @property
    def world(self) -> int:
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def with_gradients(self) -> bool:
        """True for the layouts with steps of which the gradients are compared, and those of one row."""
        return self.dtype == "float32" and self.recompute == "none" and (self.world > 1 or self.max_tokens > 1000)

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of ``groups.join``."""
        return {
            "tensor_parallel_size": self.tensor_parallel,
            "pipeline_parallel_size": self.pipeline_parallel,
            "virtual_pipeline_size": self.virtual_pipeline,
            "edge_layers": (self.first_stage_layers, 0),
            "context_parallel_size": self.context_parallel,
            "sequence_parallel": self.sequence_parallel,
        }


def train(model_dir: Path, here: parallel.Parallel, case: str, layout: Layout) -> dict[str, object]:
    """Train two steps. Returns their metrics, the number of micro-batches, and the operations that would raise on
    CUDA.
    """
    config, minibatches = algorithm(case), CASES[case][1]
    replicas = groups.Replicas(
        distributed_optimizer=layout.sharded,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap and layout.sharded,
    )
    kernels = Wanted(recompute=layout.recompute)
    policy = build_policy(model_dir, dtype=layout.dtype, parallel=here, replicas=replicas, kernels=kernels)
    reference = (
        another(policy) if config.listed_by_reference else WeightBackup(policy) if config.needs_reference else None
    )
    trainer = Trainer(
        policy,
        MegatronOptimizer(policy, OPTIMIZER, steps=10, offload=layout.offload),
        config,
        max_lag=2,
        others=OtherModels(reference=reference),
        row_tokens=layout.max_tokens,
        pair_tokens=64 if case == EQUAL_REWARDS else 0,
    )
    seen = RaisingOnCuda()
    watched = seen if layout.watched else contextlib.nullcontext()
    metrics, split = [], 0
    for step in STEPS:
        batches = make_batches(
            samples_of(case, step),
            step=step,
            data_parallel=here.dp_size,
            max_tokens=layout.max_tokens,
            minibatches=minibatches,
            pad_to=here.tp_size * here.cp_size,
        )
        with watched if THOROUGH or step == STEPS[-1] else contextlib.nullcontext():
            metrics.append(trainer.train(batches[here.dp_rank]))
        split = len(batches[here.dp_rank].micro_batches)
    exported = [(name, projected(tensor)) for name, tensor in policy.export()]
    weights = dict(exported)
    assert len(weights) == len(exported), "a weight is exported twice"
    return {"metrics": metrics, "micro_batches": split, "raising_on_cuda": seen.found, "weights": weights}


def samples_of(case: str, step: int) -> list[Sample]:
    """Return six groups: with the scores of a teacher, demonstrations and fresh samples where the case has them."""
    config, shown = algorithm(case), SHOWN_GROUPS.get(case, 0)
    temperature = (0.7, 1.0, 1.3) if case in OWN_TEMPERATURES else 1.0
    top_k = config.distill.top_k if config.needs_teacher else None
    samples = make_samples(vocab=VOCAB, step=step, groups=6, temperature=temperature, top_k=top_k)
    if case in FRESH:
        versions = {0: step - 1, 1: 0}
        samples = [
            _by_one_version(sample, versions[sample.index]) if sample.index in versions else sample
            for sample in samples
        ]
        samples = [
            replace(sample, reward=1.0, status=Status.TRUNCATED) if sample.task == 6 else sample for sample in samples
        ]
    if case == EQUAL_REWARDS:  # the second minibatch is one of them alone
        samples = [sample if sample.task == 3 else replace(sample, reward=1.0) for sample in samples]
        samples = with_long_prompts(samples, vocab=VOCAB)
    return [_demonstration(sample) if sample.task <= shown else sample for sample in samples]


def _by_one_version(sample: Sample, version: int) -> Sample:
    return replace(sample, spans=(Span(version=version, num_tokens=sample.response_length),))


def _demonstration(sample: Sample) -> Sample:
    """Return a demonstration of the same tokens, of which every third is not trained."""
    mask = (np.arange(sample.response_length) % 3 != 1).astype(np.uint8)
    nothing = np.zeros(sample.response_length, np.float32)
    taught = {"teacher_log_probs": None, "teacher_top_ids": None, "teacher_top_log_probs": None}
    return replace(sample, loss_mask=mask, rollout_log_probs=nothing, reward=0.0, demonstration=True, **taught)


def gradients(
    model_dir: Path, here: parallel.Parallel, layout: Layout, max_tokens: int
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the gradient of each weight of the whole model in one step, and the step's metrics."""
    replicas = groups.Replicas(
        distributed_optimizer=layout.sharded,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap and layout.sharded,
    )
    policy = build_policy(
        model_dir, dtype=layout.dtype, parallel=here, replicas=replicas, kernels=Wanted(recompute=layout.recompute)
    )
    trainer = Trainer(policy, MegatronOptimizer(policy, PLAIN, steps=10), WITH_GRADIENTS, max_lag=2)
    samples = [
        sample for sample in samples_of(EVERY_TERM, STEPS[0]) if sample.task in (2, 3)
    ]  # demonstrations, and a group of a policy
    batches = make_batches(
        samples,
        step=STEPS[0],
        data_parallel=here.dp_size,
        max_tokens=max_tokens or layout.max_tokens,
        pad_to=here.tp_size * here.cp_size,
    )
    return taken(policy.export, lambda: trainer.train(batches[here.dp_rank]))


@torch.no_grad()
def another(policy: MegatronPolicy) -> WeightBackup:
    """Return the weights of another model, the same at every layout."""
    backup = WeightBackup(policy)
    backup.restore({name: 0.9 * weight for name, weight in backup.tensors.items()})
    return backup


def projected(tensor: torch.Tensor) -> float:
    """Return one number that changes with every element."""
    flat = tensor.detach().double().reshape(-1)
    return float(flat @ torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device).cos())


def main(model_dir: Path, layout: Layout, out: Path) -> None:
    logprobs.CHUNK_ELEMENTS = layout.chunk
    with joined(**layout.sizes) as here:
        assert not_sent_once(build_policy(model_dir, dtype=layout.dtype, parallel=here)) == []
        results = {case: train(model_dir, here, case, layout) for case in layout.cases}
        for rows, max_tokens in ROWS.items() if layout.with_gradients else ():
            tensors, metrics = gradients(model_dir, here, layout, max_tokens)
            save(out, rows, tensors, metrics)
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
