"""The scale of the loss that balances the experts' tokens, beside a loss with denominators of its own.

Megatron multiplies the balancing loss of a row by its tokens on this rank, and expects that all gradients are divided by the tokens of the
step later. The objective's gradients are not, so the balancing loss is divided here.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from learner.layout.parallel import Parallel


def balanced(
    scale_loss: Callable[[Tensor], Tensor], lengths: Sequence[int], here: Parallel, summed: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return Megatron's ``grad_scale_func`` for one minibatch: the balancing loss counts as its mean over all tokens.

    ``lengths``: tokens of this rank's rows, or of its part of them with context parallelism. ``summed`` adds a tensor up over the
    data-parallel ranks; collective. ``scale_loss`` scales the objective.
    """
    tokens = summed(torch.tensor(float(sum(lengths) * here.cp_size), dtype=torch.float64))
    # A rank counts only its own part of a row's tokens.
    share = here.tp_size * here.cp_size / float(tokens)

    def scale(value: Tensor) -> Tensor:
        """Scale the objective, which has a graph, or the number that Megatron gives for the balancing loss."""
        return scale_loss(value) if value.requires_grad else value * share

    return scale
