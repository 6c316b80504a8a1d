"""Files of recorded samples: round trip, damage, and packing for another layout."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.debug_kit import rollout
from tests.refusals import refusal
from tidemill.bus.wire.codec import encode_record, encode_sample
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.batch.batching import build_batches
from tidemill.learner.buffer.step_plan import GENESIS
from tidemill.learner.debug.rollout_file import (
    DumpedRollout,
    Packing,
    load_rollout,
    planned_again,
    read_header,
    save_rollout,
)
from tidemill.learner.errors import DebugFileRefused


def test_a_file_holds_plan_samples_and_limits(tmp_path: Path) -> None:
    saved, file = rollout(), tmp_path / "new" / "r.msgpack"
    save_rollout(file, saved)
    loaded = load_rollout(file)
    assert encode_record(loaded.plan) == encode_record(saved.plan)
    assert [*map(encode_sample, loaded.samples)] == [*map(encode_sample, saved.samples)]
    assert (loaded.run, loaded.token_limits) == ("r", {1: 12})
    header = read_header(file)
    assert (header["step"], header["samples"]) == (3, 16)
    assert [path.name for path in file.parent.iterdir()] == ["r.msgpack"]


def test_damaged_and_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.msgpack"
    save_rollout(file, rollout())
    whole = file.read_bytes()
    for cut in (0, 1, 60, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with refusal(DebugFileRefused, where=re.compile(r"r\.msgpack$")):
            load_rollout(file)
    file.write_bytes(b"\x81\xa4kind\xa5other")
    with refusal(DebugFileRefused, got="another file"):
        load_rollout(file)
    with refusal(DebugFileRefused, where=re.compile(r"none$"), got="No such file or directory"):
        load_rollout(tmp_path / "none")


def batches(data: DumpedRollout, step: int, packing: Packing) -> tuple[StepBatch, ...]:
    return build_batches(
        planned_again(data, step, packing, chain=GENESIS), data.samples, token_limits=data.token_limits
    )


def trained(found: tuple[StepBatch, ...]) -> dict[tuple[int, int], tuple[int, float, int]]:
    """Return (target, log-prob, lag) of every trainable token by its sequence and position."""
    return {
        (int(row.sequence_T[at]), int(row.position_ids_T[at])): (
            int(row.targets_T[at]),
            float(row.rollout_log_probs_T[at]),
            int(row.lag_T[at]),
        )
        for batch in found
        for row in batch.micro_batches
        for at in np.flatnonzero(row.loss_mask_T)
    }


def test_another_layout_trains_the_same_tokens() -> None:
    data = rollout(oldest_step=2)  # the gate masks some tokens
    whole = batches(data, 3, Packing(data_parallel=1, max_tokens=1 << 20, minibatches=1))
    want = trained(whole)
    assert 0 < len(want) < sum(sample.response_length for sample in data.samples)
    assert want == trained(build_batches(data.plan, data.samples))
    split = batches(data, 3, Packing(data_parallel=2, max_tokens=40, minibatches=2))
    assert trained(split) == want
    assert len(split) == 2 and split[0].num_minibatches == 2 and len(split[0].micro_batches) > 2
    assert max(len(row.tokens_T) for batch in split for row in batch.micro_batches) <= 40
    assert split[0].minibatches_N.tolist() == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4  # whole groups in turn


@pytest.mark.parametrize("step", [1, 3, 40])
def test_a_file_may_be_the_batch_of_any_step(step: int) -> None:
    data = rollout(oldest_step=2)
    packing = Packing(data_parallel=1, max_tokens=1 << 20, minibatches=1)
    (found,), (want,) = batches(data, step, packing), batches(data, 3, packing)
    assert found.step == step
    assert trained((found,)) == trained((want,))  # with the recorded lags
