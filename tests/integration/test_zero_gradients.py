"""Samples whose every term of the loss is 0 are left out of the rows. The weights end with the same bits where each
sequence has a row of its own, and differ by rounding where rows become shorter.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithm_cases import CASES, algorithm
from tests.backend_learner import open_learner
from tests.examples import rarely, some
from tests.integration.megatron_ranks import OPTIMIZER, VOCAB
from tests.learner_steps import make_batches, make_samples
from tests.tiny_models import write_tiny_model
from tidemill.bus.wire.messages import Sample
from tidemill.learner.backends.fsdp import model as fsdp_model
from tidemill.learner.backends.fsdp.backend import FsdpBackend
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.backends.megatron.layers.experts import Mixture
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.trainer import port
from tidemill.learner.trainer.backups import OtherModels, WeightBackup
from tidemill.learner.trainer.rows import Step
from tidemill.learner.trainer.trainer import Trainer

STEPS = (3, 4)
OF_ADVANTAGE = [name for name in CASES if algorithm(name).by_advantage]
OFTEN = ["none", "gspo", "mis", "decoupled in 2 minibatches", "advantage batch_std", "prefix weights", "whitened"]
"""Cases that are tried in every run of the tests."""
OTHERS = [name for name in CASES if name not in OF_ADVANTAGE]


class Complete(Trainer):
    """A trainer that leaves no sample out."""

    def _without_gradient(self, step: Step, advantages: Tensor | None) -> Tensor:
        return torch.zeros_like(step.demonstration_N)


def samples_of(name: str, step: int, *, equal: Sequence[int]) -> list[Sample]:
    """Return four groups, of which the ``equal`` ones have advantages of 0 by the estimator of the case."""
    reward = 0.0 if algorithm(name).advantage == "reinforce" else 1.0
    samples = make_samples(vocab=VOCAB, step=step)
    return [replace(sample, reward=reward) if sample.task in equal else sample for sample in samples]


def trained(kind: type[Trainer], model_dir: Path, here: Any, name: str, *, equal: Sequence[int]) -> Any:
    """Train two steps with each sequence in a row of its own. Returns their metrics and the digest of the weights."""
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    trainer = kind(
        policy,
        MegatronOptimizer(policy, OPTIMIZER, steps=10),
        algorithm(name),
        max_lag=2,
        others=OtherModels(proximal=WeightBackup(policy)),
    )
    batches = [
        make_batches(
            samples_of(name, step, equal=equal if step == STEPS[-1] else ()),
            step=step,
            max_tokens=1,
            minibatches=CASES[name][1],
        )[0]
        for step in STEPS
    ]
    return [trainer.train(batch) for batch in batches], policy.digest()


EQUAL_BITS = ("train/loss", "train/grad_norm", "train/grad_norm_max", "train/lr", "train/tokens", "train/reward_mean")


@pytest.mark.parametrize(
    ("name", "equal"), some(product([*OFTEN, *rarely(sorted({*OF_ADVANTAGE} - {*OFTEN}))], [(2, 3), (1, 2, 3, 4)]), 3)
)
def test_a_step_without_the_samples_of_no_gradient_ends_with_the_same_bits(
    here: Any, model_dir: Path, name: str, equal: Sequence[int]
) -> None:
    """Some or all of the second step: then Adam still moves the weights by the momentum of the first."""
    ours, digest = trained(Trainer, model_dir, here, name, equal=equal)
    whole, whole_digest = trained(Complete, model_dir, here, name, equal=equal)
    assert digest == whole_digest
    skipped = ours[1].pop("train/zero_samples_skipped")
    assert whole[1].pop("train/zero_samples_skipped") == 0
    # Whitening and a penalty for length give samples of equal rewards an advantage.
    assert skipped >= 4 * len(equal) or name not in OFTEN or name == "whitened"
    for metric in EQUAL_BITS:
        assert ours[1][metric] == whole[1][metric], metric
    assert ours[0].keys() == whole[0].keys()


def test_only_a_loss_of_the_advantage_alone_leaves_samples_out() -> None:
    """Elsewhere a sample with an advantage of 0 has a gradient, or its log-probs are part of another number."""
    assert {"decoupled", "gspo", "cispo", "sapo", "vespo", "topr", "mis", "opsm"} <= set(OF_ADVANTAGE)
    assert {"sft", "dro", "kl_cov", "clip_cov", "dppo_tv", "m2po", "top entropy", "ess_lr", "kl k3"} <= set(OTHERS)
    assert {name for name in OTHERS if "distill" in name} == {name for name in CASES if "distill" in name}


@pytest.mark.parametrize("name", ["dro", "dppo_tv", "aggregation token_mean"])
def test_a_sample_with_another_term_is_trained(here: Any, model_dir: Path, name: str) -> None:
    [_, metrics], _ = trained(Trainer, model_dir, here, name, equal=(1, 2, 3, 4))
    assert metrics["train/zero_samples_skipped"] == 0 < metrics["train/grad_norm"]


def test_the_reported_steps_are_complete(here: Any, model_dir: Path) -> None:
    """Their log-probs and entropies are compared with the engines', also where all rewards are equal."""
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    trainer = Trainer(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), algorithm("none"), max_lag=2)
    for step, skipped in ((1, 0), (2, 0), (3, 16)):
        samples = [replace(sample, reward=1.0) for sample in make_samples(vocab=VOCAB, step=step)]
        metrics = trainer.train(make_batches(samples, step=step)[0])
        assert (metrics["train/zero_samples_skipped"], "train/entropy" in metrics) == (skipped, not skipped)


