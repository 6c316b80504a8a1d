"""Advantages from outcome rewards, by explicit group ids: groups may have any size and stand in any order.

Pure functions of torch tensors, float32 or float64. Shape letters: N = samples of the step, G = groups.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group. Source: DeepSeekMath (GRPO), Shao et al. 2024, as implemented everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMoments:
    """Sizes and moments of the groups, spread over their samples."""

    sizes_N: Tensor
    centered_N: Tensor
    """r_i less the mean of its group; exactly 0 where all rewards of the group are equal."""
    std_N: Tensor
    """Unbiased (divides by size - 1); 0 in a group of one."""
    constant_N: Tensor
    """True where all rewards of the group are equal (a group of one included)."""


def group_moments(rewards_N: Tensor, groups_N: Tensor) -> GroupMoments:
    """Moments of every sample's group. ``groups_N``: one integer id per sample, equal within a group."""
    _, place_N = torch.unique(groups_N, return_inverse=True)
    num_groups = int(place_N.max()) + 1 if place_N.numel() else 0
    zeros_G = rewards_N.new_zeros(num_groups)
    sizes_G = zeros_G.index_add(0, place_N, torch.ones_like(rewards_N))
    mean_G = zeros_G.index_add(0, place_N, rewards_N) / sizes_G
    low_G = zeros_G.scatter_reduce(0, place_N, rewards_N, "amin", include_self=False)
    high_G = zeros_G.scatter_reduce(0, place_N, rewards_N, "amax", include_self=False)
    constant_N = (low_G == high_G)[place_N]
    centered_N = torch.where(constant_N, 0.0, rewards_N - mean_G[place_N])
    variance_G = zeros_G.index_add(0, place_N, centered_N.square()) / (sizes_G - 1).clamp(min=1)
    return GroupMoments(sizes_N=sizes_G[place_N], centered_N=centered_N, std_N=variance_G.sqrt()[place_N], constant_N=constant_N)


def grpo(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """``(r_i - mean) / (std + 1e-6)`` within each group; 0 where all rewards are equal.

    Source: DeepSeekMath, Shao et al. 2024.
    """
    moments = group_moments(rewards_N, groups_N)
    return moments.centered_N / (moments.std_N + STD_EPSILON)


def grpo_no_std(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """``r_i - mean`` within each group. Source: Dr. GRPO, Liu et al. 2025."""
    return group_moments(rewards_N, groups_N).centered_N


def rloo(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """``r_i - mean of the others = G / (G - 1) (r_i - mean)``; 0 in a group of one. Source: Ahmadian et al. 2024, Kool et al. 2019."""
    moments = group_moments(rewards_N, groups_N)
    return moments.centered_N * moments.sizes_N / (moments.sizes_N - 1).clamp(min=1)


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grpo": grpo, "grpo_no_std": grpo_no_std, "rloo": rloo}
"""By the name in ``AlgorithmConfig.advantage``."""
