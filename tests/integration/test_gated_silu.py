"""The activation of an MLP computes the bits of Megatron's operations."""

from pathlib import Path

import pytest
import torch

from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import one_rank
from tests.tiny_models import write_tiny_model
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron.layers.dense import GatedSilu
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.learner.trainer.trainer import Trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_ends_with_the_bits_of_megatrons_activation(tmp_path: Path, dtype: str) -> None:
    model_dir, digests = write_tiny_model(tmp_path, "llama", vocab_size=64), set()
    with one_rank() as world:
        for is_ours in (True, False):
            policy = build_policy(model_dir, dtype=dtype, parallel=world)
            modules = [layer.mlp for layer in policy.module.decoder.layers]
            assert all(isinstance(mlp.activation_func, GatedSilu) for mlp in modules)
            before = policy.digest()
            policy.config.use_te_activation_func = is_ours  # Megatron's operations follow the configuration
            optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=1e-2), steps=2)
            Trainer(policy, optimizer, AlgorithmConfig(), max_lag=2).train(make_batches(make_samples(vocab=64))[0])
            assert policy.digest() != before
            digests.add(policy.digest())
    assert len(digests) == 1


def test_its_gradients_are_those_of_the_formula() -> None:
    x = torch.randn(5, 1, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(GatedSilu(None), (x,))
    gate, up = x.detach().chunk(2, dim=-1)
    assert torch.equal(GatedSilu(None)(x.detach()), torch.nn.functional.silu(gate) * up)
