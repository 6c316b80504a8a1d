"""Refusals of ``learner.algorithm``: settings that are wrong together, or that nothing reads."""

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from tidemill.learner.algorithms.choices import (
    ANCHORED,
    BOUNDED,
    BY_COVARIANCE,
    BY_CRITIC,
    DISCOUNTED,
    DPPO,
    IN_REWARD,
    PRESETS,
    RUNNING,
    WEIGHTS,
)

if TYPE_CHECKING:
    from tidemill.learner.algorithms.config import AlgorithmConfig

_READERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "loss": {
        **dict.fromkeys(("clip.low", "clip.high"), BOUNDED),
        **dict.fromkeys(("dppo.penalty", "dppo.ratio_cap"), DPPO),
        "covariance.share": BY_COVARIANCE,
        **dict.fromkeys(("covariance.low", "covariance.high"), ("clip_cov",)),
        "covariance.kl_coef": ("kl_cov",),
        "dro.tau": ("dro",),
        **dict.fromkeys(("sapo.tau_positive", "sapo.tau_negative"), ("sapo",)),
    },
    "advantage": {
        "gamma": (*BY_CRITIC, *DISCOUNTED),
        "lam": BY_CRITIC,
        **dict.fromkeys(("vtrace.rho", "vtrace.c"), ("vtrace",)),
        **dict.fromkeys(("rae.decay", "rae.role"), RUNNING),
        "pass_at_k.k": ("pass_at_k",),
        "gdpo.weights": ("gdpo",),
    },
    "weight.level": dict.fromkeys(("weight.action", "weight.low", "weight.high", "weight.self_normalise"), WEIGHTS[1:]),
    "aggregation": {"loss_constant": ("constant",)},
}
"""Settings that only some choices of another setting read, with these choices."""
_GET_SETTINGS = ("loss", "weight.level")
"""Choices that may be a function by import path which reads any setting: a loss gets all of them, and the weights of a
function are bounded as others are."""
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
"""The quantity that ``clip.low`` and ``clip.high`` bound, by loss."""
_BY_PROBABILITY = ("dppo_tv", "ipo")
_LOWEST_RATIO = ("ppo", "clip_cov", "gspo", "gspo_token")
"""Losses with the lower bound 1 - clip.low of a ratio."""


def refuse_foreign_range(config: "AlgorithmConfig") -> None:
    """Raise ValueError if the preset has the clip range of another kind of loss, or of another anchor."""
    if config.clip.low is not None and config.clip.high is not None:
        return
    preset = PRESETS[config.correction]
    preset_loss, loss = str(preset["loss"]), config.loss or str(preset["loss"])
    if preset_loss not in _RANGES or loss not in _RANGES:
        return
    got = f"{preset['clip.low']}, {preset['clip.high']}"
    if _RANGES[preset_loss] != _RANGES[loss]:
        raise ValueError(
            f"clip.low, clip.high: want both set with loss: {loss} on correction: {config.correction}, "
            f"whose range {got} is {_RANGES[preset_loss]}, not {_RANGES[loss]}; or take correction: {loss}"
        )
    if loss in ("gspo", "gspo_token") and config.anchor == "rollout":
        raise ValueError(
            f"clip.low, clip.high: want both set with loss: {loss} and anchor: rollout: against mu, noise alone is "
            f"larger than {got}; or leave anchor: proximal"
        )


def refuse_contradictions(config: "AlgorithmConfig", unset: Mapping[str, object]) -> None:
    """Raise ValueError for settings that contradict each other, or that have no effect, with the reason.

    ``unset``: the value of each setting that is left out, by its path.
    """
    _refuse_unread(config, unset)
    _refuse_without_reference(config)
    if config.loss == "sft":
        _refuse_with_sft(config, unset)
    _refuse_anchor(config)
    _refuse_range(config)
    _refuse_bounds(config)
    _refuse_loglinear(config)
    if config.kl.reward_by == "token" and config.advantage not in (*IN_REWARD, *BY_CRITIC):
        raise ValueError(
            "kl.reward_by: token needs an advantage in units of the reward: want advantage: "
            f"{' | '.join((*IN_REWARD, *BY_CRITIC))}, or kl.reward_by: sample, got advantage {config.advantage}"
        )


def _refuse_unread(config: "AlgorithmConfig", unset: Mapping[str, object]) -> None:
    """Raise ValueError for a setting that was changed and has no effect."""
    for setting, settings in _READERS.items():
        choice = attrgetter(setting)(config)
        for path, readers in settings.items():
            value, default = attrgetter(path)(config), unset[path]
            # A bound of 0 is none, so it says what is the case.
            is_set = value != default and not (value == 0 and path in PRESETS[config.correction])
            if is_set and choice not in readers and not (":" in choice and setting in _GET_SETTINGS):
                raise ValueError(
                    f"{path}: not used by {setting} {choice}; want {setting}: {' | '.join(readers)}, or {default!r} "
                    f"here, got {value!r}"
                )
    if config.advantage == "gdpo" and (config.overlong.buffer or config.kl.reward_coef):
        raise ValueError(
            "advantage: gdpo takes the parts of the reward, to which overlong.buffer and kl.reward_coef are not added; "
            "want 0 for both (the reward overlong can be a part; kl.coef is in the loss)"
        )
    m2 = config.m2
    if not m2.limit and (m2.tokens != "all" or m2.keep_low or m2.keep_high):
        raise ValueError(
            "m2.tokens, m2.keep_low, m2.keep_high: not used without m2.limit; want m2.limit > 0, or their defaults, "
            f"got m2.tokens {m2.tokens}, {m2.keep_low} .. {m2.keep_high}"
        )


