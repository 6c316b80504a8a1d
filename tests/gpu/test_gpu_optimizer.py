"""The optimizer's state in host memory, in shares, or both: the same bits as on the device, and less of its memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.megatron_ranks import OPTIMIZER, VOCAB
from tests.learner_steps import make_batches, make_samples
from tests.skips import inapplicable
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.groups import Replicas
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.offload import OffloadedAdam
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

SHARES = Replicas(
    distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_elements=9_000
)
"""One replica has all shares; collectives run on NCCL all the same."""
WAYS: dict[str, tuple[Replicas | None, bool]] = {
    "plain": (None, False),
    "offload": (None, True),
    "distributed": (SHARES, False),
    "distributed, offload": (SHARES, True),
}


def learner(model_dir: Path, rank: Parallel, dtype: str, way: str) -> tuple[Trainer, MegatronPolicy, MegatronOptimizer]:
    replicas, offload = WAYS[way]
    policy = build_policy(model_dir, dtype=dtype, parallel=rank, replicas=replicas)
    optimizer = MegatronOptimizer(policy, OPTIMIZER, steps=10, offload=offload)
    return Trainer(policy, optimizer, AlgorithmConfig(), max_lag=2), policy, optimizer


def take(trainer: Trainer, step: int) -> dict[str, float]:
    return trainer.train(make_batches(make_samples(vocab=VOCAB, step=step), step=step, max_tokens=60)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_has_the_bits_of_the_device(dtype: str, rank: Parallel, model_dir: Path) -> None:
    digests = {}
    for way in ("plain", "offload"):
        trainer, policy, optimizer = learner(model_dir, rank, dtype, way)
        digests[way] = [(take(trainer, step)["train/grad_norm"], policy.digest()) for step in (3, 4)]
    assert digests["offload"] == digests["plain"]
    assert isinstance(optimizer.inner, OffloadedAdam)
    held = [flat for block in optimizer.inner.blocks for flat in block.host.values()]
    assert held and all(flat.device.type == "cpu" and flat.is_pinned() == (rank.device.type == "cuda") for flat in held)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["distributed", "distributed, offload"])
def test_shares_train_and_are_loaded_by_the_plain_optimizer(
    way: str, dtype: str, rank: Parallel, model_dir: Path, tmp_path: Path
) -> None:
    trainer, policy, optimizer = learner(model_dir, rank, dtype, way)
    plain = learner(model_dir, rank, dtype, "plain")
    for step in (3, 4):
        ours, wanted = take(trainer, step), take(plain[0], step)
        assert ours["train/loss"] == pytest.approx(wanted["train/loss"], rel=1e-4, abs=1e-4)
        assert ours["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-4)
    write_staged(state.stage(tmp_path, step=4, policy=policy, optimizer=optimizer))
    _, other, its_optimizer = learner(model_dir, rank, dtype, "plain")
    assert state.load(tmp_path, policy=other, optimizer=its_optimizer)[0] == 4
    assert other.digest() == policy.digest()


def test_offload_frees_the_device(rank: Parallel, on_gpu: bool, model_dir: Path) -> None:
    """Between steps the device has neither moments nor main weights."""
    if not on_gpu:
        inapplicable("counts the memory of a CUDA device")
    taken: dict[str, Any] = {}
    for way in ("plain", "offload"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        made = learner(model_dir, rank, "bfloat16", way)
        take(made[0], 3)
        torch.cuda.synchronize()
        taken[way] = torch.cuda.memory_allocated() - before
        size = sum(parameter.numel() for parameter in made[1].module.parameters())
        del made
    assert taken["plain"] - taken["offload"] > 11 * size
