"""Divergences from a reference: exact expectations and gradients over all sequences of a small policy, in float64.

The policy is a tree: 3 tokens, 3 steps, 27 sequences. Two ways to see them as tokens of a row: "sequence" (each one
action, with its summed log-prob) and "token" (81 tokens; a token's divergence is that given its prefix, and prefixes
have no gradient).
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.refusals import refusal
from tidemill.learner.algorithms.choices import KL_ESTIMATORS
from tidemill.learner.algorithms.kl import (
    ESTIMATORS,
    LOW_VAR_BOUND,
    corrected_kl,
    counted_samples,
    kl_T,
    next_coefficient,
)

LEVELS = ("sequence", "token")
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: (-x).exp() - 1 + x,
    "low_var_kl": lambda x: ((-x).exp() - 1 + x).clamp(-10, 10),
    "k1+": lambda x: x,
    "k3+": lambda x: (-x).exp() - 1 + x,
}


@dataclass(frozen=True)
class Tree:
    """Policy with its own distribution for each of the 1 + 3 + 9 prefixes."""

    logits: Tensor
    """[13, 3], prefixes in order of depth."""

    def conditionals(self) -> list[Tensor]:
        """Return the log-probs of the next token by depth, [prefixes, 3]."""
        return list(self.logits.log_softmax(-1).split([1, 3, 9]))

    def log_probs(self, level: str) -> Tensor:
        """Return the log-probs of the sampled actions, [27] or [27 * 3]."""
        at = torch.arange(27)
        steps = torch.stack(
            [part.reshape(-1)[at // 3 ** (2 - depth)] for depth, part in enumerate(self.conditionals())], dim=-1
        )
        return steps.sum(-1) if level == "sequence" else steps.reshape(-1)

    def weights(self, level: str) -> Tensor:
        """Return the probability that a token of ``log_probs`` is reached."""
        weights = self.log_probs("sequence").detach().exp()
        return weights if level == "sequence" else weights.repeat_interleave(3)

    def expectation(self, value: Callable[[Tensor], Tensor], other: "Tree", prefixes: "Tree", level: str) -> Tensor:
        """Return ``E_self[value(log self - log other)]`` with the gradient of the distribution too; prefixes are those
        of ``prefixes``.
        """
        if level == "sequence":
            here, there = self.log_probs(level), other.log_probs(level)
            return (here.exp() * value(here - there)).sum()
        total, reach = torch.zeros((), dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        for here, there, given_ in zip(self.conditionals(), other.conditionals(), prefixes.conditionals(), strict=True):
            total = total + (reach[:, None] * here.exp() * value(here - there)).sum()
            reach = (reach[:, None] * given_.detach().exp()).reshape(-1)
        return total


@dataclass(frozen=True)
class Case:
    pi: Tree
    ref: Tree
    mu: Tree
    level: str

    def gradient(self, number: Tensor) -> Tensor:
        return torch.autograd.grad(number, self.pi.logits)[0]

    def divergence(self, prefixes: Tree) -> Tensor:
        """KL(pi || ref)."""
        return self.pi.expectation(VALUES["k1"], self.ref, prefixes, self.level)

    def reverse(self, prefixes: Tree) -> Tensor:
        """KL(ref || pi)."""
        return self.ref.expectation(VALUES["k1"], self.pi, prefixes, self.level)

    def mean(self, estimator: str, sampler: Tree) -> Tensor:
        """Return the expectation of ``kl_T`` under a sampler without gradient."""
        return (sampler.weights(self.level) * self.estimate(estimator)).sum()

    def estimate(self, estimator: str) -> Tensor:
        log_probs_T = self.pi.log_probs(self.level)
        return kl_T(
            log_probs_T, self.ref.log_probs(self.level), torch.ones_like(log_probs_T).bool(), estimator=estimator
        )

    def corrected_mean(self, estimator: str, sampler: Tree) -> Tensor:
        log_probs_T = self.pi.log_probs(self.level)
        places = (self.ref.log_probs(self.level), sampler.log_probs(self.level), torch.ones_like(log_probs_T).bool())
        return (sampler.weights(self.level) * corrected_kl(log_probs_T, *places, estimator=estimator)).sum()


def _case(level: str, seed: int = 1) -> Case:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(13, 3, generator=generator, dtype=torch.float64)  # noqa: E731
    logits = draw()
    ref, mu = logits + 0.5 * draw(), logits + 0.5 * draw()
    return Case(Tree(logits.requires_grad_()), Tree(ref.detach()), Tree(mu.detach()), level)


def _same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def _apart(got: Tensor, other: Tensor) -> None:
    assert float((got - other).detach().norm()) > 1e-3


def _of(x: Tensor, estimator: str) -> Tensor:
    return kl_T(x, torch.zeros_like(x), torch.ones_like(x).bool(), estimator=estimator)


def test_names_are_those_of_the_config() -> None:
    assert tuple(ESTIMATORS) == KL_ESTIMATORS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None)
@given(x=st.floats(-19, 19, width=32) | st.floats(-(2**-10), 2**-10, width=32))
def test_k3_is_not_negative_and_close_to_k2(dtype: torch.dtype, x: float) -> None:
    at = torch.tensor([x], dtype=dtype)
    k1, k2, k3, low_var = (float(_of(at, name)) for name in ("k1", "k2", "k3", "low_var_kl"))
    rounding = 4 * torch.finfo(dtype).eps * (abs(x) + k3)
    assert k1 == x and k3 >= 0 and k2 == pytest.approx(x * x / 2)
    assert abs(k3 - k2) <= abs(x) ** 3 * math.exp(abs(x)) / 6 + rounding
    assert low_var == min(k3, LOW_VAR_BOUND)


def test_small_divergences_survive_single_precision() -> None:
    x = torch.tensor([0.0, 1e-3, -1e-3, 1e-5])
    torch.testing.assert_close(_of(x, "k3").double(), VALUES["k2"](x.double()), rtol=2e-3, atol=0)
    assert bool((_of(x, "k1")[2:3] < 0).all())


@pytest.mark.parametrize("level", LEVELS)
def test_means_on_policy(level: str) -> None:
    case = _case(level)
    true = case.divergence(case.pi)
    _same(true, _case("sequence").divergence(case.pi))
    for name in ("k1", "k3", "k1+", "k3+"):
        _same(case.mean(name, case.pi), true)
    _apart(case.mean("k2", case.pi), true)
    x_T = case.pi.log_probs(level) - case.ref.log_probs(level)
    for name, value in VALUES.items():
        _same(case.estimate(name), value(x_T))


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_on_policy(level: str) -> None:
    case = _case(level)
    forward, reverse = case.gradient(case.divergence(case.pi)), case.gradient(case.reverse(case.pi))
    _apart(forward, reverse)
    got = {name: case.gradient(case.mean(name, case.pi)) for name in ESTIMATORS}
    _same(got["k1"], torch.zeros_like(forward))
    for name in ("k2", "k1+", "k3+"):
        _same(got[name], forward)
    for name in ("k3", "low_var_kl"):
        _same(got[name], reverse)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_corrected_is_exact_off_policy(level: str, estimator: str) -> None:
    case = _case(level)
    got = case.corrected_mean(estimator, case.mu)
    wanted = case.pi.expectation(VALUES[estimator], case.ref, case.mu, level)
    _same(got, wanted)
    _same(case.gradient(got), case.gradient(wanted))
    _apart(case.mean(estimator, case.mu), wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_corrected_has_the_gradient_of_the_divergence(level: str, estimator: str) -> None:
    case = _case(level)
    true = case.gradient(case.divergence(case.mu))
    _same(case.gradient(case.corrected_mean(estimator, case.mu)), true)
    on_policy = Tree(case.pi.logits.detach())
    _same(case.gradient(case.corrected_mean(estimator, on_policy)), case.gradient(case.divergence(case.pi)))
    ratio_T = (case.pi.log_probs(level) - case.mu.log_probs(level)).exp().detach()
    detached = case.gradient((case.mu.weights(level) * ratio_T * case.estimate(estimator)).sum())
    if estimator in ("k1", "k3"):
        _apart(detached, true)
    if estimator == "k3":
        _same(detached, case.gradient(case.reverse(case.mu)))


def test_token_by_token_is_not_the_divergence_of_sequences_of_another_policy() -> None:
    """The correction leaves the prefixes of mu."""
    case = _case("token")
    _apart(case.corrected_mean("k3", case.mu), _case("sequence").divergence(case.pi))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_extreme_inputs_stay_finite(estimator: str, dtype: torch.dtype) -> None:
    extremes = [0.0, -1e-30, -30.0, -1e6, -1e38, -math.inf]
    triples = [three for three in itertools.product(extremes, repeat=3) if math.isfinite(three[0])]
    columns = torch.tensor(triples, dtype=dtype).T
    theta_T, ref_T, mu_T = columns[0].clone().requires_grad_(), columns[1], columns[2]
    mask_T = torch.ones_like(ref_T).bool()
    for made_T in (
        kl_T(theta_T, ref_T, mask_T, estimator=estimator),
        corrected_kl(theta_T, ref_T, mu_T, mask_T, estimator=estimator),
    ):
        (gradient_T,) = torch.autograd.grad(made_T.sum(), theta_T)
        assert bool(torch.isfinite(made_T).all()) and bool(torch.isfinite(gradient_T).all())
    at_minus_infinity = kl_T(torch.tensor([-math.inf]), torch.tensor([-1.0]), torch.tensor([True]), estimator=estimator)
    assert bool(torch.isfinite(at_minus_infinity))
    if estimator == "low_var_kl":
        assert float(at_minus_infinity) == LOW_VAR_BOUND


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_is_masked_has_exactly_no_gradient_whatever_stands_there(estimator: str, poison: float) -> None:
    generator = torch.Generator().manual_seed(2)
    mask_T = torch.tensor([True, False, True, False])
    for field in range(3):
        fields = [-torch.rand(4, generator=generator) - 0.1 * place for place in range(3)]
        fields[field][~mask_T] = poison
        theta_T, ref_T, mu_T = fields[0].requires_grad_(), fields[1], fields[2]
        plain_T = kl_T(theta_T, ref_T, mask_T, estimator=estimator)
        for made_T in (plain_T, corrected_kl(theta_T, ref_T, mu_T, mask_T, estimator=estimator)):
            (gradient_T,) = torch.autograd.grad(made_T.sum(), theta_T)
            assert bool((made_T[~mask_T] == 0).all()) and bool((gradient_T[~mask_T] == 0).all())
            assert bool((gradient_T[mask_T] != 0).all())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_reference_and_behaviour_get_no_gradient(estimator: str) -> None:
    theta_T, ref_T, mu_T = (torch.tensor([-value], requires_grad=True) for value in (1.0, 1.2, 0.7))
    corrected_kl(theta_T, ref_T, mu_T, torch.tensor([True]), estimator=estimator).sum().backward()  # type: ignore[no-untyped-call]
    assert theta_T.grad is not None and ref_T.grad is None and mu_T.grad is None


@pytest.mark.parametrize(
    ("kl", "wanted"),
    [
        (0.1, 1.0),
        (0.11, 1.01),
        (0.09, 0.99),
        (0.12, 1.02),
        (5.0, 1.02),
        (0.08, 0.98),
        (-3.0, 0.98),
        (math.nan, 1.0),
        (math.inf, 1.0),
    ],
)
def test_the_coefficient_moves_towards_the_target(kl: float, wanted: float) -> None:
    got = next_coefficient(0.5, kl, target=0.1, horizon=10_000, num_samples=1000)
    assert got == pytest.approx(0.5 * wanted, rel=1e-12)


def test_a_coefficient_that_could_turn_its_sign_is_refused() -> None:
    with refusal(ValueError, place="horizon"):
        next_coefficient(0.5, 0.1, target=0.1, horizon=200, num_samples=1000)
    assert next_coefficient(0.5, 0.0, target=0.1, horizon=201, num_samples=1000) > 0
    with refusal(ValueError, place="target"):
        next_coefficient(0.5, 0.1, target=0.0, horizon=10_000, num_samples=1000)


def test_a_step_of_any_size_takes_99_percent_of_a_coefficient_at_most() -> None:
    assert counted_samples(5, 200) == 5
    left = next_coefficient(1.0, 0.0, target=0.1, horizon=200, num_samples=counted_samples(10**6, 200))
    assert left == pytest.approx(0.01)
