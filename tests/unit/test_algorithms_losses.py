"""Correction and losses: identities that hold for every correct implementation, on enumerated policies in float64."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.correction import DELTA_BOUND, truncated_weights
from learner.losses import three_policy_loss, token_mean, two_policy_loss, uncorrected_loss

CLIP: dict[str, float] = {"clip_low": 0.2, "clip_high": 0.28}
TIS: dict[str, float] = {"tis_low": 0.0, "tis_high": 2.0}
WIDE: dict[str, float] = {"tis_low": 0.0, "tis_high": float("inf")}


def _case(seed: int = 0, size: int = 40, spread: float = 0.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda scale: scale * torch.randn(size, generator=generator, dtype=torch.float64)  # noqa: E731
    old = -2 + draw(0.5).clamp(-1.9, 1.9)
    return {
        "theta": (old + draw(spread)).requires_grad_(),
        "old": old,
        "mu": old + draw(spread),
        "advantages": draw(1.0),
        "mask": torch.rand(size, generator=generator) < 0.8,
    }


def _gradient(loss_T: Tensor, theta: Tensor) -> Tensor:
    return torch.autograd.grad(loss_T.sum(), theta)[0]


def _three(c: dict[str, Tensor], **changes: Any) -> Any:
    return three_policy_loss(c["theta"], c["old"], c["mu"], c["advantages"], c["mask"], **(CLIP | TIS | changes))


def test_on_policy_every_loss_has_the_policy_gradient() -> None:
    c = _case()
    same = c["theta"].detach()
    wanted = torch.where(c["mask"], -c["advantages"], 0.0)
    three = three_policy_loss(c["theta"], same, same, c["advantages"], c["mask"], **CLIP, **TIS)
    two = two_policy_loss(c["theta"], same, c["advantages"], c["mask"], **CLIP)
    plain = uncorrected_loss(c["theta"], c["advantages"], c["mask"])
    for loss in (three, two, plain):
        torch.testing.assert_close(_gradient(loss.loss_T, c["theta"]), wanted)
        assert not loss.clipped_T.any()


def test_weights_are_truncated_then_detached_then_multiplied() -> None:
    c = _case(spread=1.5)
    theta = c["theta"]
    start = theta.detach()
    weight_T = (start - c["mu"]).exp().clamp(0, 2)
    assert bool((weight_T == 2).any())
    loss = three_policy_loss(theta, theta, c["mu"], c["advantages"], c["mask"], **CLIP, **TIS)
    torch.testing.assert_close(_gradient(loss.loss_T, theta), torch.where(c["mask"], -weight_T * c["advantages"], 0.0))
    undetached = -((theta - c["mu"]).exp() * c["advantages"] * theta)
    assert not torch.allclose(_gradient(undetached, theta)[c["mask"]], (-weight_T * c["advantages"])[c["mask"]])


@settings(deadline=None)
@given(seed=st.integers(0, 100))
def test_three_policies_meet_two_and_the_weighted_gradient(seed: int) -> None:
    """pi_old = mu is PPO on pi_theta / mu; pi_old = pi_theta is the importance-weighted policy gradient."""
    c = _case(seed)
    at_mu = three_policy_loss(c["theta"], c["mu"], c["mu"], c["advantages"], c["mask"], **CLIP, **TIS)
    two = two_policy_loss(c["theta"], c["mu"], c["advantages"], c["mask"], **CLIP)
    torch.testing.assert_close(at_mu.loss_T, two.loss_T)
    torch.testing.assert_close(_gradient(at_mu.loss_T, c["theta"]), _gradient(two.loss_T, c["theta"]))
    at_theta = three_policy_loss(c["theta"], c["theta"].detach(), c["mu"], c["advantages"], c["mask"], **CLIP, **WIDE)
    ratio_T = (c["theta"].detach() - c["mu"]).exp()
    torch.testing.assert_close(_gradient(at_theta.loss_T, c["theta"]), torch.where(c["mask"], -ratio_T * c["advantages"], 0.0))


@settings(deadline=None)
@given(ratio=st.floats(0.3, 3), advantage=st.floats(-3, 3).filter(lambda value: abs(value) > 1e-3))
def test_the_clip_takes_the_gradient_only_where_it_should(ratio: float, advantage: float) -> None:
    theta = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    zero, mask = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.bool)
    loss = three_policy_loss(theta, zero, zero, torch.tensor([advantage], dtype=torch.float64), mask, **CLIP, **TIS)
    stopped = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
    gradient = float(_gradient(loss.loss_T, theta))
    assert gradient == pytest.approx(0.0 if stopped else -advantage * ratio)
    assert bool(loss.clipped_T) == stopped


def test_the_clip_range_is_not_symmetric() -> None:
    theta = torch.tensor([1.25, 1.29], dtype=torch.float64).log().requires_grad_()
    zeros, ones = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    loss = three_policy_loss(theta, zeros, zeros, ones, ones.bool(), **CLIP, **TIS)
    assert loss.clipped_T.tolist() == [False, True]


def _bandit() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of pi and mu over 27 actions, and a reward for each."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(27, generator=generator, dtype=torch.float64)
    other = logits + 0.7 * torch.randn(27, generator=generator, dtype=torch.float64)
    return logits, other, torch.rand(27, generator=generator, dtype=torch.float64)


def _expected_gradient(high: float) -> Tensor:
    """Gradient of the expected loss under mu, by enumeration."""
    logits, other, rewards = _bandit()
    logits = logits.requires_grad_()
    log_pi, log_mu = logits.log_softmax(-1), other.log_softmax(-1)
    mask = torch.ones(27, dtype=torch.bool)
    loss = three_policy_loss(log_pi, log_pi.detach(), log_mu, rewards, mask, **CLIP, tis_low=0.0, tis_high=high)
    return torch.autograd.grad((log_mu.exp() * loss.loss_T).sum(), logits)[0]


def test_untruncated_weights_give_the_true_gradient_and_truncation_a_bounded_bias() -> None:
    logits, other, rewards = _bandit()
    pi, mu = logits.softmax(-1), other.softmax(-1)
    logits = logits.requires_grad_()
    true = torch.autograd.grad(-(logits.softmax(-1) * rewards).sum(), logits)[0]
    torch.testing.assert_close(_expected_gradient(float("inf")), true)
    score_norm = (torch.eye(27, dtype=torch.float64) - pi).norm(dim=-1)
    bounds = []
    for high in (0.5, 1.0, 1.5, 2.0, float((pi / mu).max()) + 1e-9):
        weights = truncated_weights(pi.log(), mu.log(), torch.ones(27, dtype=torch.bool), low=0.0, high=high).weight_T
        assert float((mu * weights).sum()) <= 1 + 1e-12
        bounds.append(float((mu * (pi / mu - high).clamp(min=0) * rewards * score_norm).sum()))
        assert float((_expected_gradient(high) - true).norm()) <= bounds[-1] + 1e-12
    assert bounds == sorted(bounds, reverse=True) and bounds[-1] == 0
    assert float((_expected_gradient(1.0) - true).norm()) > 1e-3


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["theta", "old", "mu", "advantages"])
def test_what_is_masked_has_exactly_no_gradient_whatever_stands_there(poison: float, field: str) -> None:
    c = _case()
    clean = {name: value.detach().clone() for name, value in c.items()}
    clean[field][~c["mask"]] = poison
    clean["theta"].requires_grad_()
    losses = (
        _three(clean),
        two_policy_loss(clean["theta"], clean["mu"], clean["advantages"], clean["mask"], **CLIP),
        uncorrected_loss(clean["theta"], clean["advantages"], clean["mask"]),
    )
    for loss in losses:
        total = token_mean(loss.loss_T, clean["mask"], 10)
        (gradient,) = torch.autograd.grad(total, clean["theta"])
        assert bool(torch.isfinite(total)) and bool(torch.isfinite(gradient).all())
        assert bool((gradient[~c["mask"]] == 0).all()) and bool((gradient[c["mask"]] != 0).any())


def test_log_ratios_are_clamped_so_that_weights_stay_finite() -> None:
    theta, mu = torch.tensor([-1.0], requires_grad=True), torch.tensor([-1e6])
    loss = two_policy_loss(theta, mu, torch.tensor([-1.0]), torch.tensor([True]), **CLIP)
    assert loss.loss_T.item() == pytest.approx(torch.tensor(DELTA_BOUND).exp().item(), rel=1e-5)


@settings(deadline=None)
@given(seed=st.integers(0, 50), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_the_mean_does_not_depend_on_order_padding_or_split(seed: int, cuts: list[int]) -> None:
    c = _case(seed)
    values, mask = _three(c).loss_T.detach(), c["mask"]
    whole = token_mean(values, mask, 29)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(token_mean(values[order], mask[order], 29), whole)
    bounds = [0, *sorted(cuts), 40]
    parts = [token_mean(values[a:b], mask[a:b], 29) for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    padded = torch.cat([values, torch.full((5,), float("nan"))])
    torch.testing.assert_close(token_mean(padded, torch.cat([mask, torch.zeros(5, dtype=torch.bool)]), 29), whole)


def test_rejection_shrinks_the_mean_and_does_not_renormalise() -> None:
    values, mask = torch.ones(10), torch.ones(10, dtype=torch.bool)
    mask[:4] = False
    assert float(token_mean(values, mask, 10)) == pytest.approx(0.6)
