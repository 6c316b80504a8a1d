"""The update of Muon: a matrix with orthogonal rows or columns, by torch's own Muon. Knows no ranks.

The update of a matrix [O, I] is multiplied by 0.2 sqrt(max(O, I)): it has the size of AdamW's, so both take one
learning rate. Experts in one tensor, [E, O, I], are E matrices.
Sources: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); Liu et al. 2025 (arXiv:2502.16982) for the
factor.
"""

import torch
from torch import Tensor


def orthogonal(gradient: Tensor) -> Tensor:
    """Return the update of a matrix, or of each matrix of experts, for a learning rate of 1."""
    update = torch.zeros_like(gradient)
    matrices = [update] if update.dim() == 2 else list(update.unbind())
    # A step of torch's Muon from 0, without momentum and decay, is the update.
    torch_muon = torch.optim.Muon(
        matrices, lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    for matrix, part in zip(matrices, [gradient] if gradient.dim() == 2 else gradient.unbind(), strict=True):
        matrix.grad = part
    torch_muon.step()
    return update.neg_()


def add_momentum(gradient: Tensor, momentum: Tensor, coefficient: float) -> Tensor:
    """Return what is made orthogonal (Nesterov's rule), and let ``momentum`` move towards the gradient."""
    momentum.lerp_(gradient, 1 - coefficient)
    return gradient.lerp(momentum, coefficient)
