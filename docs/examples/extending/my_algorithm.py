"""A loss and an advantage estimator. T = tokens of a packed row, N = samples of the step."""

import torch
from torch import Tensor

from learner.algorithms.config import AlgorithmConfig
from learner.algorithms.objective import Tokens
from learner.algorithms.policy_losses import PolicyLoss
from learner.algorithms.ratios import log_ratio


def one_sided(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """-A log r, without gradient for good tokens that are already 28 % likelier than under the anchor."""
    delta_T = log_ratio(log_probs_T, anchor_T.detach(), tokens.mask_T)
    advantages_T = torch.where(tokens.mask_T, tokens.advantages_T, 0.0)
    done_T = (advantages_T > 0) & (delta_T.detach() > 0.25)
    return PolicyLoss(loss_T=torch.where(done_T, 0.0, -advantages_T * delta_T), clipped_T=done_T)


def median_baseline(rewards_N: Tensor, groups_N: Tensor, *, lengths_N: Tensor) -> Tensor:
    """Reward less the median of its group."""
    advantages_N = torch.zeros_like(rewards_N)
    for group in groups_N.unique():
        here_N = groups_N == group
        advantages_N = torch.where(here_N, rewards_N - rewards_N[here_N].median(), advantages_N)
    return advantages_N
