"""Bodies of the ranks of a world of two: a recorded step in one layout after the other; dumps of modules at every
layout, with faults planted in some of them. Run by the tests.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.integration.expert_ranks import LAYOUTS, OF_FOUR
from tests.integration.megatron_ranks import OPTIMIZER
from tests.megatron_world import joined
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron.backend import module_outputs
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.batch.batching import build_batches
from tidemill.learner.buffer.step_plan import GENESIS
from tidemill.learner.debug.collector import Collector
from tidemill.learner.debug.config import ProfileRequest
from tidemill.learner.debug.rollout_file import Packing, load_rollout, planned_again
from tidemill.learner.debug.train_file import write_modules
from tidemill.learner.layout import parallel
from tidemill.learner.ranks.debugging import StepMemory, agreed
from tidemill.learner.trainer.trainer import Trainer

STEP_LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2 in sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}


def packed(file: Path, *, data_parallel: int, max_tokens: int, pad_to: int = 1) -> tuple[StepBatch, ...]:
    """Return the batches of a recorded step for a layout."""
    data = load_rollout(file)
    plan = planned_again(
        data, data.plan.step, Packing(data_parallel=data_parallel, max_tokens=max_tokens, minibatches=1), chain=GENESIS
    )
    return build_batches(plan, data.samples, pad_to=pad_to, token_limits=data.token_limits)


def main(model_dir: Path, file: Path, out: Path) -> None:
    found: dict[str, Any] = {}
    for name, sizes in STEP_LAYOUTS.items():
        with joined(**sizes) as here:
            _train(model_dir, file, out, name, here)
            found["memory"] = StepMemory(here).of_all_ranks()
            found["own memory"] = psutil.Process().memory_info().rss
            request = ProfileRequest(steps=3, memory=True, rank=1) if here.rank == 0 else None
            answers = [agreed(asked, here) for asked in (request, None)]
            found["agreed"] = [None if one is None else asdict(one) for one in answers]
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def _train(model_dir: Path, file: Path, out: Path, name: str, here: parallel.Parallel) -> None:
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    collector = Collector(f"{out}/{name}_{{step}}_{{rank}}.safetensors", here)
    trainer = Trainer(
        policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), AlgorithmConfig(), max_lag=2, collector=collector
    )
    trainer.train(
        packed(file, data_parallel=here.dp_size, max_tokens=80, pad_to=here.tp_size * here.cp_size)[here.dp_rank]
    )


# ---- dumps of modules

PROMPTS = [[5, 9, 33, 77, 120, 4, 8], [17, 3, 200]]
DENSE, EXPERTS, LATENT = "qwen3", "qwen3_moe", "deepseek_v3"
MODULE_LAYOUTS: Mapping[str, Mapping[str, Any]] = {"TP2 without SP": {"tensor_parallel_size": 2}, **LAYOUTS}
MODULE_LAYOUTS_OF_FOUR: Mapping[str, Mapping[str, Any]] = {
    **OF_FOUR,
    "TP2 PP2 VP2": {
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
    },
}
DUMPED = [
    *((DENSE, layout) for layout in ("TP2 without SP", "TP2", "PP2", "CP2")),
    *((EXPERTS, layout) for layout in ("DP2", "EP2", "TP2 EP2", "CP2 EP2", "PP2 VP2")),
    (LATENT, "TP2"),
]
"""(model, layout)"""
DUMPED_OF_FOUR = [*((EXPERTS, layout) for layout in OF_FOUR), (DENSE, "TP2 PP2 VP2")]


def offset_stage(policy: MegatronPolicy, other: Path) -> None:
    """Give the second stage the weights of another directory: there, its layers have those of the first stage."""
    if policy.parallel.pp_rank == 1:
        policy.bridge.load(policy.chunks, other)


def stale_shard(part: str, policy: MegatronPolicy, other: Path) -> None:
    """Give the second tensor-parallel rank the weights of another version where their names begin with ``part``."""
    if policy.parallel.tp_rank == 1:
        kept = {name: weight.detach().clone() for name, weight in policy.named_weights() if not name.startswith(part)}
        policy.bridge.load(policy.chunks, other)
        with torch.no_grad():
            for name, weight in policy.named_weights():
                if name in kept:
                    weight.copy_(kept[name])


Plant = Callable[[MegatronPolicy, Path], None]


def modules(
    model_dirs: Mapping[str, Path], dumps: list[tuple[str, str]], faults: list[tuple[str, str, Plant, Path]], out: Path
) -> None:
    """Write ``<model> <layout>.safetensors`` for each of ``dumps``, and ``<fault>.safetensors`` of the dense model with
    each of ``faults``: (name, layout, function, a directory for it).
    """
    for layout, sizes in (MODULE_LAYOUTS if os.environ["WORLD_SIZE"] == "2" else MODULE_LAYOUTS_OF_FOUR).items():
        if layout not in {of for _, of, *_ in (*dumps, *faults)}:
            continue
        with joined(**sizes) as here:
            for model, of in dumps:
                if of == layout:
                    policy = build_policy(model_dirs[model], dtype="float32", parallel=here)
                    _write(policy, out / f"{model} {layout}.safetensors")
            for name, of, plant, other in faults:
                if of == layout:
                    policy = build_policy(model_dirs[DENSE], dtype="float32", parallel=here)
                    plant(policy, other)
                    _write(policy, out / f"{name}.safetensors")
    (out / f"rank-{os.environ['RANK']}.json").write_text("{}")


def _write(policy: MegatronPolicy, file: Path) -> None:
    outputs = module_outputs(policy, PROMPTS)
    if policy.parallel.rank == 0:
        write_modules(file, outputs, prompts=PROMPTS, dtype="float32", source="learner")
    else:
        assert outputs == {}
