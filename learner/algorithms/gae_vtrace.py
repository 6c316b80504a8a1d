"""Advantages and targets with a learned value function, on packed rows of several sequences, and the loss of that
function.

Pure functions of torch tensors; T = tokens of a packed row, M = trainable tokens in it. ``values_T[t]`` is V of the
prefix that token t was sampled after, in units of the reward. ``sample_T`` is the index of a token's sample; a sample's
tokens are neighbours, all in one row. A masked token inside a sample is skipped without discount, and its reward, value
and ratio are ignored. The value after the last trainable token of a sample is 0, also if the sample is truncated.
Everything but the loss is detached.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def recurrence(terms_T: Tensor, factors_T: Tensor) -> Tensor:
    """Return x with ``x_t = terms_t + factors_t x_{t+1}`` and 0 after the end, [T]; a factor of 0 restarts it, also
    before NaN or infinity.

    Doubling takes O(T log T) work in log2(T) vector operations without division, so it is as stable as the loop.
    Source: parallel prefix of a linear recurrence, Kogge and Stone 1973.
    """
    reach = 1
    while reach < len(terms_T):
        here_T, ahead_T = factors_T[:-reach], factors_T[reach:]
        # Not the plain product: 0 times NaN or infinity of the next sample would be NaN.
        step_T = torch.where(here_T != 0, here_T * terms_T[reach:], 0.0)
        terms_T = torch.cat([terms_T[:-reach] + step_T, terms_T[-reach:]])
        factors_T = torch.cat([here_T * ahead_T, torch.zeros_like(factors_T[-reach:])])
        reach *= 2
    return terms_T


@dataclass(frozen=True, slots=True)
class _Steps:
    """The trainable tokens of a row, in order."""

    mask_T: Tensor
    last_M: Tensor
    """True for the last trainable token of each sample."""

    @classmethod
    def of(cls, mask_T: Tensor, sample_T: Tensor) -> "_Steps":
        """Gather the trainable tokens of a row."""
        sample_M = sample_T[mask_T]
        last_M = torch.ones_like(sample_M, dtype=torch.bool)
        last_M[:-1] = sample_M[1:] != sample_M[:-1]
        return cls(mask_T, last_M)

    def gathered(self, values_T: Tensor) -> Tensor:
        """Return the values at the trainable tokens, [M], float64."""
        return values_T[self.mask_T].double()

    def following(self, values_M: Tensor) -> Tensor:
        """Return the value at the sample's next trainable token; 0 after its last."""
        return torch.where(self.last_M, 0.0, values_M.roll(-1))

    def summed(self, terms_M: Tensor, factors_M: Tensor | float) -> Tensor:
        """Return x with ``x_t = terms_t + factors_t x_next`` within each sample, [M]."""
        return recurrence(terms_M, torch.where(self.last_M, torch.zeros_like(terms_M), factors_M))

    def spread(self, values_M: Tensor, like_T: Tensor) -> Tensor:
        """Return the values at their positions in the row, [T], in the dtype of ``like_T``; 0 where masked."""
        values_T = torch.zeros_like(like_T)
        values_T[self.mask_T] = values_M.to(like_T.dtype)
        return values_T


def terminal_rewards(rewards_N: Tensor, mask_T: Tensor, sample_T: Tensor) -> Tensor:
    """Return each sample's reward at its last trainable token in the row, 0 elsewhere, [T]."""
    steps = _Steps.of(mask_T, sample_T)
    rewards_M = torch.where(steps.last_M, rewards_N[sample_T[mask_T]], 0.0)
    return steps.spread(rewards_M, rewards_N.new_zeros(mask_T.shape))


