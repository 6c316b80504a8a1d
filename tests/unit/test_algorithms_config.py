"""Presets expand to their documented parts, every part can be changed, and contradictions are refused with the
reason.
"""

import math
import re
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.algorithm_settings import algorithm_of
from tests.refusals import refusal
from tidemill.launch.settings.config_loader import load, render
from tidemill.learner.algorithms.alarms import AlarmConfig
from tidemill.learner.algorithms.choices import ADVANTAGES, PRESETS
from tidemill.learner.algorithms.config import AlgorithmConfig, unset_names
from tidemill.learner.algorithms.objective import Objective
from tidemill.learner.algorithms.sections import KLConfig, RejectRule, reject_rule
from tidemill.learner.settings.config import LearnerConfig

DIGITS = Path(__file__).parents[2] / "launch/configs/digits.yaml"

PARTS = """actor.reward="" actor.reward_parts={"right":{"reward":"exact"},"form":{"reward":"format","weight":0.2}}"""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_unset_values_and_nothing_else(name: str) -> None:
    plain = AlgorithmConfig(correction=name)
    assert not [field for field in unset_names() if attrgetter(field)(plain) is None]
    assert {field: attrgetter(field)(plain) for field in PRESETS[name]} == dict(PRESETS[name])
    assert algorithm_of(**{field.name: getattr(plain, field.name) for field in fields(plain)}) == plain, (
        "what is printed means the same"
    )
    changed = AlgorithmConfig(correction=name, aggregation="constant")
    assert changed == replace(plain, aggregation="constant")


def test_the_expansion_is_printed_with_where_it_came_from() -> None:
    text = render(load(DIGITS, ["learner.algorithm.correction=icepop", "learner.algorithm.weight.high=4"]))
    assert re.search(r"action: mask +# preset icepop\n +low: 0.5 +# preset icepop\n +high: 4.0 +# --set\n", text)
    assert re.search(r"entropy:\n +coef: 0.0 +# default\n", text)


def test_parts_of_the_reward_have_weights() -> None:
    for weights in ("", ' learner.algorithm.gdpo.weights={"right":1,"form.open":0.5}'):
        config = load(DIGITS, f"{PARTS} learner.algorithm.advantage=gdpo{weights}".split()).config
        assert config.learner.algorithm.gdpo.weights == ({"right": 1, "form.open": 0.5} if weights else {})


