"""Weights and rejections: exact properties, on a policy that can be enumerated (facts A: 02 to 06, 14 to 20, 22)."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithm_settings import loss_by
from tests.enumerated import (
    MASK_T,
    PLACE,
    PREFIXES,
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
from tidemill.learner.algorithms.correction import (
    beyond,
    binary_kl_outside,
    bounded,
    effective_sample_share,
    opsm,
    outside,
    rate_factor,
    raw_weights,
    second_moment_cut,
    self_normalised,
    total_variation_outside,
    vetoed,
    weight_sums,
)
from tidemill.learner.algorithms.policy_losses import loglinear_proximal
from tidemill.learner.algorithms.tokens import (
    DELTA_BOUND,
    log_ratio,
    prefix_sums,
    sequence_means,
    sequence_sums,
    spread,
)

PI = Policy(Policy.random(1).logits_PV.requires_grad_())
MU, MU2 = Policy.random(2, like=PI, spread=0.5), Policy.random(3, like=PI, spread=0.5)
REWARDS_N = torch.rand(len(RESPONSES), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
DELTA_T = (PI.log_probs_T - MU.log_probs_T).detach()


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def different(one: Tensor, other: Tensor) -> None:
    assert float((one - other).norm()) > 1e-3


def weighted_gradient(weight_T: Tensor, signal_T: Tensor, under: Policy = MU) -> Tensor:
    """Return ``E_under[sum_t w_t signal_t grad log pi]`` through the loss of the trainer."""
    loss_T = loss_by("reinforce", PI.log_probs_T, PI.log_probs_T, signal_T, MASK_T).loss_T
    return -gradient(expected(weight_T * loss_T, under), PI)


def raw(level: str) -> Tensor:
    return raw_weights(DELTA_T, *PLACE, level=level)


def action_values() -> Tensor:
    """Return Q of each token: the expected reward after it, [81]."""
    p = PI.probabilities_N.detach()
    found = []
    for response, step in itertools.product(RESPONSES, range(STEPS)):
        here = torch.tensor([other[: step + 1] == response[: step + 1] for other in RESPONSES])
        found.append((p * REWARDS_N)[here].sum() / p[here].sum())
    return torch.stack(found)


def test_sequence_weights_are_unbiased_and_token_weights_are_not() -> None:
    """02, 03."""
    wanted = objective_gradient(PI, REWARDS_N)
    same(weighted_gradient(raw("sequence"), per_token(REWARDS_N)), wanted)
    different(weighted_gradient(raw("token"), per_token(REWARDS_N)), wanted)
    different(weighted_gradient(torch.ones_like(DELTA_T), per_token(REWARDS_N)), wanted)


def test_token_weights_are_unbiased_for_one_token() -> None:
    """03: a bandit; the last two steps are masked, and the reward is that of the first token."""
    first_T = torch.arange(len(SAMPLE_T)) % STEPS == 0
    by_first = torch.tensor([REWARDS_N[9 * response[0]] for response in RESPONSES])
    raw_T = raw_weights(torch.where(first_T, DELTA_T, 0.0), first_T, SAMPLE_T, len(RESPONSES), level="token")
    loss_T = loss_by("reinforce", PI.log_probs_T, PI.log_probs_T, per_token(by_first), first_T).loss_T
    same(-gradient(expected(raw_T * loss_T, MU), PI), objective_gradient(PI, by_first))


def test_prefix_weights_want_the_value_of_each_token() -> None:
    """04."""
    wanted = objective_gradient(PI, REWARDS_N)
    same(weighted_gradient(raw("prefix"), action_values()), wanted)
    different(weighted_gradient(raw("prefix"), per_token(REWARDS_N)), wanted)


def test_weights_have_mean_1() -> None:
    """05."""
    p = per_token(MU.probabilities_N)
    for level in ("token", "sequence", "prefix"):
        means = (p * raw(level)).view(-1, STEPS).sum(0)
        same(means, torch.ones(STEPS, dtype=torch.float64))


def test_truncation_biases_within_its_bound_and_lowers_the_mean() -> None:
    """06."""
    wanted, scores = objective_gradient(PI, REWARDS_N), []
    for row in range(len(RESPONSES)):
        scores.append(gradient(PI.log_probs_T.view(-1, STEPS)[row].sum(), PI).norm())
    raw_N = raw("sequence")[::STEPS]
    before = math.inf
    for cap in (0.5, 1.0, 2.0, 4.0, float(raw_N.max())):
        weights = bounded(raw("sequence"), MASK_T, high=cap)
        bias = float((weighted_gradient(weights.weight_T, per_token(REWARDS_N)) - wanted).norm())
        bound = float((MU.probabilities_N * (raw_N - cap).clamp(min=0) * REWARDS_N * torch.stack(scores)).sum())
        assert bias <= bound + 1e-12
        assert bound <= before
        before = bound
        assert float((MU.probabilities_N * weights.weight_T[::STEPS]).sum()) <= 1 + 1e-12
    assert bias < 1e-12


def test_the_geometric_ratio_does_not_depend_on_the_length_and_the_product_does() -> None:
    """14."""
    once, twice = DELTA_T[:3], DELTA_T[:3].repeat(2)
    levels = {}
    for name, delta_T in (("once", once), ("twice", twice)):
        place = (torch.ones(len(delta_T), dtype=torch.bool), torch.zeros(len(delta_T), dtype=torch.int64), 1)
        levels[name] = {level: raw_weights(delta_T, *place, level=level)[0] for level in ("geometric", "sequence")}
    same(levels["twice"]["geometric"], levels["once"]["geometric"])
    same(levels["twice"]["sequence"], levels["once"]["sequence"].square())


def test_self_normalised_weights_have_mean_1_whatever_is_added_to_the_log_probs() -> None:
    """16, and S6: the same from sums of two ranks as from one."""
    for level in ("token", "sequence", "prefix", "geometric"):
        weights = bounded(raw(level), MASK_T, high=math.inf)
        half_T = SAMPLE_T < 11
        parts = [weight_sums(weights, MASK_T & part_T, *PLACE[1:], level=level) for part_T in (half_T, ~half_T)]
        same(sum(parts), weight_sums(weights, *PLACE, level=level))
        same(self_normalised(weights, MASK_T, sum(parts)).weight_T.mean(), torch.ones((), dtype=torch.float64))
    normal = []
    for offset in (0.0, 0.3):
        moved = bounded(raw_weights(DELTA_T + offset, *PLACE, level="token"), MASK_T, high=math.inf)
        normal.append(self_normalised(moved, MASK_T, weight_sums(moved, *PLACE, level="token")).weight_T)
    same(*normal)
    nothing = bounded(torch.zeros_like(DELTA_T), MASK_T, high=2.0)
    same(self_normalised(nothing, MASK_T, weight_sums(nothing, *PLACE, level="token")).weight_T, nothing.weight_T)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.floats(0.1, 10))
def test_the_effective_share_is_between_one_sample_and_all(weights: list[float], scale: float) -> None:
    """17: scale-free, 1 iff constant, 1/n for one that outweighs all others, 1 / (1 + CV^2)."""
    n = len(weights)
    share = effective_sample_share(sum(weights), sum(w * w for w in weights), n)
    scaled = effective_sample_share(sum(scale * w for w in weights), sum((scale * w) ** 2 for w in weights), n)
    mean = sum(weights) / n
    variation = sum((w / mean - 1) ** 2 for w in weights) / n
    assert 1 / n - 1e-9 <= share <= 1 + 1e-9
    assert share == pytest.approx(scaled)
    assert share == pytest.approx(1 / (1 + variation))
    assert effective_sample_share(1.0, 1.0, n) == pytest.approx(1 / n)
    assert effective_sample_share(0.0, 0.0, 0) == 1.0


WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)
BASES = st.floats(0.01, 1)


def factor(weights: list[float], base: float) -> float:
    return rate_factor(sum(weights), sum(w * w for w in weights), len(weights), base=base)


@settings(deadline=None)
@given(weights=WEIGHTS, base=BASES, smaller=st.floats(0.01, 1))
def test_the_factor_of_the_rate_is_the_root_of_the_bounded_share(
    weights: list[float], base: float, smaller: float
) -> None:
    """Bounds: 1/n of one sample that has all the weight, and 1. A smaller base never gives a smaller rate."""
    found, share = factor(weights, base), sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    assert found == pytest.approx(math.sqrt(min(1.0, share / base)), rel=1e-12)
    assert 0 < math.sqrt(1 / len(weights)) * (1 - 1e-12) <= found <= 1
    assert factor(weights, base * smaller) >= found
    if share >= base * (1 + 1e-12):
        assert found == 1


@settings(deadline=None)
@given(weight=st.floats(1e-3, 1e3), n=st.integers(1, 50), base=st.floats(0.01, 0.999))
def test_equal_weights_leave_the_rate_whole(weight: float, n: int, base: float) -> None:
    assert factor([weight] * n, base) == 1
    assert factor([weight] * n, 1.0) == pytest.approx(1, rel=1e-12)


@settings(deadline=None)
@given(weights=WEIGHTS, base=BASES, part=st.floats(0, 1))
def test_weights_that_are_more_alike_never_slow_it_down(weights: list[float], base: float, part: float) -> None:
    mean = sum(weights) / len(weights)
    assert factor([w + part * (mean - w) for w in weights], base) >= factor(weights, base) * (1 - 1e-9)


def test_per_token_log_probs_are_right_for_samples_of_two_versions() -> None:
    """19: the version changes after a first token of 0 (so it depends on the prefix). One version for all tokens is
    wrong.
    """
    switched_T = torch.tensor([response[0] == 0 and step > 0 for response in RESPONSES for step in range(STEPS)])
    mixed_T = torch.where(switched_T, MU2.log_probs_T, MU.log_probs_T).detach()
    mixed = mixed_T.view(-1, STEPS).sum(-1).exp()
    assert float(mixed.sum()) == pytest.approx(1)

    def estimate(behaviour_T: Tensor) -> Tensor:
        weight_T = raw_weights((PI.log_probs_T - behaviour_T).detach(), *PLACE, level="sequence")
        loss_T = loss_by("reinforce", PI.log_probs_T, PI.log_probs_T, per_token(REWARDS_N), MASK_T).loss_T
        return -gradient((per_token(mixed) * weight_T * loss_T).sum(), PI)

    same(estimate(mixed_T), objective_gradient(PI, REWARDS_N))
    different(estimate(MU.log_probs_T), objective_gradient(PI, REWARDS_N))
    different(estimate(MU2.log_probs_T), objective_gradient(PI, REWARDS_N))


def test_dropping_by_the_outcome_is_biased_and_dropping_at_random_is_not() -> None:
    """20."""
    wanted, signal_T = objective_gradient(PI, REWARDS_N), per_token(REWARDS_N)
    good_T = per_token((REWARDS_N > 0.5).double())
    share = float((MU.probabilities_N * good_T[::STEPS]).sum())
    different(weighted_gradient(raw("sequence") * good_T / share, signal_T), wanted)
    half = [weighted_gradient(raw("sequence") * keep, signal_T) for keep in (torch.zeros(81), torch.full((81,), 2.0))]
    same((half[0] + half[1]) / 2, wanted)


# ---- bounds, masks, rows


@pytest.mark.parametrize(
    ("action", "wanted"),
    [("clip", [0.5, 0.5, 1.0, 2.0, 2.0]), ("truncate", [0.2, 0.5, 1.0, 2.0, 2.0]), ("mask", [0.0, 0.5, 1.0, 2.0, 0.0])],
)
def test_what_happens_outside_the_bounds(action: str, wanted: list[float]) -> None:
    """12, 18: a weight at a bound is inside."""
    raw_T = torch.tensor([0.2, 0.5, 1.0, 2.0, 3.0, 9.0], dtype=torch.float64, requires_grad=True)
    mask_T = torch.tensor([True] * 5 + [False])
    weights = bounded(raw_T, mask_T, low=0.5, high=2.0, action=action)
    assert weights.weight_T.tolist() == [*wanted, 1.0]
    assert not weights.weight_T.requires_grad
    assert weights.too_high_T.tolist() == [False, False, False, False, True, False]
    assert weights.too_low_T.tolist() == [action != "truncate", False, False, False, False, False]


@st.composite
def packed(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """(delta, mask, sample, number of samples) of a row with several samples and padding."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(lengths))))
    sample_T = torch.tensor([row for row in order for _ in range(lengths[row])] + [-1] * draw(st.integers(0, 3)))
    mask_T = torch.tensor(draw(st.lists(st.booleans(), min_size=len(sample_T), max_size=len(sample_T)))) & (
        sample_T >= 0
    )
    values = draw(st.lists(st.floats(-3, 3, width=32), min_size=len(sample_T), max_size=len(sample_T)))
    return torch.where(mask_T, torch.tensor(values, dtype=torch.float64), 0.0), mask_T, sample_T, len(lengths) + 1


