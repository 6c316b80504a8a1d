"""Log-probs of the sampled tokens and entropies from logits that are kept: the reference of
``tidemill.learner.kernels.logprobs``.

Shape letters: T = tokens, V = the vocabulary, C = the tokens of one chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 22
"""Number of logits worked on at once (16 MB in float32)."""


def log_probs_and_entropy(logits_TV: Tensor, targets_T: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return ``log softmax(logits / temperature)[target]`` and ``-sum p log p``, both [T], differentiable.

    Of size [T, V] are only the logits and, in the backward pass, their gradient.
    """
    log_probs_T, entropy_T = _LogProbsAndEntropy.apply(logits_TV, targets_T, 1.0 / temperature)
    return log_probs_T, entropy_T


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, both [T]. Keeps the logits for ``backward``, and besides them only tensors of
        size T.
        """
        kind = torch.promote_types(logits_TV.dtype, torch.float32)
        normalizer_T, picked_T, entropy_T = (torch.empty(len(targets_T), dtype=kind) for _ in range(3))
        for rows in _chunks(logits_TV):
            x_CV = logits_TV[rows].to(kind) * scale
            highest_C = x_CV.amax(-1)
            x_CV -= highest_C[:, None]
            picked_C = x_CV.gather(-1, targets_T[rows, None])[:, 0]
            p_CV = x_CV.exp()
            sum_C = p_CV.sum(-1)
            log_sum_C = sum_C.log()
            picked_T[rows] = picked_C - log_sum_C
            entropy_T[rows] = log_sum_C - x_CV.mul_(p_CV).sum(-1) / sum_C
            normalizer_T[rows] = highest_C + log_sum_C
        ctx.save_for_backward(logits_TV, targets_T, normalizer_T, entropy_T)
        ctx.scale = scale
        return picked_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor, None, None]:
        """Return the logits' gradient, [T, V]: ``scale (g (1[target] - p) - h p (log p + H))``, g of the log-prob, h of
        the entropy.
        """
        logits_TV, targets_T, normalizer_T, entropy_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        with_entropy = bool((grad_entropy_T != 0).any())
        for rows in _chunks(logits_TV):
            log_p_CV = logits_TV[rows].to(normalizer_T.dtype) * ctx.scale - normalizer_T[rows, None]
            p_CV = log_p_CV.exp()
            coefficient_CV = -grad_log_probs_T[rows, None]
            if with_entropy:
                coefficient_CV = coefficient_CV - grad_entropy_T[rows, None] * (log_p_CV + entropy_T[rows, None])
            grad_CV = p_CV.mul_(coefficient_CV)
            grad_CV[torch.arange(len(grad_CV)), targets_T[rows]] += grad_log_probs_T[rows]
            grad_TV[rows] = grad_CV.mul_(ctx.scale)
        return grad_TV, None, None


def _chunks(logits_TV: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, logits_TV.shape[-1]))
    return [slice(start, start + rows) for start in range(0, len(logits_TV), rows)]
