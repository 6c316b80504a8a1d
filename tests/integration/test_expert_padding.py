"""Padding in the rows of a mixture of experts: neither the balancing loss nor the routers' biases count it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integration.expert_ranks import OPTIMIZER, VOCAB
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import one_rank
from tests.same_metrics import assert_same
from tests.tiny_models import write_tiny_model
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron.layers.experts import Mixture
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.batch.batch import MicroBatch, StepBatch
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.trainer import Trainer

STEP = 3
FAMILIES = ("qwen3_moe", "glm4_moe")
BALANCED, BIASED = Mixture(aux_loss_coef=0.1), Mixture(bias_update_rate=0.01)


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one step."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    biases: list[Tensor]


@pytest.fixture(scope="module")
def here() -> Iterator[Parallel]:
    with one_rank() as joined:
        yield joined


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_tiny_model(tmp_path_factory.mktemp(family), family, vocab_size=VOCAB) for family in FAMILIES}


def batch_of(*, pad_to: int = 1, row_of_padding: bool = False) -> StepBatch:
    """Return a batch of the same rows for every ``pad_to``, and optionally one more row with nothing but padding."""
    samples = make_samples(vocab=VOCAB, step=STEP)
    [batch] = make_batches(samples, step=STEP, max_tokens=45, pad_to=pad_to)
    if not row_of_padding:
        return batch
    [empty] = make_batches(samples, step=STEP, data_parallel=len(samples) + 1, pad_to=pad_to)[-1].micro_batches
    assert (empty.sample_T < 0).all()
    return replace(batch, micro_batches=(*batch.micro_batches, empty))


def trained(model_dir: Path, here: Parallel, batch: StepBatch, mixture: Mixture, *, recompute: str = "none") -> Result:
    """Train one step of a new learner, without clipping."""
    policy = build_policy(
        model_dir, dtype="float32", parallel=here, kernels=Wanted(recompute=recompute), mixture=mixture
    )
    optimizer = MegatronOptimizer(policy, replace(OPTIMIZER, clip_grad=0.0), steps=10)
    metrics = Trainer(policy, optimizer, AlgorithmConfig(), max_lag=2).train(batch)
    gradients = {
        name: weight.main_grad.clone() for name, weight in policy.named_weights() if hasattr(weight, "main_grad")
    }
    return Result(metrics, gradients, [bias.clone() for bias in policy.moving_biases()])


def assert_same_result(ours: Result, wanted: Result) -> None:
    assert_same(ours.metrics, wanted.metrics)
    assert ours.metrics["train/grad_norm"] == pytest.approx(wanted.metrics["train/grad_norm"], rel=1e-6)
    for name, gradient in wanted.gradients.items():
        assert torch.linalg.vector_norm(ours.gradients[name] - gradient) <= 1e-6 * torch.linalg.vector_norm(gradient), (
            name
        )
    for moved, bias in zip(ours.biases, wanted.biases, strict=True):
        assert torch.equal(moved, bias)


@pytest.mark.parametrize(("family", "mixture"), [("qwen3_moe", BALANCED), ("glm4_moe", BALANCED), ("glm4_moe", BIASED)])
@pytest.mark.parametrize(("pad_to", "row_of_padding"), [(2, False), (32, False), (4, True)])
def test_padded_rows_train_as_those_without_padding(
    here: Parallel, model_dirs: dict[str, Path], family: str, mixture: Mixture, pad_to: int, row_of_padding: bool
) -> None:
    """Metrics, gradients and biases. The embedding of the padding token is 0, where the derivative of a norm is 1 /
    sqrt(eps).
    """
    plain, padded = batch_of(), batch_of(pad_to=pad_to, row_of_padding=row_of_padding)
    assert any((row.sample_T < 0).any() for row in padded.micro_batches)
    wanted = trained(model_dirs[family], here, plain, mixture)
    ours = trained(model_dirs[family], here, padded, mixture)
    assert wanted.metrics["train/grad_norm"] < 100
    assert_same_result(ours, wanted)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_leave_out_padding(here: Parallel, model_dirs: dict[str, Path], recompute: str) -> None:
    batch, mixture = batch_of(pad_to=32, row_of_padding=True), replace(BALANCED, bias_update_rate=0.01)
    wanted = trained(model_dirs["glm4_moe"], here, batch, mixture)
    assert_same_result(trained(model_dirs["glm4_moe"], here, batch, mixture, recompute=recompute), wanted)


def test_the_balancing_loss_is_the_mean_over_all_tokens_of_that_of_their_row(
    here: Parallel, model_dirs: dict[str, Path]
) -> None:
    """The gradient of a batch is the sum of those of its rows alone, each times the share of the row in the tokens
    without padding.
    """
    batch, model_dir = batch_of(pad_to=32, row_of_padding=True), model_dirs["qwen3_moe"]

    def gradient(*rows: MicroBatch) -> Tensor:
        """Return the gradient of the balancing loss of these rows by all weights: the difference of two runs, with and
        without it.
        """
        part = replace(batch, micro_batches=rows)
        with_loss, without = (
            trained(model_dir, here, part, Mixture(aux_loss_coef=coef)).gradients for coef in (10.0, 0.0)
        )
        return torch.cat([(with_loss[name] - gradient).flatten() for name, gradient in without.items()])

    tokens = {number: int((row.sample_T >= 0).sum()) for number, row in enumerate(batch.micro_batches)}
    of_rows = [
        gradient(batch.micro_batches[number]) * count / sum(tokens.values())
        for number, count in tokens.items()
        if count
    ]
    assert len(of_rows) == len(tokens) - 1 > 2
    wanted = torch.stack(of_rows).sum(0)
    assert torch.linalg.vector_norm(gradient(*batch.micro_batches) - wanted) < 1e-5 * torch.linalg.vector_norm(wanted)
