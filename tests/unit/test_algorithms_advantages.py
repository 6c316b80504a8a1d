"""Advantages: against loops over groups of any size in any order, and their exact mean gradients over all groups of a
small policy.
"""

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.enumerated import Policy, gradient
from tests.examples import examples
from tidemill.learner.algorithms import choices
from tidemill.learner.algorithms.advantages import (
    ADVANTAGES,
    WHITENED,
    Advantage,
    batch_std,
    gdpo,
    group_moments,
    grpo,
    grpo_no_std,
    masked_moments,
    maxrl,
    opo,
    pass_at_k,
    reinforce,
    rloo,
    whitened,
)

KINDS = sorted(ADVANTAGES)


def _close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Member:
    reward: float
    length: int


MEMBER = st.builds(
    Member,
    reward=st.floats(-10, 10).map(lambda value: round(value, 3)),
    length=st.integers(0, 9),
)
GROUPS = st.lists(st.lists(MEMBER, min_size=1, max_size=6), min_size=1, max_size=5)


@dataclass(frozen=True)
class Samples:
    """A step's samples; the ids of its groups are neither small nor in order."""

    rewards: Tensor
    groups: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, groups: list[list[Member]]) -> "Samples":
        flat = [member for group in groups for member in group]
        return cls(
            torch.tensor([member.reward for member in flat], dtype=torch.float64),
            torch.tensor([1000 - 7 * number for number, group in enumerate(groups) for _ in group]),
            torch.tensor([member.length for member in flat]),
        )

    def at(self, order: Tensor) -> "Samples":
        return Samples(self.rewards[order], self.groups[order], self.lengths[order])

    def advantages(self, kind: str) -> Tensor:
        return estimated(kind, self.rewards, self.groups, self.lengths)


def estimated(kind: str, rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    further: dict[str, dict[str, Any]] = {"opo": {"trainable_N": lengths}, "pass_at_k": {"k": 2}}
    return ADVANTAGES[kind](rewards, groups, **further.get(kind, {}))


def _loop(kind: str, groups: list[list[Member]]) -> list[float]:
    """Compute the definitions, sample by sample."""
    everything = [member.reward for group in groups for member in group]
    scale = statistics.stdev(everything) if len(everything) > 1 else 0.0
    return [_own(kind, member, group, scale) for group in groups for member in group]


def _pass_at_2(member: Member, group: list[Member]) -> float:
    """Compute the mean over pairs with the member of their reward less that of all pairs, by the standard deviation
    over all pairs.
    """
    places = range(len(group))
    pairs = [
        (set(pair), float(any(group[place].reward > 0 for place in pair))) for pair in itertools.combinations(places, 2)
    ]
    rewards = [reward for _, reward in pairs]
    if len(set(rewards)) < 2:
        return 0.0
    own = [reward for pair, reward in pairs if next(place for place in places if group[place] is member) in pair]
    return (statistics.fmean(own) - statistics.fmean(rewards)) / statistics.pstdev(rewards)


def _own(kind: str, member: Member, group: list[Member], scale: float) -> float:
    rewards = [other.reward for other in group]
    if kind == "pass_at_k":
        return _pass_at_2(member, group)
    if kind == "none":
        return 0.0
    if kind in ("reinforce", "reinforce_pp"):
        return member.reward
    if len(set(rewards)) == 1:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    if kind == "rloo":
        return member.reward - (math.fsum(rewards) - member.reward) / (len(rewards) - 1)
    if kind == "opo":
        tokens = sum(other.length for other in group)
        return member.reward - (math.fsum(other.length * other.reward for other in group) / tokens if tokens else mean)
    if kind == "maxrl":
        return (member.reward - mean) / mean if mean > 1e-6 * statistics.stdev(rewards) else 0.0
    deviation = statistics.stdev(rewards) + 1e-6
    divisor = {"grpo": deviation, "gdpo": deviation, "batch_std": scale + 1e-6}.get(kind, 1.0)
    return (member.reward - mean) / divisor


EACH = examples(40)
"""Number of examples for every estimator."""


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=EACH)
@given(groups=GROUPS)
def test_every_kind_is_the_loop_over_groups(kind: str, groups: list[list[Member]]) -> None:
    """Properties 40-44."""
    got = Samples.of(groups).advantages(kind)
    torch.testing.assert_close(got, torch.tensor(_loop(kind, groups), dtype=torch.float64), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=EACH)
@given(groups=GROUPS, seed=st.integers(0, 1000))
def test_advantages_go_with_their_samples_in_any_order(kind: str, groups: list[list[Member]], seed: int) -> None:
    """Property 40."""
    samples = Samples.of(groups)
    order = torch.randperm(len(samples.rewards), generator=torch.Generator().manual_seed(seed))
    got = samples.at(order).advantages(kind)
    torch.testing.assert_close(got, samples.advantages(kind)[order], rtol=1e-8, atol=1e-10)


