"""Layers that differ from Megatron's own: the router of experts, sublayers with a norm behind them. Knows no family."""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from learner.megatron.layers.norms import Norm


class PartialReplay(RouterReplay):  # type: ignore[misc]
    """Megatron's replay of one router, for tokens with known experts; the router chooses those of the others (-1).

    The targets keep their narrow dtype until a layer needs them.
    """

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any = None, group_topk: Any = None, default_compute_topk: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return scores and ids of each token's experts, [T, K]."""
        if self.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            given = self.target_topk_idx
        elif self.router_replay_action == RouterReplayAction.REPLAY_BACKWARD:
            given = self.replay_backward_list.pop(0)
        else:
            found: tuple[Tensor, Tensor] = super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
            return found
        assert given is not None and len(given) == len(scores), "as many targets as tokens"
        _, own_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen_TK = torch.where(given < 0, own_TK, given.to(own_TK.dtype))
        return scores.gather(1, chosen_TK), chosen_TK


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's router of tokens to experts, with a product that needs no Transformer Engine."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.router_replay: RouterReplay | None = PartialReplay() if self.config.moe_enable_routing_replay else None

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


class ScoreRouter(Router):
    """Router that weighs a token's experts by their sigmoid scores, as ``norm_topk_prob: false`` has it.

    Megatron divides the scores by their sum, unless there is one. Its result is multiplied by that sum again, so that a balancing loss
    stays attached to it.
    """

    def routing(self, logits: Tensor, *arguments: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts, [T, experts], and where it is sent."""
        probs_TX, sent_TX = super().routing(logits, *arguments, **more)
        if self.topk == 1:
            return probs_TX, sent_TX
        scores_TX = logits.view(-1, logits.shape[-1]).float().sigmoid()
        total_T1 = torch.where(sent_TX, scores_TX, 0.0).sum(-1, keepdim=True)
        return probs_TX * total_T1.type_as(probs_TX), sent_TX


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
