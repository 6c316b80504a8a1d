"""Numbers that a run adapts from step to step, equal on all ranks: a part of its checkpoints. Knows no model."""

import math
from collections.abc import Mapping

from tidemill.learner.algorithms.choices import RUNNING
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.kl import EntropyBonus, counted_samples, next_coefficient
from tidemill.learner.errors import ConfigRefused

_BASELINE = "baseline/"  # prefix of the running baselines among the numbers of a checkpoint


class Adaptive:
    """Coefficients of KL and entropy, running baselines, and the count of trained tokens."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.kl_scale = 1.0
        """Factor of the KL coefficients, which the adaptive controller sets."""
        self.baselines: dict[str, float] = {}
        """Running baseline of each role, in units of the reward, with ``advantage: rae``."""
        self.trained_tokens = 0.0
        self.configure(algorithm)

    def configure(self, algorithm: AlgorithmConfig) -> None:
        """Take over the settings of the next steps. The coefficient of the entropy bonus begins anew."""
        self._algorithm = algorithm
        self.entropy_bonus = EntropyBonus(coef=algorithm.entropy.coef)
        """Coefficient of the entropy bonus, which ``entropy.target`` moves."""

    @property
    def entropy_coef(self) -> float | None:
        """The coefficient in use; None = that of the settings."""
        return self.entropy_bonus.applied if self._algorithm.entropy.target else None

    @property
    def numbers(self) -> dict[str, float]:
        """The content of a checkpoint."""
        adaptive = {"entropy_coef": self.entropy_bonus.coef, "entropy_low": float(self.entropy_bonus.low)}
        running = {_BASELINE + role: baseline for role, baseline in self.baselines.items()}
        adaptive = adaptive if self._algorithm.entropy.target else {}
        return {"kl_scale": self.kl_scale, "trained_tokens": self.trained_tokens, **adaptive, **running}

    def restore(self, numbers: Mapping[str, float], *, by_tokens: bool) -> None:
        """Go on with the ``numbers`` of a checkpoint. ConfigRefused for one without tokens for a schedule that is
        ``by_tokens``.
        """
        self.kl_scale = numbers["kl_scale"]
        if self._algorithm.entropy.target and "entropy_coef" in numbers:  # missing where the target was set later
            self.entropy_bonus = EntropyBonus(coef=numbers["entropy_coef"], low=bool(numbers["entropy_low"]))
        if self._algorithm.advantage in RUNNING:
            self.baselines = {
                name.removeprefix(_BASELINE): baseline
                for name, baseline in numbers.items()
                if name.startswith(_BASELINE)
            }
        if "trained_tokens" not in numbers and by_tokens:
            raise ConfigRefused(
                "learner.optimizer.warmup_tokens, lr_decay_tokens",
                "0: the checkpoint has no count of trained tokens",
                "> 0",
            )
        self.trained_tokens = numbers.get("trained_tokens", 0.0)

    def adapt(self, metrics: dict[str, float], num_samples: int, *, warms_up: bool) -> None:
        """Move the coefficients of KL and entropy to their targets, in the metrics too, unless the critic warms up.

        The reduced metrics are equal on all ranks, so every rank computes the same next coefficients.
        """
        kl, entropy = self._algorithm.kl, self._algorithm.entropy
        if kl.target and num_samples and "train/kl_reference" in metrics and not warms_up:
            counted = counted_samples(num_samples, kl.horizon)
            divergence = metrics["train/kl_reference"]
            self.kl_scale = next_coefficient(
                self.kl_scale, divergence, target=kl.target, horizon=kl.horizon, num_samples=counted
            )
        if self.baselines:
            metrics["train/baseline_mean"] = math.fsum(self.baselines.values()) / len(self.baselines)
        if self._algorithm.needs_reference:
            metrics["train/kl_scale"] = self.kl_scale
        if entropy.target:
            metrics["train/entropy_coef"] = self.entropy_bonus.applied
            if "train/entropy" in metrics and not warms_up:
                bounds = {"target": entropy.target, "delta": entropy.delta, "most": entropy.coef_max}
                self.entropy_bonus = self.entropy_bonus.after(metrics["train/entropy"], **bounds)
