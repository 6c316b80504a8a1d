"""What an objective has made of the tokens of a micro-batch; the diagnostics read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.algorithms.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss of every token, and what was done to it; T = tokens of a packed row."""

    loss_T: Tensor
    """Weighted; exactly 0 where masked or rejected."""
    clipped_T: Tensor
    """The trust region has taken the gradient away."""
    weights: Weights | None = None
    """Importance weights that multiplied the loss; None = there were none."""
    rejected: Mapping[str, Tensor] = field(default_factory=dict)
    """Rule -> tokens it has rejected (bool, [T])."""

    @property
    def rejected_T(self) -> Tensor:
        """Tokens that any rule has rejected."""
        total_T = torch.zeros_like(self.clipped_T)
        for rejected_T in self.rejected.values():
            total_T = total_T | rejected_T
        return total_T