@settings(deadline=None)
@given(groups=GROUPS)
def test_grpo_sums_to_zero_and_ignores_shift_and_scale(groups: list[list[Member]]) -> None:
    """Property 40."""
    samples = Samples.of(groups)
    advantages = grpo(samples.rewards, samples.groups)
    for group in samples.groups.unique():
        assert abs(float(advantages[samples.groups == group].sum())) < 1e-8
    spread = group_moments(samples.rewards, samples.groups)
    if bool(((spread.std_N > 0.01) | spread.constant_N).all()):
        torch.testing.assert_close(grpo(3 * samples.rewards + 5, samples.groups), advantages, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degenerate_groups_have_finite_advantages(kind: str, dtype: torch.dtype) -> None:
    """Properties 40 and 60: equal rewards, one sample (with a torch.std of NaN), no samples at all."""
    cases: dict[str, tuple[list[float], list[int]]] = {
        "equal": ([0.1, 0.1, 0.1], [1, 1, 1]),
        "of one": ([7.0], [2]),
        "a step of groups of one": ([7.0, 7.0], [2, 3]),
        "empty": ([], []),
    }
    for name, (rewards, groups) in cases.items():
        place = torch.tensor(rewards, dtype=dtype), torch.tensor(groups, dtype=torch.int64)
        got = estimated(kind, *place, torch.ones(len(groups), dtype=torch.int64))
        assert got.dtype == dtype, name
        wanted = rewards if ADVANTAGES[kind] is reinforce else [0.0] * len(rewards)
        assert torch.equal(got, torch.tensor(wanted, dtype=dtype)), name


def test_moments_are_those_of_the_counted_members() -> None:
    rewards, groups = torch.tensor([4.0, 1.0, 3.0, 9.0, 5.0]), torch.tensor([8, 5, 5, 5, 2])
    moments = group_moments(rewards, groups, torch.tensor([True, True, True, False, False]))
    assert moments.sizes_N.tolist() == [1, 2, 2, 2, 0]
    assert moments.mean_N.tolist() == [4, 2, 2, 2, 0]
    assert moments.centered_N.tolist() == [0, -1, 1, 0, 0]
    torch.testing.assert_close(moments.std_N, torch.tensor([0.0, 2**0.5, 2**0.5, 2**0.5, 0.0]))
    assert moments.constant_N.tolist() == [True, False, False, False, True]


def test_two_samples_right_and_wrong() -> None:
    """Property 41: the standard deviation is the unbiased one."""
    rewards, groups = torch.tensor([0.0, 1.0]), torch.tensor([4, 4])
    torch.testing.assert_close(grpo(rewards, groups), torch.tensor([-1.0, 1.0]) / 2**0.5, atol=1e-5, rtol=0)
    assert grpo_no_std(rewards, groups).tolist() == [-0.5, 0.5]
    assert rloo(rewards, groups).tolist() == [-1, 1]
    assert maxrl(rewards, groups).tolist() == [-1, 1]


def test_the_leave_one_out_baseline_excludes_the_samples_own_reward() -> None:
    """Property 42."""
    rewards, groups = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64), torch.tensor([0, 0, 0])
    changed = rewards.clone()
    changed[1] += 100
    assert float(rloo(changed, groups)[1] - rloo(rewards, groups)[1]) == pytest.approx(100)
    _close(rloo(rewards, groups), 1.5 * grpo_no_std(rewards, groups))
    assert float(rloo(rewards, groups).sum()) == pytest.approx(0, abs=1e-12)


def test_opo_is_the_mean_baseline_where_lengths_are_equal_and_weighs_longer_ones_more_elsewhere() -> None:
    """Property 44."""
    rewards, groups = torch.tensor([0.0, 1.0, 5.0, 9.0], dtype=torch.float64), torch.tensor([3, 3, 3, 8])
    _close(opo(rewards, groups, torch.tensor([4, 4, 4, 1])), grpo_no_std(rewards, groups))
    _close(
        opo(rewards, groups, torch.tensor([1, 1, 2, 1])),
        torch.tensor([-2.75, -1.75, 2.25, 0], dtype=torch.float64),
    )


@pytest.mark.parametrize("successes", [1, 2, 4])
def test_maxrl_pays_a_success_by_its_rarity_whatever_the_unit(successes: int) -> None:
    """Property 44."""
    rewards = torch.tensor([1.0] * successes + [0.0] * (5 - successes), dtype=torch.float64)
    wanted = torch.tensor([(5 - successes) / successes] * successes + [-1.0] * (5 - successes), dtype=torch.float64)
    for unit in (1e-9, 1.0, 1e9):
        _close(maxrl(unit * rewards, torch.zeros(5, dtype=torch.int64)), wanted)
    assert not maxrl(-rewards, torch.zeros(5, dtype=torch.int64)).any()


