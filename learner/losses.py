"""Policy losses per token, and their mean over the step. Pure functions of torch tensors, float32 or float64; T = tokens.

Every loss takes log-probs (nats) of the sampled token and is exactly 0 with exactly 0 gradient where the mask is False, whatever
stands there (masking is by ``where``: 0 times infinity would be NaN).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.correction import TruncatedWeights, log_ratio, truncated_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss of every token and what was done to it."""

    loss_T: Tensor
    clipped_T: Tensor
    """True where the clip has taken the gradient away."""
    weights: TruncatedWeights | None = None
    """Importance weights that multiplied the loss; None = there were none."""


def ppo_clip(ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` and where it is clipped, both [T].

    The gradient is 0 iff (A > 0 and r > 1 + clip_high) or (A < 0 and r < 1 - clip_low), else ``-A r``.
    Source: PPO, Schulman et al. 2017; the asymmetric range is DAPO, Yu et al. 2025.
    """
    plain_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    return -torch.minimum(plain_T, clipped_T), (clipped_T < plain_T).detach()


def three_policy_loss(
    log_probs_T: Tensor,
    old_T: Tensor,
    rollout_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    tis_low: float,
    tis_high: float,
) -> TokenLoss:
    """``sg(clamp(pi_old / mu)) * PPO(pi_theta / pi_old)``: the trust region is around pi_old, the weight corrects for mu.

    Source: decoupled PPO, Hilton et al. 2021; AReaL, Fu et al. 2025; with token TIS, Yao et al. 2025.
    """
    weights = truncated_weights(old_T, rollout_T, mask_T, low=tis_low, high=tis_high)
    ratio_T = log_ratio(log_probs_T, old_T.detach(), mask_T).exp()
    loss_T, clipped_T = ppo_clip(ratio_T, _where(mask_T, advantages_T), clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(loss_T=_where(mask_T, weights.weight_T * loss_T), clipped_T=clipped_T & mask_T, weights=weights)


def two_policy_loss(
    log_probs_T: Tensor, rollout_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """``PPO(pi_theta / mu)``: one ratio is correction and trust region; no further weight (it would count twice).

    Source: "bypass" mode of verl's rollout correction, Li et al. 2025.
    """
    ratio_T = log_ratio(log_probs_T, rollout_T.detach(), mask_T).exp()
    loss_T, clipped_T = ppo_clip(ratio_T, _where(mask_T, advantages_T), clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(loss_T=_where(mask_T, loss_T), clipped_T=clipped_T & mask_T)


def uncorrected_loss(log_probs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> TokenLoss:
    """The policy gradient ``-A grad log pi_theta``, as if pi_theta had sampled the data: wrong on stale data, there to compare with."""
    ratio_T = log_ratio(log_probs_T, log_probs_T.detach(), mask_T).exp()
    return TokenLoss(loss_T=_where(mask_T, -ratio_T * advantages_T), clipped_T=torch.zeros_like(mask_T))


def token_mean(values_T: Tensor, mask_T: Tensor, denominator: float) -> Tensor:
    """``sum of the unmasked values / denominator``, a scalar.

    The denominator is the step's number of trainable tokens on all ranks, given from outside: it depends neither on how the tokens are
    split over micro-batches and ranks nor on which of them a correction rejects.
    """
    return _where(mask_T, values_T).sum() / denominator


def _where(mask_T: Tensor, values_T: Tensor) -> Tensor:
    return torch.where(mask_T, values_T, 0.0)
