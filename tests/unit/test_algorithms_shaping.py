"""Shaped rewards: the overlong line, groups without variance, and the exact mean gradients of distillation and of KL in the reward."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithms.advantages import returns_to_go
from learner.algorithms.shaping import distillation_advantages, kl_in_reward, overlong_penalty, zero_variance_groups


def _close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(max_tokens=st.integers(1, 500), data=st.data())
def test_the_overlong_penalty_is_a_line_between_nothing_and_one(max_tokens: int, data: st.DataObject) -> None:
    """Property 47: continuous (steps of 1 / buffer), in [-1, 0], its corners where DAPO has them."""
    buffer = data.draw(st.integers(1, max_tokens))
    lengths = torch.arange(max_tokens + 20)
    penalty = overlong_penalty(lengths, max_tokens=max_tokens, buffer=buffer)
    steps = penalty.diff()
    begin = max_tokens - buffer
    assert not penalty[: begin + 1].any() and bool((penalty[max_tokens:] == -1).all())
    _close(steps[begin:max_tokens], torch.full((buffer,), -1 / buffer, dtype=torch.float64))
    assert penalty.dtype == torch.float64


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_a_buffer_outside_the_response_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(torch.tensor([5]), max_tokens=10, buffer=buffer)


def test_groups_without_variance_are_found_whatever_their_order() -> None:
    rewards = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, 5.0])
    groups = torch.tensor([70, 3, 70, 3, 70, 12])
    assert zero_variance_groups(rewards, groups).tolist() == [True, False, True, False, True, True]
    assert zero_variance_groups(rewards[:0], groups[:0]).tolist() == []


def test_what_is_masked_teaches_nothing_and_a_teacher_that_excludes_a_token_stays_finite() -> None:
    student = torch.tensor([-1.0, -2.0, math.nan], requires_grad=True)
    teacher = torch.tensor([-0.25, -math.inf, math.inf])
    got = distillation_advantages(student, teacher, torch.tensor([True, True, False]))
    assert got.tolist() == [0.75, -20.0, 0.0] and not got.requires_grad


# ---- mean gradients over all 27 responses of 3 tokens and 3 steps, one row of 81 tokens


class Tree:
    """Two policies with distributions of their own for each of the 1 + 3 + 9 prefixes; the student has a gradient."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.logits = torch.randn(13, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        self.other = torch.randn(13, 3, generator=generator, dtype=torch.float64).log_softmax(-1)
        self.rewards = torch.randn(27, generator=generator, dtype=torch.float64)
        response = torch.arange(27)
        self.prefix = torch.stack([torch.zeros_like(response), 1 + response // 9, 4 + response // 3], -1).reshape(-1)
        self.action = torch.stack([response // 9, response // 3 % 3, response % 3], -1).reshape(-1)
        self.sample = response.repeat_interleave(3)
        self.mask = torch.ones(81, dtype=torch.bool)
        self.student = self.logits.log_softmax(-1)
        self.log_p = self.sampled(self.student).reshape(27, 3).sum(-1)
        self.weights = self.log_p.detach().exp().repeat_interleave(3)

    def sampled(self, table: Tensor) -> Tensor:
        return table[self.prefix, self.action]

    def gradient(self, number: Tensor) -> Tensor:
        return torch.autograd.grad(number, self.logits, retain_graph=True)[0]

    def policy_gradient(self, advantages_T: Tensor) -> Tensor:
        """Mean gradient of the loss ``-A log pi`` summed over the tokens of a response."""
        return self.gradient(-(self.weights * advantages_T * self.sampled(self.student)).sum())

    def divergence(self) -> Tensor:
        """KL of whole responses."""
        return (self.log_p.exp() * (self.log_p - self.sampled(self.other).reshape(27, 3).sum(-1))).sum()


def test_distillation_follows_the_gradient_of_the_divergence_of_the_next_token() -> None:
    """Property 34: prefixes as the student samples them."""
    tree = Tree()
    reach = torch.zeros(13, dtype=torch.float64).index_add(0, tree.prefix, tree.weights)
    next_token = (tree.student.exp() * (tree.student - tree.other)).sum(-1)
    advantages_T = distillation_advantages(tree.sampled(tree.student), tree.sampled(tree.other), tree.mask)
    _close(tree.policy_gradient(advantages_T), tree.gradient((reach * next_token).sum()))


def test_distillation_summed_to_the_end_follows_that_of_whole_responses() -> None:
    """Property 34."""
    tree = Tree()
    advantages_T = distillation_advantages(tree.sampled(tree.student), tree.sampled(tree.other), tree.mask)
    _close(tree.policy_gradient(returns_to_go(advantages_T, tree.sample, gamma=1.0)), tree.gradient(tree.divergence()))


def test_kl_in_the_reward_is_the_gradient_of_reward_less_divergence() -> None:
    """The score term alone: k1 in a reward needs no gradient of its own."""
    tree = Tree()
    kl_sums = (tree.sampled(tree.student) - tree.sampled(tree.other)).reshape(27, 3).sum(-1)
    shaped = kl_in_reward(tree.rewards, kl_sums, 0.3)
    assert not shaped.requires_grad
    aim = (tree.log_p.exp() * tree.rewards).sum() - 0.3 * tree.divergence()
    _close(tree.policy_gradient(shaped.repeat_interleave(3)), tree.gradient(-aim))