def of_samples(delta_T: Tensor, mask_T: Tensor, sample_T: Tensor, count: int) -> dict[int, list[tuple[int, float]]]:
    """Map each sample to the (place, delta) of its trainable tokens."""
    found: dict[int, list[tuple[int, float]]] = {row: [] for row in range(count)}
    for place in mask_T.nonzero()[:, 0].tolist():
        found[int(sample_T[place])].append((place, float(delta_T[place])))
    return found


@settings(deadline=None)
@given(packed())
def test_rows_are_summed_by_sample(row: Any) -> None:
    delta_T, mask_T, sample_T, count = row
    wanted = of_samples(*row)
    sums = sequence_sums(delta_T, mask_T, sample_T, count).tolist()
    means = sequence_means(delta_T, mask_T, sample_T, count).tolist()
    prefixes = prefix_sums(delta_T, mask_T, sample_T, count)
    spread_T = spread(torch.arange(1.0, count + 1), sample_T)
    levels = {
        level: raw_weights(delta_T, mask_T, sample_T, count, level=level)
        for level in ("token", "sequence", "geometric", "prefix")
    }
    for number, tokens in wanted.items():
        total = sum(delta for _, delta in tokens)
        assert sums[number] == pytest.approx(total, abs=1e-12)
        assert means[number] == pytest.approx(total / max(len(tokens), 1), abs=1e-12)
        running = 0.0
        for place, delta in tokens:
            running += delta
            assert float(prefixes[place]) == pytest.approx(running, abs=1e-12)
            assert float(levels["token"][place]) == pytest.approx(math.exp(delta))
            assert float(levels["sequence"][place]) == pytest.approx(math.exp(total))
            assert float(levels["geometric"][place]) == pytest.approx(math.exp(total / len(tokens)))
            assert float(levels["prefix"][place]) == pytest.approx(math.exp(running))
    assert not prefixes[~mask_T].any()
    assert all(bool((level_T[~mask_T] == 1).all()) for level_T in levels.values())
    assert spread_T.tolist() == [0.0 if number < 0 else number + 1.0 for number in sample_T.tolist()]


