"""Steps of the learner are those of transformers with torch's AdamW: losses and norms of gradients, dense and
with experts.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.examples import THOROUGH, rarely
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import one_rank
from tests.tiny_models import write_tiny_model
from tidemill.bus.wire.messages import Sample
from tidemill.learner.algorithms.choices import AGGREGATIONS
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.learner.trainer.trainer import Trainer

VOCAB = 128
STEPS = range(1, 21 if THOROUGH else 9)
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1)
"""With a smaller eps Adam steps by the sign of gradients that are rounding noise."""


def advantages_of(samples: list[Sample]) -> torch.Tensor:
    """Return GRPO's advantage of each sample, in groups of four."""
    rewards = torch.tensor([sample.score for sample in samples]).view(-1, 4)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1)


def log_probs_of(model: Any, sample: Sample) -> torch.Tensor:
    """Return the log-probs of the response's tokens."""
    tokens = torch.from_numpy(sample.tokens).long()
    return model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[-sample.response_length :, 0]


def loss_of(model: Any, samples: list[Sample]) -> torch.Tensor:
    """Return the mean over all response tokens of GRPO's loss with truncated importance weights, a sequence at a
    time.
    """
    total = torch.zeros(())
    for sample, advantage in zip(samples, advantages_of(samples), strict=True):
        log_probs = log_probs_of(model, sample)
        weights = (log_probs.detach() - torch.from_numpy(sample.rollout_log_probs)).exp().clamp(0, 2)
        total = total - (weights * (log_probs - log_probs.detach()).exp() * advantage).sum()
    return total / sum(sample.response_length for sample in samples)


def by_transformers(model_dir: Path, steps: list[list[Sample]]) -> list[tuple[float, float]]:
    """Return (loss, norm of the gradient) of each step."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [one for one in parameters if one.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
    found = []
    for samples in steps:
        adam.zero_grad()
        loss = loss_of(model, samples)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip_grad)
        adam.step()
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.parametrize("family", ["qwen3", *rarely(["llama"]), "qwen3_moe"])
def test_steps_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model_dir = write_tiny_model(tmp_path / "model", family, vocab_size=VOCAB)
    steps = [make_samples(vocab=VOCAB, step=step) for step in STEPS]
    found = []
    with one_rank() as here:
        policy = build_policy(model_dir, dtype="float32", parallel=here)
        trainer = Trainer(policy, MegatronOptimizer(policy, OPTIMIZER, steps=len(steps)), AlgorithmConfig(), max_lag=2)
        for step, samples in zip(STEPS, steps, strict=True):
            metrics = trainer.train(make_batches(samples, step=step, max_tokens=90)[0])
            found.append((metrics["train/loss"], metrics["train/grad_norm"]))
            assert metrics["train/ppo_clip_fraction"] == 0
    for step, ours, theirs in zip(STEPS, found, by_transformers(model_dir, steps), strict=True):
        assert ours == (pytest.approx(theirs[0], abs=2e-6), pytest.approx(theirs[1], rel=1e-4)), f"step {step}"


def aggregated(losses: list[torch.Tensor], tasks: list[int], mode: str) -> torch.Tensor:
    """Return the number of a minibatch, from the losses of the tokens of each of its responses."""
    sums, means = torch.stack([one.sum() for one in losses]), torch.stack([one.mean() for one in losses])
    by_prompt = [
        torch.cat([one for one, own in zip(losses, tasks, strict=True) if own == task]).mean()
        for task in sorted(set(tasks))
    ]
    match mode:
        case "token_mean":
            return torch.cat(losses).mean()
        case "seq_mean_token_mean":
            return means.mean()
        case "seq_mean_token_sum":
            return sums.mean()
        case "prompt_mean":
            return torch.stack(by_prompt).mean()
        case "token_sum":
            return sums.sum()
    return sums.sum() / (12 * len(losses))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_two_unequal_minibatches_are_those_of_a_plain_loop(tmp_path: Path, mode: str) -> None:
    """Loss and weights after two steps of SGD, the second with clipped ratios: each is divided by the size of its own
    minibatch.
    """
    model_dir = write_tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    samples = make_samples(vocab=VOCAB, groups=3)
    (batch,) = make_batches(samples, minibatches=2, max_tokens=90)
    parts = [[samples[at] for at in np.flatnonzero(batch.minibatches_N == number)] for number in range(2)]
    assert [len(part) for part in parts] in ([8, 4], [4, 8])
    rate = 0.05 if mode in ("token_sum", "seq_mean_token_sum") else 0.5
    optimizer = OptimizerConfig(name="sgd", lr=rate, momentum=0.0, clip_grad=0.0)
    with one_rank() as here:
        policy = build_policy(model_dir, dtype="float32", parallel=here)
        trainer = Trainer(
            policy, MegatronOptimizer(policy, optimizer, steps=3), AlgorithmConfig(aggregation=mode), max_lag=2
        )
        metrics = trainer.train(batch)
        weights = {name: tensor.clone() for name, tensor in policy.export()}

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with torch.no_grad():
        old = {(one.task, one.index): log_probs_of(model, one) for one in samples}
    advantages = dict(zip(old, advantages_of(samples), strict=True))
    sgd, losses = torch.optim.SGD(model.parameters(), lr=rate), []
    for part in parts:
        responses = []
        for one in part:
            start, advantage = old[one.task, one.index], advantages[one.task, one.index]
            ratio = (log_probs_of(model, one) - start).exp()
            weight = (start - torch.from_numpy(one.rollout_log_probs)).exp().clamp(0, 2)
            responses.append(-weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
        sgd.zero_grad()
        loss = aggregated(responses, [one.task for one in part], mode)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    assert metrics["train/loss"] == pytest.approx(sum(losses) / 2, rel=1e-4, abs=1e-6)
    assert metrics["train/ppo_clip_fraction"] > 0
    for name, tensor in model.named_parameters():
        moved, wanted = weights[name] - before[name], tensor.detach() - before[name]
        assert (moved - wanted).norm() <= 1e-3 * wanted.norm(), name
