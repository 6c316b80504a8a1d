"""Supervised loss on given responses of any origin. Pure functions; T = tokens of a packed row."""

import torch
from torch import Tensor


def sft_loss(log_probs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the cross-entropy ``-log pi_theta`` of every token (nats), [T]; exactly 0 with exactly 0 gradient where masked."""
    return torch.where(mask_T, -log_probs_T, 0.0)
