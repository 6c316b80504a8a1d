"""Presets expand to their documented parts, every part can be changed, and contradictions are refused with the reason."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.settings.config_loader import load, render
from learner.algorithms.config import ADVANTAGES, PRESETS, AlarmConfig, AlgorithmConfig, KLConfig, RejectRule, reject_rule, unset_names
from learner.algorithms.objective import Objective
from learner.config import LearnerConfig

DIGITS = Path(__file__).parents[2] / "launch/configs/digits.yaml"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_unset_values_and_nothing_else(name: str) -> None:
    plain = AlgorithmConfig(correction=name)
    assert not [field for field in unset_names() if getattr(plain, field) is None]
    assert {field: getattr(plain, field) for field in PRESETS[name]} == dict(PRESETS[name])
    assert AlgorithmConfig(**{field.name: getattr(plain, field.name) for field in fields(plain)}) == plain, "what is printed means the same"
    changed = AlgorithmConfig(correction=name, aggregation="constant")
    assert changed == replace(plain, aggregation="constant")


def test_the_expansion_is_printed_with_where_it_came_from() -> None:
    text = render(load(DIGITS, ["learner.algorithm.correction=icepop", "learner.algorithm.weight_high=4"]))
    shown = dict(re.findall(r"^ +(\w+: [^#\n]*?) +# (.*)$", text, re.MULTILINE))
    assert shown["weight_action: mask"] == "preset icepop"
    assert shown["weight_low: 0.5"] == "preset icepop"
    assert shown["weight_high: 4.0"] == "--set"
    assert shown["entropy_coef: 0.0"] == "default"


def test_a_list_of_rules_is_a_setting() -> None:
    config = load(DIGITS, ["learner.algorithm.reject=[k1 token 0.5 2, k3 seq_mean 0.01]"]).config.learner.algorithm
    assert config.rejects == (RejectRule("k1", "token", 0.5, 2.0), RejectRule("k3", "seq_mean", 0.0, 0.01))


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
    with pytest.raises(ValueError, match=r"reject: .*want"):
        reject_rule(text)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"correction": "magic"}, "correction: want none | naive"),
        ({"advantage": "magic"}, "advantage: want grpo"),
        ({"loss": "magic"}, "module:function"),
        ({"anchor": "sea"}, "anchor: want proximal"),
        ({"weight_action": "bend"}, "weight_action: want clip"),
        ({"clip_low": -1.0}, "clip_low: want >= 0"),
        ({"correction": "bypass", "weight": "token", "weight_high": 2.0}, "corrects twice"),
        ({"correction": "cispo", "weight": "sequence", "weight_high": 2.0}, "corrects twice"),
        ({"correction": "tis", "loss": "ppo"}, "anchor: ppo compares"),
        ({"correction": "decoupled", "loss": "reinforce"}, "anchor: reinforce compares the policy with none"),
        ({"correction": "sapo", "anchor": "proximal", "weight": "token", "weight_high": 2.0}, "weighs by the ratio itself"),
        ({"correction": "sft", "veto": 1e-4}, "no rejection"),
        ({"correction": "sft", "m2_limit": 0.1}, "no rejection"),
        ({"correction": "sft", "opsm_threshold": 0.5}, "no advantages"),
        ({"correction": "bypass", "clip_high": 0.0}, "needs its trust region"),
        ({"clip_dual": 0.5}, "clip_dual: want > 1"),
        ({"correction": "tis", "clip_dual": 3.0}, "clip_dual: want > 1"),
        ({"weight_low": 3.0}, "weight_low: want < weight_high"),
        ({"weight_high": 0.9}, "want weight_low <= 1 <= weight_high"),
        ({"weight_low": 1.5}, "want weight_low <= 1 <= weight_high"),
        ({"weight_action": "truncate", "weight_low": 0.5}, "no lower bound"),
        ({"correction": "bypass", "self_normalise": True}, "no weights to normalise"),
        ({"correction": "tis", "proximal": "loglinear"}, "has no effect"),
        ({"correction": "a3po", "m2_limit": 0.04}, "saves the forward pass"),
        ({"overlong_penalty": 2.0}, "overlong_buffer > 0"),
        ({"correction": "m2po", "m2_tokens": "some"}, "m2_tokens: want all | harmful"),
        ({"m2_tokens": "harmful"}, "not used without m2_limit"),
        ({"m2_keep_low": 0.5, "m2_keep_high": 2.0}, "not used without m2_limit"),
        ({"correction": "m2po_harmful", "m2_keep_low": 1.2}, "want m2_keep_low <= 1 <= m2_keep_high"),
        ({"correction": "m2po_harmful", "m2_keep_high": 0.0}, "want m2_keep_low <= 1 <= m2_keep_high"),
        ({"ess_lr": True, "ess_lr_base": 1.5}, "ess_lr_base: want <= 1"),
        ({"ess_lr": True, "ess_lr_base": 0.0}, "ess_lr_base: want > 0"),
        ({"ess_lr_base": 0.5}, "ess_lr_base: not used without ess_lr"),
        ({"correction": "dro", "dro_tau": 0.0}, "dro_tau: want > 0"),
        ({"dro_tau": 0.5}, "dro_tau: not used by loss ppo; want loss: dro"),
        ({"correction": "dppo_kl", "dppo_ratio_cap": 0.5}, "dppo_ratio_cap: want >= 1"),
        ({"dppo_ratio_cap": 2.0}, "dppo_ratio_cap: not used by loss ppo; want loss: dppo_tv | dppo_kl | ipo"),
        ({"correction": "gmpo", "clip_low": 0.0}, "needs its trust region"),
        ({"correction": "ipo", "anchor": "none"}, "anchor: ipo compares"),
        ({"advantage": "pass_at_k", "pass_k": 0}, "pass_k: want >= 1"),
        ({"pass_k": 4}, "pass_k: not used by advantage grpo; want advantage: pass_at_k"),
        ({"veto": 1.5}, "veto: want < 1"),
        ({"veto": 1.0}, "veto: want < 1"),
        ({"entropy_coef": -0.1}, "entropy_coef: want >= 0"),
        ({"correction": "sapo", "sapo_tau_positive": 0.0}, "sapo_tau_positive: want > 0"),
        ({"correction": "sapo", "sapo_tau_negative": -1.0}, "sapo_tau_negative: want > 0"),
        ({"sapo_tau_positive": 2.0}, "sapo_tau_positive: not used by loss ppo; want loss: sapo"),
        ({"correction": "bypass", "dppo_penalty": 0.1}, "dppo_penalty: not used by loss ppo; want loss: dppo_tv"),
        ({"loss_constant": 100.0}, "loss_constant: not used by aggregation token_mean; want aggregation: constant"),
        ({"correction": "sft", "advantage": "rloo"}, "advantage: sft has no advantages"),
        ({"correction": "sft", "whiten": True}, "whiten: sft has no advantages"),
        ({"correction": "sft", "overlong_buffer": 4}, "overlong_buffer: sft has no advantages"),
        ({"correction": "sft", "distill_coef": 1.0}, "distill_coef: sft has no advantages"),
        ({"correction": "sft", "kl": KLConfig(reward_coef=0.1)}, "kl.reward_coef: sft uses no reward"),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        AlgorithmConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"estimator": "k9"}, "estimator: want k1"),
        ({"coef": -1.0}, "want >= 0"),
        ({"target": 0.1}, "nothing to adapt"),
        ({"coef": 0.1, "estimator": "k1", "corrected": False}, "no gradient"),
    ],
)
def test_a_divergence_that_makes_no_sense_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        KLConfig(**settings)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"correction": "none"}, True),
        ({"correction": "naive"}, True),
        ({"correction": "gspo", "weight": "none"}, True),
        ({"correction": "sapo", "anchor": "proximal"}, True),
        ({"loss": "package.module:mine", "weight": "none"}, True),
        ({"correction": "tis"}, False),
        ({"correction": "bypass"}, False),
        ({"correction": "cispo"}, False),
        ({"correction": "sft"}, False),
    ],
)
def test_corrections_that_train_stale_data_as_fresh_are_known(changes: dict[str, Any], wanted: bool) -> None:
    assert AlgorithmConfig(**changes).uncorrected is wanted


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"clip_dual": 1.01}, {"clip_dual": 1.0}),
        ({"weight_low": 0.99, "weight_high": 1.01}, {"weight_low": 1.0, "weight_high": 1.0}),
        ({"weight_low": 1.0, "weight_high": 2.0}, {"weight_low": 1.01, "weight_high": 2.0}),
        ({"weight_low": 0.5, "weight_high": 1.0}, {"weight_low": 0.5, "weight_high": 0.99}),
        ({"reject": ("k1 token 0.5 1",)}, {"reject": ("k1 token 0.5 0.99",)}),
        ({"reject": ("k1 token 0.99 1",)}, {"reject": ("k1 token 1 1",)}),
    ],
)
def test_where_a_setting_ends_to_be_good(good: dict[str, Any], bad: dict[str, Any]) -> None:
    AlgorithmConfig(correction="decoupled", **good)
    with pytest.raises(ValueError, match="want"):
        AlgorithmConfig(correction="decoupled", **bad)


def test_settings_are_accepted_only_where_they_have_an_effect() -> None:
    AlgorithmConfig(correction="dppo_tv", dppo_penalty=0.1)
    AlgorithmConfig(correction="sapo", sapo_tau_positive=2.0)
    AlgorithmConfig(aggregation="constant", loss_constant=100.0)
    AlgorithmConfig(loss="package.module:mine", dppo_penalty=0.1, sapo_tau_negative=2.0)
    AlgorithmConfig(veto=0.999)
    assert AlgorithmConfig(correction="sft", kl=KLConfig(coef=0.1)).kl.coef == 0.1


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_groups_of_one_are_for_estimators_without_a_baseline(advantage: str) -> None:
    """The estimator's formula itself decides which those are."""
    alone = Objective(AlgorithmConfig(advantage=advantage, whiten=False)).advantages(
        torch.tensor([1.0, 0.0, 3.0]), torch.arange(3), torch.tensor([2, 3, 4]), torch.tensor([2, 3, 4])
    )
    if alone.any():
        assert LearnerConfig(group_size=1, algorithm=AlgorithmConfig(advantage=advantage)).group_size == 1
    else:
        with pytest.raises(ValueError, match="group_size: want >= 2"):
            LearnerConfig(group_size=1, algorithm=AlgorithmConfig(advantage=advantage))


def test_a_set_of_k_samples_fits_into_a_group() -> None:
    algorithm = AlgorithmConfig(advantage="pass_at_k", pass_k=4)
    assert LearnerConfig(group_size=4, algorithm=algorithm).group_size == 4
    with pytest.raises(ValueError, match=r"group_size: want >= algorithm.pass_k = 4, got 3: .*lower pass_k"):
        LearnerConfig(group_size=3, algorithm=algorithm)


def test_groups_of_one_are_enough_without_advantages() -> None:
    assert LearnerConfig(group_size=1, algorithm=AlgorithmConfig(correction="sft")).group_size == 1


def test_where_the_other_settings_end() -> None:
    assert AlarmConfig(patience=1).patience == 1
    assert KLConfig(coef=0.1, horizon=0.5).horizon == 0.5
    for make in (lambda: AlarmConfig(patience=0), lambda: KLConfig(horizon=0.0), lambda: KLConfig(coef=-0.1)):
        with pytest.raises(ValueError, match="want"):
            make()