METRIC: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
}


@settings(deadline=None, max_examples=examples(200))
@given(packed(), st.sampled_from(["k1", "k2", "k3"]), st.sampled_from(["token", "seq_sum", "seq_mean", "seq_max"]))
def test_rejection_is_that_of_a_loop(row: Any, metric: str, span: str) -> None:
    low, high = (0.6, 1.7) if metric == "k1" else (0.0, 0.4)
    rejected_T = outside(*row, metric=metric, span=span, low=low, high=high)
    wanted = torch.zeros_like(row[1])
    for tokens in of_samples(*row).values():
        values = [METRIC[metric](delta) for _, delta in tokens]
        for (place, _), value in zip(tokens, values, strict=True):
            if span == "seq_sum":
                value = sum(values)
            elif span == "seq_mean":
                value = sum(values) / len(values)
            elif span == "seq_max":
                value = max(abs(one) for one in values)
            wanted[place] = value > math.log(high) or value < math.log(low) if metric == "k1" else value > high
    assert rejected_T.tolist() == wanted.tolist()


def test_a_ratio_at_its_bound_is_kept() -> None:
    delta_T = torch.tensor([math.log(2.0), math.log(0.5), 0.0], dtype=torch.float64)
    place = (torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), 1)
    assert not outside(delta_T, *place, metric="k1", span="token", low=0.5, high=2.0).any()
    assert outside(delta_T - 1e-9, *place, metric="k1", span="token", low=0.5, high=2.0).tolist() == [
        False,
        True,
        False,
    ]
    assert not outside(delta_T - 30, *place, metric="k1", span="token", high=2.0).any(), "no lower bound"


