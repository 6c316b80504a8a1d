"""The body of one rank of a world of four, which FSDP2 divides as two copies of a model in two parts each, and as one
copy in four parts. Run by the test.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.examples import rarely
from tests.integration.fsdp_state_ranks import KINDS, opened, resumed, whole_run
from tests.integration.muon_ranks import exact
from tests.megatron_world import not_sent_once
from tidemill.learner.layout.parallel import Parallel, join_world, of_replicas

COPIES = {"2 x 2": 2, "4": 1}
"""Copies of the model by the name of the division."""
TRIED = ("critic", *rarely(("lora", "muon")))


def other(division: str) -> str:
    """Return the other division."""
    return next(name for name in COPIES if name != division)


def parts(model_dir: Path, here: Parallel) -> dict[str, Any]:
    """Return how many rows of the embedding this rank has, and the tensors that are not sent exactly once."""
    policy = opened(model_dir, here, KINDS["lora"]).policy
    rows = [len(part) for name, part in policy.named_weights() if "embed_tokens" in name]
    return {"rows": rows, "not sent once": not_sent_once(policy), "exports": len(list(policy.export_part(1)))}


def results_of(
    name: str, model_dir: Path, places: Mapping[str, Parallel], checkpoints: Path
) -> dict[str, dict[str, Any]]:
    """Return the results of a kind of learner in each division, and behind the checkpoint of the other one."""
    kind, results = KINDS[name], dict[str, dict[str, Any]]()
    for division, here in places.items():
        directory = checkpoints / f"{name}, {division}"
        if here.rank == 0:
            directory.mkdir()
        torch.distributed.barrier()
        results[f"{name}, {division}"] = {
            "whole": whole_run(model_dir, here, kind, directory),
            "resumed": resumed(model_dir, here, kind, directory),
        }
    results[f"{name}, exchanged"] = {
        division: resumed(model_dir, here, kind, checkpoints / f"{name}, {other(division)}")
        for division, here in places.items()
    }
    return results


def main(model_dir: Path, checkpoints: Path, out: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    cpu = torch.device("cpu")
    join_world(cpu, timeout_s=300)
    places = {name: of_replicas(cpu, copies=copies) for name, copies in COPIES.items()}
    results: dict[str, Any] = {"parts": parts(model_dir, places["2 x 2"])}
    with exact():
        for name in TRIED:
            results |= results_of(name, model_dir, places, checkpoints)
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
