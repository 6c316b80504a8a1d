"""Policy losses: values and gradients by their definitions (facts A: 01, 07 to 13, 21, 23 to 25)."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithm_settings import algorithm_of, loss_by
from tests.enumerated import (
    MASK_T,
    PLACE,
    RESPONSES,
    SAMPLE_T,
    STEPS,
    Policy,
    expected,
    gradient,
    objective_gradient,
    per_token,
)
from tests.examples import examples
from tidemill.learner.algorithms.aggregation import Denominators, aggregate
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.objective import Coupled, Objective, sequence_weight_sums
from tidemill.learner.algorithms.policy_losses import PolicyLoss
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.algorithms.tokens import Tokens

PI = Policy(Policy.random(1).logits_PV.requires_grad_())
MU = Policy.random(2, like=PI, spread=0.5)
REWARDS_N = torch.rand(len(RESPONSES), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
ADVANTAGES_T = per_token(REWARDS_N - 0.5)
CLIP = {"low": 0.2, "high": 0.28}

Loss = Callable[[Tensor, Tensor, Tensor], PolicyLoss]
"""(log_probs_T, anchor_T, advantages_T) on the enumerated row."""
SETTINGS: dict[str, tuple[str, dict[str, float]]] = {
    "reinforce": ("reinforce", {}),
    "ppo": ("ppo", CLIP),
    "dual": ("ppo", {**CLIP, "dual": 3.0}),
    "cispo": ("cispo", {"low": 1.0, "high": 4.0}),
    "gspo": ("gspo", CLIP),
    "gspo_token": ("gspo_token", CLIP),
    "topr": ("topr", {}),
    "sapo": ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    "dppo_tv": ("dppo_tv", {"low": 0.2, "high": 0.2}),
    "dppo_tv, cap": ("dppo_tv", {"low": 0.2, "high": 0.2, "ratio_cap": 1.5}),
    "dppo_kl": ("dppo_kl", {"low": 0.05, "high": 0.05}),
    "ipo": ("ipo", {"low": 0.1, "high": 0.1}),
    "gmpo": ("gmpo", {"low": 0.4, "high": 0.4}),
    "dro": ("dro", {"tau": 0.1}),
    "vespo": ("vespo", {}),
}


def _on_the_row(loss: str, settings: dict[str, float]) -> Loss:
    return lambda log_probs_T, anchor_T, advantages_T: loss_by(
        loss, log_probs_T, anchor_T, advantages_T, *PLACE, **settings
    )


LOSSES = {name: _on_the_row(*chosen) for name, chosen in SETTINGS.items()}


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def at(ratio: float, advantage: float, loss: str, **settings: float) -> tuple[float, float, bool]:
    """Return (loss, its derivative by log pi, clipped) of a sample of one token with this ratio."""
    log_prob_T = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    anchor_T, advantages_T = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    made = loss_by(loss, log_prob_T, anchor_T, advantages_T, **settings)
    slope = torch.autograd.grad(made.loss_T.sum(), log_prob_T)[0]
    return float(made.loss_T.detach()), float(slope), bool(made.clipped_T)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    """01, 55: and the value -A, with nothing clipped. GSPO's ratio is of the sequence: the same sum over each
    sample.
    """
    log_probs_T = PI.log_probs_T
    made = LOSSES[name](log_probs_T, log_probs_T.detach(), ADVANTAGES_T)
    wanted = -ADVANTAGES_T
    got = torch.autograd.grad(made.loss_T.sum(), log_probs_T, retain_graph=True)[0]
    same(got, wanted)
    scale_T = 2 / torch.where(ADVANTAGES_T > 0, torch.tensor(1.0).double(), 1.05) if name == "sapo" else 1.0
    same(made.loss_T.detach(), scale_T * wanted)
    assert not made.clipped_T.any()
    same(-gradient(expected(made.loss_T, PI), PI), objective_gradient(PI, REWARDS_N))


@settings(deadline=None)
@given(ratio=st.floats(0.05, 20), advantage=st.floats(-3, 3), dual=st.sampled_from([0.0, 3.0]))
def test_ppo_has_no_gradient_exactly_where_it_reports_clipping(ratio: float, advantage: float, dual: float) -> None:
    """09, 10."""
    edges = (0.8, 1.28, 3.0)
    if min(abs(ratio - edge) for edge in edges) < 1e-6 or abs(advantage) < 1e-6:
        return
    gone = (
        (advantage > 0 and ratio > 1.28)
        or (advantage < 0 and ratio < 0.8)
        or (bool(dual) and advantage < 0 and ratio > 3)
    )
    value, slope, clipped = at(ratio, advantage, "ppo", **CLIP, dual=dual)
    assert clipped is gone
    assert slope == pytest.approx(0 if gone else -advantage * ratio)
    bounded = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    assert value == pytest.approx(-max(bounded, dual * advantage) if dual and advantage < 0 else -bounded)


def test_both_ends_of_the_range_are_their_own() -> None:
    """10."""
    assert not at(1.25, 1.0, "ppo", **CLIP)[2]
    assert at(1.29, 1.0, "ppo", **CLIP)[2]
    assert not at(0.81, -1.0, "ppo", **CLIP)[2]
    assert at(0.79, -1.0, "ppo", **CLIP)[2]


@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0, 4.9, 5.1, 50.0])
def test_cispo_keeps_every_gradient_and_caps_its_weight(ratio: float) -> None:
    """11: no lower bound at clip_low 1; with one, the weight stays above it."""
    for advantage in (1.5, -1.5):
        assert at(ratio, advantage, "cispo", low=1.0, high=4.0)[1] == pytest.approx(-min(ratio, 5.0) * advantage)
        assert at(ratio, advantage, "cispo", low=0.2, high=0.28)[1] == pytest.approx(
            -min(max(ratio, 0.8), 1.28) * advantage
        )


def test_gspo_has_one_ratio_for_a_sample() -> None:
    """13: s^T = W; with seq_mean_token_mean the gradient is -A s / T at each token; the token form is the same for one
    advantage.
    """
    log_probs_T = PI.log_probs_T
    delta_T = (log_probs_T - MU.log_probs_T).detach()
    s_T = per_token(delta_T.view(-1, STEPS).mean(-1).exp())
    wide = {"low": 0.99, "high": 100.0}
    trainable_N = torch.full((len(RESPONSES),), STEPS)
    denominators = Denominators(tokens=81, sequences=27, trainable_N=trainable_N, constant=1.0)
    gradients = []
    for loss in ("gspo", "gspo_token"):
        loss_T = loss_by(loss, log_probs_T, MU.log_probs_T, ADVANTAGES_T, *PLACE, **wide).loss_T
        same(loss_T.detach(), -s_T * ADVANTAGES_T)
        total = aggregate(loss_T, MASK_T, SAMPLE_T, denominators, mode="seq_mean_token_mean")
        gradients.append(torch.autograd.grad(total, log_probs_T, retain_graph=True)[0])
    same(gradients[0], -ADVANTAGES_T * s_T / STEPS / 27)
    same(gradients[0], gradients[1])
    for ratio, advantage in ((1.25, 1.0), (1.5, 1.0), (0.5, -1.0), (0.5, 1.0)):
        assert at(ratio, advantage, "gspo", **CLIP) == pytest.approx(at(ratio, advantage, "ppo", **CLIP))
        assert at(ratio, advantage, "gspo_token", **CLIP) == pytest.approx(at(ratio, advantage, "ppo", **CLIP))
        assert at(4.0, -1.0, "gspo", **CLIP, dual=3.0)[2]


def test_gspo_clips_whole_samples_and_gspo_token_single_advantages() -> None:
    log_probs_T = PI.log_probs_T
    clipped = loss_by("gspo", log_probs_T, MU.log_probs_T, ADVANTAGES_T, *PLACE, low=0.01, high=0.01)
    by_sample = clipped.clipped_T.view(-1, STEPS)
    assert bool((by_sample.all(-1) == by_sample.any(-1)).all())
    assert by_sample.any()
    mixed_T = torch.where(torch.arange(81) % STEPS == 0, 1.0, -1.0).double()
    by_token = loss_by("gspo_token", log_probs_T, MU.log_probs_T, mixed_T, *PLACE, low=0.01, high=0.01)
    got = torch.autograd.grad(by_token.loss_T.sum(), log_probs_T)[0]
    assert bool((got[by_token.clipped_T] == 0).all())
    assert bool((got[~by_token.clipped_T] != 0).all())


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 3.0])
def test_topr_weighs_negatives_down_and_positives_never(ratio: float) -> None:
    """25: and its ratio is that of the sequence."""
    assert at(ratio, 2.0, "topr")[1] == pytest.approx(-2.0)
    assert at(ratio, 0.0, "topr")[1] == 0
    assert at(ratio, -2.0, "topr")[1] == pytest.approx(2.0 * min(ratio, 1.0))
    log_probs_T = PI.log_probs_T
    whole_T = per_token((log_probs_T - MU.log_probs_T).detach().view(-1, STEPS).sum(-1).exp().clamp(max=1))
    loss_T = loss_by("topr", log_probs_T, MU.log_probs_T, -torch.ones_like(log_probs_T), *PLACE).loss_T
    same(torch.autograd.grad(loss_T.sum(), log_probs_T)[0], whole_T.detach())


def test_sapo_has_slope_1_at_1_and_fades() -> None:
    """24."""
    tau: dict[str, float] = {"tau_positive": 1.0, "tau_negative": 2.0}
    for advantage, name in ((1.0, "tau_positive"), (-1.0, "tau_negative")):
        assert at(1.0, advantage, "sapo", **tau)[1] == pytest.approx(-advantage)
        for ratio in (0.2, 1.7, 5.0):
            sigmoid = 1 / (1 + math.exp(-tau[name] * (ratio - 1)))
            value, slope, _ = at(ratio, advantage, "sapo", **tau)
            assert value == pytest.approx(-4 / tau[name] * sigmoid * advantage)
            assert slope == pytest.approx(-4 * sigmoid * (1 - sigmoid) * advantage * ratio)


@pytest.mark.parametrize(("advantage", "k", "rate"), [(1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)])
def test_vespo_weighs_1_at_1_and_most_at_its_peak(advantage: float, k: float, rate: float) -> None:
    """24: W^k e^(lambda (1 - W))."""
    weights = {
        ratio: -at(ratio, advantage, "vespo")[1] / advantage
        for ratio in (0.3, k / rate - 0.05, k / rate, k / rate + 0.05, 1.0, 4.0)
    }
    for ratio, weight in weights.items():
        assert weight == pytest.approx(ratio**k * math.exp(rate * (1 - ratio)))
    assert max(weights, key=lambda ratio: weights[ratio]) == k / rate
    assert weights[1.0] == pytest.approx(1.0)


def test_dppo_drops_by_probability_and_pulls_back_everywhere() -> None:
    """23."""
    e = math.e  # the anchor's probability is 1 / e
    assert at(1.1, 1.0, "dppo_tv", low=0.2, high=0.2)[1:] == (pytest.approx(-1.1), False)
    assert at(0.7 * e, 1.0, "dppo_tv", low=0.2, high=0.2)[1:] == (0.0, True)
    assert at(0.1 * e, -1.0, "dppo_tv", low=0.2, high=0.2)[1:] == (0.0, True)
    assert at(0.1 * e, 1.0, "dppo_tv", low=0.2, high=0.2)[1:] == (pytest.approx(-0.1 * e), False)
    value, slope, _ = at(0.7 * e, 1.0, "dppo_tv", low=0.2, high=0.2, penalty=0.5)
    log_ratio = math.log(0.7 * e)
    assert value == pytest.approx(0.5 * log_ratio**2)
    assert slope == pytest.approx(log_ratio)
    assert not at(0.1 * e, 0.0, "dppo_tv", low=0.2, high=0.2)[2], "without an advantage there is nothing to take"


# ---- composed


def tokens(
    old_T: Tensor | None = None, *, rollout_T: Tensor | None = None, advantages_T: Tensor = ADVANTAGES_T, lag: int = 0
) -> Tokens:
    return Tokens(
        mask_T=MASK_T,
        sample_T=SAMPLE_T,
        num_samples=len(RESPONSES),
        rollout_T=(MU.log_probs_T if rollout_T is None else rollout_T).detach(),
        lag_T=torch.full(MASK_T.shape, lag),
        advantages_T=advantages_T,
        old_T=None if old_T is None else old_T.detach(),
    )


def loss_of(settings: dict[str, Any], given: Tokens, coupled: Coupled | None = None) -> tuple[Tensor, Tensor, Any]:
    """Return (loss_T, its gradient by log pi, the complete result) of an objective."""
    log_probs_T = PI.log_probs_T
    made = Objective(algorithm_of(**settings)).token_loss(log_probs_T, given, coupled or Coupled())
    return made.loss_T.detach(), torch.autograd.grad(made.loss_T.sum(), log_probs_T, retain_graph=True)[0], made


def test_weights_are_detached_bounded_then_multiplied() -> None:
    """07: d loss / d log pi = -w A; a weight with gradient would be another number."""
    ratio_T = (PI.log_probs_T - MU.log_probs_T).exp().detach()
    assert float(ratio_T.max()) > 1.2
    for preset in ("tis", "decoupled"):
        _, got, _ = loss_of({"correction": preset, "weight": {"high": 1.2}}, tokens())
        same(got, -ratio_T.clamp(max=1.2) * ADVANTAGES_T)
    log_probs_T = PI.log_probs_T
    undetached_T = -(log_probs_T - MU.log_probs_T).exp() * ADVANTAGES_T * log_probs_T
    wrong = torch.autograd.grad(undetached_T.sum(), log_probs_T)[0]
    assert float((wrong + ratio_T * ADVANTAGES_T).norm()) > 1e-3


def test_three_policies_meet_two_and_the_weighted_gradient() -> None:
    """08."""
    bypass = loss_of({"correction": "bypass"}, tokens())
    at_mu = loss_of({"correction": "decoupled"}, tokens(MU.log_probs_T))
    same(at_mu[0], bypass[0])
    same(at_mu[1], bypass[1])
    ratio_T = (PI.log_probs_T - MU.log_probs_T).exp().detach()
    same(
        loss_of({"correction": "decoupled", "weight": {"high": 0.0}}, tokens(PI.log_probs_T))[1],
        -ratio_T * ADVANTAGES_T,
    )
    old = Policy.random(7, like=PI, spread=0.1)
    wide = {"correction": "decoupled", "weight": {"high": 0.0}, "clip": {"low": 0.99, "high": 100.0}}
    same(loss_of(wide, tokens(old.log_probs_T))[1], -ratio_T * ADVANTAGES_T)


def test_icepop_is_importance_sampling_inside_its_band_and_nothing_outside() -> None:
    """12, 54: rejected tokens leave the others unchanged."""
    ratio_T = (PI.log_probs_T - MU.log_probs_T).exp().detach()
    inside_T = (ratio_T >= 0.8) & (ratio_T <= 1.2)
    assert 0 < int(inside_T.sum()) < 81
    band = {"weight": {"low": 0.8, "high": 1.2}}
    loss_T, got, made = loss_of({"correction": "icepop", **band}, tokens())
    same(got, torch.where(inside_T, -ratio_T * ADVANTAGES_T, 0.0))
    assert not loss_T[~inside_T].any()
    assert (made.weights.too_high_T | made.weights.too_low_T).tolist() == (~inside_T).tolist()
    _, rejected, said = loss_of({"correction": "tis", "reject": {"rules": ("k1 token 0.8 1.2",)}}, tokens())
    same(rejected, got)
    assert said.rejected_T.tolist() == (~inside_T).tolist()


def test_a_constant_baseline_is_neutral_unless_weights_are_cut() -> None:
    """21."""

    def effect(settings: dict[str, Any], under: Policy) -> float:
        log_probs_T = PI.log_probs_T
        given = tokens(rollout_T=under.log_probs_T, advantages_T=torch.ones_like(ADVANTAGES_T))
        loss_T = Objective(algorithm_of(**settings)).token_loss(log_probs_T, given, Coupled()).loss_T
        return float(gradient(expected(loss_T, under), PI).norm())

    assert effect({"correction": "none"}, PI) < 1e-12
    assert effect({"correction": "tis", "weight": {"level": "sequence", "high": 0.0}}, MU) < 1e-12
    assert effect({"correction": "none"}, MU) > 1e-3
    assert effect({"correction": "tis", "weight": {"level": "sequence", "high": 1.0}}, MU) > 1e-3


def test_the_interpolated_proximal_policy_needs_no_old_log_probs() -> None:
    """22: at lag 0 it is mu: the weight is 1 and the ratio pi / mu; at a great age it is pi, and only the weight is
    left.
    """
    bypass = loss_of({"correction": "bypass"}, tokens())
    same(loss_of({"correction": "a3po"}, tokens())[1], bypass[1])
    ratio_T = (PI.log_probs_T - MU.log_probs_T).exp().detach()
    far = loss_of({"correction": "a3po", "weight": {"high": 0.0}}, tokens(lag=10**9))[1]
    torch.testing.assert_close(far, -ratio_T * ADVANTAGES_T, atol=1e-6, rtol=0)


def test_coupled_corrections_are_the_same_from_any_number_of_rows() -> None:
    """M2PO and self-normalised weights, from sums that are added up, as the ranks do."""
    objective = Objective(algorithm_of(correction="m2po", m2={"limit": 0.02}, weight={"self_normalise": True}))
    whole = tokens(PI.log_probs_T)
    place = (SAMPLE_T % 2 == 0).nonzero()[:, 0], (SAMPLE_T % 2 == 1).nonzero()[:, 0]
    halves = [
        Tokens(
            **{
                name: value[at] if torch.is_tensor(value := getattr(whole, name)) else value
                for name in Tokens.__slots__
            }
        )
        for at in place
    ]
    one = objective.coupled([whole], summed=lambda x: x, gathered=lambda x: x)
    two = objective.coupled(halves, summed=lambda x: x, gathered=lambda x: x)
    assert one.weight_sums is not None and two.weight_sums is not None
    same(one.weight_sums, two.weight_sums)
    assert one.m2_cut == two.m2_cut < math.inf
    delta_T = (PI.log_probs_T - MU.log_probs_T).detach()
    made = objective.token_loss(PI.log_probs_T, whole, one)
    kept_T = ~made.rejected["m2"]
    assert float(delta_T[kept_T].square().mean()) < 0.02
    assert float(delta_T[kept_T].abs().max()) <= float(delta_T[~kept_T].abs().min())
    assert made.weights is not None
    same(made.weights.weight_T.mean(), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("preset", ["opsm", "kpop", "geo_mask"])
def test_rules_of_presets_are_applied(preset: str) -> None:
    rule = ("k1 seq_mean 0.9 1.1",)
    changes = {
        "opsm": {"reject": {"opsm": 0.05}},
        "kpop": {"reject": {"binary_kl": 0.02}},
        "geo_mask": {"reject": {"rules": rule}},
    }[preset]
    _, got, made = loss_of({"correction": preset, **changes}, tokens())
    assert 0 < int(made.rejected_T.sum()) < 81
    assert not got[made.rejected_T].any()
    assert got[~made.rejected_T].any()


def test_a_veto_takes_the_whole_sample() -> None:
    lowest = float((PI.log_probs_T - MU.log_probs_T).detach().min())
    _, got, made = loss_of({"correction": "tis", "reject": {"veto": math.exp(lowest + 0.05)}}, tokens())
    by_sample = made.rejected["veto"].view(-1, STEPS)
    assert bool((by_sample.all(-1) == by_sample.any(-1)).all())
    assert by_sample.any()
    assert not got[made.rejected_T].any()


# ---- the number that is minimised


def denominators(constant: float = 5.0) -> Denominators:
    return Denominators(tokens=81, sequences=27, trainable_N=torch.full((27,), STEPS), constant=constant)


def total_of(
    settings: dict[str, Any], given: Tokens, *, kl_scale: float = 1.0, entropy_coef: float | None = None
) -> tuple[float, Any]:
    entropy_T = torch.arange(81.0).double() / 81
    total, _, divergence_T = Objective(algorithm_of(**settings)).total(
        PI.log_probs_T, entropy_T, given, denominators(), Coupled(), kl_scale=kl_scale, entropy_coef=entropy_coef
    )
    return float(total.detach()), divergence_T


def test_what_is_minimised_is_loss_plus_divergence_less_entropy() -> None:
    """Each part is aggregated alike, the divergence times its coefficient and its scale, corrected by pi / mu or
    not.
    """
    reference = Policy.random(9, like=PI, spread=0.3)
    given = replace(tokens(), reference_T=reference.log_probs_T)
    pi_T, mu_T = PI.log_probs_T.detach(), MU.log_probs_T.detach()
    x_T, ratio_T = pi_T - reference.log_probs_T, (pi_T - mu_T).exp()
    policy = float((-ratio_T.clamp(max=2.0) * ADVANTAGES_T).sum() / 81)
    entropy = float((torch.arange(81.0).double() / 81).sum() / 81)
    k2 = x_T.square() / 2
    for corrected, divergence in ((True, float((ratio_T * k2).sum() / 81)), (False, float(k2.sum() / 81))):
        settings = {"entropy": {"coef": 0.3}, "kl": KLConfig(coef=0.2, estimator="k2", corrected=corrected)}
        total, divergence_T = total_of(settings, given, kl_scale=0.5)
        assert total == pytest.approx(policy + 0.5 * 0.2 * divergence - 0.3 * entropy)
        same(divergence_T, (-x_T).exp() - 1 + x_T)
    assert total_of({"entropy": {"coef": 0.3}}, tokens(), entropy_coef=0.7)[0] == pytest.approx(
        policy - 0.7 * entropy
    ), "the present one"
    assert total_of({"entropy": {"coef": 0.3}}, tokens(), entropy_coef=0.0)[0] == pytest.approx(policy)
    assert total_of({}, tokens())[0] == pytest.approx(policy)
    assert total_of({}, tokens())[1] is None
    assert total_of({"aggregation": "constant"}, tokens())[0] == pytest.approx(policy * 81 / (27 * 5))


def test_rewards_are_shaped_by_length_and_divergence() -> None:
    objective = Objective(algorithm_of(overlong={"buffer": 4, "penalty": 0.5}, kl=KLConfig(reward_coef=0.1)))
    rewards_N, lengths_N = torch.tensor([1.0, 1.0, 1.0]).double(), torch.tensor([6, 8, 10])
    kl_N = torch.tensor([0.0, 1.0, 2.0]).double()
    shaped = objective.shaped_rewards(rewards_N, lengths_N, max_tokens=10, kl_N=kl_N, kl_scale=2.0)
    assert shaped.tolist() == pytest.approx([1.0, 1.0 - 0.25 - 0.2, 1.0 - 0.5 - 0.4])
    assert Objective(AlgorithmConfig()).shaped_rewards(rewards_N, lengths_N, max_tokens=10).tolist() == [1.0, 1.0, 1.0]


def test_the_sums_for_the_learning_rate_are_of_whole_samples() -> None:
    whole_N = (PI.log_probs_T - MU.log_probs_T).detach().view(-1, STEPS).sum(-1).exp()
    given = replace(tokens(), num_samples=30)
    wanted = [float(whole_N.sum()), float(whole_N.square().sum()), 27.0]
    assert sequence_weight_sums(PI.log_probs_T, given).tolist() == pytest.approx(wanted)
    far = replace(given, rollout_T=PI.log_probs_T.detach() - 15.0)
    assert sequence_weight_sums(PI.log_probs_T, far).tolist() == pytest.approx(
        [27 * math.exp(20), 27 * math.exp(40), 27.0]
    )


def test_log_probs_are_computed_before_the_step_only_where_they_differ() -> None:
    def wanted(minibatches: int, published_every: int, **settings: Any) -> bool:
        return algorithm_of(**settings).needs_old(minibatches=minibatches, published_every=published_every)

    assert not wanted(1, 1)
    assert wanted(2, 1)
    assert wanted(1, 2)
    assert not wanted(2, 2, correction="bypass")
    assert not wanted(2, 1, correction="a3po")
    assert wanted(1, 1, correction="m2po")
    assert wanted(1, 1, weight={"self_normalise": True})


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "reinforce"])
def test_what_a_loss_compares_with_is_held_fixed(name: str) -> None:
    """An anchor with a graph is a constant: no gradient goes through it, and none is changed by it."""
    log_probs_T = PI.log_probs_T.detach().requires_grad_()
    anchor_T = (MU.log_probs_T.detach() * 1.0).requires_grad_()
    made = LOSSES[name](log_probs_T, anchor_T, ADVANTAGES_T)
    got, through = torch.autograd.grad(made.loss_T.sum(), [log_probs_T, anchor_T], allow_unused=True)
    fixed = LOSSES[name](log_probs_T, anchor_T.detach(), ADVANTAGES_T)
    same(got, torch.autograd.grad(fixed.loss_T.sum(), log_probs_T)[0])
    assert through is None or not through.any()
    assert not made.clipped_T.requires_grad


def test_vespo_weighs_by_the_product_over_the_sample() -> None:
    log_w_N = (PI.log_probs_T - MU.log_probs_T).detach().view(-1, STEPS).sum(-1)
    log_probs_T = PI.log_probs_T
    got = torch.autograd.grad(
        loss_by("vespo", log_probs_T, MU.log_probs_T, ADVANTAGES_T, *PLACE).loss_T.sum(), log_probs_T
    )[0]
    positive_T = ADVANTAGES_T > 0
    k_T, rate_T = torch.where(positive_T, 2.0, 3.0), torch.where(positive_T, 3.0, 2.0)
    same(got, -(k_T * per_token(log_w_N) + rate_T * (1 - per_token(log_w_N).exp())).exp() * ADVANTAGES_T)


def test_vespo_of_what_pi_cannot_have_written_is_bounded() -> None:
    _, slope, _ = at(math.exp(-20.0), -1.0, "vespo")
    assert slope == pytest.approx(math.exp(3 * -20.0 + 2.0), rel=1e-9)
    far_T = torch.full((3,), -20.0, dtype=torch.float64)  # log W = -60, held at -50
    place = (torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), 1)
    made = loss_by("vespo", far_T, torch.zeros_like(far_T), torch.full_like(far_T, -1.0), *place)
    assert made.loss_T.tolist() == pytest.approx([math.exp(3 * -50.0 + 2.0)] * 3, rel=1e-9)


def test_the_dual_clip_begins_beyond_its_bound_and_below_no_advantage() -> None:
    log_probs_T, anchor_T = (
        torch.tensor([0.0, 0.0], dtype=torch.float64) - 0.5,
        torch.tensor([-2.0, -2.0], dtype=torch.float64),
    )
    ratio = float((log_probs_T - anchor_T).exp()[0])
    advantages_T = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    mask_T = torch.ones(2, dtype=torch.bool)
    assert not loss_by("ppo", log_probs_T, anchor_T, advantages_T, mask_T, **CLIP, dual=ratio).clipped_T.any()
    assert loss_by(
        "ppo", log_probs_T, anchor_T, advantages_T, mask_T, **CLIP, dual=ratio - 1e-9
    ).clipped_T.tolist() == [True, False]


def test_what_is_rejected_has_no_loss_at_all() -> None:
    """Rejected tokens have neither gradient nor value: the minimised number does not count them."""
    loss_T, _, made = loss_of({"correction": "geo_mask", "reject": {"rules": ("k1 seq_mean 0.9 1.1",)}}, tokens())
    assert made.rejected_T.any() and not loss_T[made.rejected_T].any()


def test_what_is_only_measured_keeps_no_graph() -> None:
    given = replace(tokens(), reference_T=MU.log_probs_T)
    log_probs_T = PI.log_probs_T
    objective = Objective(AlgorithmConfig())
    _, _, divergence_T = objective.total(log_probs_T, torch.zeros_like(log_probs_T), given, denominators(), Coupled())
    assert divergence_T is not None and not divergence_T.requires_grad
    assert not sequence_weight_sums(log_probs_T, given).requires_grad


def test_a_sample_of_one_token_is_a_sample_for_the_learning_rate() -> None:
    mask_T = MASK_T.clone()
    mask_T[1:3] = False
    assert float(sequence_weight_sums(PI.log_probs_T, replace(tokens(), mask_T=mask_T))[2]) == 27.0


# ---- losses against their definitions, in plain floats


CASE = st.tuples(st.floats(0.001, 0.999), st.floats(0.001, 0.999), st.sampled_from([-1.5, 0.0, 2.0]))
"""(p of pi_theta, q of the anchor, advantage) of one token."""


def one_token(p: float, q: float, advantage: float, loss: str, **settings: float) -> tuple[float, bool]:
    """Return (derivative by log pi, clipped)."""
    log_p_T = torch.tensor([math.log(p)], dtype=torch.float64, requires_grad=True)
    anchor_T = torch.tensor([math.log(q)], dtype=torch.float64)
    made = loss_by(loss, log_p_T, anchor_T, torch.tensor([advantage]), **settings)
    return float(torch.autograd.grad(made.loss_T.sum(), log_p_T)[0]), bool(made.clipped_T)


@settings(deadline=None, max_examples=examples(200))
@given(case=CASE, low=st.floats(0.01, 0.3), high=st.floats(0.01, 0.3), cap=st.sampled_from([0.0, 1.0, 3.0]))
def test_dppo_of_the_binary_kl_and_ipo_are_their_definitions(
    case: tuple[float, float, float], low: float, high: float, cap: float
) -> None:
    p, q, advantage = case
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    out_kl = (kl > high and p > q) if advantage > 0 else (kl > low and p < q)
    out_ipo = p - q > high or p - q < -low
    inside = -advantage * (min(p / q, cap) if cap else p / q)
    for loss, out in (("dppo_kl", out_kl), ("ipo", out_ipo)):
        slope, clipped = one_token(p, q, advantage, loss, low=low, high=high, ratio_cap=cap)
        assert slope == pytest.approx(0.0 if out else inside, rel=1e-9, abs=1e-12)
        assert clipped == (out and advantage != 0)


def test_ipo_lets_go_of_a_token_that_dppo_would_bring_back() -> None:
    assert one_token(0.7, 0.4, -1.0, "dppo_tv", low=0.1, high=0.1)[0] == pytest.approx(0.7 / 0.4)
    assert one_token(0.7, 0.4, -1.0, "ipo", low=0.1, high=0.1) == (0.0, True)


@settings(deadline=None, max_examples=examples(100))
@given(
    deltas=st.lists(st.floats(-2, 2), min_size=1, max_size=6),
    advantage=st.sampled_from([-1.0, 0.5]),
    low=st.floats(0.05, 1.0),
    high=st.floats(0.05, 1.0),
)
def test_gmpo_is_the_product_of_clipped_ratios_to_the_power_of_one_over_the_length(
    deltas: list[float], advantage: float, low: float, high: float
) -> None:
    size = len(deltas)
    log_probs_T = torch.tensor(deltas, dtype=torch.float64, requires_grad=True)
    place = torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64), 1
    advantages_T = torch.full((size,), advantage, dtype=torch.float64)
    made = loss_by(
        "gmpo", log_probs_T, torch.zeros(size, dtype=torch.float64), advantages_T, *place, low=low, high=high
    )
    held = [min(delta, high) if advantage > 0 else max(delta, -low) for delta in deltas]
    wanted = -advantage * math.prod(math.exp(delta) for delta in held) ** (1 / size)
    assert made.loss_T.tolist() == pytest.approx([wanted] * size, rel=1e-9)
    slopes = torch.autograd.grad(made.loss_T.mean(), log_probs_T)[0].tolist()
    free = [delta == clipped for delta, clipped in zip(deltas, held, strict=True)]
    assert slopes == pytest.approx([wanted / size if each else 0.0 for each in free], rel=1e-9)
    assert made.clipped_T.tolist() == [not each for each in free]


def test_gmpo_without_bounds_that_bind_is_gspo() -> None:
    far = loss_by("gmpo", PI.log_probs_T, MU.log_probs_T, ADVANTAGES_T, *PLACE, low=50.0, high=50.0)
    same(
        far.loss_T, loss_by("gspo", PI.log_probs_T, MU.log_probs_T, ADVANTAGES_T, *PLACE, low=0.999999, high=1e9).loss_T
    )


@pytest.mark.parametrize("tau", [0.05, 1.0])
def test_dro_has_the_gradient_of_the_squared_error_of_responses(tau: float) -> None:
    gap_N = (PI.log_probs_T - MU.log_probs_T).view(-1, STEPS).sum(-1)
    wanted = gradient(((REWARDS_N - 0.5 - tau * gap_N) ** 2 / (2 * tau)).sum(), PI)
    got = gradient(loss_by("dro", PI.log_probs_T, MU.log_probs_T, ADVANTAGES_T, *PLACE, tau=tau).loss_T.sum(), PI)
    same(got, wanted)


def test_dro_is_least_where_the_log_ratio_is_the_advantage_by_tau() -> None:
    anchor_T = PI.log_probs_T.detach() - (ADVANTAGES_T / (0.5 * STEPS)).detach()
    got = torch.autograd.grad(
        loss_by("dro", PI.log_probs_T, anchor_T, ADVANTAGES_T, *PLACE, tau=0.5).loss_T.sum(), PI.logits_PV
    )[0]
    same(got, torch.zeros_like(got))
