"""Demonstrations on the real Megatron: their loss is transformers' cross-entropy, and beside another loss they change
nothing of it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.algorithm_settings import algorithm_of
from tests.integration.megatron_ranks import OPTIMIZER, VOCAB
from tests.learner_steps import make_batches, make_samples
from tests.metric_names import undocumented
from tidemill.bus.wire.messages import Sample
from tidemill.learner.algorithms.aggregation import Denominators
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.layout import parallel
from tidemill.learner.trainer.trainer import Trainer

SEED = 5


@pytest.fixture
def make(here: parallel.Parallel, model_dir: Path) -> Any:
    """Return a function: ``make(**algorithm) -> trainer`` with fresh weights."""

    def build(**algorithm: Any) -> Trainer:
        policy = build_policy(model_dir, dtype="float32", parallel=here)
        return Trainer(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), algorithm_of(**algorithm), max_lag=2)

    return build


def demonstrations(*, task: int = 1, groups: int = 4, masked: bool = True) -> list[Sample]:
    """Return groups of one with masks of several stretches, from task id ``task`` on."""
    found = []
    for number, one in enumerate(make_samples(vocab=VOCAB, groups=groups, group_size=1, seed=SEED)):
        mask = np.array([not masked or at % 3 != 1 for at in range(one.response_length)], np.uint8)
        nothing = np.zeros(one.response_length, np.float32)
        found.append(
            replace(one, task=task + number, loss_mask=mask, rollout_log_probs=nothing, reward=0.0, demonstration=True)
        )
    return found


def cross_entropy(model_dir: Path, samples: list[Sample]) -> tuple[float, int, list[torch.Tensor]]:
    """Return (sum, number of tokens, gradients of the mean) of the cross-entropy by transformers, a sequence at a
    time.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens).long()
        labels = torch.full_like(tokens, -100)
        trained = torch.from_numpy(sample.loss_mask.astype(bool))
        labels[-sample.response_length :][trained] = tokens[-sample.response_length :][trained]
        logits = model(tokens[None]).logits[0, :-1].double()
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
        count += int(trained.sum())
    (total / count).backward()
    return float(total.detach()), count, [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("max_tokens", [1 << 20, 20])
def test_the_loss_and_the_gradient_are_those_of_transformers(make: Any, model_dir: Path, max_tokens: int) -> None:
    samples = demonstrations()
    total, count, gradients = cross_entropy(model_dir, samples)
    (batch,) = make_batches(samples, max_tokens=max_tokens)
    metrics = make(correction="sft").train(batch)
    assert (metrics["train/sft_tokens"], metrics["train/tokens"], batch.num_tokens) == (count, count, count)
    assert metrics["train/sft_loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["train/loss"] == pytest.approx(total / count, rel=1e-5)
    norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert not [name for name in metrics if name.startswith("offpolicy/")], "there is no policy to compare with"
    assert not undocumented(metrics)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"correction": "tis", "advantage": "reinforce_pp", "weight": {"self_normalise": True}},
        {"correction": "m2po", "advantage": "batch_std"},
        {"correction": "kl_cov"},
        {"correction": "gspo", "ess_lr": 1.0},
        {"aggregation": "prompt_mean", "top_entropy": 0.5},
    ],
    ids=str,
)
def test_beside_another_loss_both_terms_are_as_if_alone(make: Any, algorithm: dict[str, Any]) -> None:
    sampled, shown = make_samples(vocab=VOCAB, seed=SEED), demonstrations(task=100)
    coef = 0.5
    aggregation = {"aggregation": algorithm["aggregation"]} if "aggregation" in algorithm else {}
    if algorithm.get("correction") == "gspo":
        aggregation = {"aggregation": "seq_mean_token_mean"}
    alone = make(**algorithm).train(make_batches(sampled)[0])
    supervised = make(correction="sft", **aggregation).train(make_batches(shown)[0])
    both = make(**algorithm, sft_coef=coef).train(make_batches([*sampled, *shown], max_tokens=60)[0])
    assert both["train/loss"] == pytest.approx(
        alone["train/loss"] + coef * supervised["train/loss"], rel=1e-5, abs=1e-6
    )
    assert both["train/sft_loss"] == pytest.approx(supervised["train/sft_loss"], rel=1e-5)
    assert both["train/tokens"] == alone["train/tokens"] + supervised["train/tokens"]
    same = [
        name
        for name in alone
        if name.startswith(("offpolicy/", "train/reward", "train/entropy", "train/ppo", "train/zero"))
    ]
    assert {name: both[name] for name in same} == pytest.approx(
        {name: alone[name] for name in same}, rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("correction", ["m2po", "kl_cov", "decoupled", "gspo"])
def test_a_step_of_demonstrations_alone_in_a_mixed_run(make: Any, correction: str) -> None:
    shown = demonstrations()
    metrics = make(correction=correction, sft_coef=0.5, aggregation="token_mean", ess_lr=1.0).train(
        make_batches(shown)[0]
    )
    wanted = make(correction="sft").train(make_batches(shown)[0])
    assert metrics["train/loss"] == pytest.approx(0.5 * wanted["train/loss"], rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(0.5 * wanted["train/grad_norm"], rel=1e-5)
    assert metrics["train/skipped_minibatches"] == 0


def test_minibatches_without_demonstrations_have_the_other_term_alone(make: Any) -> None:
    sampled, shown = make_samples(vocab=VOCAB, groups=4, seed=SEED), demonstrations(task=100, groups=1)
    (batch,) = make_batches([*sampled, *shown], minibatches=4)
    with_demonstrations = {int(one) for one in batch.minibatches_N[batch.demonstration_N]}
    assert len(with_demonstrations) == 1 and batch.num_minibatches == 4
    metrics = make(sft_coef=0.5).train(replace(batch, unended_N=batch.demonstration_N))
    assert metrics["train/skipped_minibatches"] == metrics["train/unended_share"] == 0
    assert metrics["train/sft_tokens"] == sum(int(one.loss_mask.sum()) for one in shown)
    assert np.isfinite(metrics["train/loss"])


def mean(mask_T: torch.Tensor, sample_T: torch.Tensor, denominators: Denominators) -> torch.Tensor:
    """The mean over tokens, as an aggregation of one's own."""
    return torch.full(mask_T.shape, 1 / denominators.tokens, dtype=torch.float64)


@pytest.mark.parametrize("algorithm", [{"correction": "sft"}, {"sft_coef": 0.5}], ids=str)
def test_demonstrations_have_an_aggregation_of_ones_own(make: Any, algorithm: dict[str, Any]) -> None:
    """Also in minibatches that have demonstrations alone, or none: no function divides by 0 tokens."""
    sampled, shown = make_samples(vocab=VOCAB, groups=2, seed=SEED), demonstrations(task=100, groups=2)
    (batch,) = make_batches([*sampled, *shown], minibatches=4)
    ours, wanted = (make(**algorithm, aggregation=name).train(batch) for name in (f"{__name__}:mean", "token_mean"))
    assert ours["train/loss"] == wanted["train/loss"] and ours["train/grad_norm"] == wanted["train/grad_norm"] > 0


def test_with_loss_sft_all_tokens_have_one_mean(make: Any, model_dir: Path) -> None:
    known, shown = make_samples(vocab=VOCAB, groups=2, seed=SEED), demonstrations(task=100)
    total, count, _ = cross_entropy(model_dir, [*known, *shown])
    metrics = make(correction="sft").train(make_batches([*known, *shown])[0])
    assert metrics["train/loss"] == pytest.approx(total / count, rel=1e-5)
