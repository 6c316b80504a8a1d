"""Advantages of turns: the return of every turn of an episode, less that of the other members of its group from the same ordinal on.

Pure functions; N = samples (episodes) of the step, C = their turns, O = most turns of one. The turns of a sample are neighbours, in order
of delivery, across its token sequences: an agent of an episode acts on the others through text.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def turn_returns(rewards_N: Tensor, turn_rewards_C: Tensor, turn_samples_C: Tensor, *, gamma: float) -> Tensor:
    """Return ``G_c = r_c + gamma G_(c+1)`` of every turn, [N, O]; a sample with fewer turns repeats its last return to the end of its row.

    The part of a sample's reward beyond the sum of its turn rewards is added to its last turn, so with gamma = 1 and without turn rewards
    every return is the reward. A row of a sample without turns is its reward.
    """
    num_samples = len(rewards_N)
    counts_N = torch.bincount(turn_samples_C, minlength=num_samples)
    most = max(1, int(counts_N.max())) if num_samples else 1
    own_NO = rewards_N.new_zeros(num_samples, most)
    own_NO[turn_samples_C, _ordinals(turn_samples_C, counts_N)] = turn_rewards_C.to(rewards_N.dtype)
    last_N = (counts_N - 1).clamp(min=0)
    at_N = torch.arange(num_samples)
    own_NO[at_N, last_N] += rewards_N - own_NO.sum(1)
    returns_NO = own_NO.clone()
    for ordinal in range(most - 2, -1, -1):
        returns_NO[:, ordinal] += gamma * returns_NO[:, ordinal + 1]
    # Behind the last turn there is nothing to return, and the row would read 0 there.
    places_NO = torch.minimum(torch.arange(most)[None], last_N[:, None])
    return returns_NO.gather(1, places_NO)


def _ordinals(turn_samples_C: Tensor, counts_N: Tensor) -> Tensor:
    first_N = counts_N.cumsum(0) - counts_N
    return torch.arange(len(turn_samples_C)) - first_N[turn_samples_C]


def _group_means(values_NO: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean over the group of every sample, size of its group): [N, O] and [N, 1]."""
    _, place_N = torch.unique(groups_N, return_inverse=True)
    sums_GO = values_NO.new_zeros(int(place_N.max()) + 1, values_NO.shape[1]).index_add(0, place_N, values_NO)
    sizes_N1 = torch.bincount(place_N).to(values_NO.dtype)[place_N][:, None]
    return sums_GO[place_N] / sizes_N1, sizes_N1


def _reinforce(returns_NO: Tensor, groups_N: Tensor) -> Tensor:
    return returns_NO


def _grpo_no_std(returns_NO: Tensor, groups_N: Tensor) -> Tensor:
    return returns_NO - _group_means(returns_NO, groups_N)[0]


def _rloo(returns_NO: Tensor, groups_N: Tensor) -> Tensor:
    mean_NO, size_N1 = _group_means(returns_NO, groups_N)
    return (returns_NO - mean_NO) * size_N1 / (size_N1 - 1).clamp(min=1)


BY_TURN: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reinforce": _reinforce,
    "reinforce_pp": _reinforce,
    "reinforce_pp_baseline": _grpo_no_std,
    "rloo": _rloo,
    "grpo_no_std": _grpo_no_std,
}
"""Estimators by the name in ``AlgorithmConfig.advantage``. The baseline of a turn is the mean of the members' returns at the same ordinal,
or at the last one of a member that has fewer turns: it does not depend on the turn's own action, so it is unbiased for ``rloo``."""


def turn_advantages(
    rewards_N: Tensor, groups_N: Tensor, turn_rewards_C: Tensor, turn_samples_C: Tensor, *, advantage: str, gamma: float
) -> Tensor:
    """Return the advantage of every turn, [C], before any whitening. ``rewards_N``: of the episodes, shaped."""
    returns_NO = turn_returns(rewards_N, turn_rewards_C, turn_samples_C, gamma=gamma)
    advantages_NO = BY_TURN[advantage](returns_NO, groups_N)
    ordinals_C = _ordinals(turn_samples_C, torch.bincount(turn_samples_C, minlength=len(rewards_N)))
    return advantages_NO[turn_samples_C, ordinals_C]
