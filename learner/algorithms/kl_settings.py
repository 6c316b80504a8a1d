"""Settings of the section ``learner.algorithm.kl``: the divergence from a reference model, and whether that one
moves.
"""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from pydantic import Field

from tidemill.bus.section import NotNegative, NotNegativeFloat, OneOf, PositiveFloat, section
from tidemill.learner.algorithms.choices import KL_ESTIMATORS


@section
@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Divergence from a reference model (its initial weights, or ``reference``)."""

    coef: NotNegativeFloat = 0.0
    """Coefficient in the loss; 0 = none."""
    estimator: Annotated[str, OneOf(KL_ESTIMATORS)] = "k3"
    """k1 | k2 | k3 | low_var_kl | k1+ | k3+ (the value of the one, the gradient of k2)."""
    corrected: bool = True
    """Multiply the estimate by pi_theta / mu, with the gradient through the ratio: exact on stale data too."""
    reward_coef: NotNegativeFloat = 0.0
    """Coefficient of the summed k1 of a sample, subtracted from its reward; 0 = none."""
    reward_by: Literal["sample", "token"] = "sample"
    """sample (its sum, before the advantages) | token (REINFORCE++: each token's advantage loses the sum from it to the
    end).
    """
    target: NotNegativeFloat = 0.0
    """> 0: the coefficients adapt so that the mean divergence per token stays there."""
    horizon: PositiveFloat = 10_000.0
    """Samples over which the coefficients adapt."""
    reference: str = ""
    """Directory of the reference model, Hugging Face format, the same architecture; empty = the model the run starts
    from.
    """
    reference_every: NotNegative = 0
    """The policy becomes the reference after every so many steps; 0 = never."""
    reference_ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the reference that stays in each step, the rest becoming the policy's weights (0.99: a moving average;
    at 1 it would never move); 0 = off.
    """

    def __post_init__(self) -> None:
        if self.reward_by != "sample" and not self.reward_coef:
            raise ValueError(
                f"reward_by: not used without reward_coef; want reward_coef > 0, or sample, got {self.reward_by!r}"
            )
        if self.reference_every and self.reference_ema:
            raise ValueError(
                f"reference_ema: want 0 with reference_every = {self.reference_every}: the reference moves by one rule"
            )
        if self.target and not (self.coef or self.reward_coef):
            raise ValueError("target: want coef or reward_coef > 0 as well: there is nothing to adapt")
        defaults = {field.name: field.default for field in fields(KLConfig)}
        for name, user in (("estimator", "coef"), ("corrected", "coef"), ("horizon", "target")):
            if not getattr(self, user) and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name}: not used without {user}; want {user} > 0, or {defaults[name]!r}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.estimator == "k1" and self.coef and not self.corrected:
            raise ValueError(
                "estimator: k1 in the loss has no gradient in expectation; want corrected: true, or another estimator"
            )

    @property
    def moves(self) -> bool:
        """True if the reference changes during the run."""
        return bool(self.reference_every or self.reference_ema)
