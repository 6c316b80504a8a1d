"""Importance weights that correct for the age of the data. Pure functions of torch tensors; T = tokens.

``mu`` is the distribution the engine sampled from, ``pi_old`` the policy at the start of the step, ``pi_theta`` the one with gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DELTA_BOUND = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is far outside every clip and finite. Source: the SAFETY_BOUND of verl."""


def log_ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """``log p - log q`` clamped to +-20; exactly 0, with exactly 0 gradient, where the mask is False.

    Both inputs are masked *before* they are subtracted: NaN or infinity behind the mask reaches neither value nor gradient.
    """
    numerator_T = torch.where(mask_T, numerator_T, 0.0)
    denominator_T = torch.where(mask_T, denominator_T, 0.0)
    return (numerator_T - denominator_T).clamp(-DELTA_BOUND, DELTA_BOUND)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedWeights:
    """Detached token weights and which of them were truncated."""

    weight_T: Tensor
    too_high_T: Tensor
    too_low_T: Tensor


def truncated_weights(old_T: Tensor, rollout_T: Tensor, mask_T: Tensor, *, low: float, high: float) -> TruncatedWeights:
    """Token-level truncated importance weights ``clamp(pi_old / mu, low, high)``, detached; 1 where masked.

    Source: TIS, Yao et al. 2025 (fengyao.notion.site/off-policy-rl); clamped, then detached, then multiplied to the loss.
    """
    ratio_T = log_ratio(old_T, rollout_T, mask_T).exp().detach()
    too_high_T, too_low_T = mask_T & (ratio_T > high), mask_T & (ratio_T < low)
    weight_T = torch.where(mask_T, ratio_T.clamp(low, high), 1.0)
    return TruncatedWeights(weight_T=weight_T, too_high_T=too_high_T, too_low_T=too_low_T)
