"""Names of settings of ``learner.algorithm`` before it had sections. Digests of runs are made of them, so that a run
has the digest that it had then, and records of earlier runs are read by them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from tidemill.learner.algorithms.config import AlgorithmConfig

FORMER: Mapping[str, str] = {
    "vtrace_rho": "vtrace.rho",
    "vtrace_c": "vtrace.c",
    "pass_k": "pass_at_k.k",
    "rae_decay": "rae.decay",
    "rae_role": "rae.role",
    "gdpo_weights": "gdpo.weights",
    "overlong_buffer": "overlong.buffer",
    "overlong_penalty": "overlong.penalty",
    "distill_coef": "distill.coef",
    "distill_teacher": "distill.teacher",
    "distill_loss": "distill.loss",
    "distill_top_k": "distill.top_k",
    "clip_low": "clip.low",
    "clip_high": "clip.high",
    "clip_dual": "clip.dual",
    "sapo_tau_positive": "sapo.tau_positive",
    "sapo_tau_negative": "sapo.tau_negative",
    "dppo_penalty": "dppo.penalty",
    "dppo_ratio_cap": "dppo.ratio_cap",
    "cov_share": "covariance.share",
    "clip_cov_low": "covariance.low",
    "clip_cov_high": "covariance.high",
    "kl_cov_coef": "covariance.kl_coef",
    "dro_tau": "dro.tau",
    "weight": "weight.level",
    "weight_action": "weight.action",
    "weight_low": "weight.low",
    "weight_high": "weight.high",
    "self_normalise": "weight.self_normalise",
    "reject": "reject.rules",
    "veto": "reject.veto",
    "binary_kl_limit": "reject.binary_kl",
    "opsm_threshold": "reject.opsm",
    "m2_limit": "m2.limit",
    "m2_tokens": "m2.tokens",
    "m2_keep_low": "m2.keep_low",
    "m2_keep_high": "m2.keep_high",
    "entropy_coef": "entropy.coef",
    "entropy_target": "entropy.target",
    "entropy_delta": "entropy.delta",
    "entropy_coef_max": "entropy.coef_max",
    "ess_lr_base": "ess_lr",
}
"""Path of each of these settings, by its former name."""
_SECTIONS = {path.partition(".")[0] for path in FORMER.values()}


def flat(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings by their former names."""
    settings = {name: value for name, value in asdict(algorithm).items() if name not in _SECTIONS}
    settings |= {former: attrgetter(path)(algorithm) for former, path in FORMER.items()}
    return settings | {"ess_lr": bool(algorithm.ess_lr), "ess_lr_base": algorithm.ess_lr or 1.0}


def with_sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a record in their sections, whatever names they had when it was made."""
    if all(former not in settings or isinstance(settings[former], Mapping) for former in FORMER):
        return dict(settings)
    settings = dict(settings)
    if settings.pop("ess_lr", None) is False:
        settings.pop("ess_lr_base", None)
    result = {name: value for name, value in settings.items() if name not in FORMER}
    for former, path in FORMER.items():
        section, _, name = path.partition(".")
        if former in settings and name:
            result.setdefault(section, {})[name] = settings[former]
        elif former in settings:
            result[section] = settings[former]
    return result
