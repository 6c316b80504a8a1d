"""Configuration of the objective and of the off-policy correction: a preset by name, in which every field can be
replaced.

``correction`` names a preset; a field that is None takes the preset's value, any other value replaces it, and
``--print-config`` shows the result. Formulas, sources and recommendations: ``docs/algorithms.md``.
"""

import functools
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Literal

from pydantic import Field

from tidemill.bus.section import BASIC, NotNegativeFloat, OneOf, Share, section
from tidemill.learner.algorithms.alarms import AlarmConfig
from tidemill.learner.algorithms.choices import (
    ADVANTAGES,
    AGGREGATIONS,
    BY_COVARIANCE,
    BY_CRITIC,
    DEFAULTS,
    LOSSES,
    OF_ADVANTAGE,
    OF_GROUPS,
    PRESETS,
    RUNNING,
)
from tidemill.learner.algorithms.contradictions import refuse_contradictions, refuse_foreign_range
from tidemill.learner.algorithms.sections import (
    ClipConfig,
    CovarianceConfig,
    DistillConfig,
    DppoConfig,
    DroConfig,
    EntropyConfig,
    GdpoConfig,
    KLConfig,
    M2Config,
    OverlongConfig,
    PassAtKConfig,
    RaeConfig,
    RejectConfig,
    SapoConfig,
    VtraceConfig,
    WeightConfig,
)