@torch.no_grad()
def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, sample_T: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of generalised advantage estimation, both [T], detached; 0 where masked.

    ``A_t = d_t + gamma lam A_next``, ``d_t = r_t + gamma V_next - V_t``, ``returns = A + V`` (target of the value
    function, before any whitening of A). lam = 1: the discounted return less V; lam = 0: d. It assumes data of the
    policy itself and does not correct for their age (``vtrace`` does). Raises ValueError for gamma or lam outside 0..1.
    Source: Schulman et al. 2016; masked tokens skipped as in verl.
    """
    _check(gamma=gamma, lam=lam)
    steps = _Steps.of(mask_T, sample_T)
    values_M = steps.gathered(values_T)
    errors_M = steps.gathered(rewards_T) + gamma * steps.following(values_M) - values_M
    advantages_M = steps.summed(errors_M, gamma * lam)
    return steps.spread(advantages_M, rewards_T), steps.spread(advantages_M + values_M, values_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class VTrace:
    """Targets of the value function and advantages of the policy, both detached, [T]; 0 where masked."""

    targets_T: Tensor
    advantages_T: Tensor
    """Advantages that include the weight min(rho_pg_bar, pi / mu): the loss is ``-A log pi``, with no further weight
    and no ratio.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Upper bounds of V-trace's weights. Raises ValueError unless 0 < c_bar <= rho_bar and rho_pg_bar > 0: there is no
    fixed point else.
    """

    rho_bar: float = 1.0
    c_bar: float = 1.0
    rho_pg_bar: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.c_bar <= self.rho_bar and self.rho_pg_bar > 0):
            got = f"c_bar {self.c_bar}, rho_bar {self.rho_bar}, rho_pg_bar {self.rho_pg_bar}"
            raise ValueError(f"want 0 < c_bar <= rho_bar, rho_pg_bar > 0, got {got}")


_ALL_ONE = Bars()


@torch.no_grad()
def vtrace(
    log_ratio_T: Tensor,
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    *,
    gamma: float,
    lam: float = 1.0,
    bars: Bars = _ALL_ONE,
) -> VTrace:
    """Return value targets v and advantages that correct for data of mu, ``log_ratio_T = log pi - log mu``.

    ``d_t = min(rho_bar, w_t) (r_t + gamma V_next - V_t)``, ``v_t - V_t = d_t + gamma lam min(c_bar, w_t) (v_next -
    V_next)``, ``A_t = min(rho_pg_bar, w_t) (r_t + gamma v_next - V_t)`` with w = pi / mu. On policy with bounds >= 1
    and lam = 1, v is the discounted return. The mean of v over data of mu is V when V is the value of the policy
    proportional to ``min(rho_bar mu, pi)``, between mu and
    pi: rho_bar determines the fixed point, c_bar the speed (the product of c over many tokens goes to 0, and with it
    the effect of a late reward on early tokens).
    Raises ValueError for gamma or lam outside 0..1.
    Source: IMPALA, Espeholt et al. 2018.
    """
    _check(gamma=gamma, lam=lam)
    steps = _Steps.of(mask_T, sample_T)
    rewards_M, values_M, weights_M = (
        steps.gathered(rewards_T),
        steps.gathered(values_T),
        steps.gathered(log_ratio_T).exp(),
    )
    errors_M = weights_M.clamp(max=bars.rho_bar) * (rewards_M + gamma * steps.following(values_M) - values_M)
    targets_M = values_M + steps.summed(errors_M, gamma * lam * weights_M.clamp(max=bars.c_bar))
    advantages_M = weights_M.clamp(max=bars.rho_pg_bar) * (rewards_M + gamma * steps.following(targets_M) - values_M)
    return VTrace(targets_T=steps.spread(targets_M, values_T), advantages_T=steps.spread(advantages_M, rewards_T))


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, mask_T: Tensor, *, clip: float) -> Tensor:
    """Return ``max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2`` per token, [T]; 0 with 0 gradient
    where masked.

    It is never below the unclipped loss. The gradient is 0 iff V is more than ``clip`` from V_old and nearer to R than
    the clamped value: V has moved towards R as far as it may. ``clip``: in units of the value, ``math.inf`` = none;
    raises ValueError unless > 0.
    Source: PPO as in OpenAI baselines, Dhariwal et al. 2017.
    """
    plain_T, held_T = _squares(values_T, old_values_T, returns_T, mask_T, clip)
    return 0.5 * torch.where(held_T > plain_T, held_T, plain_T)


def value_clipped(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, mask_T: Tensor, *, clip: float) -> Tensor:
    """Return a mask of the tokens at which the clip has set the value gradient to 0, bool [T]; False where masked."""
    plain_T, held_T = _squares(values_T, old_values_T, returns_T, mask_T, clip)
    return held_T > plain_T


def _squares(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, mask_T: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Return the squared errors of V and of V clamped near V_old; 0 where masked."""
    if not clip > 0:
        raise ValueError(f"clip: want > 0 (math.inf = none), got {clip}")
    values_T = torch.where(mask_T, values_T, 0.0)
    old_T = torch.where(mask_T, old_values_T.detach(), 0.0)
    returns_T = torch.where(mask_T, returns_T.detach(), 0.0)
    held_T = torch.minimum(torch.maximum(values_T, old_T - clip), old_T + clip)
    return (values_T - returns_T).square(), (held_T - returns_T).square()


def _check(**shares: float) -> None:
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name}: want 0..1, got {share}")
