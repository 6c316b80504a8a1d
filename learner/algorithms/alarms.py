"""Alarms on diagnostics: a table of thresholds with their sources, and the reaction of a run to them. Plain numbers; no
torch.

Metrics that do not depend on the age of the data (mean weight, entropy gap), or that are computed on fresh data alone
(numerics), have fixed thresholds. For metrics that grow with age, sources give thresholds for data one version old;
they are multiplied by ``1 + mean lag``. Thresholds marked "practice" are our judgement.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tidemill.bus.section import Positive, section

MIN_TOKENS = 256
"""With fewer trainable tokens in a step, only the alarms that need no statistics are checked."""
MOST_EMPTY_STEPS = 20
"""Steps in a row that train nothing, after which a run ends unless alarms are off."""
MIN_GAP = 0.02
"""An entropy gap below this (nats) raises no alarm, even if it is statistically significant."""
OF_THE_FEEDER = "long_episodes"
"""The alarm that the counts of a record leave out."""
MIN_SPREAD = 0.1
"""Standard deviation of mu's probabilities below which their correlation is not meaningful."""


@section
@dataclass(frozen=True, kw_only=True)
class AlarmConfig:
    """Action when a diagnostic passes its threshold (docs/metrics.md)."""

    action: Literal["off", "warn", "stop"] = "warn"
    """off | warn (log) | stop (end at an error-level alarm). Unless off, 20 new steps that train nothing end it."""
    patience: Positive = 3
    """Steps in a row at error level before ``stop`` stops."""
    ignore: tuple[str, ...] = ()
    """Names of alarms to ignore."""
    thresholds: dict[str, Any] = field(default_factory=dict)
    """Alarm -> [warn, error] in place of the defaults."""


@dataclass(frozen=True, slots=True)
class Context:
    """Settings of the run that thresholds depend on."""

    max_lag: int
    dtype: str = "float32"
    """Data type of the learner's forward pass."""
    gate: str = "mask"
    """``staleness.gate``; under ``train``, tokens older than max_lag are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One row of the table."""

    metric: str
    warn: float
    error: float
    below: bool = False
    """True: values below the threshold are bad, else values above it."""
    ages: bool = False
    """True: the metric grows with the age of the data."""
    advice: str
    source: str


