"""Value functions on packed rows: against the definitions sample by sample, and V-trace's fixed point over all
responses of a policy.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.enumerated import MASK_T, PREFIXES, RESPONSES, SAMPLE_T, STEPS, VOCABULARY, Policy, per_token
from tidemill.learner.algorithms.gae_vtrace import (
    gae,
    recurrence,
    terminal_rewards,
    value_clipped,
    value_loss,
    vtrace,
)
from tidemill.learner.algorithms.token_returns import returns_to_go


def _close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def _tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Step:
    """One trainable token, with the quantities of its sample at that token."""

    reward: float
    value: float
    log_ratio: float
    place: int
    """Position in the row."""


@dataclass(frozen=True)
class Row:
    """Samples behind one another, with NaN and infinity wherever a token is masked."""

    rewards_T: Tensor
    values_T: Tensor
    log_ratio_T: Tensor
    mask_T: Tensor
    sample_T: Tensor

    @property
    def place(self) -> tuple[Tensor, Tensor]:
        return self.mask_T, self.sample_T

    def samples(self) -> list[list[Step]]:
        found: dict[int, list[Step]] = {}
        for at in range(len(self.mask_T)):
            if self.mask_T[at]:
                step = Step(float(self.rewards_T[at]), float(self.values_T[at]), float(self.log_ratio_T[at]), at)
                found.setdefault(int(self.sample_T[at]), []).append(step)
        return list(found.values())

    def spread(self, by_place: dict[int, float]) -> Tensor:
        return _tensor([by_place.get(at, 0.0) for at in range(len(self.mask_T))])

    def at(self, chosen_T: Tensor) -> "Row":
        return Row(
            self.rewards_T[chosen_T],
            self.values_T[chosen_T],
            self.log_ratio_T[chosen_T],
            self.mask_T[chosen_T],
            self.sample_T[chosen_T],
        )


@st.composite
def _rows(draw: st.DrawFn) -> Row:
    lengths = draw(st.lists(st.integers(1, 7), max_size=5))
    padding = draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    total = sum(lengths) + padding
    sample_T = torch.tensor(
        [9 - number for number, length in enumerate(lengths) for _ in range(length)] + [-1] * padding, dtype=torch.int64
    )
    mask_T = (torch.rand(total, generator=generator) < 0.7) & (sample_T >= 0)
    columns = torch.randn(3, total, generator=generator, dtype=torch.float64)
    rewards_T, values_T, log_ratio_T = torch.where(mask_T, columns, torch.tensor([[math.nan], [math.inf], [-math.inf]]))
    return Row(rewards_T, values_T, log_ratio_T, mask_T, sample_T)


SHARES = st.sampled_from([0.0, 0.3, 0.95, 1.0])


def _errors(sample: list[Step], gamma: float) -> list[float]:
    """Return r_t + gamma V_{t+1} - V_t."""
    values = [step.value for step in sample] + [0.0]
    return [step.reward + gamma * values[t + 1] - values[t] for t, step in enumerate(sample)]


# ---- the recurrence


@settings(deadline=None)
@given(size=st.integers(0, 40), seed=st.integers(0, 1000))
def test_the_recurrence_is_the_loop_backwards(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    terms = torch.randn(size, generator=generator, dtype=torch.float64)
    factors = torch.rand(size, generator=generator, dtype=torch.float64) * (torch.rand(size, generator=generator) < 0.9)
    wanted, after = [], 0.0
    for term, factor in zip(terms.flip(0).tolist(), factors.flip(0).tolist(), strict=True):
        after = term + factor * after
        wanted.append(after)
    _close(recurrence(terms, factors), _tensor(wanted[::-1]))


def test_a_factor_of_zero_stops_nan_and_infinity() -> None:
    got = recurrence(_tensor([1, 2, math.nan, 5, math.inf]), _tensor([1, 0, 0, 0, 1]))
    assert torch.equal(got.nan_to_num(nan=-1), _tensor([3, 2, -1, 5, math.inf]).nan_to_num())


# ---- GAE


@settings(deadline=None)
@given(row=_rows(), gamma=SHARES, lam=SHARES)
def test_gae_is_the_sum_of_discounted_errors_of_its_own_sample(row: Row, gamma: float, lam: float) -> None:
    """Masked tokens are skipped without discount, whatever value is at their place."""
    wanted: dict[int, float] = {}
    for sample in row.samples():
        errors = _errors(sample, gamma)
        for t, step in enumerate(sample):
            wanted[step.place] = math.fsum((gamma * lam) ** k * error for k, error in enumerate(errors[t:]))
    advantages, returns = gae(row.rewards_T, row.values_T, *row.place, gamma=gamma, lam=lam)
    _close(advantages, row.spread(wanted))
    _close(returns, torch.where(row.mask_T, row.spread(wanted) + row.values_T, 0.0))


@settings(deadline=None)
@given(row=_rows(), gamma=SHARES)
def test_gae_ends_at_the_return_less_the_value_and_at_the_error_of_one_step(row: Row, gamma: float) -> None:
    """Property 45: lam = 1 and lam = 0."""
    whole = returns_to_go(row.rewards_T, row.sample_T, gamma=gamma, mask_T=row.mask_T)
    advantages, returns = gae(row.rewards_T, row.values_T, *row.place, gamma=gamma, lam=1.0)
    _close(advantages, torch.where(row.mask_T, whole - row.values_T, 0.0))
    _close(returns, whole)
    errors = {
        step.place: error
        for sample in row.samples()
        for step, error in zip(sample, _errors(sample, gamma), strict=True)
    }
    _close(gae(row.rewards_T, row.values_T, *row.place, gamma=gamma, lam=0.0)[0], row.spread(errors))


@settings(deadline=None)
@given(row=_rows())
def test_a_reward_at_the_end_reaches_every_token_unchanged(row: Row) -> None:
    """Property 45: gamma = lam = 1, whatever the values."""
    rewards_N = torch.arange(10, dtype=torch.float64) + 0.5
    wanted = torch.where(row.mask_T, rewards_N[row.sample_T.clamp(min=0)], 0.0)
    terminal_T = terminal_rewards(rewards_N, *row.place)
    _close(gae(terminal_T, row.values_T, *row.place, gamma=1.0, lam=1.0)[1], wanted)
    assert int((terminal_T != 0).sum()) == len(row.samples())


# ---- V-trace

BOUNDS = st.sampled_from([(1.0, 1.0), (2.0, 1.0), (1e9, 0.7), (0.8, 0.4)])


@settings(deadline=None)
@given(row=_rows(), gamma=SHARES, lam=SHARES, bounds=BOUNDS)
def test_vtrace_is_its_definition(row: Row, gamma: float, lam: float, bounds: tuple[float, float]) -> None:
    """v_s = V_s + sum_t gamma^(t - s) (product of c from s to t - 1) rho_t error_t. Source: remark 1 of the paper."""
    rho, c = bounds
    targets: dict[int, float] = {}
    for sample in row.samples():
        errors = _errors(sample, gamma)
        weights = [math.exp(step.log_ratio) for step in sample]
        v = [
            sample[s].value
            + math.fsum(
                gamma ** (t - s) * math.prod(lam * min(c, w) for w in weights[s:t]) * min(rho, weights[t]) * errors[t]
                for t in range(s, len(sample))
            )
            for s in range(len(sample))
        ]
        for s, step in enumerate(sample):
            targets[step.place] = v[s]
    got = vtrace(row.log_ratio_T, row.rewards_T, row.values_T, *row.place, gamma=gamma, lam=lam, rho=rho, c=c)
    _close(got, row.spread(targets))


@settings(deadline=None)
@given(row=_rows(), gamma=SHARES)
def test_vtrace_on_policy_is_the_discounted_return(row: Row, gamma: float) -> None:
    """Property 46: the n-step return to the end."""
    got = vtrace(torch.zeros_like(row.rewards_T), row.rewards_T, row.values_T, *row.place, gamma=gamma)
    _close(got, returns_to_go(row.rewards_T, row.sample_T, gamma=gamma, mask_T=row.mask_T))


@settings(deadline=None)
@given(row=_rows())
def test_vtrace_relies_on_the_values_where_the_weights_vanish(row: Row) -> None:
    """Property 46."""
    for log_weight in (-60.0, -math.inf):
        got = vtrace(torch.full_like(row.rewards_T, log_weight), row.rewards_T, row.values_T, *row.place, gamma=0.9)
        _close(got, torch.where(row.mask_T, row.values_T, 0.0))


PREFIX_T = torch.tensor([PREFIXES.index(response[:step]) for response in RESPONSES for step in range(STEPS)])


class Tree:
    """All responses of two policies, with a reward and a value after every prefix."""

    def __init__(self) -> None:
        self.mu, self.pi = Policy.random(11), Policy.random(12)
        self.rewards_PV = Policy.random(13).logits_PV
        self.rewards_T = self.rewards_PV[PREFIX_T, torch.tensor(RESPONSES).reshape(-1)]
        self.log_ratio_T = self.pi.log_probs_T - self.mu.log_probs_T
        self.p_T = per_token(self.mu.probabilities_N)

    def clipped(self, rho_bar: float) -> Tensor:
        """Return the policy proportional to min(rho_bar mu, pi), [13, 3]."""
        mu_PV, pi_PV = self.mu.logits_PV.softmax(-1), self.pi.logits_PV.softmax(-1)
        both_PV = torch.minimum(rho_bar * mu_PV, pi_PV)
        return both_PV / both_PV.sum(-1, keepdim=True)

    def value(self, policy_PV: Tensor, gamma: float) -> Tensor:
        """Return the value of every prefix, from the longest to the empty one, [13]."""
        values: dict[tuple[int, ...], float] = {}
        for number, prefix in reversed(list(enumerate(PREFIXES))):
            after = [values.get((*prefix, token), 0.0) for token in range(VOCABULARY)]
            values[prefix] = float((policy_PV[number] * (self.rewards_PV[number] + gamma * _tensor(after))).sum())
        return _tensor([values[prefix] for prefix in PREFIXES])

    def mean_target(self, values_P: Tensor, *, gamma: float, rho_bar: float, c_bar: float) -> Tensor:
        """Return the mean V-trace target of every prefix over data of mu, [13]."""
        bounds = {"gamma": gamma, "rho": rho_bar, "c": c_bar}
        got = vtrace(self.log_ratio_T, self.rewards_T, values_P[PREFIX_T], MASK_T, SAMPLE_T, **bounds)
        zeros_P = torch.zeros_like(values_P)
        return zeros_P.index_add(0, PREFIX_T, self.p_T * got) / zeros_P.index_add(0, PREFIX_T, self.p_T)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1e9, 1.0), (1.0, 1.0), (0.5, 0.3), (1.5, 0.1)])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_vtrace_comes_to_rest_at_the_value_of_the_clipped_policy(rho_bar: float, c_bar: float, gamma: float) -> None:
    """Property 46: the policy proportional to min(rho_bar mu, pi); that is pi itself without a bound."""
    tree = Tree()
    wanted = tree.value(tree.clipped(rho_bar), gamma)
    _close(tree.mean_target(wanted, gamma=gamma, rho_bar=rho_bar, c_bar=c_bar), wanted)
    values = torch.full_like(wanted, 5.0)
    for _ in range(150):
        values = tree.mean_target(values, gamma=gamma, rho_bar=rho_bar, c_bar=c_bar)
    _close(values, wanted)
    assert rho_bar > 1e8 or float((wanted - tree.value(tree.pi.logits_PV.softmax(-1), gamma)).abs().max()) > 0.01


# ---- both


def _estimates(row: Row) -> list[Tensor]:
    targets_T = vtrace(row.log_ratio_T, row.rewards_T, row.values_T, *row.place, gamma=0.9, lam=0.8, rho=2.0)
    return [*gae(row.rewards_T, row.values_T, *row.place, gamma=0.9, lam=0.8), targets_T]


@settings(deadline=None)
@given(row=_rows())
def test_a_sample_is_the_same_alone_and_among_others_even_broken_ones(row: Row) -> None:
    for sample in row.sample_T.unique():
        mine_T = row.sample_T == sample
        broken = Row(
            torch.where(mine_T, row.rewards_T, math.nan), row.values_T, row.log_ratio_T, row.mask_T, row.sample_T
        )
        for alone, among in zip(_estimates(row.at(mine_T)), _estimates(broken), strict=True):
            _close(among[mine_T], alone)


def test_estimates_are_detached_and_keep_their_dtype() -> None:
    values_T = torch.tensor([0.5, 1.0], requires_grad=True)
    row = Row(
        torch.ones(2),
        values_T,
        torch.zeros(2, requires_grad=True),
        torch.ones(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.int64),
    )
    for estimate in _estimates(row):
        assert not estimate.requires_grad and estimate.dtype == torch.float32


# ---- the loss of the value function

NUMBERS = st.floats(-5, 5).map(lambda value: round(value, 2))
TRIPLES = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8)


@settings(deadline=None)
@given(triples=TRIPLES, clip=st.sampled_from([0.205, 1.005, math.inf]))
def test_the_value_clip_is_pessimistic_and_stops_only_what_has_gone_far_enough(
    triples: list[tuple[float, float, float]], clip: float
) -> None:
    """Property 58. Clip bounds never fall on the grid of the values."""
    values, old, returns = (_tensor([triple[part] for triple in triples]).requires_grad_() for part in range(3))
    mask = torch.ones(len(triples), dtype=torch.bool)
    loss = value_loss(values, old, returns, mask, clip=clip)
    assert bool((loss >= (values - returns).square() / 2).all())
    loss.sum().backward()
    assert values.grad is not None and old.grad is None and returns.grad is None
    clipped = value_clipped(values, old, returns, mask, clip=clip)
    for at, (value, before, wanted) in enumerate(triples):
        held = min(max(value, before - clip), before + clip)
        worst = held if abs(held - wanted) > abs(value - wanted) else value
        assert float(loss.detach()[at]) == pytest.approx((worst - wanted) ** 2 / 2, abs=1e-12)
        gone_far_enough = abs(value - before) > clip and abs(held - wanted) > abs(value - wanted)
        assert bool(clipped[at]) == gone_far_enough
        assert float(values.grad[at]) == pytest.approx(0.0 if gone_far_enough else value - wanted, abs=1e-12)


def test_a_value_at_the_bound_or_as_far_from_its_return_as_the_held_one_keeps_its_gradient() -> None:
    values, old, returns = _tensor([1.5, 2.0]).requires_grad_(), _tensor([1.0, 0.5]), _tensor([0.0, 1.5])
    mask = torch.ones(2, dtype=torch.bool)
    value_loss(values, old, returns, mask, clip=0.5).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1.5, 0.5]
    assert not value_clipped(values, old, returns, mask, clip=0.5).any()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_masked_value_has_no_loss_and_no_gradient(broken: float) -> None:
    values = _tensor([1.0, broken]).requires_grad_()
    others, mask = _tensor([3.0, broken]), torch.tensor([True, False])
    loss = value_loss(values, others, others, mask, clip=0.2)
    loss.sum().backward()
    assert values.grad is not None
    assert loss.tolist() == [2.0, 0.0] and values.grad.tolist() == [-2.0, 0.0]
    assert value_clipped(values, others, others, mask, clip=0.2).tolist() == [False, False]


# ---- rewards of tokens


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=6), max_size=5),
    padding=st.integers(0, 3),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_returns_to_go_are_the_loop_within_each_sample(
    rows: list[list[tuple[float, bool]]], padding: int, gamma: float
) -> None:
    wanted: list[float] = []
    for row in rows:
        there = [kept for _, kept in row]
        for at in range(len(row)):
            later = [reward for (reward, _), kept in zip(row[at:], there[at:], strict=True) if kept]
            wanted.append(math.fsum(gamma**k * reward for k, reward in enumerate(later)) if there[at] else 0.0)
    rewards = [reward if kept else math.nan for row in rows for reward, kept in row] + [math.nan] * padding
    sample_T = torch.tensor(
        [number for number, row in enumerate(rows) for _ in row] + [-1] * padding, dtype=torch.int64
    )
    mask_T = torch.tensor([kept for row in rows for _, kept in row] + [True] * padding, dtype=torch.bool)
    got = returns_to_go(torch.tensor(rewards, dtype=torch.float64), sample_T, gamma=gamma, mask_T=mask_T)
    _close(got, torch.tensor(wanted + [0.0] * padding, dtype=torch.float64))
