"""Supervised loss on given responses of any origin. Pure functions; T = tokens of a packed row, N = samples of the step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.learner.algorithms.aggregation import Denominators, Reducer, aggregate


def sft_loss(log_probs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the cross-entropy ``-log pi_theta`` of every token (nats), [T]; exactly 0 with exactly 0 gradient where masked."""
    return torch.where(mask_T, -log_probs_T, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    """The term of the demonstrations in the number that an update minimises: ``coef`` times their aggregated cross-entropy.

    Demonstrations have no log-probs of a policy that sampled them, so they are in no ratio, no baseline and no diagnostic of the others,
    and the two terms have denominators of their own.
    """

    coef: float
    mode: str | Reducer
    """Aggregation mode, as in ``Objective.mode``."""
    denominators: Denominators
    """Denominators of the update's demonstrations; with ``loss: sft`` of all its samples, which then have one loss."""

    def term(self, log_probs_T: Tensor, mask_T: Tensor, sample_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a row's part of the term, and its sums for ``train/sft_loss``. ``mask_T``: trainable tokens of demonstrations."""
        loss_T = sft_loss(log_probs_T, mask_T)
        total = self.coef * aggregate(loss_T, mask_T, sample_T, self.denominators, mode=self.mode)
        return total, {"sft_tokens": mask_T.sum().double(), "sft_loss": loss_T.detach().sum().double()}
