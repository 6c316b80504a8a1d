"""Importance weights that correct for the age of the data: detached, bounded, then multiplied to the loss.

Pure functions; T = tokens of a packed row, N = samples of the step. ``delta_T = log pi - log mu`` from
``ratios.log_ratio`` (0 where masked). The level of a weight (token, sequence ...) and the action outside its bounds are
chosen separately; names of the field are products of the two: TIS = token x clip, MIS and IcePop = token x mask,
Seq-TIS = sequence x clip, Seq-MIS = sequence x mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tidemill.learner.algorithms.ratios import DELTA_BOUND, prefix_sums, sequence_means, sequence_sums, spread

LEVELS = ("token", "sequence", "geometric", "prefix")
ACTIONS = ("truncate", "clip", "mask")
NORMALISER_FLOOR = 1e-8
"""Weights with a smaller mean are not normalised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeights:
    """Detached token weights, and masks of those outside their bounds."""

    weight_T: Tensor
    """1 where masked."""
    too_high_T: Tensor
    too_low_T: Tensor


WeightFunction = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""``(delta_T, mask_T, sequence_T, num_sequences) -> weight of every token [T]``: signature of a weight by import path.
Bounds and action of the config are applied to the result.
"""


def raw_weights(
    delta_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int, *, level: str | WeightFunction
) -> Tensor:
    """Return the ratio pi / mu at a level, not bounded, [T]; 1 where masked. Raises ValueError for an unknown level.

    ``token``: e^delta_t. Biased for two tokens and more, with any bounds: prefix and continuation stay mu's. Variance
    per token only.
    ``sequence``: e^(sum of delta), the same at every token of a sample. Unbiased without bounds; its variance grows
    exponentially in the length, and beyond 1,000 tokens it is 0 or its bound.
    ``geometric``: e^(mean of delta): independent of the length, and not an importance weight; use it to reject, not to
    weigh.
    ``prefix``: e^(sum of delta up to t), corrects the distribution of the state too. Unbiased only with the true
    advantage of each token.
    Sources: TIS, Yao et al. 2025; sequence and geometric, Liu, Li et al. 2025 ("When speed kills stability"); prefix,
    CTPO 2605.07331.
    """
    if callable(level):
        return torch.where(mask_T, level(delta_T, mask_T, sample_T, num_samples).detach(), 1.0)
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


def bounded(raw_T: Tensor, mask_T: Tensor, *, low: float = 0.0, high: float, action: str = "clip") -> ImportanceWeights:
    """Return detached weights within ``low .. high``: ``clip`` (both bounds), ``truncate`` (the upper alone), ``mask``
    (0 outside).

    The bounds themselves are inside. A lower bound > 0 with ``clip`` keeps training tokens that the policy has nearly
    ruled out: more bias. Masking does not change the denominator of the loss. Raises ValueError for an unknown action.
    Sources: TIS, Yao et al. 2025; IcePop (.5 .. 5), Ring-1T 2510.18855.
    """
    if action not in ACTIONS:
        raise ValueError(f"action: want one of {', '.join(ACTIONS)}, got {action!r}")
    raw_T = raw_T.detach()
    too_high_T = mask_T & (raw_T > high)
    too_low_T = mask_T & (raw_T < low) & (action != "truncate")
    bounded_T = (
        torch.where(too_high_T | too_low_T, 0.0, raw_T)
        if action == "mask"
        else raw_T.clamp(None if action == "truncate" else low, high)
    )
    return ImportanceWeights(weight_T=torch.where(mask_T, bounded_T, 1.0), too_high_T=too_high_T, too_low_T=too_low_T)


def geometric_means(
    weights: ImportanceWeights, mask_T: Tensor, sample_T: Tensor, num_samples: int
) -> ImportanceWeights:
    """Return the weights with the geometric mean of each sample's bounded weights, the same at every token but those of
    weight 0.

    Weights of 0, which ``mask`` gives, take their token out and leave the mean of the others.
    Source: verl's ``geo_mean``, for the loss whose ratio is a geometric mean itself.
    """
    kept_T = mask_T & (weights.weight_T > 0)
    log_T = torch.where(kept_T, weights.weight_T, 1.0).log()
    means_T = spread(sequence_means(log_T, kept_T, sample_T, num_samples), sample_T).exp()
    return replace(weights, weight_T=torch.where(kept_T, means_T, weights.weight_T))


def weight_sums(
    weights: ImportanceWeights, mask_T: Tensor, sample_T: Tensor, num_samples: int, *, level: str
) -> Tensor:
    """Return (sum of weights, number of weights), float64 [2]; add them over micro-batches and ranks before
    ``self_normalised``.

    Token and prefix weights count once a token, sequence and geometric ones once a sample.
    """
    weight_T = weights.weight_T.double()
    if level in ("sequence", "geometric"):
        means_N = sequence_means(weight_T, mask_T, sample_T, num_samples)
        there_N = sequence_sums(torch.ones_like(weight_T), mask_T, sample_T, num_samples) > 0
        return torch.stack([means_N.sum(), there_N.sum().double()])
    return torch.stack([torch.where(mask_T, weight_T, 0.0).sum(), mask_T.sum().double()])


def self_normalised(weights: ImportanceWeights, mask_T: Tensor, sums: Tensor) -> ImportanceWeights:
    """Return the weights divided by their mean over the update on all ranks: a constant offset of the log-probs
    cancels.

    ``sums``: the sum over all micro-batches and ranks. It undoes the smaller steps that truncation causes (E[w] < 1),
    at a bias of O(1/n).
    Source: self-normalised importance sampling; verl's ``rollout_is_batch_normalize``.
    """
    mean = sums[0] / sums[1]
    if not bool(mean > NORMALISER_FLOOR):  # also if there are no weights and the mean is NaN
        return weights
    return replace(weights, weight_T=torch.where(mask_T, (weights.weight_T / mean).to(weights.weight_T.dtype), 1.0))


def effective_sample_share(total: float, squares: float, count: float) -> float:
    """Return ``(sum w)^2 / (n sum w^2)``, in 1/n .. 1: 1 iff all weights are equal, and for no weights. Source: Kish
    1965.
    """
    return total * total / (count * squares) if count and squares else 1.0


def rate_factor(total: float, squares: float, count: float, *, base: float) -> float:
    """Return the factor of the learning rate, ``sqrt(min(1, share / base))``, from the sums of the sequence weights of
    the update.

    ``base``: effective sample share, above 0, from which on the rate is whole. Source: VCPO 2602.17616.
    """
    return min(1.0, effective_sample_share(total, squares, count) / base) ** 0.5
