"""Megatron's split linear layers with a weight that is not trained: no gradient of the weight, and the products of a
batch in one call.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


class _OneProduct(torch.nn.Module):
    """Mixin for Megatron's linear layers, to be the first base class."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *arguments: Any, **named: Any) -> Tensor:
        # torch.matmul multiplies each token with a frozen weight on its own where the strides of [s, 1, H] are not
        # those of a contiguous tensor, as behind a transposition; that takes as long as the weight's gradient.
        out: Tensor = super()._forward_impl(input.flatten(0, -2), weight, *arguments, **named)  # type: ignore[misc]
        return out.unflatten(0, (-1, *input.shape[1:-1]))


class FrozenColumn(_OneProduct, ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel layer whose weight is not trained."""


class FrozenRow(_OneProduct, RowParallelLinear):  # type: ignore[misc]
    """A row-parallel layer whose weight is not trained."""


def freeze_linears(module: torch.nn.Module) -> None:
    """Exchange the class of each of Megatron's linear layers in ``module`` whose weight has no gradient."""
    classes: dict[type, type] = {ColumnParallelLinear: FrozenColumn, RowParallelLinear: FrozenRow}
    for layer in module.modules():
        if type(layer) in classes and not layer.weight.requires_grad:  # type: ignore[union-attr]
            layer.__class__ = classes[type(layer)]
