"""Sections of ``learner.algorithm``: the settings that one estimator, one loss or one term reads.

A field that is None takes the value of the preset (``choices.py``). A section checks what its own fields decide;
``contradictions.py`` checks the rest.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tidemill.bus.section import (
    NotNegative,
    NotNegativeFloat,
    OneOf,
    Positive,
    PositiveFloat,
    refusal,
    section,
)
from tidemill.learner.algorithms.choices import KL_ESTIMATORS, WEIGHTS

MAX_LISTED = 1024
"""Maximum number of tokens that a teacher may list at each position."""


def _factor(weight: float) -> float:
    if not weight:
        raise refusal("a number other than 0")
    return weight


# ---- advantages


@section
@dataclass(frozen=True, kw_only=True)
class VtraceConfig:
    """Bounds of ``advantage: vtrace``."""

    rho: PositiveFloat = 1.0
    """Upper bound of the weight of a temporal difference; it decides which policy's values the critic learns."""
    c: PositiveFloat = 1.0
    """Upper bound of the weight with which later differences reach earlier tokens; <= rho."""

    def __post_init__(self) -> None:
        if self.c > self.rho:
            raise ValueError(f"c: want <= rho = {self.rho!r} (else there is no fixed point), got {self.c!r}")


@section
@dataclass(frozen=True, kw_only=True)
class PassAtKConfig:
    """Setting of ``advantage: pass_at_k``."""

    k: Positive = 2
    """Number of samples, at least one of which must pass; at most the samples of a group."""


@section
@dataclass(frozen=True, kw_only=True)
class RaeConfig:
    """Running baselines of ``advantage: rae``."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Share of a role's baseline that stays when one reward of the role has been added to it; at 1 it would never move.
    """
    role: str = ""
    """Key of the samples' metadata with the role; each role has a baseline. Empty = one for all samples."""


@section
@dataclass(frozen=True, kw_only=True)
class GdpoConfig:
    """Setting of ``advantage: gdpo``."""

    weights: dict[str, Annotated[float, AfterValidator(_factor)]] = field(default_factory=dict)
    """Weight of each reward part by name; parts without one are ignored. Empty = 1 for every part."""


@section
@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """Penalty of responses that nearly reach their length limit (DAPO)."""

    buffer: NotNegative = 0
    """Responses that end within so many tokens of max_new_tokens lose reward, linearly, up to ``penalty``; 0 = off."""
    penalty: NotNegativeFloat = 1.0
    """Reward that a response of ``max_new_tokens`` loses."""

    def __post_init__(self) -> None:
        if self.penalty != 1.0 and not self.buffer:
            raise ValueError(f"penalty: not used without buffer; want buffer > 0 as well, or 1.0, got {self.penalty!r}")
        if self.buffer and not self.penalty:
            raise ValueError(f"penalty: want > 0 with buffer: {self.buffer}, got {self.penalty!r}")


@section
@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """On-policy distillation (docs/distillation.md)."""

    coef: NotNegativeFloat = 0.0
    """Factor of log pi_teacher - log pi in each token's advantage, or of the KL in the loss (``loss``)."""
    teacher: Literal["reference", "engine"] = "reference"
    """reference (``kl.reference``) or engine (scores in the samples); derived: engine with ``actor.teachers``."""
    loss: Literal["token", "forward_kl", "reverse_kl"] = "token"
    """token (an advantage of the sampled token) | forward_kl, reverse_kl (a loss of ``top_k`` tokens and the rest)."""
    top_k: Annotated[int, Field(ge=0, le=MAX_LISTED)] = 0
    """Most probable tokens of the teacher at each position, for forward_kl and reverse_kl."""

    def __post_init__(self) -> None:
        if self.loss != "token" and not self.coef:
            raise ValueError(f"loss: nothing reads it without coef > 0; want token, or that, got {self.loss}")
        if (self.loss == "token") != (self.top_k == 0):
            want = "0 with loss: token" if self.loss == "token" else f"1 to {MAX_LISTED} with {self.loss}"
            raise ValueError(f"top_k: want {want}, got {self.top_k!r}")

    @property
    def by_engine(self) -> bool:
        """True if the samples need the scores of a teacher."""
        return bool(self.coef) and self.teacher == "engine"

    @property
    def by_reference(self) -> bool:
        """True if the reference model is the teacher."""
        return bool(self.coef) and self.teacher == "reference"


# ---- losses


