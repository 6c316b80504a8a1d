"""Configuration of the objective and of the off-policy correction: a preset by name, in which every field can be
replaced.

``correction`` names a preset; a field that is None takes the preset's value, any other value replaces it, and
``--print-config`` shows the result. Formulas, sources and recommendations: ``docs/algorithms.md``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tidemill.bus.section import (
    BASIC,
    NotNegative,
    NotNegativeFloat,
    OneOf,
    Positive,
    PositiveFloat,
    Share,
    refusal,
    section,
)
from tidemill.learner.algorithms.alarms import AlarmConfig
from tidemill.learner.algorithms.choices import (
    ADVANTAGES,
    AGGREGATIONS,
    ANCHORED,
    BOUNDED,
    BY_COVARIANCE,
    BY_CRITIC,
    DISCOUNTED,
    IN_REWARD,
    LOSSES,
    RUNNING,
)
from tidemill.learner.algorithms.kl_settings import KLConfig
from tidemill.learner.algorithms.presets import DEFAULTS, PRESETS
from tidemill.learner.algorithms.reject_rules import RejectRule, by_path, reject_rule

MAX_LISTED = 1024
"""Maximum number of tokens that a teacher may list at each position."""


def _factor(weight: float) -> float:
    if not weight:
        raise refusal("a number other than 0")
    return weight


@section
@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantages, loss, correction, divergence."""

    correction: Annotated[Annotated[str, OneOf(tuple(PRESETS))], BASIC] = "decoupled"
    """A preset: none | naive | bypass | tis | aipo | decoupled | a3po | mis | icepop | seq_tis | seq_mis | geo_mask |
    kpop | opsm | m2po | m2po_harmful | cispo | gspo | gspo_token | luspo | gmpo | clip_cov | kl_cov | topr | sapo |
    vespo | dppo_tv | dppo_kl | ipo | dro | sft.
    """
    train_without_correction: bool = False
    """Needed to train asynchronously on data that nothing corrects (none, naive)."""

    advantage: Annotated[Annotated[str, OneOf((*ADVANTAGES, *RUNNING, *BY_CRITIC), by_path=True)], BASIC] = "grpo"
    """grpo | grpo_no_std (Dr. GRPO) | batch_std | rloo | reinforce | reinforce_pp | reinforce_pp_baseline | opo | maxrl
    | pass_at_k | gdpo | rae; with a critic gae | vtrace; or module:function.
    """
    gamma: Share = 1.0
    """Discount from a trainable token to the next (gae, vtrace, reinforce, reinforce_pp)."""
    lam: Share = 1.0
    """GAE's lambda, from 0 (one step ahead) to 1 (the whole return); with vtrace a factor of its traces."""
    vtrace_rho: PositiveFloat = 1.0
    """vtrace: upper bound of the weight of a temporal difference; it decides which policy's values the critic learns.
    """
    vtrace_c: PositiveFloat = 1.0
    """vtrace: upper bound of the weight with which later differences reach earlier tokens; <= vtrace_rho."""
    pass_k: Positive = 2
    """k of ``pass_at_k``; at most the samples of a group."""
    rae_decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """rae: share of a role's baseline that stays when one reward of the role has been added to it; at 1 it
    would never move."""
    rae_role: str = ""
    """rae: key of the samples' metadata with the role, each of which has a baseline of its own; empty = one baseline
    for all samples.
    """
    gdpo_weights: dict[str, Annotated[float, AfterValidator(_factor)]] = field(default_factory=dict)
    """Weight of each reward part in ``gdpo``, by name; parts without one are ignored. Empty = 1 for every part."""
    whiten: bool | None = None
    """Advantages to mean 0 and variance 1 over the trainable tokens of the step; None = as the estimator wants it."""
    overlong_buffer: NotNegative = 0
    """Responses that end within so many tokens of max_new_tokens lose reward, linearly, up to overlong_penalty; 0 =
    off.
    """
    overlong_penalty: NotNegativeFloat = 1.0
    """Reward that a response of ``max_new_tokens`` loses."""
    mask_truncated: bool = False
    """Do not train responses that ran into their length limit; their rewards still count in the baseline of their
    group.
    """
    sft_coef: NotNegativeFloat = 0.0
    """Coefficient of the cross-entropy of demonstrations (recorded responses without log-probs) beside another loss; 0
    = none (docs/sft.md).
    """
    distill_coef: NotNegativeFloat = 0.0
    """On-policy distillation: adds coef (log pi_teacher - log pi) to each token's advantage, or coef times a KL of the
    teacher's top-k tokens to the loss (``distill_loss``).
    """
    distill_teacher: Literal["reference", "engine"] = "reference"
    """The teacher: reference (``kl.reference``, a model of the trained one's architecture) | engine (the scores in the
    samples, from one of ``actor.teachers``); derived: engine where there are ``actor.teachers``.
    """
    distill_loss: Literal["token", "forward_kl", "reverse_kl"] = "token"
    """token (the sampled token alone, as an advantage) | forward_kl, reverse_kl (of the teacher's ``distill_top_k``
    tokens and the rest, as a loss).
    """
    distill_top_k: Annotated[int, Field(ge=0, le=MAX_LISTED)] = 0
    """Most probable tokens of the teacher at each position, for forward_kl and reverse_kl."""

    loss: Annotated[str, OneOf(LOSSES, by_path=True)] | None = None
    """ppo | reinforce | cispo | gspo | gspo_token | gmpo | clip_cov | kl_cov | topr | sapo | vespo | dppo_tv | dppo_kl
    | ipo | dro | sft, or module:function.
    """
    anchor: Literal["proximal", "rollout", "none"] | None = None
    """Policy that the loss compares with: proximal (three policies) | rollout (two) | none."""
    proximal: Literal["recompute", "loglinear"] | None = None
    """recompute (a forward pass under the weights the step starts from, or those last published) | loglinear (none:
    A-3PO).
    """
    clip_low: NotNegativeFloat | None = None
    """Trust region 1 - clip_low .. 1 + clip_high (dppo_tv, ipo: of the probability; dppo_kl: of the binary KL; gmpo: of
    the log-ratio, nats; cispo: of the weight, 1 = no lower bound).
    """
    clip_high: NotNegativeFloat | None = None
    """Upper half of the trust region; see ``clip_low``."""
    clip_dual: NotNegativeFloat = 0.0
    """Upper bound of the ratio where the advantage is negative; 0 = none, else > 1."""
    sapo_tau_positive: PositiveFloat = 1.0
    """Temperature of SAPO's gate for positive advantages."""
    sapo_tau_negative: PositiveFloat = 1.05
    """Temperature of SAPO's gate for negative advantages."""
    dppo_penalty: NotNegativeFloat | None = None
    """Coefficient of the squared log-ratio (dppo_tv, dppo_kl, ipo)."""
    dppo_ratio_cap: NotNegativeFloat = 0.0
    """Largest ratio that multiplies the gradient (dppo_tv, dppo_kl, ipo); 0 = none, else >= 1."""
    cov_share: Annotated[float, Field(gt=0, le=1)] = 0.0002
    """Share of the tokens, at least one, whose gradient clip_cov drops (drawn) or which kl_cov holds back (largest
    covariance).
    """
    clip_cov_low: NotNegativeFloat = 1.0
    """clip_cov draws from tokens with a covariance (A - mean A) (log pi - mean log pi) of clip_cov_low ..
    clip_cov_high.
    """
    clip_cov_high: float = 5.0
    """Upper bound of that covariance; see ``clip_cov_low``."""
    kl_cov_coef: PositiveFloat = 1.0
    """Coefficient of the absolute log-ratio of kl_cov's tokens; at 0 nothing would hold the policy to its data."""
    dro_tau: PositiveFloat = 0.1
    """Weight of the squared log-ratio of a response in DRO, in units of the advantage per nat; at 0 nothing would
    correct for old data.
    """

    weight: Annotated[str, OneOf(("none", "token", "sequence", "geometric", "prefix"), by_path=True)] | None = None
    """Importance weight: none | token | sequence | geometric | prefix, or module:function; of pi_proximal / mu where
    the anchor is proximal, else pi / mu.
    """
    weight_action: Literal["clip", "truncate", "mask"] | None = None
    """Outside weight_low .. weight_high: clip | truncate (the upper bound alone) | mask (0)."""
    weight_low: NotNegativeFloat | None = None
    """Lower bound of the importance weight; see ``weight_action``."""
    weight_high: NotNegativeFloat | None = None
    """Upper bound of the importance weight; 0 = no bound."""
    self_normalise: bool = False
    """Divide the weights by their mean over the update on all ranks."""

    reject: tuple[str, ...] | None = None
    """Rules "METRIC SPAN HIGH" or "k1 SPAN LOW HIGH" with k1 | k2 | k3 and token | seq_sum | seq_mean | seq_max, or
    module:function.
    """
    veto: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Reject a sample with a token whose ratio is below this (1e-4), which is below 1; 0 = off."""
    binary_kl_limit: NotNegativeFloat | None = None
    """Largest binary KL of a token (KPop); 0 = off."""
    opsm_threshold: NotNegativeFloat | None = None
    """Off-policy sequence masking of negative samples; 0 = off."""
    m2_limit: NotNegativeFloat | None = None
    """Largest mean of the squared log-ratio (M2PO, 0.04); 0 = off."""
    m2_tokens: Literal["all", "harmful"] | None = None
    """Tokens that m2_limit counts and rejects: all | harmful (A > 0 and ratio > 1, or both below: the update moves them
    away from mu).
    """
    m2_keep_low: NotNegativeFloat | None = None
    """Tokens with a ratio of m2_keep_low .. m2_keep_high are not rejected by m2_limit; both 0 = no such range."""
    m2_keep_high: NotNegativeFloat | None = None
    """Upper bound of that range; see ``m2_keep_low``."""

    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the trainable tokens that the policy loss trains, the tokens of highest entropy; 1 = all."""

    aggregation: Annotated[str, OneOf(AGGREGATIONS, by_path=True)] | None = None
    """token_mean | seq_mean_token_mean | seq_mean_token_sum | prompt_mean | token_sum |
    constant (sum / (samples x loss_constant): Dr. GRPO), or module:function."""
    loss_constant: NotNegativeFloat = 0.0
    """Divisor of ``aggregation: constant``; 0 = max_new_tokens."""
    entropy_coef: NotNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the loss, with ``entropy_target`` the first one; 0 = none."""
    entropy_target: NotNegativeFloat = 0.0
    """> 0: mean entropy per token, nats, below which the coefficient grows; above it there is no bonus, and the
    coefficient falls.
    """
    entropy_delta: float = 0.005
    """Change of the coefficient in a step, with ``entropy_target``."""
    entropy_coef_max: float = 1.0
    """Largest coefficient, with ``entropy_target``."""
    ess_lr: bool = False
    """Learning rate times ``sqrt(min(1, share / ess_lr_base))``, share = effective sample share of the sequence weights
    (VCPO).
    """
    ess_lr_base: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Effective sample share from which on ``ess_lr`` leaves the learning rate as it is, such as the share on fresh
    data.
    """
    kl: KLConfig = field(default_factory=KLConfig)
    """Divergence from a reference model."""
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    """Alarms on diagnostics."""

    def __post_init__(self) -> None:
        _refuse_ignored_bounds(self)
        _refuse_foreign_range(self)
        for name, value in {**DEFAULTS, **PRESETS[self.correction]}.items():
            # The dataclass is frozen, and a preset is filled in before anything can read it.
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _refuse(self)

    @property
    def uncorrected(self) -> bool:
        """True if old data would be trained as if it were fresh."""
        return self.weight == "none" and self.anchor != "rollout" and self.loss != "sft"

    @property
    def demonstration_coef(self) -> float:
        """Coefficient of the cross-entropy of demonstrations; 0 = they cannot be trained."""
        return 1.0 if self.loss == "sft" else self.sft_coef

    @property
    def by_critic(self) -> bool:
        """True if a critic is trained beside the policy."""
        return self.advantage in BY_CRITIC

    @property
    def by_constant(self) -> bool:
        """True if a loss is divided by the maximum number of sampled tokens of a sample."""
        return self.aggregation == "constant" and not self.loss_constant

    @property
    def by_role(self) -> bool:
        """True if the baselines of the run depend on the metadata of samples."""
        return self.advantage in RUNNING and bool(self.rae_role)

    @property
    def may_need_metadata(self) -> bool:
        """True if the advantages depend on the metadata of samples, or might: those of a function by import path."""
        return ":" in self.advantage or self.by_role

    @property
    def rejects(self) -> tuple[RejectRule, ...]:
        """The rules of ``reject`` but those by import path. Raises ValueError for one that cannot be parsed."""
        return tuple(reject_rule(text) for text in self.reject or () if not by_path(text))

    @property
    def own_rejects(self) -> tuple[str, ...]:
        """The rules of ``reject`` by import path."""
        return tuple(text for text in self.reject or () if by_path(text))

    @property
    def needs_reference(self) -> bool:
        """True if log-probs under the reference model are needed."""
        return bool(self.kl.coef or self.kl.reward_coef or (self.distill_coef and self.distill_teacher == "reference"))

    @property
    def needs_teacher(self) -> bool:
        """True if the samples need the scores of a teacher."""
        return bool(self.distill_coef) and self.distill_teacher == "engine"

    @property
    def listed_by_engine(self) -> int:
        """Tokens that the samples list at each position."""
        return self.distill_top_k if self.needs_teacher else 0

    @property
    def listed_by_reference(self) -> int:
        """Tokens that the reference lists at each position, in each step."""
        return 0 if self.needs_teacher else self.distill_top_k

    @property
    def coupled(self) -> bool:
        """True if a token's weight depends on all tokens of the update: then log-probs are needed before the first
        backward pass.
        """
        chooses = self.top_entropy < 1 or self.loss in BY_COVARIANCE or self.advantage == "vtrace"
        return bool(self.self_normalise or self.m2_limit or self.kl.reward_coef or chooses)

    def needs_old(self, *, minibatches: int, published_every: int) -> bool:
        """Return whether log-probs are needed before the first backward pass.

        They are where weights are coupled, and where the proximal policy is not the trained one.
        """
        # Otherwise the proximal policy is the trained one, and its log-probs are those of the training pass, detached.
        moved = minibatches > 1 or published_every > 1
        return self.coupled or (self.anchor == "proximal" and self.proximal == "recompute" and moved)


