"""Returns by token without a critic: REINFORCE++, and estimators with a group baseline whose divergence is in the
reward of tokens; the credit of turns.

Pure functions; T = tokens of a packed row, N = samples (episodes) of the step, M = their token sequences. A token's
reward is ``-coef (log pi - log pi_ref)``, and the outcome comes at the last trainable token of the episode. A token
gets the outcome and is charged for the divergence from it to the end of its episode, over the sequence's own later
tokens and the later sequences, both discounted by gamma per trainable token between. The rows of an episode may be on
different ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.learner.algorithms.gae_vtrace import gae, recurrence
from tidemill.learner.algorithms.tokens import Tokens, prefix_sums, running_sums, sequence_sums


def turn_returns(rewards_N: Tensor, turn_rewards_C: Tensor, turn_samples_C: Tensor, *, gamma: float) -> Tensor:
    """Return ``G_c = r_c + gamma G_(c+1)`` of every turn, [N, O]; a sample with fewer turns repeats its last return to
    the end of its row.

    The part of a sample's reward beyond the sum of its turn rewards is added to its last turn, so with gamma = 1 and
    without turn rewards every return is the reward. A row of a sample without turns is its reward.
    """
    num_samples = len(rewards_N)
    counts_N = torch.bincount(turn_samples_C, minlength=num_samples)
    num_turns = max(1, int(counts_N.max())) if num_samples else 1
    own_NO = rewards_N.new_zeros(num_samples, num_turns)
    own_NO[turn_samples_C, _ordinals(turn_samples_C, counts_N)] = turn_rewards_C.to(rewards_N.dtype)
    last_N = (counts_N - 1).clamp(min=0)
    at_N = torch.arange(num_samples)
    own_NO[at_N, last_N] += rewards_N - own_NO.sum(1)
    returns_NO = own_NO.clone()
    for ordinal in range(num_turns - 2, -1, -1):
        returns_NO[:, ordinal] += gamma * returns_NO[:, ordinal + 1]
    # Behind the last turn there is nothing to return, and the row would read 0 there.
    places_NO = torch.minimum(torch.arange(num_turns)[None], last_N[:, None])
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
"""Estimators by the name in ``AlgorithmConfig.advantage``. The baseline of a turn is the mean of the members' returns
at the same ordinal, or at the last one of a member that has fewer turns: it does not depend on the turn's own action,
so it is unbiased for ``rloo``.
"""


def turn_advantages(
    rewards_N: Tensor, groups_N: Tensor, turn_rewards_C: Tensor, turn_samples_C: Tensor, *, advantage: str, gamma: float
) -> Tensor:
    """Return the advantage of every turn, [C], before any whitening. ``rewards_N``: of the episodes, shaped."""
    returns_NO = turn_returns(rewards_N, turn_rewards_C, turn_samples_C, gamma=gamma)
    advantages_NO = BY_TURN[advantage](returns_NO, groups_N)
    ordinals_C = _ordinals(turn_samples_C, torch.bincount(turn_samples_C, minlength=len(rewards_N)))
    return advantages_NO[turn_samples_C, ordinals_C]


def advantages_of_tokens(
    rows: Sequence[Tokens],
    gaps: Sequence[Tensor],
    *,
    gamma: float,
    scale: float,
    summed: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Return each token's advantage by row, float64 [T]: its sample's, discounted, less ``scale`` times the gaps to go.

    ``gaps``: divergence of each token by row, 0 where masked. Collective through ``summed``.
    """
    if gamma == 1:
        parts = [
            sums_and_owners(gap_T, row.mask_T, row.sample_T, *row.by_sequence)
            for gap_T, row in zip(gaps, rows, strict=True)
        ]
        sums_M, owners_M = summed(torch.stack(parts).sum(0)).unbind()
        later_M = later_sums(sums_M, owners_M)
        return [
            row.advantages_T.double()
            - scale * divergences_to_go(gap_T, row.mask_T, row.by_sequence[0], sums_M, later_M)
            for gap_T, row in zip(gaps, rows, strict=True)
        ]
    parts = [
        discounted_sums(gap_T, row.mask_T, row.sample_T, *row.by_sequence, gamma=gamma)
        for gap_T, row in zip(gaps, rows, strict=True)
    ]
    ahead, values = discounted(summed(torch.stack(parts).sum(0)), gamma=gamma), []
    for gap_T, row in zip(gaps, rows, strict=True):
        factor_T, charge_T = discounted_to_go(gap_T, row.mask_T, row.by_sequence[0], ahead, gamma=gamma)
        values.append(factor_T * row.advantages_T.double() - scale * charge_T)
    return values


