"""Body of one rank of a world of two: scores, exports, converts and trains models in layout after layout. Run by the
test.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.examples import rarely
from tests.integration.expert_ranks import LAYOUTS as OF_EXPERTS
from tests.integration.expert_ranks import VOCAB, WAYS, Way, learner, take
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import joined, not_sent_once
from tests.tiny_models import DENSE, EXPERTS
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.backups import OtherModels

STEPS = (3, 4)
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": OF_EXPERTS["TP2"],
    "TP2, no SP": {"tensor_parallel_size": 2},
    **{name: OF_EXPERTS[name] for name in ("PP2", "PP2 VP2", "CP2", "EP2")},
    "DP2, distributed": {},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in DENSE | EXPERTS},
    **{f"{family}, tied": (family, {"tied": True}) for family in ("llama", "glm4")},
    **{f"{family}, deep": (family, {"num_hidden_layers": 4}) for family in DENSE | EXPERTS},
    "llama, tied, deep": ("llama", {"tied": True, "num_hidden_layers": 4}),
}
RUNS = [
    ("qwen2", "TP2"),
    ("glm4_moe, deep", "PP2 VP2"),
    *rarely([("glm4", "TP2"), ("llama", "PP2"), ("mistral", "CP2"), ("qwen2", "DP2, distributed")]),
]
"""(model, layout): pairs that meet different code. A bias that is split; norms behind sublayers, one tensor for gate
and up; stages, and chunks of them, of a model with a dense layer before those with experts; shares of the optimizer's
state.
"""
RARE_RUNS = [
    (name, layout)
    for layout in LAYOUTS
    for name, (family, _) in MODELS.items()
    if (name, layout) not in RUNS
    and (layout != "EP2" if family in DENSE else layout != "TP2, no SP")
    and name.endswith(", deep") is (layout == "PP2 VP2")
]
"""The other pairs."""


def way_of(layout: str) -> Way:
    return WAYS["distributed" if "distributed" in layout else "plain"]


def scores(made: Any, here: Parallel) -> list[list[float]]:
    """Return the log-probs of the rows of a batch; all ranks have them whole."""
    batches = make_batches(make_samples(vocab=VOCAB, groups=6), max_tokens=90, pad_to=2, data_parallel=here.dp_size)
    return [row_T.tolist() for row_T in made.trainer.log_probs(batches[here.dp_rank])]


def exported(policy: Any) -> dict[str, torch.Tensor]:
    """Return the weights of the whole model; collective."""
    return {name: tensor.clone().contiguous() for name, tensor in policy.export()}


def differing(found: dict[str, torch.Tensor], model_dir: Path) -> list[str]:
    """Return the names that are not bit for bit those of the files."""
    there = load_file(model_dir / "model.safetensors")
    return sorted(
        name
        for name in found.keys() | there.keys()
        if name not in found or not torch.equal(found[name], there.get(name))
    )


def used(model_dir: Path, here: Parallel, way: Way, of_one: Path, out: Path) -> dict[str, Any]:
    """Score, export and train a model, and save it; begin another from the checkpoint that one process has made of the
    files.
    """
    made = learner(model_dir, here, way)
    found: dict[str, Any] = {"log_probs": scores(made, here), "exported": differing(exported(made.policy), model_dir)}
    found["sent"] = not_sent_once(made.policy)
    found["metrics"] = take(made, STEPS, here, way)
    weights = exported(made.policy)
    if here.rank == 0:
        (out / "saved").mkdir(parents=True)
        save_file(weights, out / "weights.safetensors")
    torch.distributed.barrier()
    write_staged(
        state.stage(
            out / "saved",
            step=STEPS[-1],
            policy=made.policy,
            optimizer=made.optimizer,
            others=OtherModels(proximal=made.proximal),
        )
    )
    other = build_policy(model_dir, dtype="float32", parallel=here, replicas=way.replicas)
    for _, weight in other.named_weights():
        torch.nn.init.zeros_(weight)
    state.load_model(of_one, policy=other, setting="test")
    return found | {"loaded": differing(exported(other), model_dir)}


def main(model_dirs: dict[str, Path], checkpoints: dict[str, Path], runs: list[tuple[str, str]], out: Path) -> None:
    """Use the models of ``runs``; ``checkpoints``: those that one process has made of their files."""
    results: dict[str, Any] = {}
    for layout, sizes in LAYOUTS.items():
        names = [name for name, of in runs if of == layout]
        if names:
            with joined(**sizes) as here:
                for name in names:
                    results[f"{name} {layout}"] = used(
                        model_dirs[name], here, way_of(layout), checkpoints[name], out / f"{name} {layout}"
                    )
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