_DPPO = ("dppo_tv", "dppo_kl", "ipo")
_OF_LOSS: Mapping[str, tuple[str, ...]] = {
    "dppo_ratio_cap": _DPPO,
    "cov_share": BY_COVARIANCE,
    "clip_cov_low": ("clip_cov",),
    "clip_cov_high": ("clip_cov",),
    "kl_cov_coef": ("kl_cov",),
    "dro_tau": ("dro",),
    "sapo_tau_positive": ("sapo",),
    "sapo_tau_negative": ("sapo",),
}
"""Settings that only some of the built-in losses use. A loss by import path may use any."""
_OF_ADVANTAGE: Mapping[str, tuple[str, ...]] = {
    "gamma": (*BY_CRITIC, *DISCOUNTED),
    "lam": BY_CRITIC,
    "vtrace_rho": ("vtrace",),
    "vtrace_c": ("vtrace",),
    "rae_decay": RUNNING,
    "rae_role": RUNNING,
}
"""Settings that only some of the built-in estimators use."""
_OF_ADVANTAGES = ("advantage", "whiten", "overlong_buffer", "distill_coef")
"""Settings that sft ignores, because it has no advantages."""


_RANGES: Mapping[str, str] = {
    "ppo": "of a token's ratio",
    "clip_cov": "of a token's ratio",
    "gspo": "of the mean log-ratio of a response",
    "gspo_token": "of the mean log-ratio of a response",
    "gmpo": "of a token's log-ratio",
    "cispo": "of a weight",
    "dppo_tv": "of a probability",
    "ipo": "of a probability",
    "dppo_kl": "of a binary KL",
}
"""The quantity that clip_low and clip_high bound, by loss."""
_BY_PROBABILITY = ("dppo_tv", "ipo")
_LOWEST_RATIO = ("ppo", "clip_cov", "gspo", "gspo_token")
"""Losses with the lower bound 1 - clip_low of a ratio."""