def test_a_list_of_rules_is_a_setting() -> None:
    config = load(
        DIGITS, ["learner.algorithm.reject.rules=[k1 token 0.5 2, k3 seq_mean 0.01]"]
    ).config.learner.algorithm
    assert config.reject.parsed == (RejectRule("k1", "token", 0.5, 2.0), RejectRule("k3", "seq_mean", 0.0, 0.01))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "k1",
        "k4 token 1",
        "k1 word 2",
        "k3 token",
        "k3 token 0.1 0.2",
        "k1 token 2 0.5",
        "k1 token x",
        "k1 seq_max 0.5 2",
        "k1 token 0.5",
    ],
)
def test_a_rule_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"rules: .*want"):
        reject_rule(text)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"correction": "magic"}, "correction: want none, naive"),
        ({"advantage": "magic"}, "advantage: want grpo"),
        ({"loss": "magic"}, "module:function"),
        ({"anchor": "sea"}, "anchor: want proximal"),
        ({"weight": {"action": "bend"}}, "weight.action: want clip"),
        ({"clip": {"low": -1.0}}, "clip.low: want >= 0"),
        ({"correction": "bypass", "weight": {"level": "token", "high": 2.0}}, "corrects twice"),
        ({"correction": "cispo", "weight": {"level": "sequence", "high": 2.0}}, "corrects twice"),
        ({"correction": "tis", "loss": "ppo"}, "anchor: ppo compares"),
        ({"correction": "decoupled", "loss": "reinforce"}, "anchor: reinforce compares the policy with none"),
        (
            {"correction": "sapo", "anchor": "proximal", "weight": {"level": "token", "high": 2.0}},
            "weighs by the ratio itself",
        ),
        ({"correction": "sft", "reject": {"veto": 1e-4}}, "no rejection"),
        ({"correction": "sft", "m2": {"limit": 0.1}}, "no rejection"),
        ({"correction": "sft", "reject": {"opsm": 0.5}}, "no advantages"),
        ({"correction": "bypass", "clip": {"high": 0.0}}, "needs its trust region"),
        (
            {"clip": {"low": 1.5}},
            "clip.low: want < 1 with loss ppo (the ratio is > 0, and its lower bound 1 - clip.low), got 1.5",
        ),
        *(
            ({"correction": name, "clip": {"low": 1.0}}, "clip.low: want < 1")
            for name in ("bypass", "gspo", "gspo_token", "luspo", "clip_cov")
        ),
        ({"correction": "cispo", "clip": {"low": 1.5}}, "clip.low: want <= 1 with loss cispo"),
        *(
            ({"correction": name, "clip": {"low": 1.0}}, "(a difference of probabilities), got 1.0")
            for name in ("dppo_tv", "ipo")
        ),
        *(
            ({"correction": name, "clip": {"high": 1.0}}, "clip.high: want < 1 with loss")
            for name in ("dppo_tv", "ipo")
        ),
        ({"correction": "kl_cov", "covariance": {"kl_coef": 0.0}}, "covariance.kl_coef: want > 0"),
        ({"overlong": {"buffer": 4, "penalty": 0.0}}, "overlong.penalty: want > 0 with buffer: 4"),
        ({"overlong": {"penalty": 0.0}}, "overlong.penalty: not used without buffer; want buffer > 0"),
        ({"reject": {"rules": ("k1 token 1.5 2",)}}, "want low <= 1 <= high"),
        ({"reject": {"rules": ("k3 token inf",)}}, "finite"),
        ({"reject": {"rules": ("k1 token -1 2",)}}, "want 0 <= low < high"),
        ({"clip": {"dual": 0.5}}, "clip.dual: want > 1"),
        ({"correction": "tis", "clip": {"dual": 3.0}}, "clip.dual: want > 1"),
        ({"weight": {"low": 3.0}}, "weight.low: want < weight.high"),
        ({"weight": {"high": 0.9}}, "want weight.low <= 1 <= weight.high"),
        ({"weight": {"low": 1.5}}, "want weight.low <= 1 <= weight.high"),
        ({"weight": {"action": "truncate", "low": 0.5}}, "no lower bound"),
        (
            {"correction": "bypass", "weight": {"self_normalise": True}},
            "weight.self_normalise: not used by weight.level none; want weight.level: token",
        ),
        ({"correction": "tis", "proximal": "loglinear"}, "has no effect"),
        ({"correction": "a3po", "m2": {"limit": 0.04}}, "saves the forward pass"),
        ({"overlong": {"penalty": 2.0}}, "overlong.penalty: not used without buffer; want buffer > 0"),
        ({"correction": "m2po", "m2": {"tokens": "some"}}, "m2.tokens: want all or harmful"),
        ({"m2": {"tokens": "harmful"}}, "not used without m2.limit"),
        ({"m2": {"keep_low": 0.5, "keep_high": 2.0}}, "not used without m2.limit"),
        ({"correction": "m2po_harmful", "m2": {"keep_low": 1.2}}, "want m2.keep_low <= 1 <= m2.keep_high"),
        ({"correction": "m2po_harmful", "m2": {"keep_high": 0.0}}, "want m2.keep_low <= 1 <= m2.keep_high"),
        ({"ess_lr": 1.5}, "ess_lr: want <= 1"),
        ({"ess_lr": True}, "ess_lr: want a number"),
        ({"ess_lr": -0.5}, "ess_lr: want >= 0"),
        ({"correction": "dro", "dro": {"tau": 0.0}}, "dro.tau: want > 0"),
        ({"dro": {"tau": 0.5}}, "dro.tau: not used by loss ppo; want loss: dro"),
        (
            {"correction": "tis", "clip": {"high": 0.3}},
            "clip.high: not used by loss reinforce; want loss: ppo | clip_cov | cispo | gspo | gspo_token | gmpo | "
            "dppo_tv | dppo_kl | ipo, or 0.0 here, got 0.3",
        ),
        (
            {"correction": "bypass", "weight": {"high": 3.0}},
            "weight.high: not used by weight.level none; want weight.level: token | sequence | geometric | prefix, "
            "or 0.0 here, got 3.0",
        ),
        ({"correction": "bypass", "weight": {"action": "mask"}}, "weight.action: not used by weight.level none"),
        ({"correction": "dppo_kl", "dppo": {"ratio_cap": 0.5}}, "dppo.ratio_cap: want >= 1"),
        ({"dppo": {"ratio_cap": 2.0}}, "dppo.ratio_cap: not used by loss ppo; want loss: dppo_tv | dppo_kl | ipo"),
        ({"correction": "gmpo", "clip": {"low": 0.0}}, "needs its trust region"),
        ({"correction": "ipo", "anchor": "none"}, "anchor: ipo compares"),
        ({"advantage": "pass_at_k", "pass_at_k": {"k": 0}}, "pass_at_k.k: want > 0"),
        ({"pass_at_k": {"k": 4}}, "pass_at_k.k: not used by advantage grpo; want advantage: pass_at_k"),
        ({"reject": {"veto": 1.5}}, "veto: want < 1"),
        ({"reject": {"veto": 1.0}}, "veto: want < 1"),
        ({"entropy": {"coef": -0.1}}, "entropy.coef: want >= 0"),
        ({"entropy": {"target": -0.1}}, "entropy.target: want >= 0"),
        (
            {"entropy": {"delta": 0.1}},
            "entropy.delta: not used without target; want target > 0, or 0.005, got 0.1",
        ),
        ({"entropy": {"coef_max": 0.1}}, "entropy.coef_max: not used without target"),
        ({"entropy": {"target": 0.5, "delta": 0.0}}, "entropy.delta: want > 0"),
        (
            {"entropy": {"target": 0.5, "coef": 0.2, "coef_max": 0.1}},
            "entropy.coef: want <= coef_max = 0.1, got 0.2",
        ),
        (
            {"kl": KLConfig(reward_coef=0.1, reward_by="token")},
            "kl.reward_by: token needs an advantage in units of the reward",
        ),
        (
            {"loss": "gspo"},
            (
                "clip.low, clip.high: want both set with loss: gspo on correction: decoupled, whose range 0.2, "
                "0.28 is of a token's ratio"
            ),
        ),
        ({"loss": "gspo", "clip": {"high": 4e-4}}, "want both set with loss: gspo"),
        ({"correction": "bypass", "loss": "dppo_kl"}, "not of a binary KL; or take correction: dppo_kl"),
        ({"correction": "cispo", "loss": "ppo"}, "not of a token's ratio"),
        (
            {"correction": "gspo", "anchor": "rollout", "weight": {"level": "none"}},
            "anchor: rollout: against mu, noise alone is larger",
        ),
        ({"kl": KLConfig(reference="/some/model")}, "kl.reference: nothing compares with it"),
        ({"gdpo": {"weights": {"right": 1.0}}}, "gdpo.weights: not used by advantage grpo"),
        ({"advantage": "gdpo", "gdpo": {"weights": {"right": 0}}}, "gdpo.weights.right: want a number other than 0"),
        ({"advantage": "gdpo", "gdpo": {"weights": {"right": "high"}}}, "gdpo.weights.right: want a number"),
        ({"advantage": "gdpo", "gdpo": {"weights": {"right": math.nan}}}, "gdpo.weights.right: want a finite number"),
        ({"advantage": "gdpo", "overlong": {"buffer": 4}}, "gdpo takes the parts of the reward"),
        ({"advantage": "gdpo", "kl": KLConfig(reward_coef=0.1)}, "gdpo takes the parts of the reward"),
        ({"top_entropy": 0.0}, "top_entropy: want > 0"),
        ({"top_entropy": 1.5}, "top_entropy: want <= 1"),
        ({"correction": "sft", "top_entropy": 0.2}, "top_entropy: sft trains every token"),
        ({"correction": "a3po", "top_entropy": 0.2}, "saves the forward pass"),
        ({"correction": "a3po", "loss": "clip_cov"}, "saves the forward pass"),
        ({"correction": "kl_cov", "covariance": {"share": 0.0}}, "covariance.share: want > 0"),
        ({"covariance": {"share": 0.1}}, "covariance.share: not used by loss ppo; want loss: clip_cov | kl_cov"),
        ({"correction": "clip_cov", "covariance": {"low": 5.0}}, "covariance.low: want < high = 5.0"),
        ({"correction": "kl_cov", "covariance": {"low": 2.0}}, "covariance.low: not used by loss kl_cov"),
        ({"correction": "clip_cov", "covariance": {"kl_coef": 2.0}}, "covariance.kl_coef: not used by loss clip_cov"),
        ({"correction": "clip_cov", "clip": {"low": 0.0}}, "needs its trust region"),
        ({"correction": "sapo", "sapo": {"tau_positive": 0.0}}, "sapo.tau_positive: want > 0"),
        ({"correction": "sapo", "sapo": {"tau_negative": -1.0}}, "sapo.tau_negative: want > 0"),
        ({"sapo": {"tau_positive": 2.0}}, "sapo.tau_positive: not used by loss ppo; want loss: sapo"),
        (
            {"correction": "bypass", "dppo": {"penalty": 0.1}},
            "dppo.penalty: not used by loss ppo; want loss: dppo_tv | dppo_kl | ipo, or 0.0 here, got 0.1",
        ),
        ({"loss_constant": 100.0}, "loss_constant: not used by aggregation token_mean; want aggregation: constant"),
        ({"correction": "sft", "advantage": "rloo"}, "advantage: sft has no advantages"),
        ({"correction": "sft", "whiten": True}, "whiten: sft has no advantages"),
        ({"correction": "sft", "overlong": {"buffer": 4}}, "overlong.buffer: sft has no advantages"),
        ({"correction": "sft", "distill": {"coef": 1.0}}, "distill.coef: sft has no advantages"),
        ({"correction": "sft", "kl": KLConfig(reward_coef=0.1)}, "kl.reward_coef: sft uses no reward"),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        algorithm_of(**settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("learner.group_size=1", "learner.group_size: want >= 2"),
        ("learner.min_group_size=-1", "learner.min_group_size: want >= 0, got -1"),
        ("learner.min_group_size=9", "learner.min_group_size: want <= group_size = 8, got 9"),
        ("learner.min_group_size=1", "learner.min_group_size: want >= 2 with algorithm.advantage"),
        (
            "learner.algorithm.advantage=pass_at_k learner.algorithm.pass_at_k.k=4 learner.min_group_size=3",
            "learner.min_group_size: want >= algorithm.pass_at_k.k = 4, got 3",
        ),
        ("learner.group_size=1 learner.algorithm.advantage=opo", "learner.group_size: want >= 2"),
        (
            "learner.group_size=1 learner.algorithm.advantage=reinforce staleness.filter_zero_variance=true",
            "every group would be dropped",
        ),
        ("learner.algorithm.reject.veto=1.5", "learner.algorithm.reject.veto: want < 1"),
        ("learner.algorithm.correction=sapo learner.algorithm.sapo.tau_positive=0", "sapo.tau_positive: want > 0"),
        ("learner.algorithm.overlong.buffer=100", "overlong.buffer: want <= sampling.max_new_tokens = 6"),
        ("learner.algorithm.kl.reference=/no/such/dir", "kl.reference: nothing compares with it"),
        ("learner.algorithm.distill.coef=1", "distill.coef: want learner.algorithm.kl.reference"),
        ("learner.algorithm.loss=gspo", "clip.low, clip.high: want both set"),
        (
            "learner.algorithm.correction=gspo learner.algorithm.anchor=rollout learner.algorithm.weight.level=none",
            "noise alone is larger",
        ),
        ("learner.algorithm.dppo.penalty=0.1", "dppo.penalty: not used by loss ppo"),
        ("learner.algorithm.loss_constant=5", "loss_constant: not used by aggregation"),
        ("learner.algorithm.sapo.tau_negative=2", "sapo.tau_negative: not used by loss ppo"),
        ("learner.algorithm.correction=sft learner.algorithm.advantage=rloo", "advantage: sft has no advantages"),
        ("learner.algorithm.correction=sft learner.algorithm.kl.reward_coef=0.1", "kl.reward_coef: sft uses no reward"),
        ("learner.algorithm.advantage=gdpo", "advantage: gdpo wants several rewards"),
        (
            f"{PARTS} learner.algorithm.advantage=gdpo learner.algorithm.gdpo.weights.rigth=1",
            "want names of actor.reward_parts (right, form), got rigth",
        ),
        ("learner.algorithm.entropy.coef=-0.1", "entropy.coef: want >= 0"),
    ],
)
def test_a_run_that_would_train_on_nothing_is_refused_when_its_file_is_read(settings: str, reason: str) -> None:
    """The misconfigurations that a review found accepted. Import paths, and a reference that is used: test_checks."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        load(DIGITS, settings.split())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"estimator": "k9"}, {"place": "estimator", "got": "'k9'"}),
        ({"estimator": "k2"}, {"place": "estimator"}),
        ({"corrected": False, "reward_coef": 0.1}, {"place": "corrected"}),
        ({"coef": 0.1, "horizon": 5.0}, {"place": "horizon"}),
        ({"reward_coef": 0.1, "reward_by": "word"}, {"place": "reward_by", "got": "'word'"}),
        ({"reward_by": "token"}, {"place": "reward_by"}),
        ({"coef": -1.0}, {"place": "coef", "got": "-1.0"}),
        ({"target": 0.1}, {"place": "target"}),
        ({"coef": 0.1, "estimator": "k1", "corrected": False}, {"place": "estimator"}),
    ],
)
def test_a_divergence_that_makes_no_sense_is_refused(settings: dict[str, Any], reason: dict[str, Any]) -> None:
    with refusal(ValueError, **reason):
        KLConfig(**settings)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"correction": "none"}, True),
        ({"correction": "naive"}, True),
        ({"correction": "gspo", "weight": {"level": "none"}}, True),
        ({"correction": "sapo", "anchor": "proximal"}, True),
        ({"loss": "package.module:mine", "weight": {"level": "none"}}, True),
        ({"correction": "tis"}, False),
        ({"correction": "bypass"}, False),
        ({"correction": "cispo"}, False),
        ({"correction": "sft"}, False),
    ],
)
def test_corrections_that_train_stale_data_as_fresh_are_known(changes: dict[str, Any], wanted: bool) -> None:
    assert algorithm_of(**changes).uncorrected is wanted


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"clip": {"dual": 1.01}}, {"clip": {"dual": 1.0}}),
        ({"weight": {"low": 0.99, "high": 1.01}}, {"weight": {"low": 1.0, "high": 1.0}}),
        ({"weight": {"low": 1.0, "high": 2.0}}, {"weight": {"low": 1.01, "high": 2.0}}),
        ({"weight": {"low": 0.5, "high": 1.0}}, {"weight": {"low": 0.5, "high": 0.99}}),
        ({"reject": {"rules": ("k1 token 0.5 1",)}}, {"reject": {"rules": ("k1 token 0.5 0.99",)}}),
        ({"reject": {"rules": ("k1 token 0.99 1",)}}, {"reject": {"rules": ("k1 token 1 1",)}}),
        ({"reject": {"rules": ("k1 token 1 1.1",)}}, {"reject": {"rules": ("k1 token 1.01 1.1",)}}),
        ({"clip": {"low": 0.99}}, {"clip": {"low": 1.0}}),
    ],
)
def test_where_a_setting_ends_to_be_good(good: dict[str, Any], bad: dict[str, Any]) -> None:
    algorithm_of(correction="decoupled", **good)
    with pytest.raises(ValueError, match="want"):
        algorithm_of(correction="decoupled", **bad)


def test_settings_are_accepted_only_where_they_have_an_effect() -> None:
    algorithm_of(correction="dppo_tv", dppo={"penalty": 0.1})
    algorithm_of(correction="sapo", sapo={"tau_positive": 2.0})
    AlgorithmConfig(aggregation="constant", loss_constant=100.0)
    algorithm_of(loss="package.module:mine", dppo={"penalty": 0.1}, sapo={"tau_negative": 2.0})
    algorithm_of(reject={"veto": 0.999})
    assert algorithm_of(correction="decoupled", loss="gspo", clip={"low": 3e-4, "high": 4e-4}).clip.high == 4e-4
    assert (
        algorithm_of(
            correction="gspo", anchor="rollout", weight={"level": "none"}, clip={"low": 0.1, "high": 0.1}
        ).clip.low
        == 0.1
    )
    assert AlgorithmConfig(correction="gspo", loss="gspo_token").clip.high == 4e-4
    assert AlgorithmConfig(correction="dppo_tv", loss="ipo").clip.low == 0.2
    assert algorithm_of(correction="dppo_tv", dppo={"penalty": 0.0}).dppo.penalty == 0
    assert algorithm_of(correction="cispo", clip={"low": 1.0}).clip.low == 1
    assert (
        algorithm_of(correction="gmpo", clip={"low": 1.5}).clip.low == 1.5
    )  # a log-ratio has no bound, nor a divergence
    assert algorithm_of(correction="dppo_kl", clip={"high": 1.5}).clip.high == 1.5
    assert algorithm_of(distill={"coef": 1.0}, kl=KLConfig(reference="/some/model")).needs_reference
    assert AlgorithmConfig(correction="sft", kl=KLConfig(coef=0.1)).kl.coef == 0.1


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_groups_of_one_are_for_estimators_without_a_baseline(advantage: str) -> None:
    """The estimator's formula itself decides which those are; ``none`` is for another source of learning."""
    alone = Objective(AlgorithmConfig(advantage=advantage, whiten=False)).advantages(
        torch.tensor([1.0, 0.0, 3.0]), torch.arange(3), torch.tensor([2, 3, 4]), torch.tensor([2, 3, 4])
    )
    if alone.any() or advantage == "none":
        assert LearnerConfig(group_size=1, algorithm=AlgorithmConfig(advantage=advantage)).group_size == 1
    else:
        with refusal(ValueError, place="group_size"):
            LearnerConfig(group_size=1, algorithm=AlgorithmConfig(advantage=advantage))


