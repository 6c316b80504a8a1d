"""Aggregation of token losses: against a loop, under any order and split, with rejection, and in the first step."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithm_settings import loss_by
from tests.examples import examples
from tests.refusals import refusal
from tidemill.learner.algorithms.aggregation import Denominators, Supervised, aggregate, coefficients, sft_loss
from tidemill.learner.algorithms.choices import AGGREGATIONS

CONSTANT = 7.5
DIVIDED = [mode for mode in AGGREGATIONS if mode != "token_sum"]
"""Modes with a denominator."""


def _close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tokens of all samples in one row."""

    values_T: Tensor
    mask_T: Tensor
    sample_T: Tensor
    denominators: Denominators

    def number(self, mode: str) -> Tensor:
        return aggregate(self.values_T, self.mask_T, self.sample_T, self.denominators, mode=mode)

    def at(self, index: Tensor) -> "Step":
        """Return the same step's tokens at some places of the row."""
        return replace(self, values_T=self.values_T[index], mask_T=self.mask_T[index], sample_T=self.sample_T[index])


def _denominators(mask_T: Tensor, sample_T: Tensor, num_samples: int, constant: float = CONSTANT) -> Denominators:
    trainable_N = torch.bincount(sample_T[mask_T], minlength=num_samples)
    return Denominators(
        tokens=int(mask_T.sum()),
        sequences=int((trainable_N > 0).sum()),
        trainable_N=trainable_N,
        constant=constant,
        groups_N=100 - torch.arange(num_samples) // 2,
    )


def _step(lengths: list[int], seed: int = 0, masked_share: float = 0.3) -> Step:
    generator = torch.Generator().manual_seed(seed)
    sample_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask_T = torch.rand(len(sample_T), generator=generator) >= masked_share
    values_T = torch.randn(len(sample_T), generator=generator, dtype=torch.float64)
    return Step(
        values_T=values_T, mask_T=mask_T, sample_T=sample_T, denominators=_denominators(mask_T, sample_T, len(lengths))
    )


def _loop(step: Step, mode: str) -> float:
    """Compute the definitions, sample by sample."""
    samples: list[list[float]] = [[] for _ in step.denominators.trainable_N]
    for value, kept, sample in zip(step.values_T.tolist(), step.mask_T.tolist(), step.sample_T.tolist(), strict=True):
        if kept:
            samples[sample].append(value)
    pairs = [
        [value for sample in samples[first : first + 2] for value in sample] for first in range(0, len(samples), 2)
    ]
    samples = [sample for sample in samples if sample]
    if mode == "token_sum":
        return sum(map(sum, samples))
    if mode == "prompt_mean":
        means = [sum(pair) / len(pair) for pair in pairs if pair]
        return sum(means) / max(1, len(means))
    if mode == "token_mean":
        return sum(map(sum, samples)) / max(1, sum(map(len, samples)))
    each = {
        "seq_mean_token_mean": lambda sample: sum(sample) / len(sample),
        "seq_mean_token_sum": sum,
        "constant": lambda sample: sum(sample) / CONSTANT,
    }[mode]
    return sum(map(each, samples)) / max(1, len(samples))


LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(deadline=None, max_examples=examples(50))
@given(lengths=LENGTHS, seed=st.integers(0, 1000), masked=st.sampled_from([0.0, 0.4, 0.9, 1.0]))
def test_the_number_is_the_definition(mode: str, lengths: list[int], seed: int, masked: float) -> None:
    step = _step(lengths, seed, masked)
    assert float(step.number(mode)) == pytest.approx(_loop(step, mode), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(deadline=None, max_examples=examples(50))
@given(lengths=LENGTHS, seed=st.integers(0, 1000), data=st.data())
def test_order_padding_and_split_change_nothing(mode: str, lengths: list[int], seed: int, data: st.DataObject) -> None:
    """A part is a micro-batch, a rank, or a rank's piece of a sample; parts are summed. Sample ids are arbitrary
    too.
    """
    step = _step(lengths, seed)
    whole, num_tokens, num_samples = step.number(mode), len(step.values_T), len(lengths)
    generator = torch.Generator().manual_seed(seed)
    moved = step.at(torch.randperm(num_tokens, generator=generator))
    renamed_N = torch.randperm(num_samples, generator=generator)
    trainable_N = torch.zeros_like(step.denominators.trainable_N).index_copy(
        0, renamed_N, step.denominators.trainable_N
    )
    groups = step.denominators.groups_N
    assert groups is not None
    groups_N = torch.zeros_like(groups).index_copy(0, renamed_N, groups)
    denominators = replace(step.denominators, trainable_N=trainable_N, groups_N=groups_N)
    renamed = replace(moved, sample_T=renamed_N[moved.sample_T], denominators=denominators)
    _close(renamed.number(mode), whole)
    part_T = torch.tensor(
        data.draw(st.lists(st.integers(0, 3), min_size=num_tokens, max_size=num_tokens)), dtype=torch.int64
    )
    parts = [_padded(step.at((part_T == part).nonzero()[:, 0])) for part in range(4)]
    _close(torch.stack([part.number(mode) for part in parts]).sum(), whole)


def _padded(step: Step) -> Step:
    """Append padding: of no sample, not trainable, and NaN."""
    return replace(
        step,
        values_T=torch.cat([step.values_T, torch.full((3,), math.nan, dtype=torch.float64)]),
        mask_T=torch.cat([step.mask_T, torch.zeros(3, dtype=torch.bool)]),
        sample_T=torch.cat([step.sample_T, torch.tensor([-1, 10**6, -1])]),
    )


@pytest.mark.parametrize("mode", DIVIDED)
def test_denominators_of_a_part_would_depend_on_the_split(mode: str) -> None:
    step = _step([1, 5, 3], masked_share=0.0)
    parts = [step.at(step.sample_T == 0), step.at(step.sample_T > 0)]
    local = [replace(part, denominators=_denominators(part.mask_T, part.sample_T, 3)).number(mode) for part in parts]
    assert abs(float(torch.stack(local).mean() - step.number(mode))) > 1e-3
    _close(torch.stack([part.number(mode) for part in parts]).sum(), step.number(mode))


def test_modes_differ_by_a_factor_for_equal_lengths_and_by_more_otherwise() -> None:
    equal, other = _step([4, 4, 4], masked_share=0.0), _step([2, 6, 4], masked_share=0.0)
    mean = float(equal.number("token_mean"))
    assert float(equal.number("seq_mean_token_mean")) == pytest.approx(mean, rel=1e-12)
    assert float(equal.number("seq_mean_token_sum")) == pytest.approx(4 * mean, rel=1e-12)
    assert float(equal.number("constant")) == pytest.approx(4 / CONSTANT * mean, rel=1e-12)
    assert abs(float(other.number("token_mean") - other.number("seq_mean_token_mean"))) > 1e-3
    # of the mean length 4, for any lengths
    assert float(other.number("seq_mean_token_sum")) == pytest.approx(4 * float(other.number("token_mean")), rel=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_masked_has_exactly_no_gradient_whatever_stands_there(mode: str, poison: float) -> None:
    step = _step([3, 4, 2])
    values_T = torch.where(step.mask_T, step.values_T, poison).requires_grad_()
    mask_T, log_probs_T = step.mask_T, values_T
    number = (
        replace(step, values_T=sft_loss(log_probs_T, mask_T)).number(mode)
        + replace(step, values_T=values_T).number(mode) * 3
    )
    (gradient_T,) = torch.autograd.grad(number, values_T)
    assert bool(torch.isfinite(number))
    assert bool((gradient_T[~mask_T] == 0).all()) and bool((gradient_T[mask_T] > 0).all())
    assert bool((sft_loss(log_probs_T, mask_T)[~mask_T] == 0).all())
    multiplied = (values_T * mask_T).sum()
    assert not bool(torch.isfinite(multiplied))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_gradient_is_the_coefficient(mode: str) -> None:
    step = _step([3, 4, 2, 5])
    values_T = step.values_T.clone().requires_grad_()
    (gradient_T,) = torch.autograd.grad(replace(step, values_T=values_T).number(mode), values_T)
    wanted_T = coefficients(mode, step.mask_T, step.sample_T, step.denominators)
    torch.testing.assert_close(gradient_T, wanted_T, rtol=0, atol=0)
    assert bool((wanted_T[~step.mask_T] == 0).all())


@pytest.mark.parametrize("mode", DIVIDED)
def test_rejection_shrinks_and_leaves_the_others_alone(mode: str) -> None:
    step = replace(_step([5, 5, 5, 5], masked_share=0.0), values_T=torch.ones(20, dtype=torch.float64))
    rejected_T = torch.zeros(20, dtype=torch.bool)
    rejected_T[[0, 1, 7, 15, 16, 17, 18, 19]] = True
    kept = replace(step, mask_T=step.mask_T & ~rejected_T)
    assert float(kept.number(mode)) == pytest.approx(0.6 * float(step.number(mode)), rel=1e-12)
    before_T = coefficients(mode, step.mask_T, step.sample_T, step.denominators)
    after_T = coefficients(mode, kept.mask_T, kept.sample_T, kept.denominators)
    torch.testing.assert_close(after_T, torch.where(rejected_T, 0.0, before_T), rtol=0, atol=0)
    renormalised = replace(kept, denominators=_denominators(kept.mask_T, kept.sample_T, 4))
    assert float(renormalised.number(mode)) > 1.1 * float(kept.number(mode))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_step_without_trainable_tokens_is_zero(mode: str) -> None:
    step = _step([3, 2], masked_share=1.0)
    values_T = torch.full((5,), math.nan, requires_grad=True)
    number = replace(step, values_T=values_T).number(mode)
    (gradient_T,) = torch.autograd.grad(number, values_T)
    assert number.item() == 0 and gradient_T.tolist() == [0] * 5


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_first_step_has_loss_zero_and_a_gradient(mode: str) -> None:
    """Advantages of mean 0, equal lengths, policy and anchor the same: the loss is minus the advantages' mean, nothing
    is clipped.
    """
    generator = torch.Generator().manual_seed(1)
    step = _step([6] * 4, masked_share=0.0)
    advantages_T = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)[step.sample_T]
    theta_T = (-torch.rand(24, generator=generator, dtype=torch.float64)).requires_grad_()
    made = loss_by("ppo", theta_T, theta_T.detach(), advantages_T, step.mask_T)
    number = replace(step, values_T=made.loss_T).number(mode)
    (gradient_T,) = torch.autograd.grad(number, theta_T)
    assert abs(number.item()) < 1e-12 and not bool(made.clipped_T.any())
    wanted_T = -advantages_T * coefficients(mode, step.mask_T, step.sample_T, step.denominators)
    _close(gradient_T, wanted_T)
    assert float(gradient_T.norm()) > 1e-2


def test_what_makes_no_sense_is_refused() -> None:
    step = _step([2, 2])
    with refusal(ValueError, place="aggregation", got="'mean'"):
        step.number("mean")
    none = replace(step, denominators=replace(step.denominators, constant=0.0))
    with refusal(ValueError, place="constant"):
        none.number("constant")
    assert math.isfinite(float(none.number("token_mean")))
    with refusal(ValueError, place="groups_N"):
        replace(step, denominators=replace(step.denominators, groups_N=None)).number("prompt_mean")


@pytest.mark.parametrize("mode", DIVIDED)
def test_a_token_missing_in_the_denominators_has_no_finite_loss(mode: str) -> None:
    step = _step([3, 2], masked_share=0.0)
    nothing = _denominators(torch.zeros_like(step.mask_T), step.sample_T, 2)
    assert not bool(torch.isfinite(replace(step, denominators=nothing).number(mode)))


def test_supervised_loss_is_the_cross_entropy() -> None:
    logits_TV = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target_T = torch.tensor([0, 3, 6, 2, 1])
    log_probs_T = logits_TV.log_softmax(-1).gather(-1, target_T[:, None])[:, 0]
    mask_T = torch.tensor([True, False, True, True, False])
    wanted_T = torch.nn.functional.cross_entropy(logits_TV, torch.where(mask_T, target_T, -100), reduction="none")
    _close(sft_loss(log_probs_T, mask_T), wanted_T)
    sample_T = torch.tensor([0, 0, 0, 1, 1])
    term = Supervised(coef=0.5, mode="token_mean", denominators=_denominators(mask_T, sample_T, 2))
    total, sums = term.term(log_probs_T, mask_T, sample_T)
    _close(total, 0.5 * wanted_T[mask_T].mean())
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {"sft_tokens": 3, "sft_loss": wanted_T.sum().item()}
    )
