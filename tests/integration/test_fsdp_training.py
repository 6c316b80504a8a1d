"""The Trainer gives on FSDP2 what it gives on Megatron, for one rank and for two."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from tests.algorithm_cases import EQUAL_REWARDS
from tests.families import write_family
from tests.integration import fsdp_ranks
from tests.integration.fsdp_ranks import FAILING, MODULES, TRAINED, WRITTEN, forward_only, modules, on_fsdp, train
from tests.integration.megatron_layouts import OPTIMIZER, VOCAB
from tests.learner_steps import make_samples, run_ranks
from tests.megatron_world import one_rank
from tests.same_metrics import assert_same
from tests.same_model import assert_log_probs, of_transformers, scored_rows, vocabulary
from tests.tiny_models import write_tiny_model
from tidemill.learner.backends.fsdp.optimizer import FsdpOptimizer
from tidemill.learner.backends.fsdp.policy import build_policy
from tidemill.learner.backends.megatron.model import build_policy as build_megatron
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.layout.parallel import Parallel


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def here() -> Iterator[Parallel]:
    with one_rank() as parallel:
        yield parallel


@pytest.fixture(scope="module")
def ranks(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two ranks."""
    return run_ranks(fsdp_ranks.main, (model_dir,), world=2, out=tmp_path_factory.mktemp("out"), timeout_s=300)


@pytest.fixture(scope="module")
def one(model_dir: Path, here: Parallel) -> dict[str, Any]:
    """Results of one rank."""
    return {case: on_fsdp(model_dir, here, case) for case in TRAINED}


def assert_same_training(ours: dict[str, Any], wanted: dict[str, Any]) -> None:
    for metrics, wanted_metrics in zip(ours["metrics"], wanted["metrics"], strict=True):
        assert_same(metrics, wanted_metrics)
    assert ours["weights"] == pytest.approx(wanted["weights"], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("case", TRAINED)
def test_both_backends_train_the_same(case: str, one: dict[str, Any], model_dir: Path, here: Parallel) -> None:
    policy = build_megatron(model_dir, dtype="float32", parallel=here)
    wanted = train(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), case)
    assert_same_training(one[case], wanted)


@pytest.mark.parametrize("case", TRAINED)
def test_two_ranks_train_as_one(case: str, one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_same_training(rank[case], one[case])


def test_prompts_are_computed_once_and_samples_without_gradient_are_left_out(one: dict[str, Any]) -> None:
    [_, metrics] = one[EQUAL_REWARDS]["metrics"]
    assert metrics["train/shared_tokens"] > 0
    assert metrics["train/zero_samples_skipped"] > 0


@pytest.mark.parametrize("family", ["granite", "gemma4"])
def test_log_probs_have_the_scale_and_the_cap_of_the_family(family: str, here: Parallel, tmp_path: Path) -> None:
    policy = build_policy(write_family(tmp_path, family), dtype="float32", parallel=here)
    samples = make_samples(vocab=vocabulary(tmp_path), temperature=0.7)
    scored = scored_rows(policy, samples, max_tokens=60, optimizer=FsdpOptimizer)
    assert_log_probs(scored, samples, of_transformers(tmp_path), tolerance=5e-5)


def test_a_pass_without_gradient_leaves_no_whole_weights_on_a_rank(model_dir: Path, here: Parallel) -> None:
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    forward_only(policy)
    assert all(isinstance(weight, DTensor) for weight in policy.root.parameters())


def test_the_next_pass_sees_weights_that_were_written_behind_a_pass(ranks: list[dict[str, Any]]) -> None:
    assert [rank[WRITTEN] for rank in ranks] == [{"changed": True, "restored": True}] * 2


def test_an_error_of_the_first_rank_ends_all(ranks: list[dict[str, Any]]) -> None:
    """Without waiting for the end of its process."""
    first, second = (rank[FAILING] for rank in ranks)
    assert (
        first["ConfigRefused"] == second["ConfigRefused"] == ["ConfigRefused", "model.path: want a model, got 'none'"]
    )
    assert first["MemoryError"] == ["MemoryError", "no memory is left"]
    assert second["MemoryError"][0] == "FirstRankFailed" and "no memory is left" in second["MemoryError"][1]
    assert second["damaged"][0] == "FirstRankFailed" and first["damaged"][1] in second["damaged"][1], "kept tensors"


def test_rank_0_has_the_outputs_of_modules(ranks: list[dict[str, Any]], model_dir: Path, here: Parallel) -> None:
    wanted = modules(model_dir, here)
    assert "1.layers.1.mlp" in wanted and "0.log_probs" in wanted
    assert ranks[0][MODULES] == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert ranks[1][MODULES] == {}
