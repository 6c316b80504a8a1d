"""Numbers out of range are refused when the settings are read, before any process starts."""

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.launch.settings.config_loader import load
from tidemill.launch.settings.run_config import RunConfig
from tidemill.launch.settings.yaml_file import SettingsError

DIGITS = Path("launch/configs/digits.yaml")
NEGATIVE = {
    "seed",
    "data.seed",
    "eval.seed",
    "learner.seed",
    "data.skip_hard",  # below 0 = no prompt is left out
    "data.passes_at",  # a reward, which may be below 0
    "up.require_reward",
    "sampling.top_k",  # -1 = the whole vocabulary
    "bus.port",  # -1 = any free one
}
"""Numbers that may be -1."""


def numbers(section: type, prefix: str = "") -> Iterator[str]:
    """Yield the path of every setting that is a number."""
    for name, kind in typing.get_type_hints(section).items():
        inner = [one for one in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(one)]
        if inner and prefix + name != "prepare":
            yield from numbers(typing.cast(type, inner[0]), f"{prefix}{name}.")
        elif kind in (int, float, int | None, float | None):
            yield prefix + name


def test_every_number_is_refused_below_its_range() -> None:
    taken = set()
    for path in numbers(RunConfig):
        try:
            load([DIGITS], [f"{path}=-1"], {})
        except SettingsError:
            continue
        taken.add(path)
    assert taken == NEGATIVE


ALGORITHM = "learner.algorithm."
READ_WITH = {
    **dict.fromkeys(("gamma", "lam"), "advantage=gae"),
    **dict.fromkeys(("vtrace.rho", "vtrace.c"), "advantage=vtrace"),
    "pass_at_k.k": "advantage=pass_at_k",
    "rae.decay": "advantage=rae",
    "overlong.penalty": "overlong.buffer=1",
    "distill.top_k": "distill.coef=1 distill.loss=forward_kl distill.top_k=1 kl.reference=some",
    "distill.coef": "kl.reference=some kl.coef=0.1",
    **dict.fromkeys(("sapo.tau_positive", "sapo.tau_negative"), "correction=sapo"),
    **dict.fromkeys(("dppo.penalty", "dppo.ratio_cap"), "correction=dppo_tv"),
    **dict.fromkeys(("covariance.low", "covariance.high", "covariance.share"), "correction=clip_cov"),
    "covariance.kl_coef": "correction=kl_cov",
    "dro.tau": "correction=dro",
    **dict.fromkeys(("m2.keep_low", "m2.keep_high"), "correction=m2po_harmful"),
    "loss_constant": "aggregation=constant",
    **dict.fromkeys(("entropy.delta", "entropy.coef_max"), "entropy.target=0.5"),
    **dict.fromkeys(("kl.target", "kl.reference_every", "kl.reference_ema"), "kl.coef=0.1"),
    "kl.horizon": "kl.coef=0.1 kl.target=0.1",
}
"""Settings with which a number of the algorithm is read; all others are with the defaults."""
UNLIMITED = {
    *(
        "clip.high",
        "clip.dual",
        "dppo.ratio_cap",
        "weight.high",
        "vtrace.rho",
        "m2.keep_high",
    ),  # a ratio has no upper bound
    *(
        "reject.binary_kl",
        "reject.opsm",
        "m2.limit",
        "covariance.high",
        "kl.target",
        "entropy.target",
    ),  # divergences, covariances, nats
    *(
        "overlong.penalty",
        "dppo.penalty",
        "covariance.kl_coef",
        "dro.tau",
        "entropy.coef",
        "entropy.coef_max",
    ),  # coefficients
    *("kl.coef", "kl.reward_coef", "distill.coef"),  # sft_coef needs recorded responses, which this run has not
    *("sapo.tau_positive", "sapo.tau_negative", "loss_constant"),  # divisors
    *("kl.horizon", "kl.reference_every", "alarms.patience"),  # samples, steps
}
"""Numbers of the algorithm without an upper bound."""


def test_every_number_of_the_algorithm_is_refused_above_its_range() -> None:
    taken = set()
    for path in numbers(RunConfig):
        if path.startswith(ALGORITHM):
            name = path.removeprefix(ALGORITHM)
            with_it = [ALGORITHM + word for word in READ_WITH.get(name, "").split()]
            load([DIGITS], with_it, {})
            try:
                load([DIGITS], [*with_it, f"{path}={10**6}"], {})
            except SettingsError as refused:
                assert name in str(refused) and "not used" not in str(refused), refused
                continue
            taken.add(name)
    assert taken == UNLIMITED


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("learner.optimizer.beta1=2", "beta1: want < 1, got 2"),
        ("learner.optimizer.beta2=1", "beta2: want < 1"),
        ("learner.optimizer.eps=0", "eps: want > 0"),
        ("learner.optimizer.min_lr=1", "min_lr: want <= lr = "),
        ("engine.port=99999", "engine.port: want <= 65535, got 99999"),
        ("bus.port=99999", "bus.port: want <= 65535, got 99999"),
        ("bus.port=0", "port: want 1..65535, or -1"),
        ("bus.replicas=2", "replicas: want at most cluster = 1, the servers of the embedded bus, got 2"),
        ("bus.replicas=7", "replicas: want <= 5"),
        ("sampling.stop=['']", "stop: want at most 16 strings of 1 to 200 letters"),
        ("up.drain_s=0", "drain_s: want > 0"),
    ],
)
def test_what_is_out_of_range_is_named(setting: str, complaint: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load([DIGITS], [setting], {})
    assert complaint in str(refused.value)
    assert "--set" in str(refused.value)
