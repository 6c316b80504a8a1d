"""Advantages by token with the divergence in the reward: REINFORCE++ and its variant with a group baseline.

Pure functions; T = tokens of a packed row, N = samples (episodes) of the step, M = their token sequences. A token's reward is
``-coef (log pi - log pi_ref)``, the outcome comes at the end of the episode, and gamma is 1: a token is charged for the divergence from it
to the end of its episode, over the sequence's own later tokens and the later sequences. The rows of an episode may be on different ranks.
"""

import torch
from torch import Tensor

from learner.algorithms.ratios import prefix_sums, running_sums, sequence_sums


def sums_and_owners(gap_T: Tensor, mask_T: Tensor, sample_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Return (sum of the gaps, sample) of each sequence in this row, 0 for the others, float64 [2, M]; add them over rows and ranks."""
    sums_M = sequence_sums(gap_T.double(), mask_T, sequence_T, num_sequences)
    owners_M = torch.zeros_like(sums_M).scatter_reduce(0, sequence_T.clamp(min=0), sample_T.clamp(min=0).double(), "amax")
    return torch.stack([sums_M, owners_M])


def later_sums(sums_M: Tensor, owners_M: Tensor) -> Tensor:
    """Return the sum over the later sequences of the same sample, [M]; the sequences of a sample are neighbours, in order."""
    if not len(sums_M):
        return sums_M
    owners_M = owners_M.long()
    after_M = running_sums(sums_M.flip(0)).flip(0) - sums_M
    at_M = torch.arange(len(sums_M), device=sums_M.device)
    last_N = at_M.new_zeros(int(owners_M.max()) + 1).scatter_reduce(0, owners_M, at_M, "amax")
    return after_M - after_M[last_N[owners_M]]


def divergences_to_go(gap_T: Tensor, mask_T: Tensor, sequence_T: Tensor, sums_M: Tensor, later_M: Tensor) -> Tensor:
    """Return the sum of the gaps from each token, itself included, to the end of its episode, float64 [T]; 0 where masked.

    Source: REINFORCE++, Hu et al. 2025 (2501.03262), with the token-level KL penalty of section 3; compared with verl's
    ``reinforce_plus_plus`` under ``use_kl_in_reward`` and gamma 1.
    """
    gap_T = torch.where(mask_T, gap_T.double(), 0.0)
    before_T = prefix_sums(gap_T, mask_T, sequence_T, len(sums_M)) - gap_T
    return torch.where(mask_T, (sums_M + later_M)[sequence_T.clamp(min=0)] - before_T, 0.0)
