"""Policy losses per token. Pure functions of torch tensors; T = tokens of a packed row, N = samples of the step.

``anchor_T``: log-probs of the policy that the new one is compared with, the proximal policy (three policies) or mu
itself (two). ``r = pi_theta / pi_anchor``. Every loss is exactly 0 with exactly 0 gradient where the mask is False, and
its value is a surrogate with the formula as its gradient (``-A r`` rather than ``-A log pi``), so that the first step
has loss ``-mean A``. ``aggregation`` divides it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tidemill.learner.algorithms.ratios import log_ratio, prefix_sums, sequence_means, sequence_sums, spread
from tidemill.learner.algorithms.rejection import binary_kl_moved, total_variation_outside


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Loss of every token, and the tokens at which the trust region has set the gradient of the advantage to 0."""

    loss_T: Tensor
    clipped_T: Tensor
    """True where the advantage has no gradient although it is not 0, but a penalty may; False where masked."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Values by name, [T] each, of which the step reports the mean over the trainable tokens as ``custom/NAME``; the
    same names in every row.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Trust region of a ratio: 1 - low .. 1 + high."""

    low: float
    high: float
    dual: float = 0.0
    """Bound of the ratio where the advantage is negative, > 1; 0 = none."""


def _score(log_probs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return 1 with the gradient of log pi_theta, [T]."""
    return log_ratio(log_probs_T, log_probs_T.detach(), mask_T).exp()


def _nowhere(mask_T: Tensor) -> Tensor:
    return torch.zeros_like(mask_T)


def _made(loss_T: Tensor, clipped_T: Tensor, mask_T: Tensor) -> PolicyLoss:
    return PolicyLoss(loss_T=torch.where(mask_T, loss_T, 0.0), clipped_T=clipped_T & mask_T)


def reinforce(log_probs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> PolicyLoss:
    """REINFORCE, ``-A grad log pi_theta``. With weights ``min(pi_theta / mu, C)`` it is token TIS or AIPO; without,
    wrong on old data.

    Sources: Williams 1992; with weights Yao et al. 2025 (TIS), LlamaRL 2505.24034 (AIPO).
    """
    advantages_T = torch.where(mask_T, advantages_T, 0.0)
    return _made(-_score(log_probs_T, mask_T) * advantages_T, _nowhere(mask_T), mask_T)


def ppo(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    clip: Clip,
) -> PolicyLoss:
    """PPO, ``-min(r A, clip(r, 1 - low, 1 + high) A)``; with ``dual = c > 1`` at most ``-c A`` where A < 0.

    The gradient is 0 iff (A > 0 and r > 1 + high) or (A < 0 and r < 1 - low) or (dual, A < 0 and r > c), else ``-A r``.
    Sources: PPO, Schulman et al. 2017; asymmetric range, DAPO 2503.14476; dual clip, Ye et al. 2020.
    """
    ratio_T = log_ratio(log_probs_T, anchor_T.detach(), mask_T).exp()
    return _clipped(ratio_T, torch.where(mask_T, advantages_T, 0.0), mask_T, clip)


def _clipped(ratio_T: Tensor, advantages_T: Tensor, mask_T: Tensor, clip: Clip) -> PolicyLoss:
    plain_T = ratio_T * advantages_T
    held_T = ratio_T.clamp(1 - clip.low, 1 + clip.high) * advantages_T
    loss_T, clipped_T = -torch.minimum(plain_T, held_T), held_T < plain_T
    if clip.dual:
        over_T = (advantages_T < 0) & (ratio_T > clip.dual)
        loss_T, clipped_T = torch.where(over_T, -clip.dual * advantages_T, loss_T), clipped_T | over_T
    return _made(loss_T, clipped_T, mask_T)


def cispo(
    log_probs_T: Tensor, anchor_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """CISPO, ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi_theta``: the weight is clipped, and every token keeps
    its gradient.

    ``clip_low >= 1`` = no lower bound. There is no trust region: nothing limits how far the policy moves from its data.
    Source: CISPO, MiniMax-M1 2506.13585 (TRL's epsilon_high is the cap itself, here it is cap - 1).
    """
    ratio_T = log_ratio(log_probs_T, anchor_T, mask_T).exp().clamp(max(0.0, 1 - clip_low), 1 + clip_high)
    advantages_T = torch.where(mask_T, advantages_T, 0.0)
    return _made(-ratio_T.detach() * _score(log_probs_T, mask_T) * advantages_T, _nowhere(mask_T), mask_T)


def gspo(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    *,
    clip: Clip,
) -> PolicyLoss:
    """GSPO: PPO on the sequence ratio ``s = exp(mean_t log r_t)``, the same at every token of a sample.

    With ``seq_mean_token_mean`` the gradient is ``-A s / T`` at each token. The usual clip range of 3e-4 / 4e-4 is of
    the size of bfloat16
    noise: against mu it clips nearly every sample, so anchor it at the proximal policy. Source: GSPO 2507.18071.
    """
    mean_N = sequence_means(log_ratio(log_probs_T, anchor_T.detach(), mask_T), mask_T, sample_T, num_samples)
    ratio_T = torch.where(mask_T, spread(mean_N, sample_T), 0.0).exp()
    return _clipped(ratio_T, torch.where(mask_T, advantages_T, 0.0), mask_T, clip)


def gspo_token(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    *,
    clip: Clip,
) -> PolicyLoss:
    """GSPO with token gradients, ``s_t = sg(s) pi_theta / sg(pi_theta)``: advantages may differ by token.

    It equals ``gspo`` for one advantage per sample, and PPO for a response of one token. Source: GSPO 2507.18071,
    section 4.3.
    """
    means_N = sequence_means(log_ratio(log_probs_T, anchor_T, mask_T), mask_T, sample_T, num_samples).detach()
    ratio_T = torch.where(mask_T, spread(means_N, sample_T), 0.0).exp() * _score(log_probs_T, mask_T)
    return _clipped(ratio_T, torch.where(mask_T, advantages_T, 0.0), mask_T, clip)


def topr(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
) -> PolicyLoss:
    """TOPR, ``-w A log pi``: w = 1 for A >= 0, and the detached *sequence* ratio clipped to 0 .. 1 for A < 0.

    The bound of 1 keeps updates from negative samples finite on data of any age; positive samples keep full weight, so
    the policy sharpens on old solutions. Source: TOPR 2503.14286 (others use the token ratio under this name).
    """
    sums_N = sequence_sums(log_ratio(log_probs_T, anchor_T, mask_T), mask_T, sample_T, num_samples).detach()
    ratio_T = spread(sums_N, sample_T).clamp(max=0.0).exp()
    advantages_T = torch.where(mask_T, advantages_T, 0.0)
    weight_T = torch.where(advantages_T < 0, ratio_T, 1.0)
    return _made(-weight_T * _score(log_probs_T, mask_T) * advantages_T, _nowhere(mask_T), mask_T)


def sapo(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
) -> PolicyLoss:
    """SAPO, ``-f(r) A`` with the soft gate ``f(r) = 4 / tau sigmoid(tau (r - 1))``: slope 1 at r = 1, fading smoothly
    on both sides.

    ``tau`` is tau_positive where A > 0, else tau_negative. Do not combine it with importance weights, because the gate
    is one.
    Source: SAPO 2511.20347.
    """
    ratio_T = log_ratio(log_probs_T, anchor_T.detach(), mask_T).exp()
    advantages_T = torch.where(mask_T, advantages_T, 0.0)
    tau_T = torch.where(advantages_T > 0, ratio_T.new_tensor(tau_positive), tau_negative)
    return _made(-4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1)) * advantages_T, _nowhere(mask_T), mask_T)


def dppo_tv(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    low: float,
    high: float,
    penalty: float = 0.0,
    cap: float = 0.0,
) -> PolicyLoss:
    """DPPO, ``-A r`` inside a trust region of total variation (``total_variation_outside``), plus ``penalty * (log
    r)^2`` at every token.

    With ``cap`` >= 1 the gradient is ``-A min(r, cap)``. Sources: DPPO 2602.04879; the penalty (1e-3) is that of
    prime-rl, the cap verl's.
    """
    advantages_T = torch.where(mask_T, advantages_T, 0.0)
    out_T = total_variation_outside(log_probs_T, anchor_T, advantages_T, mask_T, low=low, high=high)
    return _inside(log_probs_T, anchor_T, advantages_T, mask_T, out_T, penalty=penalty, cap=cap)


def dppo_kl(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    low: float,
    high: float,
    penalty: float = 0.0,
    cap: float = 0.0,
) -> PolicyLoss:
    """DPPO with the binary KL divergence as the distance (``binary_kl_moved``), else ``dppo_tv``. Source: DPPO
    2602.04879.
    """
    advantages_T = torch.where(mask_T, advantages_T, 0.0)
    out_T = binary_kl_moved(log_probs_T, anchor_T, advantages_T, mask_T, low=low, high=high)
    return _inside(log_probs_T, anchor_T, advantages_T, mask_T, out_T, penalty=penalty, cap=cap)


def ipo(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    low: float,
    high: float,
    penalty: float = 0.0,
    cap: float = 0.0,
) -> PolicyLoss:
    """IPO, ``-A r`` while the probability of the token is ``q - low .. q + high``, whatever the sign of A; else
    ``dppo_tv``.

    Tokens that the gradient would bring back have none either. Source: prime-rl's loss of this name (0.1 on both
    sides).
    """
    advantages_T = torch.where(mask_T, advantages_T, 0.0)
    moved_T = torch.where(mask_T, log_probs_T.detach(), 0.0).exp() - torch.where(mask_T, anchor_T, 0.0).exp()
    out_T = mask_T & ((moved_T > high) | (moved_T < -low))
    return _inside(log_probs_T, anchor_T, advantages_T, mask_T, out_T, penalty=penalty, cap=cap)


def _inside(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    out_T: Tensor,
    *,
    penalty: float,
    cap: float,
) -> PolicyLoss:
    """Return ``-A r`` (with a cap: ``-A sg(min(r, cap)) log pi``) where ``out_T`` is False, plus the penalty
    everywhere.
    """
    delta_T = log_ratio(log_probs_T, anchor_T.detach(), mask_T)
    ratio_T = delta_T.exp()
    if cap:
        ratio_T = ratio_T.detach().clamp(max=cap) * _score(log_probs_T, mask_T)
    return _made(
        torch.where(out_T, 0.0, -ratio_T * advantages_T) + penalty * delta_T.square(),
        out_T & (advantages_T != 0),
        mask_T,
    )


def gmpo(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    *,
    low: float,
    high: float,
) -> PolicyLoss:
    """GMPO, ``-s A`` with the geometric mean s of the *clipped* token ratios, the same at every token of a sample.

    A log-ratio counts as ``min(log r, high)`` where A > 0, and as ``max(log r, -low)`` where A < 0 (nats): a single
    token cannot carry the mean, and has no gradient beyond its bound. Without bounds that bind it equals ``gspo``
    without a clip.
    Source: GMPO 2507.20673 (0.4 on both sides).
    """
    advantages_T = torch.where(mask_T, advantages_T, 0.0)
    delta_T = log_ratio(log_probs_T, anchor_T.detach(), mask_T)
    over_T = ((advantages_T > 0) & (delta_T > high)) | ((advantages_T < 0) & (delta_T < -low))
    held_T = torch.where(over_T, delta_T.detach().clamp(-low, high), delta_T)
    ratio_T = spread(sequence_means(held_T, mask_T, sample_T, num_samples), sample_T).exp()
    return _made(-ratio_T * advantages_T, over_T, mask_T)


def dro(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    *,
    tau: float,
) -> PolicyLoss:
    """DRO, ``-sg(A - tau log R) log pi`` with the sequence ratio R: the gradient of ``(A - tau log R)^2 / (2 tau)`` of
    a response.

    It has no importance weight: for data of any age the loss is least where ``log R = A / tau``. The baseline of the
    advantages stands in for the value function of the paper, and the anchor for its reference policy. Source: DRO
    2405.19107.
    """
    sums_N = sequence_sums(log_ratio(log_probs_T, anchor_T, mask_T), mask_T, sample_T, num_samples).detach()
    advantages_T = torch.where(mask_T, advantages_T, 0.0)
    return _made(
        -(advantages_T - tau * spread(sums_N, sample_T)) * _score(log_probs_T, mask_T), _nowhere(mask_T), mask_T
    )


def vespo(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> PolicyLoss:
    """VESPO, ``-sg(phi(W)) A log pi``: sequence ratio W, ``phi(W) = W^k e^(lambda (1 - W))``, so phi(1) = 1 with the
    maximum at k / lambda.

    ``positive`` and ``negative`` are (k, lambda) by the sign of A. Source: VESPO 2602.10693.
    """
    log_w_N = sequence_sums(log_ratio(log_probs_T, anchor_T, mask_T), mask_T, sample_T, num_samples).detach()
    # e^50 is finite in float32, and phi is all but 0 at either bound.
    log_w_T = spread(log_w_N, sample_T).clamp(-50.0, 50.0)
    advantages_T = torch.where(mask_T, advantages_T, 0.0)
    k_T = torch.where(advantages_T > 0, log_w_T.new_tensor(positive[0]), negative[0])
    lambda_T = torch.where(advantages_T > 0, log_w_T.new_tensor(positive[1]), negative[1])
    weight_T = (k_T * log_w_T + lambda_T * (1 - log_w_T.exp())).exp()
    return _made(-weight_T * _score(log_probs_T, mask_T) * advantages_T, _nowhere(mask_T), mask_T)


def gepo_ratio(log_probs_T: Tensor, anchor_T: Tensor, mask_T: Tensor, sample_T: Tensor, groups_N: Tensor) -> Tensor:
    """Return the group-expectation weight ``p_i / (sum_j q_j^2 / sum_j q_j)``, [N], with length-normalised ``p, q =
    exp(mean log prob)``.

    The sums are over the samples of i's group, which must all be in this row (an absent sample has no tokens and is
    left out). For equal q, and in a group of one, the weight is p / q. Source: GEPO 2508.17850.
    """
    num_samples = len(groups_N)
    p_N = sequence_means(torch.where(mask_T, log_probs_T, 0.0), mask_T, sample_T, num_samples).exp()
    q_N = sequence_means(torch.where(mask_T, anchor_T.detach(), 0.0), mask_T, sample_T, num_samples).exp()
    # An absent sample has a mean log-prob of 0, and so would count with q = 1.
    there_N = sequence_sums(torch.ones_like(log_probs_T), mask_T, sample_T, num_samples) > 0
    q_N = torch.where(there_N, q_N, 0.0)
    _, place_N = torch.unique(groups_N, return_inverse=True)
    zeros_G = q_N.new_zeros(int(place_N.max()) + 1 if len(place_N) else 0)
    sums_G, squares_G = zeros_G.index_add(0, place_N, q_N), zeros_G.index_add(0, place_N, q_N.square())
    expected_N = (squares_G / torch.where(sums_G > 0, sums_G, math.inf))[place_N]
    return torch.where(there_N, p_N / torch.where(there_N, expected_N, 1.0), 1.0)


def loglinear_proximal(log_probs_T: Tensor, rollout_T: Tensor, mask_T: Tensor, lag_T: Tensor) -> Tensor:
    """Return log-probs of an interpolated proximal policy, without a forward pass: ``log mu + alpha (log pi_theta - log
    mu)``, detached.

    ``alpha = lag / (lag + 1)`` per token, where lag counts updates between the version that sampled the token and the
    policy that the step starts from: fresh tokens have the proximal policy mu, old ones nearly pi_theta. It needs exact
    per-token versions.
    Source: A-3PO 2512.06547 (lag is counted there to the policy after the update, one more than here).
    """
    lag_T = lag_T.clamp(min=0).to(log_probs_T.dtype)
    base_T = torch.where(mask_T, rollout_T, 0.0)
    return base_T + lag_T / (lag_T + 1) * (torch.where(mask_T, log_probs_T.detach(), 0.0) - base_T)


def top_cut(values_M: Tensor, share: float) -> float:
    """Return the smallest of the ``share`` largest values, at least of one; -infinity if there are none. Equal values
    go together.
    """
    if not len(values_M):
        return -math.inf
    num_chosen = max(1, int(share * len(values_M)))
    return float(values_M.double().sort(descending=True).values[num_chosen - 1])


def low_entropy(entropy_T: Tensor, mask_T: Tensor, floor: float) -> Tensor:
    """Return a mask of the trainable tokens with an entropy below ``floor``: the update leaves them out.

    Source: Wang et al. 2025 (2506.01939), the top 20 %; the denominators do not change, as there and in TRL
    (``top_entropy_quantile``).
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

    Tokens with a large value make the entropy fall most. Source: Cui et al. 2025 (2505.22617), in verl ``clip_cov`` and
    ``kl_cov``.
    """
    advantages_T = torch.where(mask_T, advantages_T, 0.0).double() - means[0]
    return torch.where(mask_T, advantages_T * (torch.where(mask_T, log_probs_T, 0.0).double() - means[1]), 0.0)


def draws(rollout_T: Tensor, mask_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Return a number of 0 .. 1 for every token, float64 [T], that only its data determine: a hash of its sequence,
    place and log mu.

    A random generator would draw other tokens on another split over rows and ranks, and when a recorded step is
    executed again.
    """
    place_T = prefix_sums(torch.ones_like(rollout_T, dtype=torch.float64), mask_T, sequence_T, num_sequences).long()
    mixed_T = sequence_T.long() * 0x2545F4914F6CDD1D + place_T * 0x1B873593CC9E2D51
    mixed_T = (
        mixed_T + torch.where(mask_T, rollout_T, 0.0).float().contiguous().view(torch.int32).long() * 0x5851F42D4C957F2D
    )
    for _ in range(2):  # one round leaves neighbours of one sequence in order
        mixed_T = (mixed_T ^ (mixed_T >> 31)) * 0x369DEA0F31A53F85
    return ((mixed_T >> 11) & (2**52 - 1)).double() / 2**52


