"""Log-probs, entropies and their gradients in float64, of an output weight whose rows lie on two ranks, against the
whole one.
"""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.learner_steps import run_ranks
from tidemill.learner.kernels import logprobs
from tidemill.learner.kernels.logprobs import listed_log_probs, most_probable

WORLD, T, V, H, K = 2, 13, 30, 6, 3
CHUNKS = [V // WORLD, 4]
"""Columns of a chunk: all of a rank's, and a few."""


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, the whole weight, targets, and listed ids."""
    generator = torch.Generator().manual_seed(0)
    hidden_TH, weight_VH = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((T, H), (V, H)))
    return hidden_TH, weight_VH, *(torch.randint(V, size, generator=generator) for size in ((T,), (T, K)))


def computed(weight_VH: Tensor, group: dist.ProcessGroup | None) -> dict[str, list[object]]:
    """Return values and gradients of a sum with a factor for each output, and the most probable ids."""
    hidden_TH, _, targets_T, listed_TK = inputs()
    hidden_TH.requires_grad_()
    weight_VH = weight_VH.clone().requires_grad_()
    outputs = listed_log_probs(hidden_TH, weight_VH, targets_T, listed_TK, temperature=0.7, group=group)
    total = sum(
        (each * torch.linspace(0.5, 2.0, each.numel(), dtype=torch.float64).view_as(each)).sum() for each in outputs
    )
    assert isinstance(total, Tensor)
    total.backward()
    assert hidden_TH.grad is not None and weight_VH.grad is not None
    best_TK = most_probable(hidden_TH, weight_VH, 4, group=group)
    return {
        "values": [each.tolist() for each in outputs],
        "hidden": hidden_TH.grad.tolist(),
        "weight": weight_VH.grad.tolist(),
        "most_probable": best_TK.tolist(),
    }


def main(out: Path) -> None:
    """Body of a rank."""
    rank, mine = int(os.environ["RANK"]), V // WORLD
    dist.init_process_group("gloo")
    found = {}
    for columns in CHUNKS:
        logprobs.CHUNK_ELEMENTS = T * columns
        found[str(columns)] = computed(inputs()[1][rank * mine : (rank + 1) * mine], dist.group.WORLD)
    dist.destroy_process_group()
    (out / f"rank-{rank}.json").write_text(json.dumps(found))


def test_two_parts_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = run_ranks(main, (), world=WORLD, out=tmp_path)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", T * V)
    wanted = computed(inputs()[1], None)
    for columns in map(str, CHUNKS):
        ours = [rank[columns] for rank in ranks]
        assert ours[0]["values"] == ours[1]["values"], "the same bits on each"
        for mine, whole in zip(ours[0]["values"], wanted["values"], strict=True):
            torch.testing.assert_close(
                torch.tensor(mine, dtype=torch.float64),
                torch.tensor(whole, dtype=torch.float64),
                atol=1e-13,
                rtol=1e-13,
            )
        for rank in ours:
            assert rank["most_probable"] == wanted["most_probable"]
            torch.testing.assert_close(
                torch.tensor(rank["hidden"], dtype=torch.float64),
                torch.tensor(wanted["hidden"], dtype=torch.float64),
                atol=1e-12,
                rtol=1e-12,
            )
        weight = torch.tensor([*ours[0]["weight"], *ours[1]["weight"]], dtype=torch.float64)
        torch.testing.assert_close(weight, torch.tensor(wanted["weight"], dtype=torch.float64), atol=1e-12, rtol=1e-12)
