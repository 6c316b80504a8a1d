"""Frozen weights and the kinds of optimizers: frozen weights keep their bits, and the others are trained as if
alone.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.megatron_ranks import VOCAB
from tests.learner_steps import make_batches, make_samples
from tests.refusals import refusal
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.cpu_shim import megatron_device
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout import parallel
from tidemill.learner.settings.lora import Tuning
from tidemill.learner.settings.optimizer import OptimizerConfig
from tidemill.learner.trainer.trainer import Trainer

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-5, weight_decay=0.1)
BELOW = ("embed_tokens", r"layers\.0\.", r"layers\.1\.(input_layernorm|self_attn)")


def learner(
    model_dir: Path,
    here: parallel.Parallel,
    settings: OptimizerConfig = OPTIMIZER,
    *,
    recompute: str = "none",
    offload: bool = False,
) -> tuple[Trainer, MegatronPolicy, MegatronOptimizer]:
    tuning = Tuning(freeze=settings.freeze)
    policy = build_policy(model_dir, dtype="float32", parallel=here, kernels=Wanted(recompute=recompute), tuning=tuning)
    optimizer = MegatronOptimizer(policy, settings, steps=10, offload=offload)
    return Trainer(policy, optimizer, AlgorithmConfig(), max_lag=2), policy, optimizer


def take(trainer: Trainer, step: int = 3, minibatches: int = 1) -> dict[str, float]:
    return trainer.train(make_batches(make_samples(vocab=VOCAB, step=step), step=step, minibatches=minibatches)[0])


def exported(policy: MegatronPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export()}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_frozen_weights_keep_their_bits_and_the_others_move_as_before(
    here: Any, model_dir: Path, recompute: str
) -> None:
    """The first step's update of the others is that of a run without frozen weights: nothing is clipped here."""
    unclipped = replace(OPTIMIZER, clip_grad=1e9)
    trainer, policy, _ = learner(model_dir, here, unclipped)
    before = exported(policy)
    take(trainer)
    wanted = exported(policy)
    trainer, policy, _ = learner(model_dir, here, replace(unclipped, freeze=BELOW), recompute=recompute)
    assert take(trainer)["train/grad_norm"] > 0
    ours = exported(policy)
    frozen = {name for name in ours if torch.equal(ours[name], before[name])}
    assert frozen == {
        name for name in ours if "embed" in name or "layers.0." in name or "layers.1.self" in name or "1.input" in name
    }
    for name in ours.keys() - frozen:
        torch.testing.assert_close(ours[name], wanted[name], atol=1e-6, rtol=1e-5)


def test_freezing_what_megatron_cannot_divide_or_everything_is_refused(here: Any, model_dir: Path) -> None:
    with refusal(ConfigRefused, field=re.compile("freeze$"), got=re.compile("q_proj")):
        learner(model_dir, here, replace(OPTIMIZER, freeze=("q_proj",)))
    with refusal(ConfigRefused, field=re.compile("freeze$")):
        learner(model_dir, here, replace(OPTIMIZER, freeze=("model|lm_head",)))


def by_hand(name: str, weights: Tensor, grads: list[Tensor], settings: OptimizerConfig) -> Tensor:
    """Return weights after these gradients, by the textbook."""
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    for step, grad in enumerate(grads, 1):
        if name != "adamw":
            grad = grad + settings.weight_decay * weights
        if name == "sgd":
            first = settings.momentum * first + grad
            weights = weights - settings.lr * first
            continue
        first = settings.beta1 * first + (1 - settings.beta1) * grad
        second = settings.beta2 * second + (1 - settings.beta2) * grad**2
        change = first / (1 - settings.beta1**step) / ((second / (1 - settings.beta2**step)).sqrt() + settings.eps)
        decay = settings.weight_decay * weights if name == "adamw" else 0.0
        weights = weights - settings.lr * (change + decay)
    return weights


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_each_optimizer_takes_the_textbook_step_and_goes_on_from_a_checkpoint(
    here: Any, model_dir: Path, tmp_path: Path, name: str
) -> None:
    settings = replace(OPTIMIZER, name=name, clip_grad=1e9)

    def stepped(optimizer: MegatronOptimizer, policy: MegatronPolicy, steps: tuple[int, ...]) -> None:
        for step in steps:
            optimizer.zero_grad()
            for buffer in policy.ddp.buffers:
                buffer.grad_data.copy_(gradient(step, buffer.grad_data))
            with megatron_device():
                optimizer.step(step, loss=0.0)

    def gradient(step: int, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(step)) * 0.1

    _, policy, optimizer = learner(model_dir, here, settings)
    parameter = policy.module.decoder.layers[0].mlp.linear_fc2.weight
    began = parameter.detach().clone()
    stepped(optimizer, policy, (1, 2))
    write_staged(state.stage(tmp_path, step=2, policy=policy, optimizer=optimizer))
    stepped(optimizer, policy, (3,))
    grads = []
    for step in (1, 2, 3):
        for buffer in policy.ddp.buffers:
            buffer.grad_data.copy_(gradient(step, buffer.grad_data))
        grads.append(parameter.main_grad.clone())
    torch.testing.assert_close(parameter.detach(), by_hand(name, began, grads, settings), atol=1e-6, rtol=1e-5)
    _, again, its_optimizer = learner(model_dir, here, settings)
    state.load(tmp_path, policy=again, optimizer=its_optimizer)
    stepped(its_optimizer, again, (3,))
    assert again.digest() == policy.digest()
    kin = {"adam": "adamw", "adamw": "adam", "sgd": "sgd"}[name]
    _, again, its_optimizer = learner(model_dir, here, replace(settings, name=kin))
    state.load(tmp_path, policy=again, optimizer=its_optimizer)
    stepped(its_optimizer, again, (3,))
    assert (again.digest() == policy.digest()) is (kin == name), "the settings of the checkpoint's optimizer were used"
    other = "adamw" if name == "sgd" else "sgd"
    _, again, its_optimizer = learner(model_dir, here, replace(settings, name=other))
    with refusal(ConfigRefused, field="learner.optimizer.name"):
        state.load(tmp_path, policy=again, optimizer=its_optimizer)


@pytest.mark.parametrize("way", ["plain", "offload", "sgd"])
def test_a_reset_forgets_the_steps_before(here: Any, model_dir: Path, way: str) -> None:
    """Step 4 after a reset is that of an optimizer which begins there; with two minibatches, the second keeps the first
    one's state.
    """
    settings = replace(OPTIMIZER, reset_at=(4,), name="sgd" if way == "sgd" else "adamw")
    trainer, policy, _ = learner(model_dir, here, settings, offload=way == "offload")
    take(trainer, 3)
    with torch.no_grad():
        middle = {name: parameter.clone() for name, parameter in policy.module.named_parameters()}
    take(trainer, 4, minibatches=2)
    fresh, its_policy, _ = learner(model_dir, here, replace(settings, reset_at=()), offload=way == "offload")
    with torch.no_grad():
        for name, parameter in its_policy.module.named_parameters():
            parameter.copy_(middle[name])
    take(fresh, 4, minibatches=2)
    assert policy.digest() == its_policy.digest()
