"""Where tokens went, in the dumps of ``debug.save_train``: in both passes, under every kind of replay, at layouts of
two ranks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration import routing_ranks
from tests.integration.expert_ranks import DEEP, MODELS
from tests.integration.routing_ranks import DUMPED, STEP, VOCAB, dumped
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.tiny_models import write_tiny_model
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.debug.comparison import compare_train
from tidemill.learner.debug.train_file import ROUTING, TrainDump, read_train, record_path


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
    return [
        sum(int((experts != before[sequence]).any(-1).sum()) for sequence, experts in step.items()) for step in steps
    ]


def test_a_dump_has_the_experts_of_every_token_their_weights_and_its_affinity_to_all(
    model_dir: Path, tmp_path: Path
) -> None:
    dump, record, _ = trained(model_dir, tmp_path, "plain")
    assert dump.routing_layers == record.routing_layers == [0, 1]
    data = dump.steps[0].debug_data
    for tokens, experts, weights, scores in zip(
        data["unconcat_tokens"], *(data[name] for name in ROUTING), strict=True
    ):
        assert experts.shape == weights.shape == (len(tokens), 2, 2) and scores.shape == (len(tokens), 2, 8)
        np.testing.assert_allclose(scores.sum(-1), 1, rtol=1e-5)
        np.testing.assert_array_equal(experts, np.sort(scores.argsort(-1)[..., -2:], -1))  # the router's own choice
        chosen = np.take_along_axis(scores, experts.astype(np.int64), -1)
        np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)
    found = compare_train(dump, record)
    assert found.first is None and list(found.compared)[:3] == list(ROUTING)


def test_replay_is_seen(model_dir: Path, tmp_path: Path) -> None:
    """Three optimizer steps at a high rate move the routers; training takes the experts of the first pass only where
    they are replayed.
    """
    first, *later = changed(*trained(model_dir, tmp_path, "moved")[:2])
    assert first == 0 and sum(later) > 0
    assert changed(*trained(model_dir, tmp_path, "replayed")[:2]) == [0, 0, 0]
    assert changed(*trained(model_dir, tmp_path, "replayed, full")[:2]) == [0, 0, 0], "not those of a recomputation"


def test_the_samples_experts_are_seen(model_dir: Path, tmp_path: Path) -> None:
    dump, record, batch = trained(model_dir, tmp_path, "given")
    compared = 0
    for one in (record, dump):
        found = {
            sequence: experts for number in range(one.num_steps) for sequence, experts in decisions(one, number).items()
        }
        for row in batch.micro_batches:
            given_TLK = np.sort(row.experts.reshape(-1, *batch.routing), -1)
            for start, end in zip(row.cu_seqlens[:-1].tolist(), row.cu_seqlens[1:].tolist(), strict=True):
                if (sequence := int(row.sequence_T[start])) >= 0:
                    known = given_TLK[start:end, 0, 0] >= 0
                    np.testing.assert_array_equal(found[sequence][known], given_TLK[start:end][known])
                    compared += int(known.sum())
    assert compared > 100


def test_every_layout_of_two_ranks_has_the_experts_of_one(model_dir: Path, tmp_path: Path) -> None:
    """With pipelines the last stage has the layers of all; a stage with several chunks has layers that are not
    neighbours.
    """
    family, changes = MODELS[DEEP]
    directories = {
        "qwen3_moe": model_dir,
        DEEP: write_tiny_model(tmp_path / "deep", family, vocab_size=VOCAB, **changes),
    }
    wanted_of = {model: trained(directory, tmp_path, "given")[:2] for model, directory in directories.items()}
    run_ranks(routing_ranks.dump_in_layouts, (directories,), world=2, out=tmp_path, timeout_s=300)
    for layout, model in DUMPED.items():
        file = tmp_path / f"{layout} {STEP} {int(layout.startswith('PP2'))}.safetensors"
        for ours, wanted in zip((read_train(file), read_train(record_path(file))), wanted_of[model], strict=True):
            found = compare_train(ours, wanted, 1e-4)
            assert found.first is None, f"{layout}: {found.first}"
            assert set(ROUTING) < set(found.compared)
            assert list(ours.routing_layers) == list(wanted.routing_layers) == ([1, 3] if model == DEEP else [0, 1])


def test_a_token_that_went_elsewhere_is_named(model_dir: Path, tmp_path: Path) -> None:
    dump, record, _ = trained(model_dir, tmp_path, "plain")
    moved = dump.steps[0].debug_data["routing_decisions"][2]
    moved[3, 1] = moved[3, 1] + 1
    first = compare_train(dump, record).first
    assert first is not None and (first.name, first.largest) == ("routing_decisions", 1.0)
    assert "token 3, 2. layer with experts" in first.place