THRESHOLDS: Mapping[str, Threshold] = {
    "numerics": Threshold(
        metric="offpolicy/fresh_logprob_diff_abs",
        warn=0.03,
        error=0.1,
        advice=(
            "engine and learner disagree about fresh tokens: temperature, stale or torn weights, shifted "
            "log-probs, kernels"
        ),
        source="slime's CI (bfloat16); float32: 1e-3 and 1e-2, measured < 1e-4 here",
    ),
    "fresh_k3": Threshold(
        metric="offpolicy/fresh_k3",
        warn=1e-3,
        error=1e-2,
        advice="as numerics; a few tokens disagree strongly",
        source="NeMo-RL, prime-rl",
    ),
    "k3": Threshold(
        metric="offpolicy/k3",
        warn=0.05,
        error=0.15,
        ages=True,
        advice="the data is far from the policy: lower max_lag or the learning rate",
        source="prime-rl (0.15), tinker (0.01)",
    ),
    "k1": Threshold(
        metric="offpolicy/k1",
        warn=-0.01,
        error=-0.05,
        below=True,
        advice="KL(mu || pi) cannot be negative: an inverse ratio, or log-probs at another temperature",
        source="practice",
    ),
    "weight_high": Threshold(
        metric="offpolicy/weight_mean",
        warn=1.25,
        error=2.0,
        advice="the mean ratio is 1 at any age: the log-probs are not those of the distribution that was sampled from",
        source="verl (0.5 .. 2)",
    ),
    "weight_low": Threshold(
        metric="offpolicy/weight_mean",
        warn=0.8,
        error=0.5,
        below=True,
        advice="the mean ratio is 1 at any age: a truncated distribution (top-p), or wrong log-probs",
        source="verl (0.5 .. 2)",
    ),
    "prob_error": Threshold(
        metric="offpolicy/fresh_prob_error",
        warn=1.02,
        error=1.05,
        advice="probabilities of fresh tokens are off by a factor: as numerics",
        source="NeMo-RL (token_mult_prob_error)",
    ),
    "pearson": Threshold(
        metric="offpolicy/pearson",
        warn=0.8,
        error=0.5,
        below=True,
        advice="probabilities do not correlate: log-probs of other tokens or of another sample",
        source="MiniMax-M1 (0.99, 0.95 on fresh data); practice for old data",
    ),
    "ess": Threshold(
        metric="offpolicy/ess",
        warn=0.5,
        error=0.3,
        below=True,
        advice="few tokens carry the update: data too old, or wrong log-probs",
        source="verl",
    ),
    "entropy_gap": Threshold(
        metric="offpolicy/entropy_gap_sigmas",
        warn=5.0,
        error=8.0,
        advice="tokens are not drawn from the distribution whose log-probs are reported: temperature, top-p, top-k",
        source="3 and 6 sigma for one look; 5 keeps the false alarms of 1,000 steps below 1e-3",
    ),
    "clipped_weights": Threshold(
        metric="offpolicy/tis_clipped_high",
        warn=0.01,
        error=0.1,
        ages=True,
        advice="many weights at their bound: the correction is biased; lower max_lag or the learning rate",
        source="practice",
    ),
    "rejected_samples": Threshold(
        metric="offpolicy/rejected_samples",
        warn=0.01,
        error=0.1,
        advice="whole responses are rejected, the long ones first",
        source="practice",
    ),
    "rejected_tokens": Threshold(
        metric="offpolicy/rejected_tokens",
        warn=0.2,
        error=0.5,
        advice=(
            "the rules leave out so many tokens that the step is small and biased: fresher data, a smaller "
            "learning rate, wider rules"
        ),
        source="practice",
    ),
    "lost_end": Threshold(
        metric="train/unended_share",
        warn=0.0,
        error=0.05,
        advice="completed responses do not end in an end-of-sequence token: the engine or an actor cuts it off",
        source="AReaL (no_eos_ratio 0.05)",
    ),
    "skipped": Threshold(
        metric="train/skipped_minibatches",
        warn=0.0,
        error=0.0,
        advice="loss or gradients were not finite, and the weights stay as they were: rewards out of scale, a loss "
        "of one's own, or a "
        "policy that has diverged (go back to a checkpoint before it)",
        source="by construction",
    ),
    "lag": Threshold(
        metric="offpolicy/lag_max",
        warn=0.0,
        error=0.0,
        advice="a token older than max_lag was trained: a bug",
        source="by construction",
    ),
    "long_episodes": Threshold(
        metric="data/episode_lag_share_p95",
        warn=1.0,
        error=2.0,
        advice="one episode in twenty takes longer than max_lag steps, so that its first turns are always too old: "
        "raise max_lag, or "
        "lower the budget of the rollout",
        source="by construction; twice as long: practice",
    ),
}
"""Thresholds by the name used in ``AlarmConfig.ignore`` and ``thresholds``; a value equal to a threshold is good."""
FLOAT32 = {"numerics": (1e-3, 1e-2)}
"""(warn, error) of alarms with other thresholds when the learner computes in float32. Source: see ``numerics`` above.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A metric beyond its threshold."""

    level: str
    """warn | error."""
    name: str
    metric: str
    value: float
    threshold: float
    advice: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.metric} = {self.value:.4g}, threshold {self.threshold:.4g} ({self.level}): "
            f"{self.advice}"
        )


def check(metrics: Mapping[str, float], config: AlarmConfig, context: Context) -> tuple[Alarm, ...]:
    """Return the alarms of one step's metrics."""
    alarms = []
    for name, row in THRESHOLDS.items():
        if row.metric not in metrics or name in config.ignore or _meaningless(name, metrics, context):
            continue
        value = abs(metrics[row.metric]) if name == "entropy_gap" else metrics[row.metric]  # too hot or too cold
        scale = 1 + metrics.get("offpolicy/lag_mean", 0.0) if row.ages else 1.0
        warn, error = _bounds(name, row, config, context)
        for level, bound in (("error", scale * error), ("warn", scale * warn)):
            if value < bound if row.below else value > bound:
                alarms.append(
                    Alarm(level=level, name=name, metric=row.metric, value=value, threshold=bound, advice=row.advice)
                )
                break
    return tuple(alarms)


def recorded(metrics: Mapping[str, float], config: AlarmConfig, context: Context) -> tuple[Alarm, ...]:
    """Return the alarms of a recorded step: the record has their numbers, and only the learner knows its data type."""
    if config.action == "off":
        return ()
    counted = tuple(int(metrics.get(f"alarm/{level}", 0)) for level in ("warnings", "errors"))
    alarms: tuple[Alarm, ...] = ()
    for dtype in ("float32", "bfloat16"):
        alarms = check(metrics, config, replace(context, dtype=dtype))
        levels = [alarm.level for alarm in alarms if alarm.name != OF_THE_FEEDER]
        if (levels.count("warn"), levels.count("error")) == counted:
            return alarms
    return alarms if any(counted) else ()


