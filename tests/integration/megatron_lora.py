"""Body of one rank: trains adapters in one layout, and continues from a checkpoint of another. Run by the test."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.algorithm_settings import algorithm_of
from tests.examples import rarely
from tests.integration.gradients import PLAIN, Gradients, save, taken
from tests.integration.megatron_ranks import VOCAB
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import joined
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.groups import Replicas
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.lora import LoraConfig, Tuning
from tidemill.learner.settings.optimizer import OptimizerConfig
from tidemill.learner.trainer.backups import OtherModels, WeightBackup, initial_weights
from tidemill.learner.trainer.trainer import Trainer

STEPS = (3, 4)
LORA = LoraConfig(rank=4, alpha=8)
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-5, beta2=0.99)
ALGORITHM = algorithm_of(entropy={"coef": 0.01}, kl=KLConfig(coef=0.1))


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of dividing the work."""

    replicas: Replicas | None = None
    offload: bool = False
    recompute: str = "none"


WAYS = {
    "plain": Way(),
    "distributed": Way(replicas=Replicas(distributed_optimizer=True)),
    "offload": Way(offload=True),
    "distributed, offload": Way(replicas=Replicas(distributed_optimizer=True), offload=True),
    "recompute full": Way(recompute="full"),
    "recompute selective": Way(recompute="selective"),
}


@dataclass(frozen=True, kw_only=True)
class Learner:
    """The parts of a rank that trains adapters."""

    policy: MegatronPolicy
    optimizer: MegatronOptimizer
    trainer: Trainer
    proximal: WeightBackup


def learner(
    model_dir: Path,
    here: Parallel,
    way: Way = WAYS["plain"],
    *,
    lora: LoraConfig = LORA,
    dtype: str = "float32",
    whole: bool = False,
    config: OptimizerConfig = OPTIMIZER,
) -> Learner:
    """Return a rank's parts. ``whole``: the reference is a copy of all weights. ``config``: of the optimizer."""
    tuning = Tuning(lora=lora, seed=5)
    policy = build_policy(
        model_dir,
        dtype=dtype,
        parallel=here,
        replicas=way.replicas,
        kernels=Wanted(recompute=way.recompute),
        tuning=tuning,
    )
    optimizer = MegatronOptimizer(policy, config, steps=10, offload=way.offload)
    reference = WeightBackup(policy, whole=True) if whole else initial_weights(policy)
    proximal = WeightBackup(policy)
    trainer = Trainer(
        policy, optimizer, ALGORITHM, max_lag=2, others=OtherModels(proximal=proximal, reference=reference)
    )
    return Learner(policy=policy, optimizer=optimizer, trainer=trainer, proximal=proximal)


def take(ours: Learner, step: int, here: Parallel, *, max_tokens: int = 60) -> dict[str, float]:
    """Train one step. Returns its metrics."""
    batches = make_batches(
        make_samples(vocab=VOCAB, step=step),
        step=step,
        data_parallel=here.dp_size,
        max_tokens=max_tokens,
        pad_to=here.tp_size * here.cp_size,
    )
    return ours.trainer.train(batches[here.dp_rank])


def trained(
    model_dir: Path, here: Parallel, way: Way, checkpoint: Path | None = None, *, lora: LoraConfig = LORA
) -> dict[str, object]:
    """Train all steps, or those behind the checkpoint. Returns metrics, and norms of the exported adapters and
    weights.
    """
    ours, steps = learner(model_dir, here, way, lora=lora), STEPS
    if checkpoint is not None:
        assert (
            state.load(
                checkpoint, policy=ours.policy, optimizer=ours.optimizer, others=OtherModels(proximal=ours.proximal)
            )[0]
            == STEPS[0]
        )
        steps = STEPS[1:]
    metrics = [take(ours, step, here) for step in steps]
    assert ours.policy.adapters is not None
    norms = {name: float(tensor.norm()) for name, tensor in (*ours.policy.export_adapters(), *ours.policy.export())}
    return {"metrics": metrics, "norms": norms, "base": ours.policy.adapters.facts()["base"]}


