"""Routers and experts of a mixture, in the place of Megatron's own. Knows no family.

The experts of a rank run in one grouped product per linear layer. Source: Megatron's ``SequentialMLP``, whose weights,
names and checkpoints they keep, and ``torch.nn.functional.grouped_mm`` of torch 2.13 (on CUDA one kernel for bfloat16).
Shape letters: T = tokens of all experts of the rank, one expert after the other, E = experts of the rank, I = inputs,
O = outputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor
from torch.nn.functional import grouped_mm

from tidemill.learner.settings.config import ROLLOUT, LearnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Settings of the experts in a step, beside the objective."""

    replay: bool = False
    """Train with the experts that the pass for old log-probs has chosen (R2), or with given ones."""
    given: bool = False
    """With ``replay``: the experts are those in the samples (R3)."""
    aux_loss_coef: float = 0.0
    """Coefficient of the loss that balances the experts' tokens; 0 = none."""
    bias_update_rate: float = 0.0
    """Step by which routers with a bias per expert move it towards experts with few tokens; 0 = it is fixed."""

    @property
    def counts_tokens(self) -> bool:
        """True if the tokens of each expert move the policy: by a balancing loss or the biases of routers."""
        return bool(self.aux_loss_coef or self.bias_update_rate)

    @classmethod
    def of(cls, learner: LearnerConfig) -> "Mixture":
        """Return the settings of experts in a learner's configuration."""
        return cls(
            replay=learner.routing_replay != "none",
            given=learner.routing_replay == ROLLOUT,
            aux_loss_coef=learner.moe_aux_loss_coef,
            bias_update_rate=learner.moe_bias_update_rate,
        )


class PartialReplay(RouterReplay):  # type: ignore[misc]
    """Megatron's replay of one router, for tokens with known experts; the router chooses for all others (-1)."""

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
        # Megatron's own cannot apply a mask to several experts.
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


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Gated experts without biases, all of a rank at once; each product copies their weights side by side."""

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
