"""Layers that differ from Megatron's own: the router of experts, sublayers with a norm behind them. Knows no family."""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from learner.megatron.norms import Norm


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's router of tokens to experts, with a product that needs no Transformer Engine."""

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits of all experts in float32, [..., experts]."""
        logits: Tensor = torch.nn.functional.linear(input.float(), self.weight.float())
        return logits

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *unused: Any, valid_token_count: Any = None, **more: Any
    ) -> Tensor:
        """Attach the balancing loss to the graph, multiplied by this rank's tokens (``balance``), without Megatron's global table of it."""
        tokens = activation.shape[0] if valid_token_count is None else valid_token_count
        attached: Tensor = MoEAuxLossAutoScaler.apply(activation, aux_loss * tokens)
        return attached


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
        more.setdefault("ffn_hidden_size", config.ffn_hidden_size)  # Megatron passes it to its own class only
        super().__init__(config, *arguments, **more)
        self.post_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *arguments: Any, **more: Any) -> tuple[Tensor, Any]:
        """Compute as Megatron does, and normalise."""
        out, bias = super().forward(*arguments, **more)
        return self.post_norm(out), bias