def _refuse_without_reference(config: "AlgorithmConfig") -> None:
    for name in ("reference", "reference_every", "reference_ema"):
        if (value := getattr(config.kl, name)) and not config.needs_reference:
            raise ValueError(
                f"kl.{name}: nothing compares with it; want kl.coef, kl.reward_coef or distill.coef (with "
                f"distill.teacher: reference) > 0 as well, or no reference, got {value!r}"
            )


def _refuse_with_sft(config: "AlgorithmConfig", unset: Mapping[str, object]) -> None:
    """Raise ValueError for a setting that has no effect with loss sft."""
    if config.sft_coef:
        raise ValueError(
            "sft_coef: not used by loss sft, which trains demonstrations as it does all samples; want 0, got "
            f"{config.sft_coef!r}"
        )
    for path in ("advantage", "whiten", "overlong.buffer", "distill.coef", "reject.opsm"):
        if (value := attrgetter(path)(config)) != unset[path]:
            raise ValueError(f"{path}: sft has no advantages; want it left out, or another loss, got {value!r}")
    if config.kl.reward_coef:
        raise ValueError(
            f"kl.reward_coef: sft uses no reward; want kl.coef, or another loss, got {config.kl.reward_coef!r}"
        )
    reject = config.reject
    if config.weight.level != "none" or reject.rules or reject.veto or reject.binary_kl or config.m2.limit:
        raise ValueError("loss: sft trains every token with weight 1; want weight.level: none and no rejection")
    if config.top_entropy < 1:
        raise ValueError(f"top_entropy: sft trains every token; want 1, or another loss, got {config.top_entropy!r}")


def _refuse_anchor(config: "AlgorithmConfig") -> None:
    """Raise ValueError for an anchor that does not suit the loss or the weight."""
    if config.anchor == "rollout" and config.weight.level != "none":
        raise ValueError(
            f"weight.level: {config.weight.level} with anchor: rollout corrects twice: the ratio pi / mu of the loss "
            "is the correction already; want weight.level: none, or anchor: proximal"
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
    if config.loss in ("sapo", "topr", "vespo") and config.weight.level != "none":
        raise ValueError(
            f"weight.level: {config.loss} weighs by the ratio itself; want none, got {config.weight.level!r}"
        )


def _refuse_range(config: "AlgorithmConfig") -> None:
    """Raise ValueError for a clip range that is missing, or wider than its quantity can be."""
    low, high, dual, loss = config.clip.low, config.clip.high, config.clip.dual, config.loss
    assert low is not None and high is not None
    if loss in BOUNDED and not (low and high):
        raise ValueError(f"clip.low, clip.high: {loss} needs its trust region: want > 0, got {low}, {high}")
    if loss in _LOWEST_RATIO and low >= 1:
        raise ValueError(
            f"clip.low: want < 1 with loss {loss} (the ratio is > 0, and its lower bound 1 - clip.low), got {low!r}"
        )
    if loss == "cispo" and low > 1:
        raise ValueError(f"clip.low: want <= 1 with loss cispo (1 = no lower bound of the weight), got {low!r}")
    for name, value in (("low", low), ("high", high)):
        if loss in _BY_PROBABILITY and value >= 1:
            raise ValueError(f"clip.{name}: want < 1 with loss {loss} (a difference of probabilities), got {value!r}")
    if dual and (dual <= 1 or loss not in ("ppo", "gspo", "gspo_token")):
        raise ValueError(
            f"clip.dual: want > 1 and a clipped loss (ppo, gspo, gspo_token), or 0, got {dual} with {loss}"
        )


def _refuse_bounds(config: "AlgorithmConfig") -> None:
    """Raise ValueError for bounds that fresh data, of ratio 1, is outside of."""
    low, high, m2 = config.weight.low, config.weight.high, config.m2
    assert low is not None and high is not None and m2.keep_low is not None and m2.keep_high is not None
    if high and low >= high:
        raise ValueError(f"weight.low: want < weight.high = {high}, got {low}")
    if (config.weight.level != "none" and low > 1) or 0 < high < 1:
        raise ValueError(
            "weight.low, weight.high: want weight.low <= 1 <= weight.high (the weight of fresh data is 1), got "
            f"{low}, {high}"
        )
    if (m2.keep_low or m2.keep_high) and not m2.keep_low <= 1 <= m2.keep_high:
        raise ValueError(
            "m2.keep_low, m2.keep_high: want m2.keep_low <= 1 <= m2.keep_high (the ratio of fresh data is 1), or 0 and "
            f"0, got {m2.keep_low}, {m2.keep_high}"
        )
    if config.weight.action == "truncate" and low:
        raise ValueError(
            f"weight.low: truncate has no lower bound; want weight.action: clip or mask, got weight.low {low}"
        )


def _refuse_loglinear(config: "AlgorithmConfig") -> None:
    if config.proximal == "loglinear" and config.anchor != "proximal":
        raise ValueError(f"proximal: loglinear has no effect with anchor: {config.anchor}; want anchor: proximal")
    if config.proximal == "loglinear" and config.coupled:
        raise ValueError(
            "proximal: loglinear saves the forward pass that weight.self_normalise, m2.limit, kl.reward_coef, "
            "top_entropy, clip_cov, kl_cov and vtrace need; want proximal: recompute"
        )
