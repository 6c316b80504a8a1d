"""Settings that decide the result of an optimizer step: a repeated step has the settings of its first execution. Loads
no torch.

Every start of the learner records its own (row ``run/settings.<epoch>``). A rank changes the ``StepSettings``
between two steps. The others are built into the models, so another value of one is refused until the steps recorded
with it are in a checkpoint.
"""

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from operator import attrgetter
from typing import Any

from tidemill.bus import section
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.optimizer import OptimizerConfig

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
"""Path of each setting of ``learner.algorithm`` by its name before there were sections. Digests of runs are made of
them, and records of earlier runs are read by them.
"""
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


BUILT_IN = (
    *("optimizer.name", "optimizer.freeze", "critic", "hooks", "dtype", "megatron", "bridge", "family"),
    *("from_checkpoint", "moe_aux_loss_coef", "moe_bias_update_rate", "routing_replay", "mtp_loss_scaling_factor"),
    *("algorithm.kl.reference", "algorithm.kl.reference_every", "algorithm.kl.reference_ema"),
)
"""Settings below ``learner`` that no rank can change between two steps, and ``weights.push_every``."""
MODELS = {
    "by_critic": "a critic",
    "needs_reference": "a reference model",
    "may_need_metadata": "the metadata of samples",
}
"""Needs of an algorithm that are decided when a rank starts."""


@section.section
@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings that can differ from step to step."""

    steps: int
    """``learner.steps``, at which the learning rate's decay ends."""
    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig
    credit: str
    credit_gamma: float

    @classmethod
    def of(cls, learner: LearnerConfig) -> "StepSettings":
        """Return the settings of a configuration."""
        return cls(**{field.name: getattr(learner, field.name) for field in dataclasses.fields(cls)})

    @classmethod
    def read(cls, record: JsonMapping) -> "StepSettings":
        values = {field.name: record["learner"][field.name] for field in dataclasses.fields(cls)}
        values["algorithm"] = with_sections(values["algorithm"])
        return typing.cast(StepSettings, section.read(cls, values, "learner"))

    @property
    def turn_gamma(self) -> float | None:
        """Discount of the returns of turns; None = one advantage for an episode."""
        return self.credit_gamma if self.credit == "turn" else None


def record_of(learner: LearnerConfig, *, push_every: int) -> JsonObject:
    """Return the record of a start's settings, plain values."""
    names = {field.name for field in dataclasses.fields(StepSettings)} | {path.partition(".")[0] for path in BUILT_IN}
    values = dataclasses.asdict(learner)
    # Through JSON: a record that is read from the bus has lists where the settings have tuples.
    record: JsonObject = json.loads(json.dumps({name: values[name] for name in sorted(names)}))
    return {"learner": record, "weights": {"push_every": push_every}}


def refuse_built_in(then: JsonMapping, now: JsonMapping, step: int) -> None:
    """Raise ConfigRefused if a setting that is built in differs from that with which ``step`` was executed."""
    for path in (*(f"learner.{path}" for path in BUILT_IN), "weights.push_every"):
        if (before := _at(then, path)) != (value := _at(now, path)):
            raise ConfigRefused(
                path, f"{before!r} until the step {step} that was executed with it is in a checkpoint", value
            )
    before, after = StepSettings.read(then).algorithm, StepSettings.read(now).algorithm
    for name, words in MODELS.items():
        if getattr(before, name) and not getattr(after, name):
            want = f"one that needs {words}, as the executed step {step} does, until it is in a checkpoint"
            raise ConfigRefused("learner.algorithm", want, f"advantage {after.advantage}, loss {after.loss}")


def _at(record: JsonMapping, path: str) -> object:
    if path == "learner.mtp_loss_scaling_factor":  # records from before it have none: heads were not trained
        return record["learner"].get("mtp_loss_scaling_factor", 0.0)
    return reduce(lambda values, name: values[name], path.split("."), record)
