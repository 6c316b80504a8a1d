"""Aggregation of token losses into one number, which does not depend on the split of the tokens over rows, ranks and
parts of a sample.

Pure functions; T = tokens of a packed row, N = samples of the step on all ranks. Every token has one factor, which
depends on its own sample and on the denominators of the whole optimizer step, and on nothing else in the row: the
step's number is the sum of the rows' numbers over micro-batches and ranks, and so is its gradient. If a scheduler
divides by its number of micro-batches or ranks, the caller has to multiply by it.

    mode                  number, l = loss of a trainable token           length of a sample
    token_mean            sum l / tokens                                  all tokens count the same
    seq_mean_token_mean   sum over samples (sum l / its tokens) / B       samples count the same: long wrong ones grow
    seq_mean_token_sum    sum l / B                                       long samples count more; it grows with length
    prompt_mean           sum over groups (sum l / their tokens) / P      each prompt counts the same
    token_sum             sum l                                           a larger batch is a larger step
    constant              sum l / (B constant)                            as seq_mean_token_sum, in other units

B = samples with at least one trainable token, P = groups with one. Denominators count tokens *before* any rejection:
rejected tokens make the number smaller and do not change the factors of the others (re-normalising would amplify
those). A mean over the tokens of a micro-batch, by contrast, depends on the split.
Sources: token_mean, DAPO 2503.14476; seq_mean_token_mean, GRPO, Shao et al. 2024; constant, Dr. GRPO 2503.20783;
prompt_mean, ScaleRL 2510.13786.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tidemill.learner.algorithms.choices import AGGREGATIONS
from tidemill.learner.algorithms.correction import ImportanceWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss of every token, with its weights, clipping and rejections; T = tokens of a packed row."""

    loss_T: Tensor
    """Weighted loss; exactly 0 where masked or rejected."""
    clipped_T: Tensor
    """True where the trust region has set the gradient to 0."""
    weights: ImportanceWeights | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Denominators of one optimizer step, over all its rows and all ranks, before any rejection."""

    tokens: int
    """Trainable tokens."""
    sequences: int
    """Samples with at least one trainable token."""
    trainable_N: Tensor
    """Trainable tokens of every sample, int64; 0 for one that this optimizer step does not train."""
    constant: float
    """Tokens that a sample counts as in mode ``constant``, by default those of the largest response."""
    groups_N: Tensor | None = None
    """Group id of every sample, for mode ``prompt_mean``. Other modes ignore it."""


Reducer = Callable[[Tensor, Tensor, Denominators], Tensor]
"""``(mask_T, sample_T, denominators) -> factor of every token [T]``: signature of an aggregation by import path. The
factor of a token may depend on its own sample and on the denominators, and on nothing else in the row.
"""


def coefficients(mode: str | Reducer, mask_T: Tensor, sample_T: Tensor, denominators: Denominators) -> Tensor:
    """Return the factor of every token's loss in the step's number, float64 [T]; 0 where masked, also if every token
    is.

    ``sample_T``: row of ``trainable_N`` that a token belongs to; any value where masked. A trainable token with a
    denominator of 0 gets infinity, not a wrong number. Raises ValueError for an unknown mode, and for a ``constant``
    that is not positive.
    """
    if callable(mode):
        if not denominators.tokens:  # as in a minibatch of demonstrations alone: one's own function may divide by them
            return torch.zeros(mask_T.shape, dtype=torch.float64, device=mask_T.device)
        return torch.where(mask_T, mode(mask_T, sample_T, denominators).double(), 0.0)
    divisor_T = torch.ones(mask_T.shape, dtype=torch.float64, device=mask_T.device)
    if mode == "token_mean":
        divisor_T *= denominators.tokens
    elif mode == "seq_mean_token_mean":
        lengths_T = denominators.trainable_N.to(mask_T.device)[torch.where(mask_T, sample_T, 0)]
        divisor_T *= denominators.sequences * lengths_T
    elif mode == "seq_mean_token_sum":
        divisor_T *= denominators.sequences
    elif mode == "prompt_mean":
        tokens_N, prompts = _prompt_tokens(denominators)
        divisor_T *= prompts * tokens_N.to(mask_T.device)[torch.where(mask_T, sample_T, 0)]
    elif mode == "token_sum":
        pass
    elif mode == "constant":
        if denominators.constant <= 0:
            raise ValueError(f"constant: want > 0, got {denominators.constant}")
        divisor_T *= denominators.sequences * denominators.constant
    else:
        raise ValueError(f"aggregation: want one of {', '.join(AGGREGATIONS)}, got {mode!r}")
    return torch.where(mask_T, 1 / divisor_T, 0.0)


def aggregate(
    values_T: Tensor, mask_T: Tensor, sample_T: Tensor, denominators: Denominators, *, mode: str | Reducer
) -> Tensor:
    """Return ``sum of coefficient * value`` over the unmasked tokens of a row: its part of the step's number, in the
    values' dtype.

    The gradient of a token is its coefficient; exactly 0 where masked, NaN and infinity there included.
    """
    factor_T = coefficients(mode, mask_T, sample_T, denominators).to(values_T.dtype)
    return (factor_T * torch.where(mask_T, values_T, 0.0)).sum()


def _prompt_tokens(denominators: Denominators) -> tuple[Tensor, int]:
    """Return (trainable tokens of each sample's group, float64 [N]; number of groups with any)."""
    if denominators.groups_N is None:
        raise ValueError("groups_N: prompt_mean divides by the tokens of each group, got None")
    _, place_N = torch.unique(denominators.groups_N, return_inverse=True)
    counts_N = denominators.trainable_N.double().to(place_N.device)
    tokens_G = counts_N.new_zeros(int(place_N.max()) + 1).index_add(0, place_N, counts_N)
    return tokens_G[place_N], int((tokens_G > 0).sum())


# ---- demonstrations


def sft_loss(log_probs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the cross-entropy ``-log pi_theta`` (nats), [T]; exactly 0 with exactly 0 gradient where masked."""
    return torch.where(mask_T, -log_probs_T, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    """The term of the demonstrations in the number that an update minimises: ``coef`` times their aggregated
    cross-entropy.

    Demonstrations have no log-probs of a policy that sampled them, so they are in no ratio, no baseline and no
    diagnostic of the others, and the two terms have denominators of their own.
    """

    coef: float
    mode: str | Reducer
    """Aggregation mode, as in ``Objective.mode``."""
    denominators: Denominators
    """Denominators of the update's demonstrations; with ``loss: sft`` of all its samples, which then have one loss."""

    def term(self, log_probs_T: Tensor, mask_T: Tensor, sample_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a row's part, and its sums for ``train/sft_loss``. ``mask_T``: trainable tokens of demonstrations."""
        loss_T = sft_loss(log_probs_T, mask_T)
        total = self.coef * aggregate(loss_T, mask_T, sample_T, self.denominators, mode=self.mode)
        return total, {"sft_tokens": mask_T.sum().double(), "sft_loss": loss_T.detach().sum().double()}