@settings(deadline=None)
@given(packed(), st.floats(0.1, 0.9))
def test_one_impossible_token_rejects_its_sample(row: Any, threshold: float) -> None:
    """15: one decision per sample, and more tokens can only reject more."""
    rejected_T = vetoed(*row, threshold=threshold)
    for tokens in of_samples(*row).values():
        verdict = any(delta < math.log(threshold) for _, delta in tokens)
        assert all(bool(rejected_T[place]) is verdict for place, _ in tokens)
    assert not rejected_T[~row[1]].any()


@settings(deadline=None)
@given(packed(), st.integers(0, 100))
def test_opsm_rejects_bad_samples_that_have_drifted_away(row: Any, seed: int) -> None:
    """22: advantages >= 0 and on-policy samples are never rejected; the criterion is the mean of log mu - log pi."""
    delta_T, mask_T, sample_T, count = row
    advantages_N = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    advantages_N[0] = 0.0
    rollout_T = torch.full_like(delta_T, -1.0)
    rejected_T = opsm(
        rollout_T + delta_T, rollout_T, spread(advantages_N, sample_T), mask_T, sample_T, count, threshold=0.2
    )
    for number, tokens in of_samples(*row).items():
        verdict = (
            bool(tokens) and -sum(delta for _, delta in tokens) / len(tokens) > 0.2 and float(advantages_N[number]) < 0
        )
        assert all(bool(rejected_T[place]) is verdict for place, _ in tokens)
    assert not rejected_T[~mask_T].any()
    assert not opsm(rollout_T, rollout_T, spread(advantages_N, sample_T), mask_T, sample_T, count, threshold=0.0).any()


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.01, 0.05, 0.2, 0.2, 1.0, 4.0]), max_size=12), st.floats(0.005, 2))
def test_the_second_moment_of_what_is_kept_is_below_its_limit(squares: list[float], limit: float) -> None:
    """22: the largest are rejected, equal ones together, no more than needed; all are kept where that suffices."""
    cut = second_moment_cut(torch.tensor(squares, dtype=torch.float64), limit)
    kept = [square for square in squares if square < cut]
    if not squares or sum(squares) / len(squares) < limit:
        assert kept == squares
        return
    assert not kept or sum(kept) / len(kept) < limit
    gone = sorted(square for square in squares if square >= cut)
    with_next = [*kept, *(square for square in gone if square == gone[0])]
    fewest = sorted(squares)[: len(kept) + 1]
    assert sum(fewest) / len(fewest) >= limit or sum(with_next) / len(with_next) >= limit
    delta_T = torch.tensor(squares, dtype=torch.float64).sqrt()
    mask_T = torch.ones(len(squares), dtype=torch.bool)
    assert beyond(delta_T, mask_T, cut).tolist() == [float(delta) ** 2 >= cut for delta in delta_T]
    assert not beyond(delta_T, ~mask_T, cut).any()


