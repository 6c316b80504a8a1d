"""Inputs of an objective: the tokens of a packed row, and the turns and reward parts of a step. Knows no batch."""

from dataclasses import dataclass

from torch import Tensor


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
