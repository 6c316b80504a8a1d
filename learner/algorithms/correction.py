"""Correction for the age of the data: importance weights, and rejection of tokens about which pi and mu disagree.

Pure functions; T = tokens of a packed row, N = samples of the step. ``delta_T = log pi - log mu`` from
``ratios.log_ratio`` (0 where masked). Weights are detached, bounded, then multiplied to the loss. Their level (token,
sequence ...) and the action outside their bounds are chosen separately; names of the field are products of the two:
TIS = token x clip, MIS and IcePop = token x mask, Seq-TIS = sequence x clip, Seq-MIS = sequence x mask.

A rejection rule returns ``rejected_T`` (bool, False where masked). A rejected token's loss is 0 and the denominators do
not change: the update shrinks, it is not amplified. Rules over whole sequences reject all tokens of a sample or none.
Rejection that depends on the outcome is biased, and rules over sequences reject long responses first: watch the
rejected share.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tidemill.learner.algorithms.tokens import (
    DELTA_BOUND,
    prefix_sums,
    running_sums,
    sequence_means,
    sequence_sums,
    spread,
)

# ---- weights

LEVELS = ("token", "sequence", "geometric", "prefix")
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
    """Return the ratio pi / mu at a level, not bounded, [T]; 1 where masked.

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
    else:
        log_weight_T = prefix_sums(delta_T, mask_T, sample_T, num_samples)
    # Once more: a sum of bounded log-ratios over a long sequence is not bounded.
    return torch.where(mask_T, log_weight_T.clamp(-DELTA_BOUND, DELTA_BOUND).exp(), 1.0)


def bounded(raw_T: Tensor, mask_T: Tensor, *, low: float = 0.0, high: float, action: str = "clip") -> ImportanceWeights:
    """Return detached weights within ``low .. high``: ``clip`` (both bounds), ``truncate`` (the upper alone), ``mask``
    (0 outside).

    The bounds themselves are inside. A lower bound > 0 with ``clip`` keeps training tokens that the policy has nearly
    ruled out: more bias. Masking does not change the denominator of the loss.
    Sources: TIS, Yao et al. 2025; IcePop (.5 .. 5), Ring-1T 2510.18855.
    """
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
    """Return the weights with the geometric mean of each sample's bounded weights, the same at every token but
    tokens of weight 0.

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
    """Return ``(sum w)^2 / (n sum w^2)``, in 1/n .. 1: 1 iff all weights are equal, or none. Source: Kish 1965."""
    return total * total / (count * squares) if count and squares else 1.0


def rate_factor(total: float, squares: float, count: float, *, base: float) -> float:
    """Return the factor of the learning rate, ``sqrt(min(1, share / base))``, from the sums of the sequence weights of
    the update.

    ``base``: effective sample share, above 0, from which on the rate is whole. Source: VCPO 2602.17616.
    """
    return min(1.0, effective_sample_share(total, squares, count) / base) ** 0.5


# ---- rejection

RejectFunction = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""``(delta_T, mask_T, sequence_T, num_sequences) -> rejected_T``, bool: signature of a rule by import path. Masked
tokens are never rejected, whatever it returns for them.
"""
PROBABILITY_BOUND = 1e-8
"""Probabilities are clamped to this distance from 0 and 1 in the binary KL, so that its logarithms are finite."""


def outside(
    delta_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    *,
    metric: str,
    span: str,
    low: float = 0.0,
    high: float,
) -> Tensor:
    """Reject tokens at which a mismatch metric is outside its bounds; the metric is per token or the sum, mean or
    maximum over a sample.

    ``k1``: ``low < e^delta < high`` is kept, of the ratio pi / mu (the geometric mean for ``seq_mean``). ``k2 = delta^2
    / 2`` and ``k3 = e^delta - 1 - delta``: below ``high`` is kept, ``low`` is ignored. verl applies the bounds of k1 to
    mu / pi instead.
    Source: verl's rollout correction, Li et al. 2025 (``rollout_rs``).
    """
    if metric == "k1":
        value_T = delta_T
    elif metric == "k2":
        value_T = delta_T.square() / 2
    else:
        value_T = delta_T.exp() - 1 - delta_T
    if span == "seq_sum":
        value_T = spread(sequence_sums(value_T, mask_T, sample_T, num_samples), sample_T)
    elif span == "seq_mean":
        value_T = spread(sequence_means(value_T, mask_T, sample_T, num_samples), sample_T)
    elif span == "seq_max":
        value_T = spread(
            _sequence_max(value_T.abs() if metric == "k1" else value_T, mask_T, sample_T, num_samples), sample_T
        )
    # k1 is compared in logarithms, because e^x of the sum over a long sample may overflow.
    if metric != "k1":
        return mask_T & (value_T > high)
    lowest = math.log(low) if low > 0 else -math.inf
    return mask_T & ((value_T > math.log(high)) | (value_T < lowest))


def vetoed(delta_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int, *, threshold: float) -> Tensor:
    """Reject a whole sample when any of its tokens has a ratio pi / mu below the threshold (typically 1e-4 .. 1e-6).

    It catches tokens that the engine sampled and that are nearly impossible under the learner's policy: wrong
    tokenisation, mixed-up weights. Long responses are rejected more often. Source: Liu, Li et al. 2025.
    """
    impossible_T = mask_T & (delta_T < math.log(threshold))
    return mask_T & spread(_any(impossible_T, sample_T, num_samples), sample_T)


