"""Choice of tokens by entropy or covariance over all tokens of an update: top-entropy tokens, Clip-Cov, KL-Cov.

Pure functions; T = tokens of a packed row, N = samples of the step, M = trainable tokens of the update on all ranks. A choice depends on
all tokens of the update, so it is made from the log-probs and entropies of the policy that the update starts from, through sums and values
that the caller collects over rows and ranks. The sources choose within one micro-batch, at the log-probs of the moment: the same for an
update of one micro-batch on fresh data.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.learner.algorithms.policy_losses import Clip, PolicyLoss, ppo
from tidemill.learner.algorithms.ratios import log_ratio, prefix_sums


def top_cut(values_M: Tensor, share: float) -> float:
    """Return the smallest of the ``share`` largest values, at least of one; -infinity if there are none. Equal values go together."""
    if not len(values_M):
        return -math.inf
    wanted = max(1, int(share * len(values_M)))
    return float(values_M.double().sort(descending=True).values[wanted - 1])


def low_entropy(entropy_T: Tensor, mask_T: Tensor, floor: float) -> Tensor:
    """Return a mask of the trainable tokens with an entropy below ``floor``: the update leaves them out.

    Source: Wang et al. 2025 (2506.01939), the top 20 %; the denominators do not change, as there and in TRL (``top_entropy_quantile``).
    """
    return mask_T & (entropy_T.double() < floor)


# ---- covariance


@dataclass(frozen=True, slots=True, kw_only=True)
class CovarianceCut:
    """Values over the whole update that choose tokens by covariance."""

    means: Tensor
    """(mean advantage, mean log-prob), float64 [2]."""
    low: float
    """Tokens with a covariance above ``low`` and below ``high`` are candidates."""
    high: float
    last_draw: float
    """Candidates with a draw above it are not chosen."""


def covariance_sums(log_probs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return (number, sum of advantages, sum of log-probs) of the trainable tokens, float64 [3]."""
    return torch.stack([mask_T.sum().double(), advantages_T[mask_T].double().sum(), log_probs_T[mask_T].double().sum()])


def covariances(log_probs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, means: Tensor) -> Tensor:
    """Return ``(A - mean A) (log pi - mean log pi)``, float64 [T]; 0 where masked.

    Tokens with a large value make the entropy fall most. Source: Cui et al. 2025 (2505.22617), in verl ``clip_cov`` and ``kl_cov``.
    """
    advantages_T = torch.where(mask_T, advantages_T, 0.0).double() - means[0]
    return torch.where(mask_T, advantages_T * (torch.where(mask_T, log_probs_T, 0.0).double() - means[1]), 0.0)


def draws(rollout_T: Tensor, mask_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Return a number of 0 .. 1 for every token, float64 [T], that only its data determine: a hash of its sequence, place and log mu.

    A random generator would draw other tokens on another split over rows and ranks, and when a recorded step is executed again.
    """
    place_T = prefix_sums(torch.ones_like(rollout_T, dtype=torch.float64), mask_T, sequence_T, num_sequences).long()
    mixed_T = sequence_T.long() * 0x2545F4914F6CDD1D + place_T * 0x1B873593CC9E2D51
    mixed_T = mixed_T + torch.where(mask_T, rollout_T, 0.0).float().contiguous().view(torch.int32).long() * 0x5851F42D4C957F2D
    for _ in range(2):  # one round leaves neighbours of one sequence in order
        mixed_T = (mixed_T ^ (mixed_T >> 31)) * 0x369DEA0F31A53F85
    return ((mixed_T >> 11) & (2**52 - 1)).double() / 2**52


def last_draw(draws_M: Tensor, wanted: int) -> float:
    """Return the largest of the ``wanted`` smallest draws; infinity if there are no more than that."""
    return math.inf if len(draws_M) <= wanted else float(draws_M.sort().values[wanted - 1])


def chosen(covariance_T: Tensor, draws_T: Tensor, mask_T: Tensor, cut: CovarianceCut) -> Tensor:
    """Return a mask of the tokens that the cut chooses."""
    return mask_T & (covariance_T > cut.low) & (covariance_T < cut.high) & (draws_T <= cut.last_draw)


def clip_cov(
    log_probs_T: Tensor, anchor_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, clip: Clip, chosen_T: Tensor | None
) -> PolicyLoss:
    """Clip-Cov: PPO, without the gradient of the chosen tokens (None = none): a share drawn from those of large covariance.

    Source: Cui et al. 2025 (2505.22617); 2e-4 of the tokens, of covariances 1 .. 5, as in verl. verl does not draw tokens that PPO clips
    already; here it may.
    """
    made = ppo(log_probs_T, anchor_T, advantages_T, mask_T, clip=clip)
    if chosen_T is None:
        return made
    return PolicyLoss(loss_T=torch.where(chosen_T, 0.0, made.loss_T), clipped_T=made.clipped_T | (chosen_T & (advantages_T != 0)))


def kl_cov(
    log_probs_T: Tensor, anchor_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, coef: float, chosen_T: Tensor | None
) -> PolicyLoss:
    """KL-Cov, ``-A r``, plus ``coef |log r|`` at the chosen tokens (None = none): those of the largest covariance.

    There is no trust region elsewhere. Where policy and anchor are equal the penalty has no gradient.
    Source: Cui et al. 2025 (2505.22617); the form of the penalty is verl's.
    """
    delta_T = log_ratio(log_probs_T, anchor_T.detach(), mask_T)
    loss_T = -delta_T.exp() * torch.where(mask_T, advantages_T, 0.0)
    if chosen_T is not None:
        loss_T = loss_T + torch.where(chosen_T, coef * delta_T.abs(), 0.0)
    return PolicyLoss(loss_T=torch.where(mask_T, loss_T, 0.0), clipped_T=torch.zeros_like(mask_T))