@section
@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantages, loss, correction, divergence."""

    correction: Annotated[Annotated[str, OneOf(tuple(PRESETS))], BASIC] = "decoupled"
    """A preset of loss, anchor, weights and rejections, whose fields can be replaced (docs/algorithms.md)."""
    train_without_correction: bool = False
    """Needed to train asynchronously on data that nothing corrects (none, naive)."""

    advantage: Annotated[Annotated[str, OneOf((*ADVANTAGES, *RUNNING, *BY_CRITIC), by_path=True)], BASIC] = "grpo"
    """Estimator of the advantages; gae and vtrace train a critic (docs/algorithms.md)."""
    gamma: Share = 1.0
    """Discount from a trainable token to the next (gae, vtrace, reinforce, reinforce_pp)."""
    lam: Share = 1.0
    """GAE's lambda, from 0 (one step ahead) to 1 (the whole return); with vtrace a factor of its traces."""
    whiten: bool | None = None
    """Advantages to mean 0 and variance 1 over the trainable tokens of the step; None = as the estimator wants it."""
    vtrace: VtraceConfig = field(default_factory=VtraceConfig)
    pass_at_k: PassAtKConfig = field(default_factory=PassAtKConfig)
    rae: RaeConfig = field(default_factory=RaeConfig)
    gdpo: GdpoConfig = field(default_factory=GdpoConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    mask_truncated: bool = False
    """Do not train responses that ran into their length limit; their rewards count in their group's baseline."""
    sft_coef: NotNegativeFloat = 0.0
    """Coefficient of the cross-entropy of demonstrations beside another loss; 0 = none (docs/sft.md)."""
    distill: DistillConfig = field(default_factory=DistillConfig)

    loss: Annotated[str, OneOf(LOSSES, by_path=True)] | None = None
    """Policy loss, by default the preset's (docs/algorithms.md)."""
    anchor: Literal["proximal", "rollout", "none"] | None = None
    """Policy that the loss compares with: proximal (three policies) | rollout (two) | none."""
    proximal: Literal["recompute", "loglinear"] | None = None
    """recompute (a forward pass under the weights last published, or of the step's begin) | loglinear (A-3PO)."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    sapo: SapoConfig = field(default_factory=SapoConfig)
    dppo: DppoConfig = field(default_factory=DppoConfig)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)
    dro: DroConfig = field(default_factory=DroConfig)

    weight: WeightConfig = field(default_factory=WeightConfig)
    reject: RejectConfig = field(default_factory=RejectConfig)
    m2: M2Config = field(default_factory=M2Config)
    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the trainable tokens that the policy loss trains, the tokens of highest entropy; 1 = all."""

    aggregation: Annotated[str, OneOf(AGGREGATIONS, by_path=True)] | None = None
    """Division of the token losses; constant = by samples x loss_constant, as in Dr. GRPO (docs/algorithms.md)."""
    loss_constant: NotNegativeFloat = 0.0
    """Divisor of ``aggregation: constant``; 0 = max_new_tokens."""
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    ess_lr: Share = 0.0
    """> 0: learning rate times ``sqrt(min(1, share / ess_lr))``, share = effective sample share of the sequence weights
    (VCPO), such as the share on fresh data, from which on the learning rate stays as it is; 0 = off.
    """
    kl: KLConfig = field(default_factory=KLConfig)
    alarms: AlarmConfig = field(default_factory=AlarmConfig)

    def __post_init__(self) -> None:
        # Before the preset fills in its range: behind that it cannot be told from a range of the user.
        refuse_foreign_range(self)
        unset = {**_defaults(), **DEFAULTS, **PRESETS[self.correction]}
        for path in unset_names():
            # The dataclass is frozen, and a preset is filled in before anything can read it.
            name, _, key = path.partition(".")
            value = getattr(self, name)
            if not key and value is None:
                object.__setattr__(self, name, unset[path])
            elif key and getattr(value, key) is None:
                object.__setattr__(self, name, replace(value, **{key: unset[path]}))
        refuse_contradictions(self, unset)

    @property
    def uncorrected(self) -> bool:
        """True if old data would be trained as if it were fresh."""
        return self.weight.level == "none" and self.anchor != "rollout" and self.loss != "sft"

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
        return self.advantage in RUNNING and bool(self.rae.role)

    @property
    def may_need_metadata(self) -> bool:
        """True if the advantages depend on the metadata of samples, or might: those of a function by import path."""
        return ":" in self.advantage or self.by_role

    @property
    def needs_reference(self) -> bool:
        """True if log-probs under the reference model are needed."""
        return bool(self.kl.coef or self.kl.reward_coef or self.distill.by_reference)

    @property
    def needs_teacher(self) -> bool:
        """True if the samples need the scores of a teacher."""
        return self.distill.by_engine

    @property
    def listed_by_engine(self) -> int:
        """Tokens that the samples list at each position."""
        return self.distill.top_k if self.needs_teacher else 0

    @property
    def listed_by_reference(self) -> int:
        """Tokens that the reference lists at each position, in each step."""
        return 0 if self.needs_teacher else self.distill.top_k

    @property
    def coupled(self) -> bool:
        """True if weights depend on all tokens of the update: log-probs are needed before the first backward pass."""
        chooses = self.top_entropy < 1 or self.loss in BY_COVARIANCE or self.advantage == "vtrace"
        return bool(self.weight.self_normalise or self.m2.limit or self.kl.reward_coef or chooses)

    @property
    def by_advantage(self) -> bool:
        """True if a sample with advantages of 0 takes no part in a step: its terms of the loss are 0, and no other
        value of the step is made of its log-probs. False for functions by import path that might read them.
        """
        terms = self.entropy.coef or self.entropy.target or self.distill.coef or self.dppo.penalty or self.ess_lr
        by_token = self.gamma < 1 or self.kl.reward_by == "token"
        own = ":" in str(self.weight.level) or self.reject.functions
        scored = self.needs_reference or self.needs_teacher or self.by_critic or self.coupled
        return self.loss in OF_ADVANTAGE and not (terms or by_token or own or scored)

    @property
    def leaves_out_equal(self) -> bool:
        """True if the samples of a group with equal rewards take no part in a step, whatever the other groups are."""
        whitens = self.advantage == "reinforce_pp_baseline" if self.whiten is None else self.whiten
        compared = self.advantage in OF_GROUPS and self.advantage != "gdpo"  # which compares parts of rewards
        return self.by_advantage and compared and not (whitens or self.overlong.buffer)

    def needs_old(self, *, minibatches: int, published_every: int) -> bool:
        """Return whether log-probs are needed before the first backward pass.

        They are where weights are coupled, and where the proximal policy is not the trained one.
        """
        # Otherwise the proximal policy is the trained one, and its log-probs are those of the training pass, detached.
        moved = minibatches > 1 or published_every > 1
        return self.coupled or (self.anchor == "proximal" and self.proximal == "recompute" and moved)


@functools.cache
def _defaults() -> Mapping[str, object]:
    """Return the default of every setting by its path; None where a preset fills it."""
    defaults: dict[str, object] = {}
    for entry in fields(AlgorithmConfig):
        if entry.default_factory is MISSING:
            defaults[entry.name] = entry.default
        else:
            values = entry.default_factory()
            defaults |= {f"{entry.name}.{inner.name}": getattr(values, inner.name) for inner in fields(values)}
    return defaults


@functools.cache
def unset_names() -> tuple[str, ...]:
    """Return the paths of the settings that a preset fills."""
    return tuple(path for path, default in _defaults().items() if default is None and path != "whiten")
