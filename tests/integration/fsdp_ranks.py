"""The same Trainer on models divided by FSDP2, and the body of one rank of a world of two that trains them. Run by the
test.
"""

import json
import os
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

from tests.algorithm_cases import CASES, EVERYWHERE, TRIED, algorithm
from tests.examples import THOROUGH
from tests.integration.megatron_layouts import OPTIMIZER, STEPS, VOCAB, projected, samples_of
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import joined
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.fsdp.backend import module_outputs
from tidemill.learner.backends.fsdp.model import Place
from tidemill.learner.backends.fsdp.optimizer import FsdpOptimizer
from tidemill.learner.backends.fsdp.policy import FsdpPolicy, build_policy
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.backups import OtherModels, WeightBackup
from tidemill.learner.trainer.exports import digest_of_kept
from tidemill.learner.trainer.rows import Row, rows_of
from tidemill.learner.trainer.trainer import Trainer

TOKENS = {1: 120, 2: 60}
"""Tokens of a micro-batch at most, by the number of ranks."""
OFTEN = ("gspo in 2 minibatches", "ess_lr")
"""Cases that are tried in every run of the tests, beside those of every layout."""
TRAINED = [*dict.fromkeys([*EVERYWHERE, *OFTEN, *(TRIED if THOROUGH else ())])]
MODULES = "outputs of modules"
FAILING = "the first rank fails"
WRITTEN = "weights written behind a pass"


def another(policy: Any) -> WeightBackup:
    """Return the weights of another model, the same on both backends."""
    backup = WeightBackup(policy)
    backup.restore({name: 0.9 * weight for name, weight in backup.tensors.items()})
    return backup


def others_of(policy: Any, config: AlgorithmConfig) -> OtherModels:
    """Return a reference other than the policy where the algorithm needs one."""
    return OtherModels(reference=another(policy) if config.needs_reference else None)


def train(policy: Any, optimizer: Any, case: str, *, max_tokens: int = 0) -> dict[str, Any]:
    """Train two steps of a case. Returns their metrics, and one number for each exported weight."""
    config, minibatches, here = algorithm(case), CASES[case][1], policy.parallel
    trainer = Trainer(policy, optimizer, config, max_lag=2, others=others_of(policy, config))
    metrics = []
    for step in STEPS:
        batches = make_batches(
            samples_of(case, step),
            step=step,
            data_parallel=here.dp_size,
            max_tokens=max_tokens or TOKENS[here.dp_size],
            minibatches=minibatches,
        )
        metrics.append(trainer.train(batches[here.dp_rank]))
    return {"metrics": metrics, "weights": {name: projected(weight) for name, weight in policy.export()}}


def on_fsdp(model_dir: Path, here: Parallel, case: str, **settings: Any) -> dict[str, Any]:
    """Train a case on this backend."""
    policy = build_policy(model_dir, dtype="float32", parallel=here, **settings)
    return train(policy, FsdpOptimizer(policy, OPTIMIZER, steps=10), case)


def forward_only(policy: FsdpPolicy) -> torch.Tensor:
    """Return the hidden states of this rank's rows of a step."""
    here = policy.parallel
    batch = make_batches(make_samples(vocab=VOCAB), max_tokens=60, data_parallel=here.dp_size)[here.dp_rank]

    def finish(row: Row, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states in the place of a result."""
        return hidden_TH.sum(), hidden_TH

    return torch.cat(policy.run(rows_of(batch, here), finish, forward_only=True))


def written_behind_a_pass(model_dir: Path, here: Parallel) -> dict[str, bool]:
    """Write other weights behind a pass, and the model's own behind the next, into parts that are held since the start
    as an optimizer holds them. Returns whether the passes see them.
    """
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    parts = dict(policy.named_weights())
    own = {name: part.clone() for name, part in parts.items()}
    before = forward_only(policy)
    # As a pass leaves the root, whatever ``run`` does behind it. Of one rank alone it would be the parts' memory.
    cast(FSDPModule, policy.root).unshard()
    for name, part in parts.items():
        if ".layers." not in name:  # layers are gathered anew for every pass
            part.mul_(0.9)
    policy.weights_changed()
    changed = not torch.equal(forward_only(policy), before)
    cast(FSDPModule, policy.root).unshard()
    for name, part in parts.items():
        part.copy_(own[name])
    policy.weights_changed()
    return {"changed": changed, "restored": torch.equal(forward_only(policy), before)}


def failing(model_dir: Path, here: Parallel) -> dict[str, list[str]]:
    """Return the errors of this rank where reading fails on the first rank: of a setting, and of a library."""
    errors: dict[str, list[str]] = {}
    for wanted in (ConfigRefused("model.path", "a model", "none"), MemoryError("no memory is left")):

        def read(error: Exception = wanted) -> None:
            raise error

        try:
            Place.of(here).from_first(read)
        except Exception as error:
            errors[type(wanted).__name__] = [type(error).__name__, str(error)]
    damaged = model_dir.parent / "damaged"
    if here.rank == 0:
        damaged.mkdir()
        (damaged / "model.safetensors").write_bytes(b"no header")
    torch.distributed.barrier()
    try:
        digest_of_kept(damaged, here.device)
    except Exception as error:
        errors["damaged"] = [type(error).__name__, str(error)]
    return errors


def modules(model_dir: Path, here: Parallel) -> dict[str, float]:
    """Return one number for each output of a module."""
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    outputs = module_outputs(policy, [[5, 9, 33, 77], [17, 3]])
    return {name: projected(torch.from_numpy(output)) for name, output in outputs.items()}


def main(model_dir: Path, out: Path) -> None:
    with joined() as here:
        results: dict[str, Any] = {case: on_fsdp(model_dir, here, case) for case in TRAINED}
        results[FAILING] = failing(model_dir, here)
        results[MODULES] = modules(model_dir, here)
        results[WRITTEN] = written_behind_a_pass(model_dir, here)
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