def test_the_binary_divergence_depends_on_the_probability_of_a_token() -> None:
    """The divergence agrees with its definition, both ways; the same ratio contributes nothing where both probabilities
    are tiny.
    """

    def kl(p: float, q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    pairs = [(0.9, 0.5), (0.5, 0.9), (1e-5, 1e-6), (0.5, 0.5), (1 - 1e-7, 0.5)]
    p_T, q_T = (torch.tensor(column, dtype=torch.float64).log() for column in zip(*pairs, strict=True))
    mask_T = torch.ones(len(pairs), dtype=torch.bool)
    worst = [max(kl(p, q), kl(q, p)) for p, q in pairs]
    for limit in (0.0, 0.3, 0.5, worst[0] - 1e-9, worst[0] + 1e-9, 5.0):
        assert binary_kl_outside(p_T, q_T, mask_T, limit=limit).tolist() == [value > limit for value in worst]
    certain = torch.tensor([0.0, -1e4], dtype=torch.float64)
    assert binary_kl_outside(certain, certain.flip(0), torch.ones(2, dtype=torch.bool), limit=2.0).all()
    assert not binary_kl_outside(certain, torch.full((2,), math.nan), torch.zeros(2, dtype=torch.bool), limit=2.0).any()


@pytest.mark.parametrize(
    ("before", "now", "advantage", "rejected"),
    [
        (1e-4, 1e-3, 1.0, False),
        (0.9, 0.65, -1.0, True),
        (0.9, 0.65, 1.0, False),
        (0.7, 0.95, 1.0, True),
        (0.7, 0.95, -1.0, False),
        (0.9, 0.65, 0.0, True),
    ],
)
def test_total_variation_is_of_probabilities(before: float, now: float, advantage: float, rejected: bool) -> None:
    """23."""
    values = [
        torch.tensor([value, math.nan], dtype=torch.float64) for value in (math.log(now), math.log(before), advantage)
    ]
    assert total_variation_outside(*values, torch.tensor([True, False]), low=0.2, high=0.2).tolist() == [
        rejected,
        False,
    ]


def test_the_loglinear_proximal_policy_lies_between_mu_and_pi() -> None:
    """22: fresh tokens have mu, old ones nearly pi; no gradient, and no influence of masked tokens."""
    theta_T = PI.log_probs_T
    for lag, share in ((0, 0.0), (1, 0.5), (3, 0.75), (10**6, 1.0), (-1, 0.0)):
        found_T = loglinear_proximal(theta_T, MU.log_probs_T, MASK_T, torch.full(MASK_T.shape, lag))
        torch.testing.assert_close(found_T, (MU.log_probs_T + share * DELTA_T).detach(), atol=1e-5, rtol=0)
        assert not found_T.requires_grad
    nan_T = torch.full((2,), math.nan, dtype=torch.float64)
    assert loglinear_proximal(nan_T, nan_T, torch.zeros(2, dtype=torch.bool), torch.ones(2)).tolist() == [0.0, 0.0]


def test_log_ratios_are_bounded_and_blind_to_what_is_masked() -> None:
    """59."""
    one_T = torch.tensor([0.0, -300.0, -1.0, math.nan], dtype=torch.float64, requires_grad=True)
    other_T = torch.tensor([-300.0, 0.0, -1.5, math.inf], dtype=torch.float64)
    mask_T = torch.tensor([True, True, True, False])
    delta_T = log_ratio(one_T, other_T, mask_T)
    assert delta_T.tolist() == [DELTA_BOUND, -DELTA_BOUND, 0.5, 0.0]
    assert torch.autograd.grad(delta_T.sum(), one_T)[0].tolist() == [0.0, 0.0, 1.0, 0.0]


def test_the_enumeration_is_one() -> None:
    assert float(PI.probabilities_N.detach().sum()) == pytest.approx(1)
    assert len(PREFIXES) == 13


def test_a_row_without_the_first_sample_but_with_padding() -> None:
    """Padding points at sample 0, which need not be in the row."""
    delta_T, sample_T = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64), torch.tensor([1, 1, -1])
    mask_T = torch.tensor([True, True, False])
    same(prefix_sums(delta_T, mask_T, sample_T, 2), torch.tensor([0.1, 0.1 + 0.2, 0.0], dtype=torch.float64))