@section
@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Trust region of the loss, 1 - low .. 1 + high (dppo_tv, ipo: of the probability; dppo_kl: of the binary KL; gmpo:
    of the log-ratio, nats; cispo: of the weight).
    """

    low: NotNegativeFloat | None = None
    """Lower half of the trust region; cispo: 1 = no lower bound."""
    high: NotNegativeFloat | None = None
    """Upper half of the trust region."""
    dual: NotNegativeFloat = 0.0
    """Upper bound of the ratio where the advantage is negative (ppo, gspo, gspo_token); 0 = none, else > 1."""

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high), after a preset has filled them in."""
        assert self.low is not None and self.high is not None
        return self.low, self.high


@section
@dataclass(frozen=True, kw_only=True)
class SapoConfig:
    """Temperatures of the gate of ``loss: sapo``."""

    tau_positive: PositiveFloat = 1.0
    """Temperature for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """Temperature for negative advantages."""


@section
@dataclass(frozen=True, kw_only=True)
class DppoConfig:
    """Further settings of the losses dppo_tv, dppo_kl and ipo."""

    penalty: NotNegativeFloat | None = None
    """Coefficient of the squared log-ratio."""
    ratio_cap: NotNegativeFloat = 0.0
    """Largest ratio that multiplies the gradient; 0 = none, else >= 1."""

    def __post_init__(self) -> None:
        if 0 < self.ratio_cap < 1:
            raise ValueError(f"ratio_cap: want >= 1 (the ratio of fresh data), or 0, got {self.ratio_cap!r}")


@section
@dataclass(frozen=True, kw_only=True)
class CovarianceConfig:
    """Tokens that clip_cov and kl_cov treat apart, by covariance (A - mean A) (log pi - mean log pi)."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.0002
    """Share of the tokens, at least one, that clip_cov leaves out (drawn) or kl_cov holds back (largest)."""
    low: NotNegativeFloat = 1.0
    """clip_cov draws from tokens with a covariance of low .. high."""
    high: float = 5.0
    """Upper bound of that covariance."""
    kl_coef: PositiveFloat = 1.0
    """Coefficient of the absolute log-ratio of kl_cov's tokens; at 0 nothing would hold the policy to its data."""

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low: want < high = {self.high!r}, got {self.low!r}")


@section
@dataclass(frozen=True, kw_only=True)
class DroConfig:
    """Setting of ``loss: dro``."""

    tau: PositiveFloat = 0.1
    """Weight of a response's squared log-ratio, in units of the advantage per nat."""


# ---- correction


@section
@dataclass(frozen=True, kw_only=True)
class WeightConfig:
    """Importance weight of pi_proximal / mu where the anchor is proximal, else of pi / mu."""

    level: Annotated[str, OneOf(WEIGHTS, by_path=True)] | None = None
    """Unit of the ratio: none | token | sequence | geometric | prefix, or module:function."""
    action: Literal["clip", "truncate", "mask"] | None = None
    """Outside low .. high: clip | truncate (the upper bound alone) | mask (0)."""
    low: NotNegativeFloat | None = None
    """Lower bound of the weight."""
    high: NotNegativeFloat | None = None
    """Upper bound of the weight; 0 = no bound."""
    self_normalise: bool = False
    """Divide the weights by their mean over the update on all ranks."""

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high), after a preset has filled them in; a ``high`` of 0 is no bound."""
        assert self.low is not None and self.high is not None
        return self.low, self.high or math.inf


@dataclass(frozen=True, slots=True)
class RejectRule:
    """One entry of ``RejectConfig.rules``."""

    metric: str
    span: str
    low: float
    """Lower bound, for k1 only; 0 = none."""
    high: float

    @property
    def name(self) -> str:
        """Name of the rule in the metrics: ``<metric>_<span>``."""
        return f"{self.metric}_{self.span}"


def by_path(text: str) -> bool:
    """Return whether a rule is the import path of a function (``module:function``)."""
    module, colon, function = text.partition(":")
    return bool(module and colon and function) and not text.split()[1:]


def reject_rule(text: str) -> RejectRule:
    """Return the rule in ``"k3 seq_mean 0.01"`` (metric, span, upper bound) or ``"k1 token 0.5 2"`` (lower and upper
    bound).

    Raises ValueError for any other text, for bounds in the wrong order or not finite, and for bounds of k1 without 1
    between them.
    """
    parts = text.split()
    form = (
        "'METRIC SPAN HIGH' or 'k1 SPAN LOW HIGH' with k1 | k2 | k3 and token | seq_sum | seq_mean | seq_max, or "
        "module:function"
    )
    try:
        metric, span, *bounds = parts
        numbers = [float(bound) for bound in bounds]
        low, high = numbers if len(numbers) == 2 else (0.0, *numbers)
    except ValueError:
        raise ValueError(f"rules: want {form}, got {text!r}") from None
    if (
        metric not in ("k1", "k2", "k3")
        or span not in ("token", "seq_sum", "seq_mean", "seq_max")
        or (low and metric != "k1")
    ):
        raise ValueError(f"rules: want {form}, got {text!r}")
    if not 0 <= low < high < math.inf:
        raise ValueError(f"rules: want 0 <= low < high, finite, got {text!r}")
    if low and span == "seq_max":
        raise ValueError(f"rules: seq_max is of the absolute log-ratio, want one bound, got {text!r}")
    if metric == "k1" and not low <= 1 <= high:
        raise ValueError(f"rules: k1 bounds the ratio pi / mu, 1 for fresh data: want low <= 1 <= high, got {text!r}")
    return RejectRule(metric, span, low, high)


@section
@dataclass(frozen=True, kw_only=True)
class RejectConfig:
    """Tokens and samples with a log-ratio that is out of bounds: their loss is 0."""

    rules: tuple[str, ...] | None = None
    """Rules "METRIC SPAN HIGH" or "k1 SPAN LOW HIGH" with k1 | k2 | k3 and token | seq_sum | seq_mean | seq_max, or
    module:function.
    """
    veto: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Reject a sample with a token whose ratio is below this (1e-4), which is below 1; 0 = off."""
    binary_kl: NotNegativeFloat | None = None
    """Largest binary KL of a token (KPop); 0 = off."""
    opsm: NotNegativeFloat | None = None
    """Off-policy sequence masking: largest mean log mu - log pi of a sample with a negative advantage; 0 = off."""

    def __post_init__(self) -> None:
        self.parsed  # noqa: B018  # for the errors of rules

    @property
    def parsed(self) -> tuple[RejectRule, ...]:
        """The rules but those by import path. Raises ValueError for one that cannot be parsed."""
        return tuple(reject_rule(text) for text in self.rules or () if not by_path(text))

    @property
    def functions(self) -> tuple[str, ...]:
        """The rules by import path."""
        return tuple(text for text in self.rules or () if by_path(text))


