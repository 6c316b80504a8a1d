"""Inputs of an objective: the tokens of a packed row with their log-ratios, sums over sequences, and the turns and
reward parts of a step. Pure; knows no batch. Shape letters: T = tokens of the row, N = samples of the step.

Notation of the field: ``mu`` is the distribution the engine sampled from, ``pi_prox`` (also ``pi_old``) the policy that
an update starts from, ``pi_theta`` the policy with gradient, ``delta = log pi - log mu``. ``sample_T`` is the index of
a token's sample in the step, 0..N-1, and -1 in padding; the tokens of a sample are neighbours and all in one row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DELTA_BOUND = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is outside every clip, and finite. Source: verl's SAFETY_BOUND."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Inputs of an objective for one packed row, besides the log-probs with gradient; T = its tokens, all [T]."""

    mask_T: Tensor
    """Trainable tokens."""
    sample_T: Tensor
    """Index of the token's sample in the step, 0..N-1; -1 in padding. Advantages and denominators are by sample."""
    num_samples: int
    """N."""
    rollout_T: Tensor
    """log mu."""
    lag_T: Tensor
    """Age in steps; -1 where masked."""
    advantages_T: Tensor
    old_T: Tensor | None = None
    """Log-probs of the proximal policy; None = the proximal policy is the trained one, detached."""
    reference_T: Tensor | None = None
    """Log-probs of the reference; None = the config uses no reference."""
    teacher_T: Tensor | None = None
    """Log-probs of the targets under the teacher that scored the samples; None = the samples have no scores."""
    teacher_top_TK: Tensor | None = None
    """Log-probs, under the teacher, of the tokens that it listed at each position, [T, K]; None = it listed none."""
    sequence_T: Tensor | None = None
    """Index of the token's sequence in the step, 0..M-1; -1 in padding; None = every sample is one sequence."""
    num_sequences: int = 0
    """M, with ``sequence_T``."""
    old_entropy_T: Tensor | None = None
    """Entropies of the distributions of ``old_T``."""
    chosen_T: Tensor | None = None
    """Tokens chosen by covariance; None = none are."""
    values_T: Tensor | None = None
    """Values of a critic before the step; None = there is none."""
    returns_T: Tensor | None = None
    """Targets of the critic's value function, with ``values_T``."""

    @property
    def by_sequence(self) -> tuple[Tensor, int]:
        """(sequence of each token, M): the unit of ratios. A sequence's tokens are neighbours in one row."""
        return (self.sample_T, self.num_samples) if self.sequence_T is None else (self.sequence_T, self.num_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnColumns:
    """Turns of all samples of a step, in columns; those of a sample are neighbours, in order of delivery."""

    samples_C: Tensor
    rewards_C: Tensor
    trainable_C: Tensor
    """Trainable tokens, after the gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """Parts of the rewards of a step."""

    names: tuple[str, ...]
    values_NK: Tensor
    """NaN = the sample has no such part."""


def given(values: Tensor | None) -> Tensor:
    """Return log-probs, entropies or scores that the config needs, so that the caller has computed them."""
    assert values is not None, "an input that the config needs is missing"
    return values


def log_ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return ``log p - log q`` clamped to +-20; exactly 0, with exactly 0 gradient, where the mask is False.

    Both inputs are masked *before* they are subtracted: NaN or infinity behind the mask reaches neither value nor
    gradient.
    """
    numerator_T = torch.where(mask_T, numerator_T, 0.0)
    denominator_T = torch.where(mask_T, denominator_T, 0.0)
    return (numerator_T - denominator_T).clamp(-DELTA_BOUND, DELTA_BOUND)


def sequence_sums(values_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int) -> Tensor:
    """Return the sum of each sample's unmasked values, [N]; 0 for a sample that is not in this row."""
    values_T = torch.where(mask_T, values_T, 0.0)
    # Padding (-1) is added to sample 0, as 0: it is never trainable.
    return values_T.new_zeros(num_samples).index_add(0, sample_T.clamp(min=0), values_T)


def sequence_means(values_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int) -> Tensor:
    """Return the mean of each sample's unmasked values, [N]; 0 for a sample without any."""
    ones_T = torch.ones_like(values_T)
    counts_N = sequence_sums(ones_T, mask_T, sample_T, num_samples).clamp(min=1)
    return sequence_sums(values_T, mask_T, sample_T, num_samples) / counts_N


def running_sums(values_T: Tensor) -> Tensor:
    """Return ``values.cumsum(0)``, by doubling: log T additions of shifted tensors.

    torch.cumsum of floating-point numbers has no deterministic kernel on CUDA, so it raises in the learner's
    deterministic mode.
    Sources: Hillis, Steele 1986 (the scan); the documentation of ``torch.use_deterministic_algorithms``.
    """
    step = 1
    while step < len(values_T):
        values_T = torch.cat([values_T[:step], values_T[step:] + values_T[:-step]])
        step *= 2
    return values_T


def prefix_sums(values_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int) -> Tensor:
    """Return the sum of a sample's unmasked values up to and including each token, [T]; 0 where masked."""
    values_T = torch.where(mask_T, values_T, 0.0)
    # float64: the sum runs over the whole row, and a prefix is the difference of two of its values.
    running_T = running_sums(values_T.double())
    at_T = torch.arange(len(values_T), device=values_T.device)
    first_N = at_T.new_full((num_samples,), len(values_T)).scatter_reduce(0, sample_T.clamp(min=0), at_T, "amin")
    before_T = (running_T - values_T.double())[first_N[sample_T.clamp(min=0)]]
    return torch.where(mask_T, (running_T - before_T).to(values_T.dtype), 0.0)


def spread(values_N: Tensor, sample_T: Tensor) -> Tensor:
    """Return the value of each token's sample, [T]; 0 in padding."""
    return torch.where(
        sample_T >= 0, values_N[sample_T.clamp(min=0)], torch.zeros((), dtype=values_N.dtype, device=values_N.device)
    )
