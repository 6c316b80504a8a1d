"""Advantages by token, and targets of the value function, from the values of a critic.

    rewards of samples, divergence of tokens -> rewards of tokens -+
    values before the step ----------------------------------------+-> GAE or V-trace -> whitened advantages, returns

Pure functions; T = tokens of a packed row, N = samples (episodes) of the step. The unit is a token sequence: each
sequence of an episode ends with the episode's reward, at its last trainable token, and the value behind it is 0. That
holds for a truncated response as well: it was scored as it is, and no later token will ever be sampled. slime, verl and
TRL do the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tidemill.learner.algorithms.advantages import masked_moments, whitened
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.gae_vtrace import Bars, gae, terminal_rewards, vtrace
from tidemill.learner.algorithms.objective import Tokens
from tidemill.learner.algorithms.ratios import log_ratio

Estimate = tuple[Tensor, Tensor]
"""(advantages, targets of the value function), float64 [T]; 0 where masked."""


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
    coef = kl_scale * config.kl.reward_coef if config.kl.reward_by == "token" else 0.0
    estimates = [_estimate(row, token_rewards(row, rewards_N, coef=coef), config) for row in rows]
    advantages = [advantages_T for advantages_T, _ in estimates]
    if config.advantage == "gae" if config.whiten is None else config.whiten:
        moments = summed(
            torch.stack([masked_moments(each_T, row.mask_T) for each_T, row in zip(advantages, rows, strict=True)]).sum(
                0
            )
        )
        advantages = [whitened(each_T, row.mask_T, moments) for each_T, row in zip(advantages, rows, strict=True)]
    kind = rows[0].advantages_T.dtype
    return [
        replace(row, advantages_T=each_T.to(kind), returns_T=returns_T.to(kind))
        for row, each_T, (_, returns_T) in zip(rows, advantages, estimates, strict=True)
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


def _estimate(row: Tokens, rewards_T: Tensor, config: AlgorithmConfig) -> Estimate:
    assert row.values_T is not None, "the values of a critic are needed"
    values_T, place = row.values_T.double(), (row.mask_T, row.by_sequence[0])
    if config.advantage == "gae":
        return gae(rewards_T, values_T, *place, gamma=config.gamma, lam=config.lam)
    assert row.old_T is not None, "V-trace weighs by pi_proximal / mu"
    bars = Bars(rho_bar=config.vtrace.rho, c_bar=config.vtrace.c)
    ratio_T = log_ratio(row.old_T, row.rollout_T, row.mask_T)
    targets_T = vtrace(ratio_T, rewards_T, values_T, *place, gamma=config.gamma, lam=config.lam, bars=bars).targets_T
    # r + gamma v_next - V, without the weight of the policy gradient, which the loss applies (``algorithm.weight``).
    ahead_T = gae(rewards_T, targets_T, *place, gamma=config.gamma, lam=0.0)[0]
    return ahead_T + torch.where(row.mask_T, targets_T - values_T, 0.0), targets_T
