"""Where tokens went, in the dumps of ``debug.save_train``: in both passes, under every kind of replay, at layouts of two ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.data.batch import StepBatch
from learner.debug.comparison import compare_train
from learner.debug.train_file import TrainDump, read_train, record_path
from tests.integration import routing_ranks
from tests.integration.routing_ranks import DUMPED, STEP, VOCAB, dumped
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", vocab_size=VOCAB)


def trained(model_dir: Path, root: Path, way: str) -> tuple[TrainDump, TrainDump, StepBatch]:
    """Return the dump of one rank's step, its record, and the batch."""
    with one_rank() as here:
        batch = dumped(model_dir, here, way, f"{root}/{way} {{step}} {{rank}}.safetensors")
    file = root / f"{way} {STEP} 0.safetensors"
    return read_train(file), read_train(record_path(file)), batch


def decisions(dump: TrainDump, number: int) -> dict[int, Any]:
    """Return the experts of each sequence of an optimizer step."""
    data = dump.steps[number].debug_data
    return dict(zip(data["sequence_ids"].tolist(), data["routing_decisions"], strict=True))


def changed(dump: TrainDump, record: TrainDump) -> list[int]:
    """Return for each optimizer step the choices of experts that differ from those of the record."""
    before = decisions(record, 0)
    steps = (decisions(dump, number) for number in range(dump.num_steps))
    return [sum(int((experts != before[sequence]).any(-1).sum()) for sequence, experts in step.items()) for step in steps]


def test_a_dump_has_the_experts_of_every_token_and_their_weights(model_dir: Path, tmp_path: Path) -> None:
    dump, record, _ = trained(model_dir, tmp_path, "plain")
    assert dump.routing_layers == record.routing_layers == [0, 1]
    data = dump.steps[0].debug_data
    for tokens, experts, weights in zip(data["unconcat_tokens"], data["routing_decisions"], data["routing_scores"], strict=True):
        assert experts.shape == weights.shape == (len(tokens), 2, 2)
        assert (np.diff(experts, axis=-1) > 0).all() and (weights > 0).all()
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    found = compare_train(dump, record)
    assert found.first is None and list(found.compared)[:2] == ["routing_decisions", "routing_scores"]


def test_replay_is_seen(model_dir: Path, tmp_path: Path) -> None:
    """Three optimizer steps at a high rate move the routers; training takes the experts of the first pass only where they are replayed."""
    first, *later = changed(*trained(model_dir, tmp_path, "moved")[:2])
    assert first == 0 and sum(later) > 0
    assert changed(*trained(model_dir, tmp_path, "replayed")[:2]) == [0, 0, 0]
    assert changed(*trained(model_dir, tmp_path, "replayed, full")[:2]) == [0, 0, 0], "not those of a recomputation"


def test_the_samples_experts_are_seen(model_dir: Path, tmp_path: Path) -> None:
    dump, record, batch = trained(model_dir, tmp_path, "given")
    compared = 0
    for one in (record, dump):
        found = {sequence: experts for number in range(one.num_steps) for sequence, experts in decisions(one, number).items()}
        for row in batch.micro_batches:
            given_TLK = np.sort(row.experts.reshape(-1, *batch.routing), -1)
            for start, end in zip(row.cu_seqlens[:-1].tolist(), row.cu_seqlens[1:].tolist(), strict=True):
                if (sequence := int(row.sequence_T[start])) >= 0:
                    known = given_TLK[start:end, 0, 0] >= 0
                    np.testing.assert_array_equal(found[sequence][known], given_TLK[start:end][known])
                    compared += int(known.sum())
    assert compared > 100


def test_every_layout_of_two_ranks_has_the_experts_of_one(model_dir: Path, tmp_path: Path) -> None:
    one, record, _ = trained(model_dir, tmp_path, "given")
    run_ranks(routing_ranks.dump_in_layouts, (model_dir,), world=2, out=tmp_path, timeout_s=300)
    for layout in DUMPED:
        file = tmp_path / f"{layout} {STEP} {int(layout == 'PP2')}.safetensors"
        for ours, wanted in ((read_train(file), one), (read_train(record_path(file)), record)):
            found = compare_train(ours, wanted, 1e-4)
            assert found.first is None, f"{layout}: {found.first}"
            assert "routing_decisions" in found.compared
            assert ("routing in one dump only: layers 0" in found.notes) is (layout == "PP2")


def test_a_token_that_went_elsewhere_is_named(model_dir: Path, tmp_path: Path) -> None:
    dump, record, _ = trained(model_dir, tmp_path, "plain")
    moved = dump.steps[0].debug_data["routing_decisions"][2]
    moved[3, 1] = moved[3, 1] + 1
    first = compare_train(dump, record).first
    assert first is not None and (first.name, first.largest) == ("routing_decisions", 1.0)
    assert "token 3, 2. layer with experts" in first.place
