"""Result of an objective on the tokens of a micro-batch, the input of the diagnostics."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tidemill.learner.algorithms.importance_weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss of every token, with its weights, clipping and rejections; T = tokens of a packed row."""

    loss_T: Tensor
    """Weighted loss; exactly 0 where masked or rejected."""
    clipped_T: Tensor
    """True where the trust region has set the gradient to 0."""
    weights: Weights | None = None
    """Importance weights that multiplied the loss; None = the config has none."""
    rejected: Mapping[str, Tensor] = field(default_factory=dict)
    """Rejected tokens (bool, [T]) by the name of the rule."""
    left_out_T: Tensor | None = None
    """Tokens without policy loss because of their low entropy; None = the config trains all."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Values that a loss of the user's own reports, by name."""

    @property
    def rejected_T(self) -> Tensor:
        """Mask of the tokens that any rule has rejected."""
        total_T = torch.zeros_like(self.clipped_T)
        for rejected_T in self.rejected.values():
            total_T = total_T | rejected_T
        return total_T