def _refuse_ignored_bounds(config: AlgorithmConfig) -> None:
    """Raise ValueError for bounds that the configuration itself sets and nothing reads: of a clip range, or of
    importance weights.
    """
    preset = {**DEFAULTS, **PRESETS[config.correction]}
    loss, weight = (config.loss or str(preset["loss"])), (config.weight or str(preset["weight"]))
    is_own = ":" in loss
    unread = (
        *(() if is_own or loss in _RANGES else ("clip_low", "clip_high")),
        *(() if is_own or loss in _DPPO else ("dppo_penalty",)),
    )
    for name in (*unread, *(("weight_action", "weight_low", "weight_high") if weight == "none" else ())):
        value = getattr(config, name)
        if value not in (None, 0, preset[name]):
            user = f"loss {loss}" if name in unread else "weight: none"
            raise ValueError(
                f"{name}: not used with {user}; want it left out, or another {user.split(':')[0].split()[0]}, "
                f"got {value!r}"
            )


def _refuse_foreign_range(config: AlgorithmConfig) -> None:
    """Raise ValueError if the preset would fill in a clip range that it has for another kind of loss, or for another
    anchor.
    """
    if config.clip_low is not None and config.clip_high is not None:
        return
    preset = PRESETS[config.correction]
    preset_loss, loss = str(preset["loss"]), config.loss or str(preset["loss"])
    if preset_loss not in _RANGES or loss not in _RANGES:
        return
    got = f"{preset['clip_low']}, {preset['clip_high']}"
    if _RANGES[preset_loss] != _RANGES[loss]:
        raise ValueError(
            f"clip_low, clip_high: want both set with loss: {loss} on correction: {config.correction}, "
            f"whose range {got} is {_RANGES[preset_loss]}, not {_RANGES[loss]}; or take correction: {loss}"
        )
    if loss in ("gspo", "gspo_token") and config.anchor == "rollout":
        raise ValueError(
            f"clip_low, clip_high: want both set with loss: {loss} and anchor: rollout: against mu, noise "
            f"alone is larger than {got}; "
            "or leave anchor: proximal"
        )