def sums_and_owners(gap_T: Tensor, mask_T: Tensor, sample_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Return (sum of gaps, sample) of each sequence in this row, float64 [2, M]; add them over rows and ranks."""
    sums_M = sequence_sums(gap_T.double(), mask_T, sequence_T, num_sequences)
    owners_M = torch.zeros_like(sums_M).scatter_reduce(
        0, sequence_T.clamp(min=0), sample_T.clamp(min=0).double(), "amax"
    )
    return torch.stack([sums_M, owners_M])


def later_sums(sums_M: Tensor, owners_M: Tensor) -> Tensor:
    """Return the sum over the later sequences of the same sample, [M]; they are neighbours, in order."""
    if not len(sums_M):
        return sums_M
    # They were added up over ranks as float64, which holds every index exactly.
    owners_M = owners_M.long()
    after_M = running_sums(sums_M.flip(0)).flip(0) - sums_M
    at_M = torch.arange(len(sums_M), device=sums_M.device)
    last_N = at_M.new_zeros(int(owners_M.max()) + 1).scatter_reduce(0, owners_M, at_M, "amax")
    return after_M - after_M[last_N[owners_M]]


def divergences_to_go(gap_T: Tensor, mask_T: Tensor, sequence_T: Tensor, sums_M: Tensor, later_M: Tensor) -> Tensor:
    """Return the sum of the gaps from each token, itself included, to the end of its episode, float64 [T]; 0 where
    masked.

    Source: REINFORCE++, Hu et al. 2025 (2501.03262), with the token-level KL penalty of section 3; compared with verl's
    ``reinforce_plus_plus`` under ``use_kl_in_reward`` and gamma 1.
    """
    gap_T = torch.where(mask_T, gap_T.double(), 0.0)
    before_T = prefix_sums(gap_T, mask_T, sequence_T, len(sums_M)) - gap_T
    return torch.where(mask_T, (sums_M + later_M)[sequence_T.clamp(min=0)] - before_T, 0.0)


@dataclass(frozen=True, slots=True)
class Ahead:
    """Tokens of each sequence, and tokens and gaps of the later ones in its episode; float64 [M] each."""

    tokens_M: Tensor
    """Trainable tokens of the sequence."""
    later_tokens_M: Tensor
    """Trainable tokens of the later sequences of the same sample."""
    later_M: Tensor
    """Discounted sum of the gaps of the later sequences, at the first trainable token of the first of them."""


def discounted_sums(
    gap_T: Tensor, mask_T: Tensor, sample_T: Tensor, sequence_T: Tensor, num_sequences: int, *, gamma: float
) -> Tensor:
    """Return (sum of gamma^j gap_j, sample, trainable tokens) of each sequence in this row, 0 for the others, float64
    [3, M].

    j counts the trainable tokens of the sequence from 0. Add them over rows and ranks, then call ``discounted``.
    """
    before_T = _counts(mask_T, sequence_T, num_sequences) - 1
    sums_2M = sums_and_owners(gamma**before_T * gap_T.double(), mask_T, sample_T, sequence_T, num_sequences)
    return torch.cat([sums_2M, sequence_sums(torch.ones_like(before_T), mask_T, sequence_T, num_sequences)[None]])


def discounted(sums_3M: Tensor, *, gamma: float) -> Ahead:
    """Return the tokens and gaps ahead of each sequence, from the ``discounted_sums`` of all rows and ranks."""
    sums_M, owners_M, tokens_M = sums_3M.unbind()
    last_M = torch.ones_like(owners_M, dtype=torch.bool)
    last_M[:-1] = owners_M[1:] != owners_M[:-1]
    from_here_M = recurrence(sums_M, torch.where(last_M, 0.0, gamma**tokens_M))
    return Ahead(
        tokens_M=tokens_M,
        later_tokens_M=later_sums(tokens_M, owners_M),
        later_M=torch.where(last_M, 0.0, from_here_M.roll(-1)),
    )


def discounted_to_go(
    gap_T: Tensor, mask_T: Tensor, sequence_T: Tensor, ahead: Ahead, *, gamma: float
) -> tuple[Tensor, Tensor]:
    """Return (the factor of the outcome, the discounted sum of the gaps from each token on, itself included), float64
    [T]; 0 where masked.

    The factor is gamma to the number of trainable tokens after this one in the episode. Masked tokens (of tools, of
    environments, or older than the gate allows) are skipped without discount, as in ``gae``; at gamma 1 the pair is (1,
    ``divergences_to_go``).
    Source: REINFORCE++, Hu et al. 2025 (2501.03262), with the discount of OpenRLHF's and verl's implementations of it.
    """
    place_T = sequence_T.clamp(min=0)
    counts_T = _counts(mask_T, sequence_T, len(ahead.tokens_M))
    left_T = ahead.tokens_M[place_T] - counts_T
    own_T = returns_to_go(gap_T.double(), sequence_T, gamma=gamma, mask_T=mask_T)
    factor_T = torch.where(mask_T, gamma ** (left_T + ahead.later_tokens_M[place_T]), 0.0)
    return factor_T, torch.where(mask_T, own_T + gamma ** (left_T + 1) * ahead.later_M[place_T], 0.0)


def returns_to_go(token_rewards_T: Tensor, sample_T: Tensor, *, gamma: float, mask_T: Tensor) -> Tensor:
    """Return ``R_t = r_t + gamma R_next`` within each sample, [T], detached; 0 where masked and in padding.

    Masked tokens pass the return on without discount, and their own rewards are ignored.
    """
    steps_T = mask_T & (sample_T >= 0)
    return gae(token_rewards_T, torch.zeros_like(token_rewards_T), steps_T, sample_T, gamma=gamma, lam=1.0)[0]


def _counts(mask_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Return the number of trainable tokens of a sequence up to and including each one, float64 [T]; 0 where masked."""
    ones_T = torch.ones(mask_T.shape, dtype=torch.float64, device=mask_T.device)
    return prefix_sums(ones_T, mask_T, sequence_T, num_sequences)
