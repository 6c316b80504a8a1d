"""Layers that differ from Megatron's own: the router of experts, the activation of an MLP, sublayers with a norm
behind them. Knows no family."""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable


class Norm(torch.nn.RMSNorm):
    """RMSNorm for Megatron's layer specs.

    With sequence parallelism each rank normalises its own tokens, so it has a part of the weight's gradient. Megatron
    adds the parts up for weights that are marked ``sequence_parallel``.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        assert (
            config.normalization == "RMSNorm"
            and not config.layernorm_zero_centered_gamma
            and not config.persist_layer_norm
        )
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the entries of a checkpoint, for Megatron's MLP, which asks each of its parts for them."""
        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {}, sharded_offsets
        )
        return entries


class FusedHeadNorm(Norm):
    """The norm of queries or keys by kernels for rows of a head's size: it takes and returns [..., n, d]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of each head."""
        from tidemill.learner.megatron.layers.triton_kernels import head_norm

        assert self.eps is not None
        return head_norm(x, self.weight, self.eps)


class PartialReplay(RouterReplay):  # type: ignore[misc]
    """Megatron's replay of one router, for tokens with known experts; the router chooses those of the others (-1)."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: Any = None,
        group_topk: Any = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and ids of each token's experts, [T, K]."""
        if self.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            experts = self.target_topk_idx
        elif self.router_replay_action == RouterReplayAction.REPLAY_BACKWARD:
            experts = self.replay_backward_list.pop(0)
        else:
            chosen: tuple[Tensor, Tensor] = super().get_replay_topk(
                scores, topk, num_groups, group_topk, default_compute_topk
            )
            return chosen
        assert experts is not None and len(experts) == len(scores), "as many targets as tokens"
        _, own_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen_TK = torch.where(experts < 0, own_TK, experts.to(own_TK.dtype))
        return scores.gather(1, chosen_TK), chosen_TK


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's router of tokens to experts, with a product that needs no Transformer Engine. It counts no padding."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.router_replay: RouterReplay | None = PartialReplay() if self.config.moe_enable_routing_replay else None

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits of all experts in float32, [..., experts]."""
        logits: Tensor = torch.nn.functional.linear(input.float(), self.weight.float())
        return logits

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Attach this rank's part of the row's balancing loss, times the tokens of the whole row (``balanced``).

        Scores and map are 0 for padding. Megatron's own multiplies by the tokens of this rank, which are fewer where
        the padding is, and keeps a global table of losses.
        """
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        # All ranks of a row must count alike, so tokens are counted by the map also where no mask is given.
        sent_E, _, tokens = get_tokens_per_expert_and_token_count(
            routing_map, self.tp_cp_group, topk=self.topk, with_padding_mask=True
        )
        loss = switch_load_balancing_loss_func(
            scores_for_aux_loss,
            sent_E,
            tokens.clamp(min=1),
            self.topk,
            self.num_experts,
            coefficient,
            fused=self.config.moe_router_fusion,
        )
        attached: Tensor = MoEAuxLossAutoScaler.apply(probs, loss * tokens)
        return attached

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert. Megatron's own cannot apply a mask to several experts."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            counted_TE = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += counted_TE.sum(dim=0)


class ScoreRouter(Router):
    """Router that weighs a token's experts by their sigmoid scores, as ``norm_topk_prob: false`` has it.

    Megatron divides the scores by their sum, unless there is one. Its result is multiplied by that sum again, so that a
    balancing loss stays attached to it.
    """

    def routing(self, logits: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts, [T, experts], and where it is sent."""
        probs_TX, sent_TX = super().routing(logits, *arguments, **options)
        if self.topk == 1:
            return probs_TX, sent_TX
        scores_TX = logits.view(-1, logits.shape[-1]).float().sigmoid()
        total_T1 = torch.where(sent_TX, scores_TX, 0.0).sum(-1, keepdim=True)
        return probs_TX * total_T1.type_as(probs_TX), sent_TX


class GatedSilu(torch.nn.Module):
    """SiLU of the first half of the input times the second. It keeps the input alone for the backward pass."""

    def __init__(self, config: Any) -> None:
        """``config``: Megatron's, which passes it to every module."""
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., I] for [..., 2 I]."""
        gated: Tensor = _GatedSilu.apply(x)
        return gated

    def sharded_state_dict(self, *place: Any, **named: Any) -> dict[str, Any]:
        """Return no entries of a checkpoint, for Megatron's MLP, which asks each of its parts for them."""
        return {}


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        [x] = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, torch.nn.functional.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=grad_gate)
        return grad_x


class NormedAttention(SelfAttention):  # type: ignore[misc]
    """Self attention with a norm between its output and the residual."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.post_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
        """Attend as Megatron does, and normalise."""
        out, bias = super().forward(*arguments, **options)
        return self.post_norm(out), bias


class NormedMLP(MLP):  # type: ignore[misc]
    """MLP with a norm between its output and the residual."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        options.setdefault("ffn_hidden_size", config.ffn_hidden_size)  # Megatron passes it to its own class only
        super().__init__(config, *arguments, **options)
        self.post_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
        """Compute as Megatron does, and normalise."""
        out, bias = super().forward(*arguments, **options)
        return self.post_norm(out), bias
