"""A loss with a metric, three advantage estimators, a weight, a rejection and an aggregation.

T = tokens of a packed row, N = samples of the step.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tidemill.learner import AlgorithmConfig, Denominators, PolicyLoss, Tokens, log_ratio, sequence_means, spread


def one_sided(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """-A log r, without gradient for good tokens that are already 28 % likelier than under the anchor."""
    delta_T = log_ratio(log_probs_T, anchor_T.detach(), tokens.mask_T)
    advantages_T = torch.where(tokens.mask_T, tokens.advantages_T, 0.0)
    done_T = (advantages_T > 0) & (delta_T.detach() > 0.25)
    loss_T = torch.where(done_T, 0.0, -advantages_T * delta_T)
    return PolicyLoss(loss_T=loss_T, clipped_T=done_T, metrics={"moved": delta_T.abs()})


def median_baseline(rewards_N: Tensor, groups_N: Tensor, *, lengths_N: Tensor) -> Tensor:
    """Reward less the median of its group."""
    advantages_N = torch.zeros_like(rewards_N)
    for group in groups_N.unique():
        here_N = groups_N == group
        advantages_N = torch.where(here_N, rewards_N - rewards_N[here_N].median(), advantages_N)
    return advantages_N


def by_level(
    rewards_N: Tensor, groups_N: Tensor, *, truncated_N: Tensor, metadata: Sequence[Mapping[str, Any]]
) -> Tensor:
    """Reward less the mean of the group's whole responses, twice as much for prompts of the level "hard"."""
    advantages_N = torch.zeros_like(rewards_N)
    for group in groups_N.unique():
        here_N = groups_N == group
        whole_N = here_N & ~truncated_N
        baseline = rewards_N[whole_N if whole_N.any() else here_N].mean()
        advantages_N = torch.where(here_N, rewards_N - baseline, advantages_N)
    return advantages_N * torch.tensor(
        [2.0 if one.get("level") == "hard" else 1.0 for one in metadata], dtype=rewards_N.dtype
    )


def over_the_step(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Rewards to mean 0 and deviation 1 over all samples of the step, whatever their group."""
    centered_N = rewards_N - rewards_N.mean()
    return centered_N / (centered_N.square().mean().sqrt() + 1e-6)


def squared(delta_T: Tensor, mask_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """pi^2 / mu^2: old tokens that the policy has moved away from count even less."""
    return (2 * delta_T.clamp(-10, 10)).exp()


def drifting(delta_T: Tensor, mask_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Reject the sequences of which more than a tenth of the tokens are less than half, or more than twice, as likely
    as when sampled.
    """
    far_T = (delta_T.abs() > math.log(2)).to(delta_T.dtype)
    return spread(sequence_means(far_T, mask_T, sequence_T, num_sequences) > 0.1, sequence_T)


def by_root(mask_T: Tensor, sample_T: Tensor, denominators: Denominators) -> Tensor:
    """A sample counts with the square root of its length."""
    lengths_T = denominators.trainable_N[torch.where(mask_T, sample_T, 0)].double()
    return 1 / (lengths_T.clamp(min=1).sqrt() * denominators.sequences)