def refuse_unknown(config: AlarmConfig) -> None:
    """Raise ValueError for an unknown alarm, or for thresholds that are not ``[warn, error]`` in the right order."""
    for name in (*config.ignore, *config.thresholds):
        if name not in THRESHOLDS:
            raise ValueError(f"alarms: want one of {', '.join(THRESHOLDS)}, got {name!r}")
    for name, pair in config.thresholds.items():
        row = THRESHOLDS[name]
        numbers = (
            isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(bound, int | float) for bound in pair)
        )
        if not numbers or (pair[0] < pair[1] if row.below else pair[0] > pair[1]):
            raise ValueError(
                f"alarms.thresholds.{name}: want [warn, error], error the "
                f"{'smaller' if row.below else 'larger'}, got {pair!r}"
            )


def thresholds(config: AlarmConfig, context: Context) -> dict[str, tuple[float, float]]:
    """Return (warn, error) of the alarms that a run checks, for data of age 0; none where they are off."""
    if config.action == "off":
        return {}
    checked = {name: row for name, row in THRESHOLDS.items() if name not in config.ignore}
    return {name: _bounds(name, row, config, context) for name, row in checked.items() if not _never(name, context)}


def _bounds(name: str, row: Threshold, config: AlarmConfig, context: Context) -> tuple[float, float]:
    if name == "lag":
        return float(context.max_lag), float(context.max_lag)
    if name in config.thresholds:
        warn, error = config.thresholds[name]
        return float(warn), float(error)
    return FLOAT32.get(name, (row.warn, row.error)) if context.dtype == "float32" else (row.warn, row.error)


def _never(name: str, context: Context) -> bool:
    return name in ("lag", "long_episodes") and context.gate == "train"


def _meaningless(name: str, metrics: Mapping[str, float], context: Context) -> bool:
    if name in ("lag", "long_episodes"):
        return _never(name, context)
    if name == "skipped":
        return False
    if metrics.get("train/tokens", 0.0) - metrics.get("train/sft_tokens", 0.0) < MIN_TOKENS:
        return True
    if name == "entropy_gap":
        few = metrics.get("offpolicy/entropy_gap_tokens", 0.0) < MIN_TOKENS
        return few or abs(metrics.get("offpolicy/entropy_gap", 0.0)) < MIN_GAP
    if name == "pearson":
        return metrics.get("offpolicy/prob_std", 0.0) < MIN_SPREAD
    return False


class AlarmWatch:
    """Checks the alarms of a run step by step."""

    def __init__(self, config: AlarmConfig, context: Context) -> None:
        refuse_unknown(config)
        self._config, self._context = config, context
        self._in_a_row: dict[str, int] = {}
        self._empty_steps = 0
        self.stop: Alarm | None = None
        """The alarm that ends the run: at error level for ``patience`` steps, or nothing was trained for too long."""

    def step(self, metrics: Mapping[str, float], *, recorded: bool = False) -> tuple[Alarm, ...]:
        """Return the alarms of this step; none when the action is ``off``.

        ``recorded``: an earlier start took this step. It is not counted as a step that trained nothing, so that a run
        which ended for them gets past them once the reason is mended.
        """
        if self._config.action == "off":
            return ()
        alarms = check(metrics, self._config, self._context)
        errors = {alarm.name: alarm for alarm in alarms if alarm.level == "error"}
        # Names that are not at error level now are left out, and begin at 1 the next time.
        self._in_a_row = {name: self._in_a_row.get(name, 0) + 1 for name in errors}
        late = [errors[name] for name, count in self._in_a_row.items() if count >= self._config.patience]
        if late and self._config.action == "stop":
            self.stop = late[0]
        if not recorded:
            self._empty_steps = (
                self._empty_steps + 1 if metrics.get("train/tokens") == 0.0 and "skipped" in errors else 0
            )
        if self._empty_steps >= MOST_EMPTY_STEPS:
            skipped = errors["skipped"]
            self.stop = replace(
                skipped, advice=f"nothing was trained in {MOST_EMPTY_STEPS} steps in a row; {skipped.advice}"
            )
        return alarms