def test_a_sample_of_one_token_counts_as_one() -> None:
    delta_T, sample_T = torch.tensor([0.5, 1.0, 1.0], dtype=torch.float64), torch.tensor([0, 1, 1])
    place = (torch.ones(3, dtype=torch.bool), sample_T, 2)
    weights = bounded(raw_weights(delta_T, *place, level="sequence"), place[0], high=math.inf)
    assert weight_sums(weights, *place, level="sequence").tolist() == pytest.approx(
        [math.exp(0.5) + math.exp(2.0), 2.0]
    )


def test_a_mean_at_its_limit_is_too_much() -> None:
    assert second_moment_cut(torch.tensor([0.5, 0.5], dtype=torch.float64), 0.5) == 0.5
    assert second_moment_cut(torch.tensor([0.25, 0.75], dtype=torch.float64), 0.5) == 0.75


def test_limits_are_exceeded_and_not_met() -> None:
    """A value exactly at a limit is kept, under every rule."""
    one = (torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 1)
    two_T = torch.tensor([2.0], dtype=torch.float64)
    assert not outside(two_T, *one, metric="k2", span="token", high=2.0).any()
    assert not vetoed(torch.tensor([math.log(1e-3)], dtype=torch.float64), *one, threshold=1e-3).any()
    now_T, before_T = torch.tensor([-0.2], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    moved = float(now_T.exp() - before_T.exp())
    for p_T, q_T, advantage in ((now_T, before_T, 1.0), (before_T, now_T, -1.0)):
        advantages_T = torch.tensor([advantage], dtype=torch.float64)
        assert not total_variation_outside(p_T, q_T, advantages_T, one[0], low=moved, high=moved).any()
        assert total_variation_outside(p_T, q_T, advantages_T, one[0], low=moved - 1e-12, high=moved - 1e-12).all()


def test_opsm_is_by_the_mean_over_the_tokens() -> None:
    gap_T = torch.full((4,), -0.1, dtype=torch.float64)
    place = (torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), 1)
    bad_T = torch.full((4,), -1.0, dtype=torch.float64)
    assert not opsm(gap_T - 1, torch.full_like(gap_T, -1.0), bad_T, *place, threshold=0.2).any()
    assert opsm(gap_T - 1, torch.full_like(gap_T, -1.0), bad_T, *place, threshold=0.09).all()


def test_masked_weights_stay_1_when_the_others_are_normalised() -> None:
    mask_T = torch.tensor([True, False, True])
    weights = bounded(torch.tensor([0.5, 1.0, 1.0], dtype=torch.float64), mask_T, low=0.0, high=2.0, action="clip")
    sums = weight_sums(weights, mask_T, torch.tensor([0, 0, 1]), 2, level="token")
    got_T = self_normalised(weights, mask_T, sums).weight_T
    assert got_T.tolist() == pytest.approx([2 / 3, 1.0, 4 / 3])
