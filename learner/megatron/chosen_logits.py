"""Logits at a few places of a row, over the whole vocabulary, for a dump of the step.

Shape letters: C = tokens of this context-parallel rank's part of the row, H = hidden size, V = vocabulary (of the weight: this
tensor-parallel rank's part), K = places.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.megatron.layers.context import gather_parts


@torch.no_grad()
def logits_at(hidden_CH: Tensor, weight_VH: Tensor, at_K: Tensor, here: Parallel, *, temperature: float | Tensor) -> Tensor:
    """Return the logits / temperature at the places ``at_K`` of the whole row, [K, V] float32, on all ranks of the row.

    Collective over the tensor- and context-parallel ranks, which have the same places. A temperature of 0 counts as 1;
    a tensor has that of each token of this rank's part, [C].
    """
    local_K = at_K - here.cp_rank * len(hidden_CH)
    mine_K = (local_K >= 0) & (local_K < len(hidden_CH))
    at = local_K.clamp(0, len(hidden_CH) - 1)
    hidden_KH = torch.where(mine_K[:, None], hidden_CH[at], 0)
    divisor = temperature[at, None] if isinstance(temperature, Tensor) else temperature or 1.0
    logits_KV = (hidden_KH @ weight_VH.t()).float() / divisor
    if here.cp_size > 1:
        dist.all_reduce(logits_KV, group=here.cp_group)  # the ranks of other parts have 0 there
    return gather_parts(logits_KV.t(), here.tp_group).t() if here.tp_size > 1 else logits_KV
