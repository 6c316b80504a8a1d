"""Policy losses per token. Pure functions of torch tensors; T = tokens of a packed row.

Built-in losses have the signature of users' own: ``(log_probs_T, anchor_T, tokens, config) -> PolicyLoss``.
``anchor_T``: log-probs of the policy that the new one is compared with, the proximal policy (three policies) or mu
itself (two). ``r = pi_theta / pi_anchor``. Every loss is exactly 0 with exactly 0 gradient where the mask is False, and
its value is a surrogate with the formula as its gradient (``-A r`` rather than ``-A log pi``), so that the first step
has loss ``-mean A``. ``aggregation`` divides it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tidemill.learner.algorithms.aggregation import sft_loss
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.correction import binary_kl_moved, total_variation_outside
from tidemill.learner.algorithms.tokens import (
    Tokens,
    given,
    log_ratio,
    prefix_sums,
    sequence_means,
    sequence_sums,
    spread,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Loss of every token, and the tokens at which the trust region has set the gradient of the advantage to 0."""

    loss_T: Tensor
    clipped_T: Tensor
    """True where the advantage has no gradient although it is not 0, but a penalty may; False where masked."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Values by name, [T]; a step reports their means as ``custom/NAME``. Every row has the same names."""


LossFunction = Callable[[Tensor, Tensor, Tokens, AlgorithmConfig], PolicyLoss]
"""``(log_probs_T, anchor_T, tokens, config)``: a policy loss, 0 with 0 gradient where masked."""


def _advantages(tokens: Tokens) -> Tensor:
    return torch.where(tokens.mask_T, tokens.advantages_T, 0.0)


