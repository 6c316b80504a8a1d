"""An advantage that is infinite in some steps. In a module of its own, so that ranks find it by its import path."""

import math

import torch
from torch import Tensor

from tidemill.learner.algorithms.advantages import grpo_no_std

OVERFLOWING = "learner.algorithm.advantage=tests.chaos.overflowing:sometimes"
"""The setting that names it."""


def sometimes(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Infinite where the sum of the step's rewards is even, which is as random as the samples, and the same whenever
    they are taken.
    """
    advantages = grpo_no_std(rewards_N, groups_N)
    return torch.full_like(advantages, math.inf) if round(float(rewards_N.sum())) % 2 == 0 else advantages
