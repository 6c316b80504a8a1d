"""Divergence from a reference policy, estimated at the sampled tokens, and the adaptive coefficient that keeps it at a
target.

Pure functions; T = tokens of a packed row, all [T]. ``x = log pi_theta - log pi_ref`` (nats) of the sampled token,
clamped to +-20. Means are over the next token of a prefix in the data, which is fixed: no gradient passes through the
prefix. grad is the gradient in pi_theta.

    estimator    value             mean under pi    mean gradient as a loss, pi     mean gradient corrected, mu
    k1           x                 KL(pi||ref)      0: no loss, for the reward      grad KL(pi||ref)
    k2           x^2 / 2           KL + O(x^3)      grad KL(pi||ref)                grad E_pi[x^2 / 2]
    k3           e^-x - 1 + x      KL(pi||ref)      grad KL(ref||pi), the reverse   grad KL(pi||ref)
    low_var_kl   min(k3, 10)       below KL         as k3; 0 where k3 > 10          grad E_pi[min(k3, 10)]
    k1+, k3+     as k1, k3         KL(pi||ref)      grad KL(pi||ref) (that of k2)   grad KL(pi||ref)

"Corrected" is ``corrected_kl``, which has the right mean on data of any mu. Without it the table does not hold on old
data: the mean of k3 over tokens of mu is not a divergence of pi. x at its bound has no gradient.
Sources: Schulman 2020 ("Approximating KL divergence"); corrected, DeepSeek-V3.2 2512.02556; "+" and the bounds 20 and
10 as in verl.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.learner.algorithms.tokens import log_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBonus:
    """Coefficient of the entropy bonus, and whether the next step has it."""

    coef: float
    """Coefficient, which moves by ``delta`` a step."""
    low: bool = True
    """True if the entropy was at its target or below in the last step; before the first one, too."""

    @property
    def applied(self) -> float:
        """Coefficient of the next step: 0 while the entropy is above its target."""
        return self.coef if self.low else 0.0

    def after(self, entropy: float, *, target: float, delta: float, most: float) -> "EntropyBonus":
        """Return the bonus after a step with this mean entropy per token, in nats as ``target``; the same for one that
        is not finite.

        The coefficient grows by ``delta``, up to ``most``, while the entropy is at most ``target``, and falls by
        ``delta`` to 0 at the least while it is above. Source: He et al. 2025 (Skywork-OR1, 2505.22312), "adaptive
        entropy control".
        """
        if not math.isfinite(entropy):
            return self
        low = entropy <= target
        return EntropyBonus(coef=min(self.coef + delta, most) if low else max(self.coef - delta, 0.0), low=low)


LOW_VAR_BOUND = 10.0
"""Largest value of ``low_var_kl`` (nats). k3 is never negative: the bound of -10 elsewhere has no effect."""
ADAPTIVE_ERROR_BOUND = 0.2
"""Largest relative error that ``next_coefficient`` reacts to. Source: Ziegler et al. 2019."""


def _k1(x_T: Tensor) -> Tensor:
    return x_T


def _k2(x_T: Tensor) -> Tensor:
    return 0.5 * x_T.square()


def _k3(x_T: Tensor) -> Tensor:
    return torch.expm1(-x_T) + x_T  # e^-x - 1 would lose its digits where x is small, as it nearly always is


def _low_var_kl(x_T: Tensor) -> Tensor:
    return _k3(x_T).clamp(max=LOW_VAR_BOUND)


def _straight_through(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an estimator with the value of ``value`` and the gradient of k2."""

    def call(x_T: Tensor) -> Tensor:
        """Return the value and gradient for x; the added difference is exactly 0."""
        k2_T = _k2(x_T)
        return value(x_T).detach() + (k2_T - k2_T.detach())

    return call


ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "low_var_kl": _low_var_kl,
    "k1+": _straight_through(_k1),
    "k3+": _straight_through(_k3),
}
"""``x_T`` -> estimate, by the name in ``KLConfig.estimator``; each is 0 at x = 0."""
STRAIGHT_THROUGH = ("k1+", "k3+")


def kl_T(log_probs_T: Tensor, reference_T: Tensor, mask_T: Tensor, *, estimator: str) -> Tensor:
    """Return the estimated divergence from the reference at the sampled tokens, nats per token; exactly 0 where masked.

    Values, means and gradients: table of this module. k1 may be negative, k2 and k3 never.
    """
    return ESTIMATORS[estimator](log_ratio(log_probs_T, reference_T.detach(), mask_T))