def _refuse(config: AlgorithmConfig) -> None:
    """Raise ValueError for an invalid value, and for values that contradict each other, with the reason."""
    _refuse_numbers(config)
    config.rejects  # noqa: B018  # parsed for its errors
    _refuse_ignored(config)
    _refuse_contradictions(config)


def _refuse_numbers(config: AlgorithmConfig) -> None:
    if config.vtrace_c > config.vtrace_rho:
        raise ValueError(
            f"vtrace_c: want <= vtrace_rho = {config.vtrace_rho!r} (else there is no fixed point), got "
            f"{config.vtrace_c!r}"
        )
    if not config.clip_cov_low < config.clip_cov_high:
        raise ValueError(f"clip_cov_low: want < clip_cov_high = {config.clip_cov_high!r}, got {config.clip_cov_low!r}")
    if 0 < config.dppo_ratio_cap < 1:
        raise ValueError(f"dppo_ratio_cap: want >= 1 (the ratio of fresh data), or 0, got {config.dppo_ratio_cap!r}")


def _refuse_ignored(config: AlgorithmConfig) -> None:
    """Raise ValueError for a setting that was changed and has no effect."""
    assert config.loss is not None
    defaults = {f.name: f.default for f in fields(AlgorithmConfig)}
    for name, losses in _OF_LOSS.items():
        if config.loss not in losses and ":" not in config.loss and getattr(config, name) != defaults[name]:
            got = getattr(config, name)
            want = " | ".join(losses)
            raise ValueError(
                f"{name}: not used by loss {config.loss}; want loss: {want}, or {defaults[name]} here, got {got!r}"
            )
    for name, estimators in _OF_ADVANTAGE.items():
        if config.advantage not in estimators and getattr(config, name) != defaults[name]:
            want, got = " | ".join(estimators), getattr(config, name)
            raise ValueError(
                f"{name}: not used by advantage {config.advantage}; want advantage: {want}, or "
                f"{defaults[name]}, got {got!r}"
            )
    if config.pass_k != defaults["pass_k"] and config.advantage != "pass_at_k":
        raise ValueError(
            f"pass_k: not used by advantage {config.advantage}; want advantage: pass_at_k, or 2, got {config.pass_k!r}"
        )
    if config.advantage != "gdpo" and config.gdpo_weights:
        raise ValueError(
            f"gdpo_weights: not used by advantage {config.advantage}; want advantage: gdpo, got {config.gdpo_weights!r}"
        )
    if config.advantage == "gdpo" and (config.overlong_buffer or config.kl.reward_coef):
        raise ValueError(
            "advantage: gdpo takes the parts of the reward, to which overlong_buffer and kl.reward_coef are not added; "
            "want 0 for both (the reward overlong can be a part; kl.coef is in the loss)"
        )
    if config.ess_lr_base != 1 and not config.ess_lr:
        raise ValueError(f"ess_lr_base: not used without ess_lr; want ess_lr: true, or 1.0, got {config.ess_lr_base!r}")
    _refuse_entropy(config, defaults)
    if not config.m2_limit and (config.m2_tokens != "all" or config.m2_keep_low or config.m2_keep_high):
        got = f"m2_tokens {config.m2_tokens}, {config.m2_keep_low} .. {config.m2_keep_high}"
        raise ValueError(
            "m2_tokens, m2_keep_low, m2_keep_high: not used without m2_limit; want m2_limit > 0, or their "
            f"defaults, got {got}"
        )
    if config.loss_constant and config.aggregation != "constant":
        raise ValueError(
            f"loss_constant: not used by aggregation {config.aggregation}; want aggregation: constant, or 0, "
            f"got {config.loss_constant!r}"
        )
    if config.distill_loss != "token" and not config.distill_coef:
        raise ValueError(
            f"distill_loss: nothing reads it without distill_coef > 0; want token, or that, got {config.distill_loss}"
        )
    if (config.distill_loss == "token") != (config.distill_top_k == 0):
        want = (
            "0 with distill_loss: token"
            if config.distill_loss == "token"
            else f"1 to {MAX_LISTED} with {config.distill_loss}"
        )
        raise ValueError(f"distill_top_k: want {want}, got {config.distill_top_k!r}")
    for name in ("reference", "reference_every", "reference_ema"):
        if getattr(config.kl, name) and not config.needs_reference:
            want = (
                "kl.coef, kl.reward_coef or distill_coef (with distill_teacher: reference) > 0 as well, or no reference"
            )
            raise ValueError(f"kl.{name}: nothing compares with it; want {want}, got {getattr(config.kl, name)!r}")
    if config.loss == "sft":
        _refuse_ignored_by_sft(config, defaults)


