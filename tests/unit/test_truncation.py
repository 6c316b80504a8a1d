"""Overlong filtering: the batch is that of samples without trainable tokens, and rewards stay."""

from dataclasses import fields, replace

import numpy as np
import pytest

from bus.wire.messages import Status
from learner.data.batch import StepBatch
from learner.data.truncation import without_truncated
from tests.learner_steps import make_batches, make_samples


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
    untrained = [replace(one, loss_mask=np.zeros_like(one.loss_mask)) if place in cut else one for place, one in enumerate(samples)]
    for got, wanted in zip(
        make_batches(truncated, data_parallel=2, max_tokens=64), make_batches(untrained, data_parallel=2, max_tokens=64), strict=True
    ):
        masked = without_truncated(got)
        same(masked, wanted, but={"truncated_N", "sampled_N"})
        np.testing.assert_array_equal(masked.sampled_N, got.sampled_N, err_msg="a penalty for length counts what was sampled")
        assert masked.truncated_N.sum() == len(cut)
        assert got.num_tokens > wanted.num_tokens or not cut, "the batch that came in is left as it was"
