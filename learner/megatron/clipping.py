"""The norm of the gradients over all ranks, and clipping by it: Megatron's rules, in a few kernels.

Megatron 0.16 without Apex and Transformer Engine takes the norm of one tensor after the other, waits for the device
after each, and scales each by an operation of its own. The bits are the same as its own on the CPU.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SMALL = 1.0e-6
"""Megatron's addition to the norm in the factor of clipping."""


def norm_over_ranks(grads: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the norm of all gradients, float32, of all ranks of ``group``; collective over it. ``device``: that of a
    rank without any.
    """
    norms = torch.stack(torch._foreach_norm(list(grads))) if grads else torch.zeros(1, device=device)
    square = torch.linalg.vector_norm(norms) ** 2
    dist.all_reduce(square, group=group)
    return float(square.item() ** 0.5)


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor for gradients of norm ``norm``: 1 up to ``most``, and above it that which reduces the norm to
    ``most``.
    """
    return min(1.0, max_norm / (norm + SMALL))


@torch.no_grad()
def clipped(inner: Any, max_norm: float, device: torch.device) -> float:
    """Scale the gradients of Megatron's optimizers, which are ready, where their norm is above ``most``. Returns the
    norm before that.

    One collective serves all optimizers with gradients over the same ranks. Otherwise (experts) each has one of its
    own.
    """
    shared, optimizers = inner.grads_states_parallel_group_is_shared(), inner.chained_optimizers
    by_group = [optimizers] if shared else [[each] for each in optimizers]
    norms = []
    for several in by_group:
        grads = [grad for each in several for grad in each.get_main_grads_for_grad_norm()]
        norms.append(norm_over_ranks(grads, several[0].get_grad_stats_parallel_group(), device))
    norm = norms[0] if len(norms) == 1 else math.sqrt(sum(each**2 for each in norms))
    factor = clip_factor(norm, max_norm)
    grads = [parameter.grad for each in optimizers for parameter in each.get_parameters()]
    if factor < 1.0 and (present := [grad.detach() for grad in grads if grad is not None]):
        torch._foreach_mul_(present, factor)
    return norm
