"""Context parallelism: every row of tokens is cut into equal parts, one for each rank of a group.

Between the attentions a rank has its part of the tokens. For attention, the ranks exchange tokens for heads: each has
all tokens of the row with its share of the heads, so that the attention of whole rows is used as it is, and its work is
divided equally whatever the lengths of the sequences. The loss is that of the whole row on every rank, from log-probs
that are gathered here.

Sources: Jacobs et al. 2023 (DeepSpeed Ulysses). Shape letters: T = tokens of the row, C = those of one part, n = heads,
d = head size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def own_part(values_T: Tensor, rank: int, size: int) -> Tensor:
    """Return part ``rank`` of ``size`` equal parts along the first axis, as a view."""
    assert len(values_T) % size == 0, f"a row of {len(values_T)} tokens has no {size} equal parts"
    width = len(values_T) // size
    return values_T[rank * width : (rank + 1) * width]


def gather_parts(values_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the concatenation of all ranks' parts, [T, ...]; differentiable.

    The computation on the result must be the same on all ranks: each has the whole gradient then, and takes its part of
    it.
    """
    gathered: Tensor = _Gather.apply(values_C, group)
    return gathered


def heads_for_tokens(values_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange: [C, n, d] of this rank's tokens -> [T, n / ranks, d] of its heads. Differentiable."""
    ranks = dist.get_world_size(group)
    tokens, heads, size = values_C.shape
    by_rank = values_C.view(tokens, ranks, heads // ranks, size).transpose(0, 1).contiguous()
    exchanged: Tensor = _Exchange.apply(by_rank, group)
    return exchanged.reshape(ranks * tokens, heads // ranks, size)


def tokens_for_heads(values_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange back: [T, m] of this rank's heads -> [C, ranks * m], the heads of all ranks in order. Differentiable."""
    ranks = dist.get_world_size(group)
    tokens, width = values_T.shape
    mine: Tensor = _Exchange.apply(values_T.view(ranks, tokens // ranks, width), group)
    return mine.transpose(0, 1).reshape(tokens // ranks, ranks * width)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_C: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return all parts."""
        ctx.group = group
        gathered = values_C.new_empty(dist.get_world_size(group) * len(values_C), *values_C.shape[1:])
        dist.all_gather(list(gathered.chunk(dist.get_world_size(group))), values_C.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's part."""
        return own_part(grad_T, dist.get_rank(ctx.group), dist.get_world_size(ctx.group)), None


class _Exchange(torch.autograd.Function):
    """Sends slice r of the first axis to rank r. It is its own inverse."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the slices that the ranks have sent to this one, in their order."""
        ctx.group = group
        return _exchanged(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of the slices that were sent."""
        return _exchanged(grad, ctx.group), None


def _exchanged(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    dist.all_to_all_single(received, values.contiguous(), group=group)
    return received
