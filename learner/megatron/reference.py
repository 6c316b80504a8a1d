"""The reference model's weights, and the rule by which they follow the policy, if they do.

A reference that follows the policy is part of the checkpoint, so a repeated step compares with the same weights.
"""

from pathlib import Path

import torch

from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.megatron.model import Policy, WeightBackup, initial_weights, reference_weights


class Reference:
    """A backup of weights, or none, that follows the policy by ``kl.reference_every`` or ``kl.reference_ema``."""

    def __init__(self, weights: WeightBackup | None, config: KLConfig) -> None:
        self.weights, self._config = weights, config

    @property
    def saved(self) -> WeightBackup | None:
        """The weights, if they belong in the checkpoint."""
        return self.weights if self._config.moves else None

    def follow(self, step: int) -> None:
        """Move the weights after step ``step``, before its checkpoint. Raises MemoryReleased."""
        if self.weights is None:
            return
        if self._config.reference_ema:
            self.weights.average(self._config.reference_ema)
        elif self._config.reference_every and step % self._config.reference_every == 0:
            self.weights.refresh()


def open_reference(policy: Policy, model_dir: Path, algorithm: AlgorithmConfig) -> Reference:
    """Return the reference of a run: the weights of ``kl.reference``, or those of the policy now.

    A moving average is kept in float32, because a small share of a difference would be lost in bfloat16.
    """
    if not algorithm.needs_reference:
        return Reference(None, algorithm.kl)
    dtype = torch.float32 if algorithm.kl.reference_ema else None
    if algorithm.kl.reference:
        return Reference(reference_weights(policy, model_dir, Path(algorithm.kl.reference), dtype=dtype), algorithm.kl)
    return Reference(initial_weights(policy, dtype=dtype), algorithm.kl)