def corrected_kl(
    log_probs_T: Tensor, reference_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, *, estimator: str
) -> Tensor:
    """Return ``pi_theta / mu * k`` for tokens sampled from mu (``behaviour_T``, log-probs), with gradient through the
    ratio; 0 if masked.

    The means of value and gradient under mu are ``E_pi[k]`` and ``grad E_pi[k]``, token by token. A detached ratio
    would lose the score term ``k grad log pi`` (for k1 that is the whole gradient; for k3 the gradient of the reverse
    divergence would remain). For "+" the gradient of k2 *is* that term, so the ratio is detached, or the term would
    count twice. With ``behaviour_T = log_probs_T.detach()`` the ratio is 1 and keeps the score term on policy. The
    ratio is bounded only by +-20 in its logarithm, so old data make it noisy.
    Source: unbiased KL estimate, DeepSeek-V3.2 2512.02556.
    """
    ratio_T = log_ratio(log_probs_T, behaviour_T.detach(), mask_T).exp()
    if estimator in STRAIGHT_THROUGH:
        ratio_T = ratio_T.detach()
    return ratio_T * kl_T(log_probs_T, reference_T, mask_T, estimator=estimator)


def counted_samples(num_samples: int, horizon: float) -> float:
    """Return a step's samples for ``next_coefficient``: so many that it loses 99 % of itself at most."""
    return min(float(num_samples), 0.99 * horizon / ADAPTIVE_ERROR_BOUND)


def next_coefficient(coef: float, kl: float, *, target: float, horizon: float, num_samples: float) -> float:
    """Return ``coef (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon)``, which grows while the divergence is
    above its target.

    ``kl`` and ``target`` are in the same unit, nats per token or per sample; ``horizon`` in samples. Returns ``coef``
    unchanged for a ``kl`` that is not finite. Raises ValueError if one step could change the sign of the coefficient.
    Source: Ziegler et al. 2019.
    """
    if target <= 0:
        raise ValueError(f"target: want > 0, got {target}")
    if horizon <= ADAPTIVE_ERROR_BOUND * num_samples:
        raise ValueError(f"horizon: want > {ADAPTIVE_ERROR_BOUND} x {num_samples} samples of a step, got {horizon}")
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / target - 1, -ADAPTIVE_ERROR_BOUND), ADAPTIVE_ERROR_BOUND)
    return coef * (1 + error * num_samples / horizon)


# ---- over the tokens that a teacher listed

LEAST_REST = 1e-6
"""Smallest probability of the tokens that are not listed: float32 sums of probabilities are about as exact."""


def top_k_divergence(student_TK: Tensor, teacher_TK: Tensor, mask_T: Tensor, *, kind: str) -> Tensor:
    """Return the KL of each position over the K listed tokens and one more outcome, any other token (nats), [T]; 0
    where masked.

    ``student_TK``, ``teacher_TK``: log-probs of the listed tokens at the sampling temperature; the gradient is that of
    the student.
    ``kind``: ``forward_kl``, KL(teacher || student), or ``reverse_kl``, KL(student || teacher). Joining outcomes never
    raises a KL, so the value lies between 0 and the KL over the whole vocabulary, and is that for K = V.
    Sources: Agarwal et al. 2024 (GKD, on-policy forward and reverse KL); the joined outcome, Csiszar's data-processing
    inequality.
    """
    student, teacher = _with_rest(student_TK, mask_T), _with_rest(teacher_TK.detach(), mask_T)
    first, second = (teacher, student) if kind == "forward_kl" else (student, teacher)
    return torch.where(mask_T, (first.exp() * (first - second)).sum(1), 0.0)


def _with_rest(log_probs_TK: Tensor, mask_T: Tensor) -> Tensor:
    """Return the log-probs, then that of any other token, [T, K + 1]; uniform and constant where masked."""
    num_listed = log_probs_TK.shape[1]
    log_probs_TK = torch.where(
        mask_T[:, None], log_probs_TK, -torch.log(torch.tensor(num_listed + 1.0, dtype=log_probs_TK.dtype))
    )
    rest_T = (1 - log_probs_TK.exp().sum(1)).clamp(min=LEAST_REST).log()
    return torch.cat([log_probs_TK, rest_T[:, None]], dim=1)
