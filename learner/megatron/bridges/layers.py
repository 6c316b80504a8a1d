"""Layers that differ from Megatron's own: norms, the router of experts, sublayers with a norm behind them. Knows no family."""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class Norm(torch.nn.RMSNorm):
    """Root mean square norm, also of tokens that are split over the tensor-parallel ranks (Megatron's wrapper of torch's refuses those)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Megatron then sums the gradient over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's router of tokens to experts, whose product needs no Transformer Engine (megatron-core 0.16.1 names a function of it)."""

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits of all experts in float32, [..., experts]."""
        logits: Tensor = torch.nn.functional.linear(input.float(), self.weight.float())
        return logits


class NormedAttention(SelfAttention):  # type: ignore[misc]
    """Self attention with a norm between its output and the residual."""

    def __init__(self, config: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.post_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *arguments: Any, **more: Any) -> tuple[Tensor, Any]:
        """Attend as Megatron does, and normalise."""
        out, bias = super().forward(*arguments, **more)
        return self.post_norm(out), bias


class NormedMLP(MLP):  # type: ignore[misc]
    """MLP with a norm between its output and the residual."""

    def __init__(self, config: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.post_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *arguments: Any, **more: Any) -> tuple[Tensor, Any]:
        """Compute as Megatron does, and normalise."""
        out, bias = super().forward(*arguments, **more)
        return self.post_norm(out), bias
