"""The learner on the device: log-probs of transformers, bfloat16 near float32, the same bits twice and after a
restart.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gpu.conftest import Child
from tests.integration.megatron_ranks import OPTIMIZER, VOCAB
from tests.learner_steps import make_batches, make_samples
from tests.tiny_models import DENSE, EXPERTS, write_tiny_model
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.backups import OtherModels, WeightBackup
from tidemill.learner.trainer.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

TIMES = {"train/step_seconds", "train/tokens_per_second"}


def learner(
    model_dir: Path, rank: Parallel, dtype: str = "float32", kernels: Wanted | None = None
) -> tuple[Trainer, MegatronPolicy, MegatronOptimizer, WeightBackup]:
    policy = build_policy(model_dir, dtype=dtype, parallel=rank, kernels=kernels)
    optimizer, proximal = MegatronOptimizer(policy, OPTIMIZER, steps=10), WeightBackup(policy)
    return (
        Trainer(policy, optimizer, AlgorithmConfig(), max_lag=2, others=OtherModels(proximal=proximal)),
        policy,
        optimizer,
        proximal,
    )


def batch(step: int, max_tokens: int = 60, vocab: int = VOCAB) -> Any:
    return make_batches(make_samples(vocab=vocab, step=step), step=step, max_tokens=max_tokens)[0]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("qwen3", "qwen3_moe") else [pytest.mark.slow])
        for family in (*DENSE, *EXPERTS)
    ],
)
def test_log_probs_are_those_of_transformers(family: str, rank: Parallel, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().to(rank.device)
    policy = build_policy(directory, dtype="float32", parallel=rank)
    trainer = Trainer(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), AlgorithmConfig(), max_lag=2)
    samples = make_samples(vocab=reference.config.vocab_size, temperature=0.7)
    step = make_batches(samples, max_tokens=100)[0]
    compared = 0
    for row, ours_T in zip(step.micro_batches, trainer.log_probs(step), strict=True):
        assert ours_T.device == rank.device
        for sample in np.unique(row.sample_T[row.sample_T >= 0]):
            at = np.flatnonzero((row.sample_T == sample) & row.loss_mask_T)
            tokens = torch.from_numpy(samples[sample].tokens).long().to(rank.device)
            with torch.no_grad():
                logits = reference(tokens[None]).logits[0] / 0.7
            wanted = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[-len(at) :, 0]
            torch.testing.assert_close(ours_T[at], wanted, atol=5e-5, rtol=0)
            compared += len(at)
    assert compared == sum(sample.response_length for sample in samples)


def test_bfloat16_is_near_float32(rank: Parallel, model_dir: Path) -> None:
    wanted = learner(model_dir, rank)[0].train(batch(3))
    trainer, policy, _, _ = learner(model_dir, rank, "bfloat16")
    step = trainer.train(batch(3))
    assert step["train/loss"] == pytest.approx(wanted["train/loss"], abs=0.05)
    assert step["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.1)
    assert {tensor.dtype for _, tensor in policy.export()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_the_same_bits_twice_and_after_a_restart(dtype: str, rank: Parallel, model_dir: Path, tmp_path: Path) -> None:
    """Two runs from the same weights, and a third from the checkpoint of the first, have equal digests after every
    step.
    """
    digests: list[list[str]] = []
    for attempt in range(2):
        trainer, policy, optimizer, proximal = learner(model_dir, rank, dtype)
        made = []
        for step in (3, 4, 5):
            trainer.train(batch(step))
            made.append(policy.digest())
            if (attempt, step) == (0, 3):
                write_staged(
                    state.stage(
                        tmp_path, step=step, policy=policy, optimizer=optimizer, others=OtherModels(proximal=proximal)
                    )
                )
        digests.append(made)
    assert digests[0] == digests[1], "not repeatable on this device"
    assert len(set(digests[0])) == 3, "a step has changed nothing"
    trainer, policy, optimizer, proximal = learner(model_dir, rank, dtype)
    assert state.load(tmp_path, policy=policy, optimizer=optimizer, others=OtherModels(proximal=proximal)) == (3, {})
    made = [policy.digest()]
    for step in (4, 5):
        trainer.train(batch(step))
        made.append(policy.digest())
    assert made == digests[0], "the restart has other bits"


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_recomputation_changes_no_bit(recompute: str, dtype: str, rank: Parallel, model_dir: Path) -> None:
    found = []
    for kernels in (Wanted(), Wanted(recompute=recompute)):
        trainer, policy, _, _ = learner(model_dir, rank, dtype, kernels)
        for step in (3, 4):
            trainer.train(batch(step))
        found.append(policy.digest())
    assert found[0] == found[1]


@pytest.mark.usefixtures("cuda")
def test_the_fused_activation_is_near_the_separate_one(rank: Parallel, model_dir: Path) -> None:
    """Rows of several lengths, for which torch.compile makes several kernels."""
    fused, separate = (
        learner(model_dir, rank, "bfloat16", Wanted(fused_activation=wanted))[0] for wanted in ("always", "never")
    )
    for step in (3, 4):
        ours, wanted = fused.train(batch(step)), separate.train(batch(step))
        assert ours["train/loss"] == pytest.approx(wanted["train/loss"], abs=0.02)
        assert ours["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.05)


def test_grouped_experts_are_near_those_one_after_the_other_and_give_the_same_bits_twice(
    rank: Parallel, tmp_path: Path
) -> None:
    directory = write_tiny_model(tmp_path, "qwen3_moe")
    first, again, sequential = (
        learner(directory, rank, "bfloat16", Wanted(grouped_experts=wanted))[:2]
        for wanted in ("always", "always", "never")
    )
    for step in (3, 4):
        ours, _, wanted = (trainer.train(batch(step, vocab=299)) for trainer, _ in (first, again, sequential))
        assert ours["train/loss"] == pytest.approx(wanted["train/loss"], abs=0.02)
        assert ours["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.05)
        assert first[1].digest() == again[1].digest()


def test_a_checkpoint_of_the_cpu_is_continued(rank: Parallel, model_dir: Path, tmp_path: Path, child: Child) -> None:
    saved = child("checkpoint", model_dir, tmp_path)
    trainer, policy, optimizer, proximal = learner(model_dir, rank)
    assert policy.digest() != saved["digest"]
    assert state.load(tmp_path, policy=policy, optimizer=optimizer, others=OtherModels(proximal=proximal))[0] == 3
    assert policy.digest() == saved["digest"]
    step = trainer.train(batch(4, max_tokens=1 << 20))
    assert step.keys() == saved["next"].keys()
    for name in step.keys() - TIMES - {"offpolicy/entropy_gap_sigmas"}:
        assert step[name] == pytest.approx(saved["next"][name], rel=1e-4, abs=1e-4), name
