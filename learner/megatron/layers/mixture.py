"""The learner's settings about mixtures of experts. Knows no model."""

from dataclasses import dataclass

from tidemill.learner.settings.config import ROLLOUT, LearnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Settings of the experts in a step, beside the objective."""

    replay: bool = False
    """Train with the experts that the pass for old log-probs has chosen (R2), or with given ones."""
    given: bool = False
    """With ``replay``: the experts are those in the samples (R3)."""
    aux_loss_coef: float = 0.0
    """Coefficient of the loss that balances the experts' tokens; 0 = none."""
    bias_update_rate: float = 0.0
    """Step by which routers with a bias per expert move it towards experts with few tokens; 0 = it is fixed."""

    @property
    def counts_tokens(self) -> bool:
        """True if the tokens of each expert move the policy: by a balancing loss or the biases of routers."""
        return bool(self.aux_loss_coef or self.bias_update_rate)

    @classmethod
    def of(cls, learner: LearnerConfig) -> "Mixture":
        """Return those of a configuration."""
        return cls(
            replay=learner.routing_replay != "none",
            given=learner.routing_replay == ROLLOUT,
            aux_loss_coef=learner.moe_aux_loss_coef,
            bias_update_rate=learner.moe_bias_update_rate,
        )
