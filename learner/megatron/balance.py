"""The scale of the loss that balances the experts' tokens, beside a loss with denominators of its own.

A router multiplies the balancing loss of a row by the tokens of the row, without padding, and Megatron expects that all gradients are
divided by the tokens of the step later. The objective's gradients are not, so the balancing loss is divided here.
"""

from collections.abc import Callable

from torch import Tensor


def balanced(scale_loss: Callable[[Tensor], Tensor], tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """Return Megatron's ``grad_scale_func`` for one minibatch: the balancing loss counts as its mean over all tokens.

    That is the sum over the rows of (loss of the row x tokens of the row) / ``tokens``. The ranks that share a row by tensor or context
    parallelism have parts of its loss, which their gradients add up; each data-parallel rank has rows of its own.

    ``tokens``: number of tokens of the minibatch on all data-parallel ranks, without padding. ``scale_loss`` scales the objective.
    """

    def scale(value: Tensor) -> Tensor:
        """Scale the objective, which has a graph, or the number that Megatron gives for the balancing loss."""
        return scale_loss(value) if value.requires_grad else value / tokens

    return scale