def _score(log_probs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return 1 with the gradient of log pi_theta, [T]."""
    # The value 1 and not log pi: then the first step has loss -mean A with every loss.
    return log_ratio(log_probs_T, log_probs_T.detach(), mask_T).exp()


def _sequence_ratio(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens) -> Tensor:
    """Return the log of each token's sequence ratio, detached, [T]."""
    sums_M = sequence_sums(log_ratio(log_probs_T, anchor_T, tokens.mask_T), tokens.mask_T, *tokens.by_sequence).detach()
    return spread(sums_M, tokens.by_sequence[0])


def _weighted(weight_T: Tensor, log_probs_T: Tensor, tokens: Tokens) -> PolicyLoss:
    """Return the loss with the gradient ``-weight A grad log pi``; there is no trust region."""
    loss_T = -weight_T * _score(log_probs_T, tokens.mask_T) * _advantages(tokens)
    return _made(loss_T, torch.zeros_like(tokens.mask_T), tokens.mask_T)


def _made(loss_T: Tensor, clipped_T: Tensor, mask_T: Tensor) -> PolicyLoss:
    return PolicyLoss(loss_T=torch.where(mask_T, loss_T, 0.0), clipped_T=clipped_T & mask_T)


def reinforce(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """REINFORCE, ``-A grad log pi_theta``. With weights ``min(pi_theta / mu, C)`` it is token TIS or AIPO; without,
    wrong on old data.

    Sources: Williams 1992; with weights Yao et al. 2025 (TIS), LlamaRL 2505.24034 (AIPO).
    """
    advantages_T = _advantages(tokens)
    loss_T = -_score(log_probs_T, tokens.mask_T) * advantages_T
    return _made(loss_T, torch.zeros_like(tokens.mask_T), tokens.mask_T)


def ppo(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO, ``-min(r A, clip(r, 1 - low, 1 + high) A)``; with ``dual = c > 1`` at most ``-c A`` where A < 0.

    The gradient is 0 iff (A > 0 and r > 1 + high) or (A < 0 and r < 1 - low) or (dual, A < 0 and r > c), else ``-A r``.
    Sources: PPO, Schulman et al. 2017; asymmetric range, DAPO 2503.14476; dual clip, Ye et al. 2020.
    """
    return _clipped(log_ratio(log_probs_T, anchor_T.detach(), tokens.mask_T).exp(), tokens, config)


def _clipped(ratio_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    (low, high), dual, advantages_T = config.clip.bounds, config.clip.dual, _advantages(tokens)
    plain_T = ratio_T * advantages_T
    held_T = ratio_T.clamp(1 - low, 1 + high) * advantages_T
    loss_T, clipped_T = -torch.minimum(plain_T, held_T), held_T < plain_T
    if dual:
        over_T = (advantages_T < 0) & (ratio_T > dual)
        loss_T, clipped_T = torch.where(over_T, -dual * advantages_T, loss_T), clipped_T | over_T
    return _made(loss_T, clipped_T, tokens.mask_T)


def cispo(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """CISPO, ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi_theta``: the weight is clipped, and every token keeps
    its gradient.

    ``clip_low >= 1`` = no lower bound. There is no trust region: nothing limits how far the policy moves from its data.
    Source: CISPO, MiniMax-M1 2506.13585 (TRL's epsilon_high is the cap itself, here it is cap - 1).
    """
    low, high = config.clip.bounds
    # Ratios are positive, so a low of 1 or more bounds nothing.
    ratio_T = log_ratio(log_probs_T, anchor_T, tokens.mask_T).exp().clamp(max(0.0, 1 - low), 1 + high)
    return _weighted(ratio_T.detach(), log_probs_T, tokens)


def gspo(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """GSPO: PPO on the sequence ratio ``s = exp(mean_t log r_t)``, the same at every token of a sample.

    With ``seq_mean_token_mean`` the gradient is ``-A s / T`` at each token. The usual clip range of 3e-4 / 4e-4 is of
    the size of bfloat16 noise: against mu it clips nearly every sample, so anchor it at the proximal policy.
    Source: GSPO 2507.18071.
    """
    delta_T = log_ratio(log_probs_T, anchor_T.detach(), tokens.mask_T)
    means_T = spread(sequence_means(delta_T, tokens.mask_T, *tokens.by_sequence), tokens.by_sequence[0])
    return _clipped(torch.where(tokens.mask_T, means_T, 0.0).exp(), tokens, config)


def gspo_token(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """GSPO with token gradients, ``s_t = sg(s) pi_theta / sg(pi_theta)``: advantages may differ by token.

    It equals ``gspo`` for one advantage per sample, and PPO for a response of one token. Source: GSPO 2507.18071,
    section 4.3.
    """
    delta_T = log_ratio(log_probs_T, anchor_T, tokens.mask_T)
    means_T = spread(sequence_means(delta_T, tokens.mask_T, *tokens.by_sequence).detach(), tokens.by_sequence[0])
    # The ratio of the sequence is a constant: each token has the gradient of its own log-prob alone.
    ratio_T = torch.where(tokens.mask_T, means_T, 0.0).exp() * _score(log_probs_T, tokens.mask_T)
    return _clipped(ratio_T, tokens, config)


def topr(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """TOPR, ``-w A log pi``: w = 1 for A >= 0, and the detached *sequence* ratio clipped to 0 .. 1 for A < 0.

    The bound of 1 keeps updates from negative samples finite on data of any age; positive samples keep full weight, so
    the policy sharpens on old solutions. Source: TOPR 2503.14286 (others use the token ratio under this name).
    """
    ratio_T = _sequence_ratio(log_probs_T, anchor_T, tokens).clamp(max=0.0).exp()
    return _weighted(torch.where(_advantages(tokens) < 0, ratio_T, 1.0), log_probs_T, tokens)


def sapo(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """SAPO, ``-f(r) A`` with the soft gate ``f(r) = 4 / tau sigmoid(tau (r - 1))``: slope 1 at r = 1, fading smoothly
    on both sides.

    ``tau`` is tau_positive where A > 0, else tau_negative. Do not combine it with importance weights, because the gate
    is one.
    Source: SAPO 2511.20347.
    """
    ratio_T = log_ratio(log_probs_T, anchor_T.detach(), tokens.mask_T).exp()
    advantages_T = _advantages(tokens)
    tau_T = torch.where(advantages_T > 0, ratio_T.new_tensor(config.sapo.tau_positive), config.sapo.tau_negative)
    loss_T = -4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1)) * advantages_T
    return _made(loss_T, torch.zeros_like(tokens.mask_T), tokens.mask_T)


def dppo_tv(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """DPPO, ``-A r`` inside a trust region of total variation (``total_variation_outside``), plus ``penalty * (log
    r)^2`` at every token.

    With ``cap`` >= 1 the gradient is ``-A min(r, cap)``. Sources: DPPO 2602.04879; the penalty (1e-3) is that of
    prime-rl, the cap verl's.
    """
    (low, high), place = config.clip.bounds, (_advantages(tokens), tokens.mask_T)
    out_T = total_variation_outside(log_probs_T, anchor_T, *place, low=low, high=high)
    return _inside(out_T, log_probs_T, anchor_T, tokens, config)


def dppo_kl(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """DPPO with the binary KL as the distance (``binary_kl_moved``), else ``dppo_tv``. Source: DPPO 2602.04879."""
    (low, high), place = config.clip.bounds, (_advantages(tokens), tokens.mask_T)
    out_T = binary_kl_moved(log_probs_T, anchor_T, *place, low=low, high=high)
    return _inside(out_T, log_probs_T, anchor_T, tokens, config)


def ipo(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """IPO, ``-A r`` while the probability of the token is ``q - low .. q + high``, whatever the sign of A; else
    ``dppo_tv``.

    Tokens that the gradient would bring back have none either. Source: prime-rl's loss of this name (0.1 on both
    sides).
    """
    (low, high), mask_T = config.clip.bounds, tokens.mask_T
    moved_T = torch.where(mask_T, log_probs_T.detach(), 0.0).exp() - torch.where(mask_T, anchor_T, 0.0).exp()
    out_T = mask_T & ((moved_T > high) | (moved_T < -low))
    return _inside(out_T, log_probs_T, anchor_T, tokens, config)


def _inside(
    out_T: Tensor, log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig
) -> PolicyLoss:
    """Return ``-A r`` (with a cap: ``-A sg(min(r, cap)) log pi``) outside of ``out_T``, and the penalty everywhere."""
    advantages_T, cap = _advantages(tokens), config.dppo.ratio_cap
    delta_T = log_ratio(log_probs_T, anchor_T.detach(), tokens.mask_T)
    ratio_T = delta_T.exp()
    if cap:
        ratio_T = ratio_T.detach().clamp(max=cap) * _score(log_probs_T, tokens.mask_T)
    penalty_T = (config.dppo.penalty or 0.0) * delta_T.square()
    loss_T = torch.where(out_T, 0.0, -ratio_T * advantages_T) + penalty_T
    return _made(loss_T, out_T & (advantages_T != 0), tokens.mask_T)


def gmpo(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """GMPO, ``-s A`` with the geometric mean s of the *clipped* token ratios, the same at every token of a sample.

    A log-ratio counts as ``min(log r, high)`` where A > 0, and as ``max(log r, -low)`` where A < 0 (nats): a single
    token cannot carry the mean, and has no gradient beyond its bound. Without bounds that bind it equals ``gspo``
    without a clip.
    Source: GMPO 2507.20673 (0.4 on both sides).
    """
    (low, high), advantages_T = config.clip.bounds, _advantages(tokens)
    delta_T = log_ratio(log_probs_T, anchor_T.detach(), tokens.mask_T)
    over_T = ((advantages_T > 0) & (delta_T > high)) | ((advantages_T < 0) & (delta_T < -low))
    # A token beyond its bound has no gradient, and still counts in the mean of its sequence.
    held_T = torch.where(over_T, delta_T.detach().clamp(-low, high), delta_T)
    ratio_T = spread(sequence_means(held_T, tokens.mask_T, *tokens.by_sequence), tokens.by_sequence[0]).exp()
    return _made(-ratio_T * advantages_T, over_T, tokens.mask_T)


def dro(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """DRO, ``-sg(A - tau log R) log pi`` with the sequence ratio R: the gradient of ``(A - tau log R)^2 / (2 tau)`` of
    a response.

    It has no importance weight: for data of any age the loss is least where ``log R = A / tau``. The baseline of the
    advantages stands in for the value function of the paper, and the anchor for its reference policy. Source: DRO
    2405.19107.
    """
    residual_T = _advantages(tokens) - config.dro.tau * _sequence_ratio(log_probs_T, anchor_T, tokens)
    loss_T = -residual_T * _score(log_probs_T, tokens.mask_T)
    return _made(loss_T, torch.zeros_like(tokens.mask_T), tokens.mask_T)


VESPO_POSITIVE, VESPO_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
"""(k, lambda) of VESPO by the sign of the advantage. Source: VESPO 2602.10693."""


def vespo(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """VESPO, ``-sg(phi(W)) A log pi``: sequence ratio W, ``phi(W) = W^k e^(lambda (1 - W))``, so phi(1) = 1 with the
    maximum at k / lambda.

    ``positive`` and ``negative`` are (k, lambda) by the sign of A. Source: VESPO 2602.10693.
    """
    # e^50 is finite in float32, and phi is all but 0 at either bound.
    log_w_T = _sequence_ratio(log_probs_T, anchor_T, tokens).clamp(-50.0, 50.0)
    is_positive_T = _advantages(tokens) > 0
    k_T = torch.where(is_positive_T, log_w_T.new_tensor(VESPO_POSITIVE[0]), VESPO_NEGATIVE[0])
    lambda_T = torch.where(is_positive_T, log_w_T.new_tensor(VESPO_POSITIVE[1]), VESPO_NEGATIVE[1])
    return _weighted((k_T * log_w_T + lambda_T * (1 - log_w_T.exp())).exp(), log_probs_T, tokens)


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
    """Return the least of the ``share`` largest values (at least one); -infinity for none. Equal ones go together."""
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


def covariance_cut(
    rows: Sequence[Tokens],
    config: AlgorithmConfig,
    *,
    summed: Callable[[Tensor], Tensor],
    gathered: Callable[[Tensor], Tensor],
) -> CovarianceCut:
    """Return the choice of kl_cov (the largest covariances), or of clip_cov (a draw within bounds). Collective."""
    kept = [(given(row.old_T)[row.mask_T].double(), row.advantages_T[row.mask_T].double()) for row in rows]
    parts = [
        torch.stack([row.mask_T.sum().double(), advantages_M.sum(), log_probs_M.sum()])
        for row, (log_probs_M, advantages_M) in zip(rows, kept, strict=True)
    ]
    number, *totals = summed(torch.stack(parts).sum(0)).unbind()
    means, settings = torch.stack(totals) / number.clamp(min=1), config.covariance
    if config.loss == "kl_cov":
        values_M = torch.cat([covariances(row, means)[row.mask_T] for row in rows])
        lowest = top_cut(gathered(values_M), settings.share)
        return CovarianceCut(means=means, low=math.nextafter(lowest, -math.inf), high=math.inf, last_draw=math.inf)
    cut = CovarianceCut(means=means, low=settings.low, high=settings.high, last_draw=math.inf)
    drawn_M = torch.cat([_draws(row)[chosen(row, cut)] for row in rows])
    return replace(cut, last_draw=last_draw(gathered(drawn_M), max(1, int(settings.share * float(number)))))


def covariances(tokens: Tokens, means: Tensor) -> Tensor:
    """Return ``(A - mean A) (log pi - mean log pi)`` before the update, float64 [T]; 0 where masked.

    Tokens with a large value make the entropy fall most. Source: Cui et al. 2025 (2505.22617), in verl ``clip_cov`` and
    ``kl_cov``.
    """
    advantages_T = _advantages(tokens).double() - means[0]
    log_probs_T = torch.where(tokens.mask_T, given(tokens.old_T), 0.0).double() - means[1]
    return torch.where(tokens.mask_T, advantages_T * log_probs_T, 0.0)


def chosen(tokens: Tokens, cut: CovarianceCut) -> Tensor:
    """Return a mask of the tokens that the cut chooses."""
    value_T = covariances(tokens, cut.means)
    return tokens.mask_T & (value_T > cut.low) & (value_T < cut.high) & (_draws(tokens) <= cut.last_draw)


def _draws(tokens: Tokens) -> Tensor:
    return draws(tokens.rollout_T, tokens.mask_T, *tokens.by_sequence)


def clip_cov(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """Clip-Cov: PPO, without the gradient of the chosen tokens (None = none): a share drawn from those of large
    covariance.

    Source: Cui et al. 2025 (2505.22617); 2e-4 of the tokens, of covariances 1 .. 5, as in verl. verl does not draw
    tokens that PPO clips already; here it may.
    """
    loss, chosen_T = ppo(log_probs_T, anchor_T, tokens, config), tokens.chosen_T
    if chosen_T is None:
        return loss
    clipped_T = loss.clipped_T | (chosen_T & (tokens.advantages_T != 0))
    return replace(loss, loss_T=torch.where(chosen_T, 0.0, loss.loss_T), clipped_T=clipped_T)


def kl_cov(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """KL-Cov, ``-A r``, plus ``coef |log r|`` at the chosen tokens (None = none): those of the largest covariance.

    There is no trust region elsewhere. Where policy and anchor are equal the penalty has no gradient.
    Source: Cui et al. 2025 (2505.22617); the form of the penalty is verl's.
    """
    delta_T = log_ratio(log_probs_T, anchor_T.detach(), tokens.mask_T)
    loss_T = -delta_T.exp() * _advantages(tokens)
    if tokens.chosen_T is not None:
        loss_T = loss_T + torch.where(tokens.chosen_T, config.covariance.kl_coef * delta_T.abs(), 0.0)
    return _made(loss_T, torch.zeros_like(tokens.mask_T), tokens.mask_T)


def sft(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """Cross-entropy of every token."""
    return PolicyLoss(loss_T=sft_loss(log_probs_T, tokens.mask_T), clipped_T=torch.zeros_like(tokens.mask_T))


LOSS_FUNCTIONS: Mapping[str, LossFunction] = {
    "ppo": ppo,
    "clip_cov": clip_cov,
    "cispo": cispo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "ipo": ipo,
    "kl_cov": kl_cov,
    "topr": topr,
    "sapo": sapo,
    "vespo": vespo,
    "dro": dro,
    "reinforce": reinforce,
    "sft": sft,
}
"""Built-in losses by the name in ``AlgorithmConfig.loss``."""
