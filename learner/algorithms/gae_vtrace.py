"""Advantages by token, and targets of the value function, from the values of a critic; and the critic's loss.

    rewards of samples, divergence of tokens -> rewards of tokens -+
    values before the step ----------------------------------------+-> GAE or V-trace -> whitened advantages, returns

Pure functions of torch tensors; T = tokens of a packed row, M = trainable tokens in it. ``values_T[t]`` is V of the
prefix that token t was sampled after, in units of the reward. ``sample_T`` is the index of a token's sample; a sample's
tokens are neighbours, all in one row. A masked token inside a sample is skipped without discount, and its reward, value
and ratio are ignored. The value after the last trainable token of a sample is 0, also if the sample is truncated.
That holds for a truncated response as well: it was scored as it is, and no later token will ever be sampled; slime,
verl and TRL do the same. Each sequence of an episode ends with the episode's reward. Everything but the loss is
detached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tidemill.learner.algorithms.advantages import whitened_rows
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.tokens import Tokens, log_ratio


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
    policy itself and does not correct for their age (``vtrace`` does).
    Source: Schulman et al. 2016; masked tokens skipped as in verl.
    """
    steps = _Steps.of(mask_T, sample_T)
    values_M = steps.gathered(values_T)
    errors_M = steps.gathered(rewards_T) + gamma * steps.following(values_M) - values_M
    advantages_M = steps.summed(errors_M, gamma * lam)
    return steps.spread(advantages_M, rewards_T), steps.spread(advantages_M + values_M, values_T)


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
    rho: float = 1.0,
    c: float = 1.0,
) -> Tensor:
    """Return value targets v that correct for data of mu, [T], detached; 0 where masked. ``log_ratio_T``: log pi / mu.

    ``d_t = min(rho, w_t) (r_t + gamma V_next - V_t)``, ``v_t - V_t = d_t + gamma lam min(c, w_t) (v_next - V_next)``
    with w = pi / mu. On policy with bounds >= 1 and lam = 1, v is the discounted return. The mean of v over data of mu
    is V when V is the value of the policy proportional to ``min(rho mu, pi)``, between mu and pi: rho determines the
    fixed point, c the speed (the product of c over many tokens goes to 0, and with it the effect of a late reward on
    early tokens). Source: IMPALA, Espeholt et al. 2018.
    """
    steps = _Steps.of(mask_T, sample_T)
    values_M, weights_M = steps.gathered(values_T), steps.gathered(log_ratio_T).exp()
    errors_M = steps.gathered(rewards_T) + gamma * steps.following(values_M) - values_M
    corrections_M = steps.summed(weights_M.clamp(max=rho) * errors_M, gamma * lam * weights_M.clamp(max=c))
    return steps.spread(values_M + corrections_M, values_T)


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, mask_T: Tensor, *, clip: float) -> Tensor:
    """Return ``max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2`` per token, [T]; 0 with 0 gradient
    where masked.

    It is never below the unclipped loss. The gradient is 0 iff V is more than ``clip`` from V_old and nearer to R than
    the clamped value: V has moved towards R as far as it may. ``clip``: > 0, in units of the value; infinity = none.
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
    values_T = torch.where(mask_T, values_T, 0.0)
    old_T = torch.where(mask_T, old_values_T.detach(), 0.0)
    returns_T = torch.where(mask_T, returns_T.detach(), 0.0)
    held_T = torch.minimum(torch.maximum(values_T, old_T - clip), old_T + clip)
    return (values_T - returns_T).square(), (held_T - returns_T).square()


# ---- from the values of a step to its advantages


def with_token_advantages(
    rows: Sequence[Tokens],
    rewards_N: Tensor,
    config: AlgorithmConfig,
    *,
    kl_scale: float,
    summed: Callable[[Tensor], Tensor],
) -> list[Tokens]:
    """Return the rows with ``advantages_T`` and ``returns_T``, from their ``values_T``. Collective through ``summed``.

    ``rows``: all rows of this rank in the step. ``rewards_N``: shaped rewards, on the CPU. Advantages are whitened over
    the trainable tokens of the step on all ranks if the config whitens (``gae`` by default); the targets never are.
    """
    # By sample, the divergence is in ``rewards_N`` already.
    coef = kl_scale * config.kl.reward_coef if config.kl.reward_by == "token" else 0.0
    estimates = [_estimate(row, token_rewards(row, rewards_N, coef=coef), config) for row in rows]
    advantages = [advantages_T for advantages_T, _ in estimates]
    if config.advantage == "gae" if config.whiten is None else config.whiten:
        advantages = whitened_rows(advantages, [row.mask_T for row in rows], summed)
    kind = rows[0].advantages_T.dtype
    return [
        replace(row, advantages_T=advantages_T.to(kind), returns_T=returns_T.to(kind))
        for row, advantages_T, (_, returns_T) in zip(rows, advantages, estimates, strict=True)
    ]


def token_rewards(row: Tokens, rewards_N: Tensor, *, coef: float = 0.0) -> Tensor:
    """Return the reward of every token, float64 [T]: the sample's at the last trainable token of each of its sequences.

    With ``coef`` every token pays ``coef (log pi_proximal - log pi_reference)``. 0 where masked.
    """
    place_T, number = row.by_sequence
    ends_T = (
        terminal_rewards(torch.ones(number, dtype=torch.float64, device=row.mask_T.device), row.mask_T, place_T) > 0
    )
    rewards_N = rewards_N.to(row.mask_T.device).double()
    rewards_T = torch.where(ends_T, rewards_N[row.sample_T.clamp(min=0)], 0.0)
    if coef:
        assert row.old_T is not None and row.reference_T is not None
        rewards_T = rewards_T - coef * torch.where(row.mask_T, (row.old_T - row.reference_T).double(), 0.0)
    return rewards_T


def _estimate(row: Tokens, rewards_T: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return (advantages, targets of the value function), float64 [T]; 0 where masked."""
    assert row.values_T is not None, "the values of a critic are needed"
    values_T, place = row.values_T.double(), (row.mask_T, row.by_sequence[0])
    if config.advantage == "gae":
        return gae(rewards_T, values_T, *place, gamma=config.gamma, lam=config.lam)
    assert row.old_T is not None, "V-trace weighs by pi_proximal / mu"
    ratio_T = log_ratio(row.old_T, row.rollout_T, row.mask_T)
    gamma, lam, (rho, c) = config.gamma, config.lam, (config.vtrace.rho, config.vtrace.c)
    targets_T = vtrace(ratio_T, rewards_T, values_T, *place, gamma=gamma, lam=lam, rho=rho, c=c)
    # r + gamma v_next - V, without the weight of the policy gradient, which the loss applies (``algorithm.weight``).
    ahead_T = gae(rewards_T, targets_T, *place, gamma=config.gamma, lam=0.0)[0]
    return ahead_T + torch.where(row.mask_T, targets_T - values_T, 0.0), targets_T
