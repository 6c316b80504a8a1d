"""Importance weights that correct for the age of the data: detached, bounded, then multiplied to the loss.

Pure functions; T = tokens of a packed row, N = samples of the step. ``delta_T = log pi - log mu`` from ``ratios.log_ratio`` (0 where
masked). What a weight is of (level) and what happens outside its bounds (action) are chosen apart; the names of the field are products of
the two: TIS = token x clip, MIS and IcePop = token x mask, Seq-TIS = sequence x clip, Seq-MIS = sequence x mask.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.algorithms.ratios import DELTA_BOUND, prefix_sums, sequence_means, sequence_sums, spread

LEVELS = ("token", "sequence", "geometric", "prefix")
ACTIONS = ("truncate", "clip", "mask")
NORMALISER_FLOOR = 1e-8
"""Weights with a smaller mean are left as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Detached token weights and where they met their bounds."""

    weight_T: Tensor
    """1 where masked."""
    too_high_T: Tensor
    too_low_T: Tensor


def raw_weights(delta_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int, *, level: str) -> Tensor:
    """The ratio pi / mu at a level, not bounded, [T]; 1 where masked.

    ``token``: e^delta_t. Biased for two tokens and more, whatever the bounds: prefix and continuation stay mu's. Variance per token only.
    ``sequence``: e^(sum of delta), the same at every token of a sample. Unbiased without bounds; its variance grows exponentially in
    the length, and beyond 1,000 tokens it is 0 or its bound.
    ``geometric``: e^(mean of delta): independent of the length, and no importance weight; good to reject by, not to weigh with.
    ``prefix``: e^(sum of delta up to t), corrects the distribution of the state too. Unbiased only with the true advantage of each token.
    Sources: TIS, Yao et al. 2025; sequence and geometric, Liu, Li et al. 2025 ("When speed kills stability"); prefix, CTPO 2605.07331.
    """
    if level == "token":
        log_weight_T = delta_T
    elif level == "sequence":
        log_weight_T = spread(sequence_sums(delta_T, mask_T, sample_T, num_samples), sample_T)
    elif level == "geometric":
        log_weight_T = spread(sequence_means(delta_T, mask_T, sample_T, num_samples), sample_T)
    elif level == "prefix":
        log_weight_T = prefix_sums(delta_T, mask_T, sample_T, num_samples)
    else:
        raise ValueError(f"level: want one of {', '.join(LEVELS)}, got {level!r}")
    return torch.where(mask_T, log_weight_T.clamp(-DELTA_BOUND, DELTA_BOUND).exp(), 1.0)


def bounded(raw_T: Tensor, mask_T: Tensor, *, low: float = 0.0, high: float, action: str = "clip") -> Weights:
    """Detached weights within ``low .. high``: ``clip`` (both bounds), ``truncate`` (the upper alone), ``mask`` (0 outside).

    The bounds themselves are inside. A lower bound > 0 with ``clip`` keeps a pull on tokens that the policy has given up: more bias.
    Masking leaves the denominator of the loss as it is. Sources: TIS, Yao et al. 2025; IcePop (.5 .. 5), Ring-1T 2510.18855.
    """
    if action not in ACTIONS:
        raise ValueError(f"action: want one of {', '.join(ACTIONS)}, got {action!r}")
    raw_T = raw_T.detach()
    too_high_T = mask_T & (raw_T > high)
    too_low_T = mask_T & (raw_T < low) & (action != "truncate")
    bounded_T = (
        torch.where(too_high_T | too_low_T, 0.0, raw_T) if action == "mask" else raw_T.clamp(None if action == "truncate" else low, high)
    )
    return Weights(weight_T=torch.where(mask_T, bounded_T, 1.0), too_high_T=too_high_T, too_low_T=too_low_T)


def weight_sums(weights: Weights, mask_T: Tensor, sample_T: Tensor, num_samples: int, *, level: str) -> Tensor:
    """(sum of weights, number of weights), float64 [2], to be added over micro-batches and ranks before ``self_normalised``.

    Token and prefix weights count once a token, sequence and geometric ones once a sample.
    """
    weight_T = weights.weight_T.double()
    if level in ("sequence", "geometric"):
        means_N = sequence_means(weight_T, mask_T, sample_T, num_samples)
        there_N = sequence_sums(torch.ones_like(weight_T), mask_T, sample_T, num_samples) > 0
        return torch.stack([means_N.sum(), there_N.sum().double()])
    return torch.stack([torch.where(mask_T, weight_T, 0.0).sum(), mask_T.sum().double()])


def self_normalised(weights: Weights, mask_T: Tensor, sums: Tensor) -> Weights:
    """Weights divided by their mean over the update on all ranks: their mean is 1, and a constant offset of the log-probs falls out.

    ``sums``: of all micro-batches and ranks. Undoes the shrinking of the learning rate by truncation (E[w] < 1) at a bias of O(1/n).
    Source: self-normalised importance sampling; verl's ``rollout_is_batch_normalize``.
    """
    mean = sums[0] / sums[1]
    if not bool(mean > NORMALISER_FLOOR):  # also where there is no weight at all
        return weights
    return replace(weights, weight_T=torch.where(mask_T, (weights.weight_T / mean).to(weights.weight_T.dtype), 1.0))


def effective_sample_share(total: float, squares: float, count: float) -> float:
    """``(sum w)^2 / (n sum w^2)``, in 1/n .. 1; 1 iff all weights are equal; 1 when there is none. Source: Kish 1965."""
    return total * total / (count * squares) if count and squares else 1.0
