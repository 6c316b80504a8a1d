"""Muon over weights that are divided over ranks: each matrix is whole on one rank, which makes its update orthogonal.

    gradient -> momentum, each rank its part -> whole matrix on its owner -> orthogonal update -> parts

Embeddings, the output layer, norms and biases have AdamW's update.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tidemill.learner.kernels.orthogonal import add_momentum, orthogonal


class Muon(torch.optim.AdamW):
    """AdamW of torch, and Muon for the groups with ``muon``. Its parameters are this rank's parts of the weights."""

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], weights: Mapping[Tensor, Tensor], *, lr: float, group: Any
    ) -> None:
        """``weights``: the DTensor of each part. ``group``: the ranks that have its parts."""
        super().__init__([dict(each) for each in groups], lr=lr, fused=True)
        self._weights, self._ranks = weights, group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step over the parts that have a gradient, which are the same on all ranks. Collective."""
        matrices = [(part, group) for group in self.param_groups if group["muon"] for part in group["params"]]
        present = [(part, group, part.grad) for part, group in matrices if part.grad is not None]
        for part, _, _ in present:
            part.grad = None
        super().step()
        ranks = dist.get_world_size(self._ranks)
        for start in range(0, len(present), ranks):
            self._step_together(present[start : start + ranks])

    def _step_together(self, matrices: Sequence[tuple[Tensor, Mapping[str, Any], Tensor]]) -> None:
        """Update at most as many matrices as there are ranks, each of which computes the update of one."""
        rank, mine = dist.get_rank(self._ranks), None
        for owner, (part, group, gradient) in enumerate(matrices):
            moved = add_momentum(gradient, self.state[part]["momentum_buffer"], group["momentum"])
            whole = self._like(part, moved).full_tensor()
            if owner == rank:
                mine = orthogonal(whole)
        for owner, (part, group, _) in enumerate(matrices):
            weight = self._weights[part]
            update = mine if owner == rank and mine is not None else torch.empty(weight.shape, device=part.device)
            dist.broadcast(update, group=self._ranks, group_src=owner)
            part.mul_(1 - group["lr"] * group["weight_decay"])
            part.add_(self._part_of(weight, update), alpha=-group["lr"])

    def _like(self, part: Tensor, values: Tensor) -> DTensor:
        weight = self._weights[part]
        assert isinstance(weight, DTensor)
        return DTensor.from_local(
            values, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride(), run_check=False
        )

    def _part_of(self, weight: Tensor, whole: Tensor) -> Tensor:
        [chunk] = weight.__create_chunk_list__()  # type: ignore[attr-defined]
        return whole[tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))]
