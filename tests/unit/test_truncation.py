"""Overlong filtering: the batch is that of samples without trainable tokens, and rewards stay."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.learner_steps import make_batches, make_samples
from tidemill.bus.wire.messages import Status
from tidemill.learner.algorithms.choices import AGGREGATIONS
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.objective import Coupled, Objective
from tidemill.learner.batch.batch import StepBatch, without_truncated
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.rows import rows_of, step_of


def same(one: StepBatch, other: StepBatch, *, but: set[str]) -> None:
    for name in {field.name for field in fields(StepBatch)} - {"micro_batches"} - but:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    for row, wanted in zip(one.micro_batches, other.micro_batches, strict=True):
        for field in fields(wanted):
            np.testing.assert_array_equal(getattr(row, field.name), getattr(wanted, field.name), err_msg=field.name)


@pytest.mark.parametrize("cut", [(), (0, 5, 6), tuple(range(16))], ids=["none", "some", "all"])
def test_truncated_samples_are_as_if_they_had_no_trainable_token(cut: tuple[int, ...]) -> None:
    samples = make_samples(vocab=50)
    truncated = [replace(one, status=Status.TRUNCATED) if place in cut else one for place, one in enumerate(samples)]
    untrained = [
        replace(one, loss_mask=np.zeros_like(one.loss_mask)) if place in cut else one
        for place, one in enumerate(samples)
    ]
    for got, wanted in zip(
        make_batches(truncated, data_parallel=2, max_tokens=64),
        make_batches(untrained, data_parallel=2, max_tokens=64),
        strict=True,
    ):
        masked = without_truncated(got)
        same(masked, wanted, but={"truncated_N", "sampled_N"})
        np.testing.assert_array_equal(
            masked.sampled_N, got.sampled_N, err_msg="a penalty for length counts what was sampled"
        )
        assert masked.truncated_N.sum() == len(cut)
        assert got.num_tokens > wanted.num_tokens or not cut, "the batch that came in is left as it was"


def of_one_rank() -> Parallel:
    """Return a world of one process without process groups, which nothing here needs."""
    groups = dict.fromkeys(("dp_group", "tp_group", "pp_group", "cp_group"), None)
    ranks, sizes = (
        dict.fromkeys(("rank", "dp_rank", "tp_rank", "pp_rank", "cp_rank"), 0),
        {"edge_layers": (0, 0), "vp_size": 1},
    )
    sizes |= dict.fromkeys(("dp_size", "tp_size", "pp_size", "cp_size", "ep_size"), 1)
    return Parallel(**groups, **ranks, **sizes, device=torch.device("cpu"), sequence_parallel=False)  # type: ignore[arg-type]


def loss_of(batch: StepBatch, log_probs: list[Tensor], aggregation: str) -> tuple[float, list[Tensor]]:
    """Return the policy loss of a batch and its gradient by row. The advantage of a sample is its reward less 0.3."""
    objective = Objective(AlgorithmConfig(correction="tis", advantage="reinforce", aggregation=aggregation))
    step = step_of(batch, constant=0)
    denominators = step.denominators(0, ~step.demonstration_N)
    total = torch.zeros((), dtype=torch.float64)
    for row, values_T in zip(rows_of(batch, of_one_rank()), log_probs, strict=True):
        advantages_T = torch.where(row.seen.mask_T, step.rewards_N[row.seen.sample_T.clamp(min=0)] - 0.3, 0.0)
        seen = replace(row.seen, advantages_T=advantages_T, rollout_T=row.seen.rollout_T.double())
        total = total + objective.total(values_T, torch.zeros_like(values_T), seen, denominators, Coupled())[0]
    return float(total.detach()), list(torch.autograd.grad(total, log_probs))


@settings(deadline=None, max_examples=examples(40))
@given(
    cut=st.sets(st.integers(0, 15), max_size=15), aggregation=st.sampled_from(AGGREGATIONS), seed=st.integers(0, 1000)
)
def test_truncated_samples_have_no_gradient_and_are_in_no_denominator(
    cut: set[int], aggregation: str, seed: int
) -> None:
    """Whatever their log-probs, NaN included; loss and gradient of the others are those of a step without them."""
    samples = make_samples(vocab=50)
    truncated = [
        replace(one, status=Status.TRUNCATED if place in cut else Status.COMPLETED) for place, one in enumerate(samples)
    ]
    whole = make_batches(truncated, max_tokens=64)[0]
    masked, alone = (
        without_truncated(whole),
        make_batches([one for place, one in enumerate(truncated) if place not in cut], max_tokens=64)[0],
    )
    alone = replace(alone, max_new_tokens=masked.max_new_tokens)
    generator = torch.Generator().manual_seed(seed)
    by_sample = [-torch.rand(64, generator=generator, dtype=torch.float64) for _ in samples]
    kept = [place for place in range(len(samples)) if place not in cut]

    def scored(batch: StepBatch, places: list[int]) -> list[Tensor]:
        """Return log-probs of the trainable tokens, by sample and place in it; NaN elsewhere."""
        found, used = [], dict.fromkeys(places, 0)
        for row in batch.micro_batches:
            values_T = torch.full((len(row.tokens_T),), torch.nan, dtype=torch.float64)
            for at in np.flatnonzero(row.loss_mask_T):
                place = places[row.sample_T[at]]
                values_T[int(at)] = by_sample[place][used[place]]
                used[place] += 1
            found.append(values_T.requires_grad_())
        return found

    def gradients(batch: StepBatch, places: list[int]) -> tuple[float, dict[int, list[float]]]:
        loss, parts = loss_of(batch, scored(batch, places), aggregation)
        found: dict[int, list[float]] = {place: [] for place in kept}
        for row, part_T in zip(batch.micro_batches, parts, strict=True):
            assert bool((part_T[torch.from_numpy(~row.loss_mask_T)] == 0).all())
            for at in np.flatnonzero(row.loss_mask_T):
                found[places[row.sample_T[at]]].append(float(part_T[int(at)]))
        return loss, found

    loss, found = gradients(masked, list(range(len(samples))))
    wanted_loss, wanted = gradients(alone, kept)
    assert loss == pytest.approx(wanted_loss, abs=1e-9)
    assert found.keys() == wanted.keys()
    for place, values in wanted.items():
        assert found[place] == pytest.approx(values, abs=1e-9)