def _refuse_entropy(config: AlgorithmConfig, defaults: Mapping[str, object]) -> None:
    """Raise ValueError for settings of the adaptive entropy bonus that have no effect, or contradict each other."""
    for name in ("entropy_delta", "entropy_coef_max"):
        if not config.entropy_target and getattr(config, name) != defaults[name]:
            got = getattr(config, name)
            raise ValueError(
                f"{name}: not used without entropy_target; want entropy_target > 0, or {defaults[name]}, got {got!r}"
            )
    if not config.entropy_target:
        return
    if not config.entropy_delta > 0:
        raise ValueError(f"entropy_delta: want > 0 (else entropy_coef never changes), got {config.entropy_delta!r}")
    if not max(config.entropy_coef, config.entropy_delta) <= config.entropy_coef_max:
        least = max(config.entropy_coef, config.entropy_delta)
        raise ValueError(
            f"entropy_coef_max: want >= entropy_coef and entropy_delta, {least!r}, got {config.entropy_coef_max!r}"
        )


def _refuse_ignored_by_sft(config: AlgorithmConfig, defaults: Mapping[str, object]) -> None:
    """Raise ValueError for a setting that differs from ``defaults`` and has no effect with loss sft."""
    if config.sft_coef:
        raise ValueError(
            "sft_coef: not used by loss sft, which trains demonstrations as it does all samples; want 0, got "
            f"{config.sft_coef!r}"
        )
    for name in _OF_ADVANTAGES:
        if getattr(config, name) != defaults[name]:
            raise ValueError(
                f"{name}: sft has no advantages; want it left out, or another loss, got {getattr(config, name)!r}"
            )
    if config.kl.reward_coef:
        raise ValueError(
            f"kl.reward_coef: sft uses no reward; want kl.coef, or another loss, got {config.kl.reward_coef!r}"
        )


