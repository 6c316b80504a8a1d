"""Settings of the section ``learner.algorithm.kl``: the divergence from a reference model, and whether that one moves."""

from dataclasses import dataclass, fields

from tidemill.learner.algorithms.choices import KL_ESTIMATORS


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Divergence from a reference model (its initial weights, or ``reference``)."""

    coef: float = 0.0
    """Coefficient in the loss; 0 = none."""
    estimator: str = "k3"
    """k1 | k2 | k3 | low_var_kl | k1+ | k3+ (the value of the one, the gradient of k2)."""
    corrected: bool = True
    """Multiply the estimate by pi_theta / mu, with the gradient through the ratio: exact on stale data too."""
    reward_coef: float = 0.0
    """Coefficient of the summed k1 of a sample, subtracted from its reward; 0 = none."""
    reward_by: str = "sample"
    """sample (its sum, before the advantages) | token (REINFORCE++: each token's advantage loses the sum from it to the end)."""
    target: float = 0.0
    """> 0: the coefficients adapt so that the mean divergence per token stays there."""
    horizon: float = 10_000.0
    """Samples over which the coefficients adapt."""
    reference: str = ""
    """Directory of the reference model, Hugging Face format, the same architecture; empty = the model the run starts from."""
    reference_every: int = 0
    """The policy becomes the reference after every so many steps; 0 = never."""
    reference_ema: float = 0.0
    """Share of the reference that stays in each step, the rest becoming the policy's weights (0.99: a moving average); 0 = off."""

    def __post_init__(self) -> None:
        if self.estimator not in KL_ESTIMATORS:
            raise ValueError(f"estimator: want {' | '.join(KL_ESTIMATORS)}, got {self.estimator!r}")
        if min(self.coef, self.reward_coef, self.target) < 0 or self.horizon <= 0:
            raise ValueError("coef, reward_coef, target: want >= 0; horizon: want > 0")
        if self.reward_by not in ("sample", "token"):
            raise ValueError(f"reward_by: want sample | token, got {self.reward_by!r}")
        if self.reward_by != "sample" and not self.reward_coef:
            raise ValueError(f"reward_by: not used without reward_coef; want reward_coef > 0, or sample, got {self.reward_by!r}")
        for name in ("reference_every", "reference_ema"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: want >= 0, got {getattr(self, name)!r}")
        if self.reference_ema >= 1:
            raise ValueError(f"reference_ema: want < 1 (at 1 the reference would never move), got {self.reference_ema!r}")
        if self.reference_every and self.reference_ema:
            raise ValueError(f"reference_ema: want 0 with reference_every = {self.reference_every}: the reference moves by one rule")
        if self.target and not (self.coef or self.reward_coef):
            raise ValueError("target: want coef or reward_coef > 0 as well: there is nothing to adapt")
        defaults = {field.name: field.default for field in fields(KLConfig)}
        for name, user in (("estimator", "coef"), ("corrected", "coef"), ("horizon", "target")):
            if not getattr(self, user) and getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}: not used without {user}; want {user} > 0, or {defaults[name]!r}, got {getattr(self, name)!r}")
        if self.estimator == "k1" and self.coef and not self.corrected:
            raise ValueError("estimator: k1 in the loss has no gradient in expectation; want corrected: true, or another estimator")

    @property
    def moves(self) -> bool:
        """True if the reference changes during the run."""
        return bool(self.reference_every or self.reference_ema)
