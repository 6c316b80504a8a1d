"""The optimizer is torch's where Megatron has found another package's: its state, and the checkpoints, are the same
everywhere.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron_world import one_rank
from tests.tiny_models import write_tiny_model
from tidemill.learner.backends.megatron import optimizer
from tidemill.learner.backends.megatron.groups import Replicas
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.settings.config import OptimizerConfig


class FusedAdam(torch.optim.Adam):
    """Adam of Apex or Transformer Engine."""

    def __init__(self, *arguments: Any, adam_w_mode: bool = True, **settings: Any) -> None:
        super().__init__(*arguments, **settings)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave Megatron as it is after the import of another package's optimizers."""
    for module, name, wanted in optimizer.NAMES:
        assert getattr(module, name) is wanted, (
            f"{module.__name__}.{name}: Megatron has changed; correct torch_optimizers.py"
        )
        monkeypatch.setattr(module, name, {"Adam": FusedAdam, "SGD": FusedAdam, "USING_PYTORCH_OPTIMIZER": False}[name])


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_optimizer_is_torchs(tmp_path: Path, family: str) -> None:
    model_dir = write_tiny_model(tmp_path / "model", family)
    wanted = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    with one_rank() as here:
        for name, kind in wanted.items():
            for shares in (False, True) if name != "sgd" else (False,):
                policy = build_policy(
                    model_dir, dtype="bfloat16", parallel=here, replicas=Replicas(distributed_optimizer=shares)
                )
                inner = MegatronOptimizer(policy, OptimizerConfig(name=name), steps=3).inner
                assert {type(each.optimizer) for each in inner.chained_optimizers} == {kind}
    for module, name, _ in optimizer.NAMES:
        assert getattr(module, name) in (FusedAdam, False), "changed inside the context only"
