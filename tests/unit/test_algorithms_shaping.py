"""Shaped rewards: the overlong line, and the exact mean gradients of distillation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.enumerated import (
    MASK_T,
    PREFIXES,
    RESPONSES,
    SAMPLE_T,
    STEPS,
    Policy,
    expected,
    gradient,
)
from tidemill.learner.algorithms.advantages import distillation_advantages, overlong_penalty
from tidemill.learner.algorithms.token_returns import returns_to_go


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


def test_what_is_masked_teaches_nothing_and_a_teacher_that_excludes_a_token_stays_finite() -> None:
    student = torch.tensor([-1.0, -2.0, math.nan], requires_grad=True)
    teacher = torch.tensor([-0.25, -math.inf, math.inf])
    got = distillation_advantages(student, teacher, torch.tensor([True, True, False]))
    assert got.tolist() == [0.75, -20.0, 0.0] and not got.requires_grad


# ---- mean gradients over all responses of a small policy


class Scene:
    """A student with a gradient, and another policy: its teacher or its reference."""

    def __init__(self) -> None:
        self.student, self.other = Policy(Policy.random(5).logits_PV.requires_grad_()), Policy.random(6)
        self.gap_T = self.student.log_probs_T - self.other.log_probs_T

    def distillation(self) -> Tensor:
        return distillation_advantages(self.student.log_probs_T, self.other.log_probs_T, MASK_T)

    def policy_gradient(self, advantages_T: Tensor) -> Tensor:
        """Return the mean gradient of the loss ``-A log pi`` summed over the tokens of a response."""
        return gradient(-expected(advantages_T * self.student.log_probs_T, self.student), self.student)

    def divergence(self) -> Tensor:
        """Return KL(student || other) of whole responses."""
        return (self.student.probabilities_N * self.gap_T.view(-1, STEPS).sum(-1)).sum()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_distillation_follows_the_gradient_of_the_divergence_of_the_next_token(scene: Scene) -> None:
    """Property 34: prefixes as the student samples them."""
    student_PV, other_PV = scene.student.logits_PV.log_softmax(-1), scene.other.logits_PV.log_softmax(-1)
    next_token_P = (student_PV.exp() * (student_PV - other_PV)).sum(-1)
    at_T = [PREFIXES.index(response[:step]) for response in RESPONSES for step in range(STEPS)]
    wanted = gradient(expected(next_token_P[at_T], scene.student), scene.student)
    _close(scene.policy_gradient(scene.distillation()), wanted)


def test_distillation_summed_to_the_end_follows_that_of_whole_responses(scene: Scene) -> None:
    """Property 34."""
    to_go_T = returns_to_go(scene.distillation(), SAMPLE_T, gamma=1.0, mask_T=MASK_T)
    _close(scene.policy_gradient(to_go_T), gradient(scene.divergence(), scene.student))
