"""The experts of a rank in one grouped product per linear layer, instead of a product for each expert. Knows no family.

Source: Megatron's ``SequentialMLP``, whose weights, names and checkpoints it keeps, and
``torch.nn.functional.grouped_mm`` of torch 2.13 (on CUDA one kernel for bfloat16). Shape letters: T = tokens of all
experts of the rank, one expert after the other, E = experts of the rank, I = inputs, O = outputs.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn.functional import grouped_mm


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Gated experts without biases, all of a rank at once.

    Each product copies their weights side by side; nothing of the copy is kept for the backward pass.
    """

    def __init__(
        self, num_local_experts: int, config: Any, submodules: MLPSubmodules, pg_collection: Any = None
    ) -> None:
        super().__init__(num_local_experts, config, MLPSubmodules(linear_fc1=_Columns, linear_fc2=_Rows), pg_collection)

    def forward(self, hidden_TI: Tensor, tokens_per_expert: Tensor, probs_T: Tensor) -> tuple[Tensor, None]:
        """Return each token's output of its expert, multiplied by its probability, [T, I], and no bias."""
        ends_E = tokens_per_expert.to(hidden_TI.device).cumsum(0).to(torch.int32)
        both_TO = _Product.apply(hidden_TI, ends_E, *(expert.linear_fc1() for expert in self.local_experts))
        gate_TO, up_TO = both_TO.chunk(2, dim=-1)
        inner_TO = self.config.activation_func(gate_TO) * up_TO
        inner_TO = (inner_TO * probs_T.unsqueeze(-1)).to(hidden_TI.dtype)
        out_TI: Tensor = _Product.apply(inner_TO, ends_E, *(expert.linear_fc2() for expert in self.local_experts))
        return out_TI, None


class _Columns(ColumnParallelLinear):  # type: ignore[misc]
    """Gives its weight. A call, so that hooks before a forward pass, in which overlapped gathering waits, run."""

    def forward(self) -> Tensor:
        return self.weight


class _Rows(RowParallelLinear):  # type: ignore[misc]
    """As ``_Columns``."""

    def forward(self) -> Tensor:
        return self.weight


class _Product(torch.autograd.Function):
    """x W^T, [T, O], with the weight of each token's expert."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, ends_E: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, ends_E, *weights)
        if not len(x_TI):  # the kernels want a token
            return x_TI.new_zeros(0, len(weights[0]))
        return grouped_mm(x_TI, torch.stack(weights).mT, offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_TO,), (x_TI, ends_E, *weights) = gradients, ctx.saved_tensors
        gradient_TO = gradient_TO.contiguous()
        of_x: Tensor | None = None
        of_weights: tuple[Tensor | None, ...] = (None,) * len(weights)
        if not len(x_TI):
            return torch.zeros_like(x_TI), None, *(torch.zeros_like(weight) for weight in weights)
        if ctx.needs_input_grad[0]:
            of_x = grouped_mm(gradient_TO, torch.stack(weights), offs=ends_E)
        if any(ctx.needs_input_grad[2:]):
            of_weights = grouped_mm(gradient_TO.T, x_TI, offs=ends_E).unbind()
        return of_x, None, *of_weights
