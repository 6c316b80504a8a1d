"""Body of one rank of a world of two: trains a mixture of experts in several layouts, saves it in one and goes on in
another.

Run by the test. The layouts take turns in the processes, because starting those is most of the cost.
"""

import json
import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.algorithm_settings import algorithm_of
from tests.examples import rarely
from tests.integration.gradients import PLAIN, save, taken
from tests.integration.megatron_ranks import skips
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import joined
from tests.tiny_models import EXPERTS
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.groups import Replicas
from tidemill.learner.backends.megatron.layers.experts import Mixture
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.layout import parallel
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.learner.trainer.backups import OtherModels, WeightBackup
from tidemill.learner.trainer.trainer import Trainer

VOCAB = 300
STEPS = (3, 4)
SAVED = 3
"""Step after which a checkpoint is written."""
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.01)
"""With a smaller eps Adam steps by the sign of gradients that are rounding noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Settings of a run beside its layout."""

    replicas: Replicas = field(default_factory=Replicas)
    mixture: Mixture = field(default_factory=Mixture)
    recompute: str = "none"
    minibatches: int = 1
    lr: float = 1e-3
    own_rows: bool = False
    """An odd number of sequences, each in a row of its own for every layout: a balancing loss is one of rows."""


REPLAYED = Mixture(replay=True)
WAYS = {
    "plain": Way(),
    "distributed": Way(replicas=Replicas(distributed_optimizer=True)),
    "overlapped": Way(
        replicas=Replicas(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    ),
    "moved": Way(minibatches=3, lr=1e-2),
    "replayed": Way(mixture=REPLAYED, minibatches=3, lr=1e-2),
    "replayed, full": Way(mixture=REPLAYED, minibatches=3, lr=1e-2, recompute="full"),
    "replayed, selective": Way(mixture=REPLAYED, minibatches=3, lr=1e-2, recompute="selective"),
    "own rows": Way(own_rows=True),
    "balanced": Way(own_rows=True, mixture=Mixture(aux_loss_coef=0.1)),
    "balanced, full": Way(own_rows=True, mixture=Mixture(aux_loss_coef=0.1), recompute="full"),
    "biased": Way(own_rows=True, mixture=Mixture(bias_update_rate=0.01)),
    "replayed and balanced": Way(
        own_rows=True, mixture=Mixture(replay=True, aux_loss_coef=0.1), minibatches=3, lr=1e-2
    ),
    "replayed and biased": Way(
        own_rows=True, mixture=Mixture(replay=True, bias_update_rate=0.01), minibatches=3, lr=1e-2
    ),
    "all of it": Way(
        own_rows=True, mixture=Mixture(replay=True, aux_loss_coef=0.1, bias_update_rate=0.01), minibatches=3, lr=1e-2
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"expert_parallel_size": 2},
    "DP2": {},
    "TP2": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "TP2 EP2": {"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 2},
    "PP2": {"pipeline_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
    "CP2 EP2": {"context_parallel_size": 2, "expert_parallel_size": 2},
    "PP2 VP2": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
}
"""Layouts of two ranks."""
OF_FOUR: dict[str, dict[str, Any]] = {
    "DP2 TP2 EP4": {"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 4},
    "DP2 TP2 EP2": {"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 2},
    "DP2 PP2 EP2": {"pipeline_parallel_size": 2, "expert_parallel_size": 2},
    "PP2 TP2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
    "CP2 TP2 EP4": {
        "context_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "expert_parallel_size": 4,
    },
}
"""Layouts of four ranks."""
DEEP = "qwen3_moe, deep"
"""A model of four layers, every second one with experts."""
DEEP_BIASED = "glm4_moe, deep"
"""A model of four layers, all but the first with experts that have a bias."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in EXPERTS},
    "qwen3_moe": ("qwen3_moe", {"seed": 1}),  # with 0 an expert gets no token in the step whose gradients are compared
    DEEP: ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    DEEP_BIASED: ("glm4_moe", {"num_hidden_layers": 4}),
}
RUNS = [
    *(("qwen3_moe", "EP2", way) for way in ("plain", "distributed")),
    ("deepseek_v3", "TP2", "plain"),
    (DEEP, "PP2 VP2", "replayed, full"),
    ("glm4_moe", "CP2", "all of it"),
    *rarely(
        [
            *((family, "EP2", "plain") for family in EXPERTS if family != "qwen3_moe"),
            *((family, "TP2", "plain") for family in ("qwen3_moe", "qwen2_moe")),
            ("deepseek_v3", "PP2", "plain"),
            ("qwen3_moe", "TP2 EP2", "plain"),
            ("qwen3_moe", "TP2", "distributed"),
            ("qwen3_moe", "EP2", "overlapped"),
            ("deepseek_v3", "CP2", "plain"),
            (DEEP, "PP2 VP2", "plain"),
            *(("qwen3_moe", layout, "replayed") for layout in ("EP2", "CP2")),
            ("qwen3_moe", "PP2", "replayed, full"),
            ("glm4_moe", "TP2", "replayed"),
            ("qwen3_moe", "EP2", "balanced"),
            (DEEP_BIASED, "PP2 VP2", "biased"),
            ("glm4_moe", "TP2", "biased"),
            *(("glm4_moe", layout, "all of it") for layout in ("EP2", "PP2")),
        ]
    ),
]
"""(model, layout, way): every family, kind of optimizer and setting, and the pairs that meet in the code; in
``GRADIENTS`` every layout.
"""
RARE_RUNS = [
    *(("qwen3_moe", layout, "plain") for layout in ("CP2", "CP2 EP2")),
    *(("qwen3_moe", layout, "balanced") for layout in ("TP2", "CP2")),
    *((DEEP, "PP2 VP2", way) for way in ("balanced", "replayed")),
    *(
        (family, layout, "plain")
        for layout in ("DP2", "TP2", "PP2")
        for family in EXPERTS
        if (family, layout, "plain") not in RUNS
    ),
    *(("qwen3_moe", "DP2", way) for way in ("distributed", "overlapped")),
    *(("qwen3_moe", layout, way) for layout, way in (("TP2", "replayed, full"), ("EP2", "replayed, selective"))),
    ("qwen3_moe", "PP2", "balanced"),
    ("qwen3_moe", "TP2", "balanced, full"),
    *(("glm4_moe", layout, "biased") for layout in ("EP2", "PP2", "CP2")),
    *(("glm4_moe", layout, "replayed and biased") for layout in ("EP2", "CP2", "PP2")),
    *(("qwen3_moe", layout, "replayed and balanced") for layout in ("EP2", "CP2", "PP2")),
]
"""The other pairs."""
RARE_ONE = [("glm4_moe", "replayed and biased"), ("qwen3_moe", "replayed and balanced"), (DEEP, "balanced")]
"""Runs of one process for them alone."""
RUNS_OF_FOUR = [
    *(("qwen3_moe", layout, way) for layout in OF_FOUR if layout != "PP2 TP2" for way in ("plain", "distributed")),
    *(("qwen3_moe", layout, "balanced") for layout in ("DP2 TP2 EP4", "CP2 TP2 EP4", "PP2 TP2")),
]


GRADIENTS = [
    *(("qwen3_moe", layout, "balanced") for layout in ("TP2 EP2", "CP2 EP2")),
    *rarely(
        [
            *(("qwen3_moe", layout, "balanced") for layout in ("EP2", "DP2", "TP2", "PP2", "CP2")),
            (DEEP, "PP2 VP2", "balanced"),
            ("deepseek_v3", "TP2", "own rows"),
        ]
    ),
]
"""Steps of which the gradient of each weight is compared."""
GRADIENTS_OF_FOUR = [("qwen3_moe", layout, "balanced") for layout in OF_FOUR]
SKIPPING = "EP2"
"""Layout in which one rank has a loss or a gradient that is not finite: there are two optimizers, and experts that one
rank alone has.
"""


def same_run(way: str) -> str:
    """Return the way of one process that has the same numbers: recomputation and the kind of optimizer change none."""
    return "plain" if way in ("distributed", "overlapped") else way.split(",")[0]


EFFECTS = [
    (DEEP, "moved", "replayed"),
    ("glm4_moe", "own rows", "biased"),
    *rarely(
        [
            *((family, "moved", "replayed") for family in ("qwen3_moe", "glm4_moe")),
            ("qwen3_moe", "own rows", "balanced"),
            ("glm4_moe", "replayed", "all of it"),
        ]
    ),
]
"""(model, way, way with another number): replay, a balancing loss and moving biases are not without effect."""
ONE = list(
    dict.fromkeys(
        [
            ("qwen3_moe", "plain"),
            *((model, same_run(way)) for model, _, way in RUNS),
            *((model, way) for model, *ways in EFFECTS for way in ways),
        ]
    )
)
"""Runs of one process."""
RESUMES = [
    ("1 plain", "EP2", "distributed"),
    ("EP2 plain", "PP2", "plain"),
    ("EP2 distributed", "TP2", "plain"),
    *rarely(
        [
            ("1 plain", "PP2", "plain"),
            *(("EP2 plain", other, "plain") for other in ("DP2", "TP2")),
            *((f"EP2 {way}", other, "distributed") for way in ("plain", "distributed") for other in ("EP2", "DP2")),
        ]
    ),
]
"""(layout and optimizer that saved, layout that goes on, its optimizer). Every pair of layouts: ``every_pair``."""


@dataclass(frozen=True, slots=True)
class Learner:
    """A policy with its optimizer and its trainer."""

    policy: MegatronPolicy
    optimizer: MegatronOptimizer
    trainer: Trainer
    proximal: WeightBackup


def learner(model_dir: Path, here: parallel.Parallel, way: Way, config: OptimizerConfig | None = None) -> Learner:
    """``config``: of the optimizer; None = that of the way."""
    kernels = Wanted(recompute=way.recompute)
    policy = build_policy(
        model_dir, dtype="float32", parallel=here, replicas=way.replicas, kernels=kernels, mixture=way.mixture
    )
    optimizer = MegatronOptimizer(policy, config or replace(OPTIMIZER, lr=way.lr), steps=10)
    proximal = WeightBackup(policy)
    return Learner(
        policy,
        optimizer,
        Trainer(
            policy, optimizer, algorithm_of(entropy={"coef": 0.01}), max_lag=2, others=OtherModels(proximal=proximal)
        ),
        proximal,
    )


def take(made: Learner, steps: tuple[int, ...], here: parallel.Parallel, way: Way) -> list[dict[str, float]]:
    """Train these steps. Returns their metrics."""
    found = []
    # Two replicas, and the interleaved schedule of two stages, want an even number of rows: both add a row of padding.
    samples_of = partial(make_samples, groups=3, group_size=3) if way.own_rows else partial(make_samples, groups=4)
    for step in steps:
        batches = make_batches(
            samples_of(vocab=VOCAB, step=step),
            step=step,
            data_parallel=here.dp_size,
            max_tokens=1 if way.own_rows else 90,
            minibatches=way.minibatches,
            pad_to=here.tp_size * here.cp_size,
        )
        found.append(made.trainer.train(batches[here.dp_rank]))
    return found


def unbroken(model_dir: Path, here: parallel.Parallel, directory: Path, way: str) -> dict[str, Any]:
    """Train all steps, with a checkpoint in between."""
    made = learner(model_dir, here, WAYS[way])
    began = made.policy.digest()
    metrics = take(made, tuple(step for step in STEPS if step <= SAVED), here, WAYS[way])
    if here.rank == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    if same_run(way) == "plain":  # the others are not resumed
        write_staged(
            state.stage(
                directory,
                step=SAVED,
                policy=made.policy,
                optimizer=made.optimizer,
                others=OtherModels(proximal=made.proximal),
            )
        )
    return {
        "began": began,
        "metrics": metrics + take(made, tuple(step for step in STEPS if step > SAVED), here, WAYS[way]),
    }


def resumed(model_dir: Path, here: parallel.Parallel, directory: Path, way: str) -> dict[str, Any]:
    """Go on from a checkpoint."""
    made = learner(model_dir, here, WAYS[way])
    step, _ = state.load(
        directory, policy=made.policy, optimizer=made.optimizer, others=OtherModels(proximal=made.proximal)
    )
    return {"metrics": take(made, tuple(each for each in STEPS if each > step), here, WAYS[way])}


def gradients(model_dir: Path, here: parallel.Parallel, way: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the gradient of each weight of the whole model in one step, and the step's metrics."""
    made = learner(model_dir, here, WAYS[way], PLAIN)
    return taken(made.policy.export, lambda: take(made, STEPS[:1], here, WAYS[way])[0])


Runs = list[tuple[str, str, str]]


def main(model_dirs: dict[str, Path], of_one: Path, runs: Runs, resumes: Runs, steps: Runs, out: Path) -> None:
    """Train ``runs`` of the layouts of this number of ranks, then go on from checkpoints of them or of one process.

    ``steps``: those whose gradients are saved.
    """
    results: dict[str, Any] = {}
    for layout, sizes in (LAYOUTS if os.environ["WORLD_SIZE"] == "2" else OF_FOUR).items():
        if not any(of == layout for _, of, _ in (*runs, *steps, *resumes)):
            continue
        with joined(**sizes) as here:
            for family, of, way in runs:
                if of == layout:
                    directory = out / f"{family} {layout} {way}"
                    results[directory.name] = unbroken(model_dirs[family], here, directory, way)
            for family, of, way in steps:
                if of == layout:
                    save(out, f"{family} {layout} {way}", *gradients(model_dirs[family], here, way))
            if layout == SKIPPING and steps:
                results["skips"] = skips(model_dirs["qwen3_moe"], here)
            for source, of, way in resumes:
                if of == layout:
                    directory = of_one if source == "1 plain" else out / f"qwen3_moe {source}"
                    results[f"{source} > {layout} {way}"] = resumed(model_dirs["qwen3_moe"], here, directory, way)
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))


PAIRED = ("TP2", "PP2", "DP2", "CP2", "EP2")
"""Layouts of which every one resumes the checkpoint of every other, and of one process."""


def every_pair(model_dir: Path, of_one: Path, out: Path) -> None:
    results: dict[str, Any] = {}
    for layout in PAIRED:
        with joined(**LAYOUTS[layout]) as here:
            unbroken(model_dir, here, out / layout, "plain")
    for layout in PAIRED:
        with joined(**LAYOUTS[layout]) as here:
            results |= {f"{other} > {layout}": resumed(model_dir, here, out / other, "plain") for other in PAIRED}
            results[f"1 > {layout}"] = resumed(model_dir, here, of_one, "plain")
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
