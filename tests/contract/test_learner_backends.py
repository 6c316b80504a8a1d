"""The contract of a backend that trains (``learner/trainer/port.py``), on one rank, for every backend.

Its other half is in ``tests/integration``: ranks, layouts and restarts, where both are compared with each other.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.backend_learner import BackendLearner, open_learner
from tests.integration.fsdp_state_ranks import BASE, VOCAB
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import one_rank
from tests.refusals import refusal
from tests.same_model import assert_log_probs, assert_weights, of_transformers, scored_rows
from tests.tiny_models import write_tiny_model
from tidemill.learner.backends.fsdp.backend import FsdpBackend
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.remote_files import CheckpointFiles, PeerClient
from tidemill.learner.errors import CheckpointCorrupt, ConfigRefused
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import LearnerConfig, OptimizerConfig
from tidemill.learner.trainer.backups import OtherWeights, WeightBackup
from tidemill.learner.trainer.rows import Row, rows_of

BACKENDS = {"megatron": MegatronBackend, "fsdp": FsdpBackend}
PLAIN = LearnerConfig(steps=10, optimizer=OptimizerConfig(name="sgd", lr=0.1, momentum=0.0, clip_grad=0.0))
"""The update of a step is the gradient, times the learning rate."""
SAMPLES = make_samples(vocab=VOCAB)


@pytest.fixture(scope="module")
def here() -> Iterator[Parallel]:
    with one_rank() as parallel:
        yield parallel


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    changes: dict[str, dict[str, Any]] = {"model": {}, "other": {"seed": 5}, "wide": {"intermediate_size": 96}}
    return {name: write_tiny_model(root / name, "qwen3", vocab_size=VOCAB, **each) for name, each in changes.items()}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    return BACKENDS[request.param]()


@pytest.fixture
def learner(backend: Any, models: dict[str, Path], here: Parallel) -> BackendLearner:
    return open_learner(backend, models["model"], here, PLAIN)


def rows(learner: BackendLearner) -> list[Row]:
    return rows_of(make_batches(SAMPLES, max_tokens=60)[0], learner.policy.parallel)


def log_probs(learner: BackendLearner) -> Tensor:
    return torch.cat(learner.trainer.log_probs(make_batches(SAMPLES, max_tokens=60)[0]))


def content(learner: BackendLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.policy.export()}


def finish_of(learner: BackendLearner) -> Callable[[Row, Tensor], tuple[Tensor, int]]:
    """Return a loss over the logits of a row, and as its result the number of tokens."""

    def finish(row: Row, hidden_TH: Tensor) -> tuple[Tensor, int]:
        logits_TV = hidden_TH @ learner.policy.head().weight_VH.t()
        return logits_TV.float().logsumexp(-1).sum(), len(row.tokens_T)

    return finish


def stepped(learner: BackendLearner, chosen: list[Row], *, loss: float = 0.0, **options: Any) -> dict[str, Tensor]:
    """Return what a step over these rows changes, and undo it."""
    backup, before = WeightBackup(learner.policy), content(learner)
    with learner.policy.ready():
        learner.optimizer.zero_grad()
        learner.policy.run(chosen, finish_of(learner), **options)
        learner.optimizer.step(1, loss=loss)
        learner.policy.gather()
    after = content(learner)
    with torch.no_grad():
        for name, weight in learner.policy.named_weights():
            weight.copy_(backup.tensors[name])
    learner.policy.weights_changed()
    return {name: after[name] - tensor for name, tensor in before.items()}


def test_log_probs_of_packed_rows_are_those_of_each_sequence(learner: BackendLearner, models: dict[str, Path]) -> None:
    scored = scored_rows(learner.policy, SAMPLES, max_tokens=60, optimizer=type(learner.optimizer))
    assert_log_probs(scored, SAMPLES, of_transformers(models["model"]))


def test_gradients_are_sums_over_the_rows(learner: BackendLearner) -> None:
    parts = rows(learner)
    assert len(parts) > 2
    whole, alone = stepped(learner, parts), [stepped(learner, [part]) for part in parts]
    for name, moved in whole.items():
        torch.testing.assert_close(moved, sum(of_row[name] for of_row in alone), rtol=1e-3, atol=1e-5)
    assert all(moved.any() for moved in whole.values()), "a weight has no gradient"


def test_results_are_in_the_order_of_the_rows_and_a_pass_without_gradient_moves_nothing(
    learner: BackendLearner,
) -> None:
    parts = rows(learner)
    with learner.policy.ready():
        lengths = learner.policy.run(parts, finish_of(learner), forward_only=True)
    assert lengths == [len(part.tokens_T) for part in parts]
    assert not any(moved.any() for moved in stepped(learner, parts, forward_only=True).values())


def test_a_loss_that_is_not_finite_skips_the_step(learner: BackendLearner) -> None:
    assert not any(moved.any() for moved in stepped(learner, rows(learner), loss=float("nan")).values())


def test_weights_are_live_and_others_take_their_place_for_a_pass(learner: BackendLearner) -> None:
    own, before = WeightBackup(learner.policy), log_probs(learner)
    other = WeightBackup(learner.policy)
    other.restore({name: 0.8 * tensor for name, tensor in other.tensors.items()})
    digest = learner.policy.digest()
    with OtherWeights(learner.policy) as weights:
        weights.take(other)
        assert not torch.allclose(log_probs(learner), before)
    assert torch.equal(log_probs(learner), before) and learner.policy.digest() == digest
    assert [name for name, _ in learner.policy.named_weights()] == list(own.tensors)


def test_the_export_is_the_files_and_has_one_sender(learner: BackendLearner, models: dict[str, Path]) -> None:
    assert_weights(content(learner), models["model"])
    assert_weights(dict(learner.policy.export_part(1)), models["model"])


def test_another_model_is_loaded_and_the_first_one_again(learner: BackendLearner, models: dict[str, Path]) -> None:
    digest = learner.policy.digest()
    learner.policy.load_reference(models["other"])
    assert_weights(content(learner), models["other"])
    learner.policy.load_initial()
    assert learner.policy.digest() == digest
    with refusal(ConfigRefused):
        learner.policy.load_reference(models["wide"])


def test_a_state_continues_with_the_same_bits(
    learner: BackendLearner, models: dict[str, Path], here: Parallel, tmp_path: Path
) -> None:
    """Weights, moments and numbers; its weights alone begin without moments."""
    backend = learner.backend
    first, again, begun = (open_learner(backend, models["model"], here, BASE) for _ in range(3))
    first.train(3, SAMPLES)
    first.save(tmp_path, 3)
    saved = first.policy.digest()
    first.train(4, SAMPLES)
    assert again.load(tmp_path) == 3 and again.policy.digest() == saved
    again.train(4, SAMPLES)
    assert again.policy.digest() == first.policy.digest() != saved
    assert backend.load_weights(tmp_path, policy=begun.policy, optimizer=begun.optimizer) == 3
    assert begun.policy.digest() == saved
    begun.train(4, SAMPLES)
    assert begun.policy.digest() != first.policy.digest()


def test_files_of_a_state_may_be_elsewhere_and_damaged_ones_are_refused(
    learner: BackendLearner, models: dict[str, Path], here: Parallel, tmp_path: Path
) -> None:
    index, elsewhere = tmp_path / "index", tmp_path / "elsewhere"
    elsewhere.mkdir()
    learner.train(3, SAMPLES)
    learner.save(elsewhere, 3)
    shutil.copytree(elsewhere, index, ignore=shutil.ignore_patterns("*.distcp"))
    entries = disk.digest(elsewhere, [path.name for path in elsewhere.iterdir()])
    files = CheckpointFiles(elsewhere, entries, PeerClient([]))
    again = open_learner(learner.backend, models["model"], here, PLAIN)
    assert again.load(index, files) == 3
    assert again.policy.digest() == learner.policy.digest()
    for part in elsewhere.glob("*.distcp"):
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    with refusal(CheckpointCorrupt, want=re.compile("sha256")):
        again.load(index, CheckpointFiles(elsewhere, entries, PeerClient([])))


def test_a_value_model_begins_at_zero_and_has_a_head_of_its_own(learner: BackendLearner) -> None:
    critic = learner.backend.open_value_model(PLAIN, learner.policy, learner.model_dir)
    values = list[Tensor]()

    def finish(row: Row, values_T1: Tensor) -> tuple[Tensor, int]:
        values.append(values_T1.detach().clone())
        return values_T1.sum(), 0

    with critic.ready():
        critic.run(rows(learner), finish, forward_only=True)
    assert {(each.shape[1], each.dtype) for each in values} == {(1, torch.float32)}
    assert not torch.cat(values).any()


def test_outputs_of_modules_are_those_of_the_other_backend(models: dict[str, Path], here: Parallel) -> None:
    outputs = [
        backend.module_outputs(open_learner(backend, models["model"], here, PLAIN).policy, [[5, 9, 33], [17, 3]], "*")
        for backend in (kind() for kind in BACKENDS.values())
    ]
    common = outputs[0].keys() & outputs[1].keys()
    assert {"0.log_probs", "1.layers.1", "1.layers.1.mlp", "1.layers.1.attention"} <= common
    for name in common:
        np.testing.assert_allclose(outputs[0][name], outputs[1][name], atol=1e-5, err_msg=name)