def _refuse_range(config: AlgorithmConfig) -> None:
    """Raise ValueError for a clip range that is missing, or wider than its quantity can be."""
    low, high, loss = config.clip_low, config.clip_high, config.loss
    assert low is not None and high is not None
    if loss in BOUNDED and not (low and high):
        raise ValueError(f"clip_low, clip_high: {loss} needs its trust region: want > 0, got {low}, {high}")
    if loss in _LOWEST_RATIO and low >= 1:
        raise ValueError(
            f"clip_low: want < 1 with loss {loss} (the ratio is > 0, and its lower bound 1 - clip_low), got {low!r}"
        )
    if loss == "cispo" and low > 1:
        raise ValueError(f"clip_low: want <= 1 with loss cispo (1 = no lower bound of the weight), got {low!r}")
    for name, value in (("clip_low", low), ("clip_high", high)):
        if loss in _BY_PROBABILITY and value >= 1:
            raise ValueError(f"{name}: want < 1 with loss {loss} (a difference of probabilities), got {value!r}")


def _refuse_bounds(config: AlgorithmConfig) -> None:
    """Raise ValueError for bounds of the weights that fresh data, of weight 1, is outside of."""
    assert config.weight_high is not None and config.weight_low is not None
    if config.weight_high and config.weight_low >= config.weight_high:
        raise ValueError(f"weight_low: want < weight_high = {config.weight_high}, got {config.weight_low}")
    if (config.weight != "none" and config.weight_low > 1) or 0 < config.weight_high < 1:
        raise ValueError(
            f"weight_low, weight_high: want weight_low <= 1 <= weight_high (the weight of fresh data is 1), "
            f"got {config.weight_low}, {config.weight_high}"
        )
    assert config.m2_keep_low is not None and config.m2_keep_high is not None
    if (config.m2_keep_low or config.m2_keep_high) and not config.m2_keep_low <= 1 <= config.m2_keep_high:
        raise ValueError(
            "m2_keep_low, m2_keep_high: want m2_keep_low <= 1 <= m2_keep_high (the ratio of fresh data is "
            "1), or 0 and 0, "
            f"got {config.m2_keep_low}, {config.m2_keep_high}"
        )
    if config.weight_action == "truncate" and config.weight_low:
        raise ValueError(
            "weight_low: truncate has no lower bound; want weight_action: clip or mask, got weight_low "
            f"{config.weight_low}"
        )