@section
@dataclass(frozen=True, kw_only=True)
class M2Config:
    """Limit of the second moment of the log-ratio (M2PO)."""

    limit: NotNegativeFloat | None = None
    """Largest mean of the squared log-ratio (0.04); 0 = off."""
    tokens: Literal["all", "harmful"] | None = None
    """Tokens that are counted and rejected: all | harmful (the update moves them away from mu)."""
    keep_low: NotNegativeFloat | None = None
    """Tokens with a ratio of keep_low .. keep_high are not rejected; both 0 = no such range."""
    keep_high: NotNegativeFloat | None = None
    """Upper bound of that range."""

    @property
    def kept(self) -> tuple[float, float]:
        """(keep_low, keep_high), after a preset has filled them in."""
        assert self.keep_low is not None and self.keep_high is not None
        return self.keep_low, self.keep_high


# ---- further terms


@section
@dataclass(frozen=True, kw_only=True)
class EntropyConfig:
    """Entropy bonus."""

    coef: NotNegativeFloat = 0.0
    """Coefficient in the loss, with ``target`` the first one; 0 = none."""
    target: NotNegativeFloat = 0.0
    """> 0: mean entropy per token, nats, below which the coefficient grows; above it falls, with no bonus."""
    delta: float = 0.005
    """Change of the coefficient in a step, with ``target``."""
    coef_max: float = 1.0
    """Largest coefficient, with ``target``."""

    def __post_init__(self) -> None:
        if not self.target:
            for entry in fields(self)[2:]:
                if (value := getattr(self, entry.name)) != entry.default:
                    want = f"target > 0, or {entry.default}"
                    raise ValueError(f"{entry.name}: not used without target; want {want}, got {value!r}")
            return
        if not self.delta > 0:
            raise ValueError(f"delta: want > 0 (else coef never changes), got {self.delta!r}")
        for name in ("coef", "delta"):
            if (value := getattr(self, name)) > self.coef_max:
                raise ValueError(f"{name}: want <= coef_max = {self.coef_max!r}, got {value!r}")


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
    """sample (its sum, before the advantages) | token (each advantage loses the sum from its token on)."""
    target: NotNegativeFloat = 0.0
    """> 0: the coefficients adapt so that the mean divergence per token stays there."""
    horizon: PositiveFloat = 10_000.0
    """Samples over which the coefficients adapt."""
    reference: str = ""
    """Directory of the reference model, of the same architecture; empty = the model the run starts from."""
    reference_every: NotNegative = 0
    """The policy becomes the reference after every so many steps; 0 = never."""
    reference_ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the reference that stays in each step, the rest becoming the policy's (0.99); 0 = off."""

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
