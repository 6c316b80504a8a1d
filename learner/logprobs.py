"""Log-probs of the sampled tokens and entropies from logits whose vocabulary may be split over tensor-parallel ranks.

Knows torch and a process group; no Megatron, no batch. Shape letters: T = tokens, V = this rank's part of the vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 22
"""Number of logits per chunk (16 MB in float32), so that temporary memory does not grow with the batch."""


def log_probs_and_entropy(
    logits_TV: Tensor, targets_T: Tensor, *, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``log softmax(logits / temperature)[target]`` and ``-sum p log p``, both [T], differentiable, float32 (float64 for float64).

    ``group``: the ranks with the other parts of the vocabulary, in order, equally long; None or a group of one = this rank has all.
    Temperature 0 (greedy) leaves the logits unscaled, as the engines do. Only the logits are kept for the backward pass, which
    recomputes the probabilities chunk by chunk. Neither input is changed.
    Source: Megatron-LM, Shoeybi et al. 2019 (parallel cross entropy); dH/dz = -p (log p + H).
    """
    scale = 1.0 if temperature == 0 else 1.0 / temperature
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    log_probs_T, entropy_T = _LogProbsAndEntropy.apply(logits_TV, targets_T, scale, group)
    return log_probs_T, entropy_T


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, scale: float, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, both [T]. Keeps the logits for ``backward``, and besides them only tensors of size T."""
        local_T, mine_T = _local_targets(targets_T, logits_TV.shape[-1], group)
        kind = torch.promote_types(logits_TV.dtype, torch.float32)
        normalizer_T, picked_T, entropy_T = (torch.empty(len(targets_T), dtype=kind, device=logits_TV.device) for _ in range(3))
        for rows in _chunks(logits_TV):
            x_CV = logits_TV[rows].to(kind) * scale
            highest_C = _reduced(x_CV.amax(-1), group, dist.ReduceOp.MAX)
            # In place: x is a copy since it was scaled. The largest logit becomes 0, so that no exponential overflows.
            x_CV -= highest_C[:, None]
            picked_C = x_CV.gather(-1, local_T[rows, None])[:, 0].masked_fill_(~mine_T[rows], 0.0)
            p_CV = x_CV.exp()
            # log p = x - log Z and H = log Z - sum(x e^x) / Z with Z = sum(e^x). One all-reduce for all three sums; x is overwritten last.
            sums_3C = _reduced(torch.stack([picked_C, p_CV.sum(-1), x_CV.mul_(p_CV).sum(-1)]), group, dist.ReduceOp.SUM)
            log_sum_C = sums_3C[1].log()
            picked_T[rows] = sums_3C[0] - log_sum_C
            entropy_T[rows] = log_sum_C - sums_3C[2] / sums_3C[1]
            normalizer_T[rows] = highest_C + log_sum_C
        ctx.save_for_backward(logits_TV, local_T, mine_T, normalizer_T, entropy_T)
        ctx.scale = scale
        return picked_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the logits' gradient, [T, V]: ``scale (g (1[target] - p) - h p (log p + H))``, g of the log-prob, h of the entropy."""
        logits_TV, local_T, mine_T, normalizer_T, entropy_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        with_entropy = bool((grad_entropy_T != 0).any())  # without an entropy bonus its term costs nothing
        for rows in _chunks(logits_TV):
            log_p_CV = logits_TV[rows].to(normalizer_T.dtype) * ctx.scale - normalizer_T[rows, None]
            p_CV = log_p_CV.exp()
            coefficient_CV = -grad_log_probs_T[rows, None]
            if with_entropy:
                coefficient_CV = coefficient_CV - grad_entropy_T[rows, None] * (log_p_CV + entropy_T[rows, None])
            grad_CV = p_CV.mul_(coefficient_CV)
            grad_CV[torch.arange(len(grad_CV), device=grad_CV.device), local_T[rows]] += grad_log_probs_T[rows] * mine_T[rows]
            grad_TV[rows] = grad_CV.mul_(ctx.scale)
        return grad_TV, None, None, None


def _chunks(logits_TV: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, logits_TV.shape[-1]))
    return [slice(start, start + rows) for start in range(0, len(logits_TV), rows)]


def _local_targets(targets_T: Tensor, num_local: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the targets as columns of this rank's part (0 for those of another rank), and a mask of those in this part."""
    local_T = targets_T - (0 if group is None else dist.get_rank(group) * num_local)
    mine_T = (local_T >= 0) & (local_T < num_local)
    return torch.where(mine_T, local_T, 0), mine_T


def _reduced(values: Tensor, group: dist.ProcessGroup | None, operation: Any) -> Tensor:
    if group is not None:
        dist.all_reduce(values, operation, group=group)
    return values