def _refuse_contradictions(config: AlgorithmConfig) -> None:
    assert config.loss is not None
    if config.anchor == "rollout" and config.weight != "none":
        raise ValueError(
            f"weight: {config.weight} with anchor: rollout corrects twice: the ratio pi / mu of the loss is "
            "the correction already; "
            "want weight: none, or anchor: proximal"
        )
    if config.loss in ANCHORED and config.anchor == "none":
        preset = "bypass" if config.loss == "ppo" else config.loss
        raise ValueError(
            f"anchor: {config.loss} compares the policy with another one; want proximal or rollout, as in "
            f"correction: {preset}, got 'none'"
        )
    if config.loss in ("reinforce", "sft") and config.anchor != "none":
        preset = "correction: sft" if config.loss == "sft" else "correction: tis (with weights) or none (without)"
        raise ValueError(
            f"anchor: {config.loss} compares the policy with none; want anchor: none, as in {preset}, got "
            f"{config.anchor!r}"
        )
    if config.loss in ("sapo", "topr", "vespo") and config.weight != "none":
        raise ValueError(f"weight: {config.loss} weighs by the ratio itself; want weight: none, got {config.weight!r}")
    if config.loss == "sft" and (
        config.weight != "none" or config.reject or config.veto or config.binary_kl_limit or config.m2_limit
    ):
        raise ValueError("loss: sft trains every token with weight 1; want weight: none and no rejection")
    _refuse_range(config)
    if config.clip_dual and (config.clip_dual <= 1 or config.loss not in ("ppo", "gspo", "gspo_token")):
        raise ValueError(
            f"clip_dual: want > 1 and a clipped loss (ppo, gspo, gspo_token), or 0, got {config.clip_dual} "
            f"with {config.loss}"
        )
    _refuse_bounds(config)
    if config.self_normalise and config.weight == "none":
        raise ValueError("self_normalise: there are no weights to normalise (weight: none)")
    if config.proximal == "loglinear" and config.anchor != "proximal":
        raise ValueError(f"proximal: loglinear has no effect with anchor: {config.anchor}; want anchor: proximal")
    if config.proximal == "loglinear" and config.coupled:
        raise ValueError(
            "proximal: loglinear saves the forward pass that self_normalise, m2_limit, kl.reward_coef, "
            "top_entropy, clip_cov, kl_cov "
            "and vtrace need; want proximal: recompute"
        )
    if config.kl.reward_by == "token" and config.advantage not in (*IN_REWARD, *BY_CRITIC):
        raise ValueError(
            "kl.reward_by: token needs an advantage in units of the reward: want advantage: "
            f"{' | '.join((*IN_REWARD, *BY_CRITIC))}, "
            f"or kl.reward_by: sample, got advantage {config.advantage}"
        )
    if config.opsm_threshold and config.loss == "sft":
        raise ValueError("opsm_threshold: sft has no advantages")
    if config.top_entropy < 1 and config.loss == "sft":
        raise ValueError(f"top_entropy: sft trains every token; want 1, or another loss, got {config.top_entropy!r}")
    if config.overlong_penalty != 1.0 and not config.overlong_buffer:
        raise ValueError("overlong_penalty: want overlong_buffer > 0 as well")
    if config.overlong_buffer and not config.overlong_penalty:
        raise ValueError(
            f"overlong_penalty: want > 0 with overlong_buffer: {config.overlong_buffer}, got "
            f"{config.overlong_penalty!r}"
        )


def unset_names() -> tuple[str, ...]:
    """Return the names of the fields that a preset fills."""
    return tuple(f.name for f in fields(AlgorithmConfig) if f.default is None and f.name != "whiten")