def gradients(model_dir: Path, here: Parallel, way: Way, lora: LoraConfig) -> tuple[Gradients, dict[str, float]]:
    """Return the gradient of each matrix of the adapters in one step, and the step's metrics."""
    ours = learner(model_dir, here, way, lora=lora, config=PLAIN)
    return taken(ours.policy.export_adapters, lambda: take(ours, STEPS[0], here))


DIVIDED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    **dict(rarely([("tp2", ({"tensor_parallel_size": 2}, ("plain", "recompute full")))])),
    "tp2 sp": ({"tensor_parallel_size": 2, "sequence_parallel": True}, ("plain",)),
    "pp2": ({"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, ("plain",)),
    "cp2": ({"tensor_parallel_size": 1, "context_parallel_size": 2}, ("plain",)),
}
"""Layouts of one copy of the model on two ranks: arguments of ``parallel.join``, and ways."""
RESUMED = ("pp2", *rarely(["tp2", "tp2 sp", "cp2"]))
"""Those that go on from a checkpoint of one rank."""


ATTENTION = LoraConfig(rank=4, alpha=8, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
"""Adapters of a mixture of experts, which are all outside of the experts."""
OF_EXPERTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    **dict(rarely([("ep2", ({"expert_parallel_size": 2}, ("plain", "distributed")))])),
    "tp2 sp ep2": ({"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 2}, ("plain",)),
    "pp2 vp2": ({"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}, ("plain", *rarely(["recompute full"]))),
}
"""Layouts of a mixture of experts on two ranks."""


SHARED = ("distributed, offload", *rarely(["plain", "distributed"]))
"""Ways of two replicas."""
SHARED_RESUMED = ("distributed, offload", *rarely(["plain"]))
"""Those that go on from a checkpoint of one rank."""
IN_REPLICAS = ("distributed", *rarely(["plain"]))
"""Ways of two replicas of which the gradient of each matrix is compared."""
SAVED = ("pp2 vp2", *rarely(["ep2"]))
"""Layouts of which one rank takes over a checkpoint."""


def saved(model_dir: Path, here: Parallel, checkpoint: Path, *, lora: LoraConfig = LORA) -> None:
    """Train the first step, and save."""
    ours = learner(model_dir, here, lora=lora)
    take(ours, STEPS[0], here)
    ours.proximal.refresh()
    checkpoint.mkdir(exist_ok=True)
    write_staged(
        state.stage(
            checkpoint,
            step=STEPS[0],
            policy=ours.policy,
            optimizer=ours.optimizer,
            others=OtherModels(proximal=ours.proximal),
        )
    )


def experts(mixture_dir: Path, checkpoint: Path, filled: LoraConfig, out: Path) -> None:
    """``filled``: with adapters of which no matrix is zero."""
    results: dict[str, object] = {}
    for layout, (sizes, ways) in OF_EXPERTS.items():
        with joined(**sizes) as here:
            for name in ways:
                results[f"{layout} {name}"] = trained(mixture_dir, here, WAYS[name], lora=ATTENTION)
                save(out, f"{layout} {name}", *gradients(mixture_dir, here, WAYS[name], filled))
            results[f"{layout} plain, resumed"] = trained(mixture_dir, here, WAYS["plain"], checkpoint, lora=ATTENTION)
            if layout in SAVED:
                saved(mixture_dir, here, out / layout, lora=ATTENTION)
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))


def main(model_dir: Path, checkpoint: Path, filled: LoraConfig, out: Path) -> None:
    """``filled``: with adapters of which no matrix is zero."""
    with joined() as here:
        results: dict[str, object] = {f"dp2 {name}": trained(model_dir, here, WAYS[name]) for name in SHARED}
        for name in IN_REPLICAS:
            save(out, f"dp2 {name}", *gradients(model_dir, here, WAYS[name], filled))
        results |= {f"dp2 {name}, resumed": trained(model_dir, here, WAYS[name], checkpoint) for name in SHARED_RESUMED}
    for layout, (sizes, ways) in DIVIDED.items():
        with joined(**sizes) as here:
            for name in ways:
                results[f"{layout} {name}"] = trained(model_dir, here, WAYS[name])
                save(out, f"{layout} {name}", *gradients(model_dir, here, WAYS[name], filled))
            if layout in RESUMED:
                results[f"{layout} plain, resumed"] = trained(model_dir, here, WAYS["plain"], checkpoint)
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