def test_maxrl_does_not_divide_by_a_mean_that_is_rounding() -> None:
    rewards = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)
    assert float(rewards.mean()) > 0
    assert not maxrl(rewards, torch.zeros(3, dtype=torch.int64)).any()


# ---- mean gradients, by enumeration


class Scene:
    """A policy with all its responses, their rewards and their scores."""

    def __init__(self) -> None:
        self.policy = Policy(Policy.random(7).logits_PV.requires_grad_())
        self.rewards_N = torch.randn(27, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        self.p_N = self.policy.probabilities_N
        self.scores_ND = torch.stack([self.gradient(log_p) for log_p in self.p_N.log()])
        """d log pi(y) / d logits."""

    def gradient(self, number: Tensor) -> Tensor:
        return gradient(number, self.policy).reshape(-1)

    def mean_gradient(self, estimate: Advantage, rewards_N: Tensor, size: int) -> Tensor:
        """``E[(1 / G) sum_i A_i grad log pi(y_i)]`` over all 27^G groups, given to the estimator as one step."""
        tuples = torch.tensor(list(itertools.product(range(27), repeat=size)))
        flat, groups = tuples.reshape(-1), torch.arange(len(tuples)).repeat_interleave(size)
        advantages = estimate(rewards_N[flat], groups)
        p = self.p_N.detach()[tuples].prod(-1).repeat_interleave(size)
        return (p * advantages / size) @ self.scores_ND[flat]


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["reinforce", "rloo", "grpo_no_std"])
def test_mean_gradient_over_all_groups(kind: str, size: int, scene: Scene) -> None:
    """Property 43: exact without a baseline and for the leave-one-out baseline; (G - 1) / G of it for the mean."""
    share = (size - 1) / size if kind == "grpo_no_std" else 1.0
    wanted = share * scene.gradient((scene.p_N * scene.rewards_N).sum())
    _close(scene.mean_gradient(ADVANTAGES[kind], scene.rewards_N, size), wanted)


@pytest.mark.parametrize("size", [2, 3])
def test_maxrl_climbs_the_likelihood_of_success_as_far_as_its_group_sees(size: int, scene: Scene) -> None:
    success = (scene.rewards_N > 0.5).double()
    p = (scene.p_N * success).sum()
    wanted = (1 - (1 - p.detach()) ** (size - 1)) * scene.gradient(p.log())
    _close(scene.mean_gradient(maxrl, success, size), wanted)


def test_batch_std_of_one_group_is_grpo_and_of_two_is_not(scene: Scene) -> None:
    groups = torch.tensor([0] * 20 + [1] * 7)
    _close(batch_std(scene.rewards_N, torch.zeros_like(groups)), grpo(scene.rewards_N, torch.zeros_like(groups)))
    centered = grpo_no_std(scene.rewards_N, groups)
    _close(batch_std(scene.rewards_N, groups), centered / (float(scene.rewards_N.std()) + 1e-6))


def test_the_table_is_what_the_config_offers() -> None:
    assert set(ADVANTAGES) == set(choices.ADVANTAGES)
    assert set(WHITENED) < set(ADVANTAGES)


# ---- whitening

VALUES = st.lists(
    st.tuples(st.floats(-100, 100).map(lambda value: round(value, 3)), st.integers(0, 4)), min_size=1, max_size=30
)


@settings(deadline=None)
@given(values=VALUES)
def test_whitening_counts_a_sample_as_often_as_it_has_tokens(values: list[tuple[float, int]]) -> None:
    tokens = [value for value, count in values for _ in range(count)]
    mean, spread = (statistics.fmean(tokens), statistics.pvariance(tokens)) if tokens else (0.0, 0.0)
    wanted = [(value - mean) / math.sqrt(spread + 1e-8) if count else 0.0 for value, count in values]
    rewards = torch.tensor([value if count else math.nan for value, count in values], dtype=torch.float64)
    got = whitened(rewards, torch.tensor([count for _, count in values]))
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(values=VALUES, shards=st.integers(2, 5), seed=st.integers(0, 1000))
def test_whitening_by_added_moments_does_not_depend_on_the_shards(
    values: list[tuple[float, int]], shards: int, seed: int
) -> None:
    """Property 48."""
    rewards = torch.tensor([value if count else math.nan for value, count in values], dtype=torch.float64)
    mask = torch.tensor([bool(count) for _, count in values])
    parts = torch.randint(shards, (len(values),), generator=torch.Generator().manual_seed(seed))
    moments = torch.stack([masked_moments(rewards[parts == part], mask[parts == part]) for part in range(shards)]).sum(
        0
    )
    whole = whitened(rewards, mask)
    for part in range(shards):
        torch.testing.assert_close(
            whitened(rewards[parts == part], mask[parts == part], moments), whole[parts == part], rtol=1e-9, atol=1e-7
        )