def test_a_set_of_k_samples_fits_into_a_group() -> None:
    algorithm = algorithm_of(advantage="pass_at_k", pass_at_k={"k": 4})
    assert LearnerConfig(group_size=4, algorithm=algorithm).group_size == 4
    with refusal(ValueError, place="group_size"):
        LearnerConfig(group_size=3, algorithm=algorithm)


def test_groups_of_one_are_enough_without_advantages() -> None:
    assert LearnerConfig(group_size=1, algorithm=AlgorithmConfig(correction="sft")).group_size == 1


def test_where_the_other_settings_end() -> None:
    assert AlarmConfig(patience=1).patience == 1
    assert KLConfig(coef=0.1, target=0.1, horizon=0.5).horizon == 0.5
    for make in (lambda: AlarmConfig(patience=0), lambda: KLConfig(horizon=0.0), lambda: KLConfig(coef=-0.1)):
        with pytest.raises(ValueError, match="want"):
            make()


@pytest.mark.parametrize("advantage", [*ADVANTAGES, "rae"])
def test_a_group_that_plans_expect_to_be_left_out_has_no_advantage(advantage: str) -> None:
    """Whatever the other groups are; and only advantages decide, without another term of the loss."""
    config = algorithm_of(advantage=advantage)
    compared = {"grpo", "grpo_no_std", "batch_std", "rloo", "opo", "maxrl", "pass_at_k"}
    assert config.leaves_out_equal == (advantage in compared)
    if not config.leaves_out_equal:
        return
    for other in ({"whiten": True}, {"overlong": {"buffer": 4}}, {"entropy": {"coef": 0.1}}, {"kl": {"coef": 0.1}}):
        assert not algorithm_of(advantage=advantage, **other).leaves_out_equal
    for reward in (-1.0, 0.0, 1.0):
        rewards_N = torch.tensor([reward, reward, reward, 0.0, 1.0, 1.0], dtype=torch.float64)
        groups_N, lengths_N = torch.tensor([7, 7, 7, 8, 8, 8]), torch.tensor([2, 9, 4, 3, 8, 5])
        advantages_N = Objective(config).advantages(rewards_N, groups_N, lengths_N, lengths_N)
        assert advantages_N[:3].tolist() == [0.0] * 3