def opsm(
    log_probs_T: Tensor,
    rollout_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    *,
    threshold: float,
) -> Tensor:
    """Reject a sample of negative advantage when ``mean(log mu - log pi_theta) > threshold``: off-policy sequence
    masking.

    ``log_probs_T``: of the policy as it is now, so a sample may be rejected from a later minibatch on. Samples with an
    advantage >= 0 and on-policy samples are never rejected. Source: DeepSeek-V3.2 2512.02556, equation 9 (of the
    sampling probabilities).
    """
    gap_T = torch.where(mask_T, rollout_T - log_probs_T, 0.0)
    far_T = spread(sequence_means(gap_T, mask_T, sample_T, num_samples) > threshold, sample_T)
    return mask_T & far_T & (advantages_T < 0)


def second_moment_cut(squares_M: Tensor, limit: float) -> float:
    """Return the smallest ``delta^2`` to reject so that the mean of the others is below ``limit``; infinity if it is
    already.

    ``squares_M``: those of all trainable tokens of the update on all ranks. The largest are rejected first, equal ones
    together.
    Source: M2PO 2510.01161 (second-moment trust region; 0.04 there).
    """
    if not len(squares_M) or bool(squares_M.double().mean() < limit):
        return math.inf
    ordered_M = squares_M.double().sort().values
    means_M = running_sums(ordered_M) / torch.arange(1, len(ordered_M) + 1, device=ordered_M.device)
    kept = int((means_M < limit).sum())  # the means never fall
    return float(ordered_M[kept])


def beyond(delta_T: Tensor, mask_T: Tensor, cut: float) -> Tensor:
    """Reject tokens with a ``delta^2`` of at least ``cut`` (``second_moment_cut``)."""
    return mask_T & (delta_T.double().square() >= cut)


def harmful(delta_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return a mask of the tokens that the update moves further from mu: ``A delta > 0``.

    The others are pulled back towards mu, or have no gradient. Source: the M2PO authors' code, which counts and clips
    these alone.
    """
    return mask_T & (torch.where(mask_T, advantages_T * delta_T, 0.0) > 0)


def outside_band(delta_T: Tensor, mask_T: Tensor, *, low: float, high: float) -> Tensor:
    """Return a mask of the tokens with a ratio outside ``low .. high``; every token where both are 0."""
    if not high:
        return mask_T
    lowest = math.log(low) if low > 0 else -math.inf
    return mask_T & ((delta_T < lowest) | (delta_T > math.log(high)))


def binary_kl_outside(log_probs_T: Tensor, rollout_T: Tensor, mask_T: Tensor, *, limit: float) -> Tensor:
    """Reject tokens where the KL divergence between "this token or another" under pi and under mu exceeds the limit in
    either direction.

    ``KL(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q))``. Unlike a bound on the ratio it takes the token's
    probability into account.
    Source: KPop (Ring team, 2026), in AReaL with limit 2.
    """
    bounds = PROBABILITY_BOUND, 1 - PROBABILITY_BOUND
    # -1: any value with finite results, which the mask removes. float64, because float32 rounds 1 - 1e-8 to 1.
    p_T = torch.where(mask_T, log_probs_T, -1.0).double().exp().clamp(*bounds)
    q_T = torch.where(mask_T, rollout_T, -1.0).double().exp().clamp(*bounds)
    forth_T = p_T * (p_T / q_T).log() + (1 - p_T) * ((1 - p_T) / (1 - q_T)).log()
    back_T = q_T * (q_T / p_T).log() + (1 - q_T) * ((1 - q_T) / (1 - p_T)).log()
    return mask_T & (torch.maximum(forth_T, back_T) > limit)


def total_variation_outside(
    log_probs_T: Tensor, anchor_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, low: float, high: float
) -> Tensor:
    """Reject tokens whose probability the update has moved far enough: ``A > 0, p - q > high`` or ``A <= 0, p - q <
    -low``.

    This is a trust region in probability, not in ratio: 1e-4 -> 1e-3 is inside, .7 -> .95 is outside.
    Source: DPPO 2602.04879.
    """
    moved_T = torch.where(mask_T, log_probs_T, 0.0).exp() - torch.where(mask_T, anchor_T, 0.0).exp()
    return mask_T & torch.where(advantages_T > 0, moved_T > high, moved_T < -low)


def binary_kl_moved(
    log_probs_T: Tensor, anchor_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, low: float, high: float
) -> Tensor:
    """Reject tokens that the update has moved far enough: ``KL(q, p) > high`` with A > 0 and p > q, or ``> low`` with A
    <= 0 and p < q.

    KL of "this token or another", q of the anchor, in nats. Source: DPPO 2602.04879, the binary KL variant.
    """
    bounds = PROBABILITY_BOUND, 1 - PROBABILITY_BOUND
    # float64, because float32 rounds 1 - 1e-8 to 1; -1: any value with finite results, which the mask removes.
    p_T = torch.where(mask_T, log_probs_T.detach(), -1.0).double().exp().clamp(*bounds)
    q_T = torch.where(mask_T, anchor_T.detach(), -1.0).double().exp().clamp(*bounds)
    moved_T = q_T * (q_T / p_T).log() + (1 - q_T) * ((1 - q_T) / (1 - p_T)).log()
    return mask_T & torch.where(advantages_T > 0, (p_T > q_T) & (moved_T > high), (p_T < q_T) & (moved_T > low))


def _any(flag_T: Tensor, sample_T: Tensor, num_samples: int) -> Tensor:
    counts_N = torch.zeros(num_samples, dtype=torch.int64, device=flag_T.device).index_add(
        0, sample_T.clamp(min=0), flag_T.long()
    )
    return counts_N > 0


def _sequence_max(value_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int) -> Tensor:
    lowest_N = value_T.new_full((num_samples,), -math.inf)
    return lowest_N.scatter_reduce(0, sample_T.clamp(min=0), torch.where(mask_T, value_T, -math.inf), "amax")