def test_whitening_each_shard_by_itself_is_something_else() -> None:
    """Property 48."""
    rewards, mask = (
        torch.tensor([1.0, 2.0, 3.0, 40.0, 50.0, 60.0], dtype=torch.float64),
        torch.ones(6, dtype=torch.bool),
    )
    apart = torch.cat([whitened(rewards[:3], mask[:3]), whitened(rewards[3:], mask[3:])])
    assert float((apart - whitened(rewards, mask)).abs().min()) > 0.1


def test_whitening_equal_values_gives_nothing_even_far_from_zero() -> None:
    """Property 60: the variance computed from sums may come out below 0."""
    for value in (0.1, 1 / 3, 12345.678, -98765.4321):
        for size in range(1, 30):
            got = whitened(torch.full((size,), value, dtype=torch.float64), torch.ones(size, dtype=torch.bool))
            assert float(got.abs().max()) < 1e-6, (value, size)


def test_whitening_takes_float32_and_has_variance_one() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, math.inf])
    got = whitened(values, torch.tensor([True, True, True, False]))
    assert got.dtype == torch.float32 and got[3] == 0
    assert float(got[:3].mean()) == pytest.approx(0, abs=1e-6) and float(got[:3].square().mean()) == pytest.approx(
        1, abs=1e-6
    )


@settings(deadline=None, max_examples=examples(60))
@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8), k=st.integers(1, 5))
def test_pass_at_k_is_the_mean_over_all_sets_of_k_samples(rewards: list[float], k: int) -> None:
    got = pass_at_k(
        torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64), k=k
    ).tolist()
    sets = [(group, max(rewards[place] for place in group)) for group in itertools.combinations(range(len(rewards)), k)]
    values = [value for _, value in sets]
    if len(set(values)) < 2:
        assert got == [0.0] * len(rewards)
        return
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    own = [statistics.fmean([value for group, value in sets if place in group]) for place in range(len(rewards))]
    assert got == pytest.approx([(value - mean) / deviation for value in own], abs=1e-9)
    assert sum(got) == pytest.approx(0.0, abs=1e-9)


@settings(deadline=None, max_examples=examples(50))
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8),
    weights=st.tuples(st.floats(0.1, 2), st.floats(0.1, 2)),
    scale=st.sampled_from([1.0, 1000.0]),
)
def test_gdpo_normalises_every_reward_by_itself(
    rows: list[tuple[int, int, int]], weights: tuple[float, float], scale: float
) -> None:
    """``scale``: of the second reward; it changes nothing but the 1e-6 beside the standard deviation."""
    rewards = torch.tensor([[float(one), scale * two] for _, one, two in rows], dtype=torch.float64)
    got = gdpo(
        rewards, torch.tensor([group for group, _, _ in rows]), torch.tensor(weights, dtype=torch.float64)
    ).tolist()
    for place, (group, *own) in enumerate(rows):
        wanted = 0.0
        for part in range(2):
            values = [row[1 + part] for row in rows if row[0] == group]
            if len(set(values)) > 1:
                wanted += weights[part] * (own[part] - statistics.fmean(values)) / statistics.stdev(values)
        assert got[place] == pytest.approx(wanted, abs=1e-4)


def test_gdpo_leaves_members_out_of_parts_that_they_lack() -> None:
    """The first part is of three members only: their statistics are of the three, and it adds nothing to the fourth."""
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 3.0], [nan, 3.0], [nan, 7.0]], dtype=torch.float64)
    got = gdpo(rewards, torch.tensor([0, 0, 0, 0, 1]), torch.tensor([2.0, 0.5])).tolist()
    assert got == pytest.approx([-0.25 * 3**0.5, -2 - 0.25 * 3**0.5, 2 + 0.25 * 3**0.5, 0.25 * 3**0.5, 0.0], abs=1e-5)


def test_gdpo_tells_samples_with_equal_sums_apart() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    got = gdpo(rewards, torch.zeros(5, dtype=torch.int64), torch.ones(2))
    assert got[0] > got[1] + 0.1
    assert (
        grpo(rewards.sum(1), torch.zeros(5, dtype=torch.int64))[0]
        == grpo(rewards.sum(1), torch.zeros(5, dtype=torch.int64))[1]
    )