def test_a_sample_without_trainable_tokens_is_left_out(here: Any, model_dir: Path) -> None:
    """Whatever the algorithm: here one with an entropy bonus."""
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    samples = make_samples(vocab=VOCAB)
    samples[2] = replace(samples[2], loss_mask=np.zeros_like(samples[2].loss_mask))
    trainer = Trainer(
        policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), algorithm("aggregation token_mean"), max_lag=2
    )
    assert trainer.train(make_batches(samples)[0])["train/zero_samples_skipped"] == 1


@pytest.mark.parametrize(
    "balance", [{"aux_loss_coef": 0.1}, {"bias_update_rate": 0.01}, {}], ids=["loss", "bias", "none"]
)
def test_samples_whose_tokens_are_counted_by_experts_are_trained(
    here: Any, tmp_path: Path, balance: dict[str, float]
) -> None:
    """A balancing loss, and biases that move, depend on all tokens, also where the advantage is 0."""
    model_dir = write_tiny_model(tmp_path, "deepseek_v3", vocab_size=VOCAB)
    policy = build_policy(model_dir, dtype="float32", parallel=here, mixture=Mixture(**balance))
    trainer = Trainer(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), algorithm("none"), max_lag=2)
    samples = [replace(sample, reward=1.0) for sample in make_samples(vocab=VOCAB)]
    metrics = trainer.train(make_batches(samples)[0])
    assert metrics["train/zero_samples_skipped"] == (0 if balance else 16)


def gradients_of(
    backend: type[FsdpBackend | MegatronBackend], model_dir: Path, here: Any, dtype: str, batch: StepBatch, kind: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradients of a step, each as a whole, and its metrics."""
    learner = open_learner(backend(), model_dir, here, LearnerConfig(steps=10), dtype=dtype)
    found: dict[str, Tensor] = {}
    optimizer, policy = learner.optimizer, learner.policy

    def keep(step: int, *, loss: float, scale: float = 1.0) -> tuple[float | None, float]:
        weights = optimizer.parameters if backend is FsdpBackend else dict(policy.named_weights())
        for name, weight in weights.items():
            gradient = weight.grad.full_tensor() if backend is FsdpBackend else weight.main_grad
            found[name] = gradient.clone()
        return 1.0, 0.0  # the weights stay: Megatron's optimizer takes none in float64

    optimizer.step = keep
    return found, kind(policy, optimizer, algorithm("none"), max_lag=2).train(batch)


ROUNDING = {"float32": 1e-5, "bfloat16": 0.1, "float64": 1e-12}
"""Largest difference of a gradient in that of its tensor. Measured on the CPU with rows of 60 tokens, and with one row:
1.5e-6, 0.03 and 0. (Models in float64 have gradients in float32, which are equal.)
"""


@pytest.mark.parametrize("max_tokens", [1, 60, 1 << 20], ids=["rows of one", "rows of several", "one row"])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("backend", [MegatronBackend, FsdpBackend], ids=["megatron", "fsdp"])
def test_gradients_of_the_remaining_samples_differ_by_rounding_alone(
    here: Any,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: type[FsdpBackend | MegatronBackend],
    dtype: str,
    max_tokens: int,
) -> None:
    """A row without the samples that are left out is shorter, and its products may be rounded in another order."""
    for module in (port, fsdp_model):
        monkeypatch.setitem(module.DTYPES, "float64", torch.float64)
    batch = make_batches(samples_of("none", 3, equal=(1, 3)), max_tokens=max_tokens)[0]
    ours, whole = (gradients_of(backend, model_dir, here, dtype, batch, kind) for kind in (Trainer, Complete))
    assert ours[1]["train/zero_samples_skipped"] >= 8 > whole[1]["train/zero_samples_skipped"] == 0
    assert ours[0].keys() == whole[0].keys() and any(gradient.any() for gradient in whole[0].values())
    for name, wanted in whole[0].items():
        bound = 0.0 if max_tokens == 1 else ROUNDING[dtype] * float(wanted.abs().max())
        assert float((ours[0][name] - wanted).abs().max()) <= bound, name
    if dtype == "float64":
        assert ours[1]["train/loss"] == pytest.approx(whole[1]["train/loss"], abs=1e-12)