def last_draw(draws_M: Tensor, num_drawn: int) -> float:
    """Return the largest of the ``wanted`` smallest draws; infinity if there are no more than that."""
    return math.inf if len(draws_M) <= num_drawn else float(draws_M.sort().values[num_drawn - 1])


def chosen(covariance_T: Tensor, draws_T: Tensor, mask_T: Tensor, cut: CovarianceCut) -> Tensor:
    """Return a mask of the tokens that the cut chooses."""
    return mask_T & (covariance_T > cut.low) & (covariance_T < cut.high) & (draws_T <= cut.last_draw)


def clip_cov(
    log_probs_T: Tensor, anchor_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, clip: Clip, chosen_T: Tensor | None
) -> PolicyLoss:
    """Clip-Cov: PPO, without the gradient of the chosen tokens (None = none): a share drawn from those of large
    covariance.

    Source: Cui et al. 2025 (2505.22617); 2e-4 of the tokens, of covariances 1 .. 5, as in verl. verl does not draw
    tokens that PPO clips already; here it may.
    """
    loss = ppo(log_probs_T, anchor_T, advantages_T, mask_T, clip=clip)
    if chosen_T is None:
        return loss
    return PolicyLoss(
        loss_T=torch.where(chosen_T, 0.0, loss.loss_T), clipped_T=loss.clipped_T | (chosen_T & (advantages_T != 0))
    )


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
