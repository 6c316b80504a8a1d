"""Twenty steps of the learner are those of transformers with torch's AdamW: losses and norms of gradients, dense and with experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bus.wire.messages import Sample
from learner.algorithms.config import AlgorithmConfig
from learner.megatron.model import build_policy
from learner.megatron.optimizer import PolicyOptimizer
from learner.megatron.trainer import Trainer
from learner.settings.config import OptimizerConfig
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import one_rank
from tests.tiny_models import write_tiny_model

VOCAB = 128
STEPS = range(1, 21)
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1)
"""With a smaller eps Adam steps by the sign of gradients that are rounding noise."""


def loss_of(model: Any, samples: list[Sample]) -> torch.Tensor:
    """Return the mean over all response tokens of GRPO's loss with truncated importance weights, a sequence at a time."""
    rewards = torch.tensor([sample.score for sample in samples]).view(-1, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1)
    total = torch.zeros(())
    for sample, advantage in zip(samples, advantages, strict=True):
        tokens = torch.from_numpy(sample.tokens).long()
        log_probs = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[-sample.response_length :, 0]
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


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_twenty_steps_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model_dir = write_tiny_model(tmp_path / "model", family, vocab_size=VOCAB)
    steps = [make_samples(vocab=VOCAB, step=step) for step in STEPS]
    found = []
    with one_rank() as here:
        policy = build_policy(model_dir, dtype="float32", parallel=here)
        trainer = Trainer(policy, PolicyOptimizer(policy, OPTIMIZER, steps=len(steps)), AlgorithmConfig(), max_lag=2)
        for step, samples in zip(STEPS, steps, strict=True):
            metrics = trainer.train(make_batches(samples, step=step, max_tokens=90)[0])
            found.append((metrics["train/loss"], metrics["train/grad_norm"]))
            assert metrics["train/ppo_clip_fraction"] == 0
    for step, ours, theirs in zip(STEPS, found, by_transformers(model_dir, steps), strict=True):
        assert ours == (pytest.approx(theirs[0], abs=2e-6), pytest.approx(theirs[1], rel=1e-4)), f"step {step}"
