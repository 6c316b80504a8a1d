"""Advantages: identities of GRPO and RLOO, against a loop, for groups of any size in any order."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.advantages import ADVANTAGES, grpo, grpo_no_std, rloo

GROUPS = st.lists(
    st.lists(st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3)), min_size=1, max_size=6), min_size=1, max_size=5
)


def _flat(groups: list[list[float]]) -> tuple[Tensor, Tensor]:
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    ids = torch.tensor([1000 - 7 * number for number, group in enumerate(groups) for _ in group])
    return rewards, ids


def _loop(kind: str, groups: list[list[float]]) -> list[float]:
    advantages = []
    for group in groups:
        mean = sum(group) / len(group)
        for reward in group:
            if len(set(group)) == 1:
                advantages.append(0.0)
            elif kind == "rloo":
                advantages.append(reward - (sum(group) - reward) / (len(group) - 1))
            else:
                advantages.append((reward - mean) / (statistics.stdev(group) + 1e-6 if kind == "grpo" else 1))
    return advantages


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
@settings(deadline=None)
@given(groups=GROUPS)
def test_every_kind_is_the_loop_over_groups(kind: str, groups: list[list[float]]) -> None:
    rewards, ids = _flat(groups)
    wanted = torch.tensor(_loop(kind, groups), dtype=torch.float64)
    torch.testing.assert_close(ADVANTAGES[kind](rewards, ids), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
@settings(deadline=None)
@given(groups=GROUPS, seed=st.integers(0, 1000))
def test_advantages_go_with_their_samples_in_any_order(kind: str, groups: list[list[float]], seed: int) -> None:
    rewards, ids = _flat(groups)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(ADVANTAGES[kind](rewards[order], ids[order]), ADVANTAGES[kind](rewards, ids)[order], atol=1e-9, rtol=1e-9)


@settings(deadline=None)
@given(groups=GROUPS)
def test_grpo_sums_to_zero_and_ignores_shift_and_scale(groups: list[list[float]]) -> None:
    rewards, ids = _flat(groups)
    advantages = grpo(rewards, ids)
    for task in ids.unique():
        assert abs(float(advantages[ids == task].sum())) < 1e-8
    spread = torch.stack([rewards[ids == task].std(correction=0) for task in ids.unique()])
    if bool((spread > 0.01).all()):
        torch.testing.assert_close(grpo(3 * rewards + 5, ids), advantages, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_without_variance_and_groups_of_one_have_exactly_none(kind: str, dtype: torch.dtype) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 7.0], dtype=dtype)
    advantages = ADVANTAGES[kind](rewards, torch.tensor([1, 1, 1, 2]))
    assert advantages.dtype == dtype and advantages.tolist() == [0, 0, 0, 0]


def test_two_samples_right_and_wrong() -> None:
    rewards, ids = torch.tensor([0.0, 1.0]), torch.tensor([4, 4])
    torch.testing.assert_close(grpo(rewards, ids), torch.tensor([-1.0, 1.0]) / 2**0.5, atol=1e-5, rtol=0)
    assert grpo_no_std(rewards, ids).tolist() == [-0.5, 0.5]
    assert rloo(rewards, ids).tolist() == [-1, 1]


def test_the_leave_one_out_baseline_does_not_know_its_own_reward() -> None:
    rewards, ids = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64), torch.tensor([0, 0, 0])
    changed = rewards.clone()
    changed[1] += 100
    assert float(rloo(changed, ids)[1] - rloo(rewards, ids)[1]) == pytest.approx(100)
    torch.testing.assert_close(rloo(rewards, ids), 1.5 * grpo_no_std(rewards, ids))
