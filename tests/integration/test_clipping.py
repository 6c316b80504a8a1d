"""Norm and clipping of the gradients have the bits of Megatron's own functions."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32

from tests.integration.megatron_ranks import OPTIMIZER
from tests.megatron_world import one_rank
from tests.tiny_models import write_tiny_model
from tidemill.learner.backends.megatron.cpu_shim import megatron_device
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.backends.megatron.optimizer_pieces import clip_factor, clipped, norm_over_ranks
from tidemill.learner.layout.parallel import Parallel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rank() -> Iterator[Parallel]:
    with one_rank() as joined:
        yield joined


@pytest.mark.parametrize("count", [1, 3, 26, 226])
@pytest.mark.parametrize("most", [0.5, 1e9])
def test_the_bits_are_megatrons(count: int, most: float, rank: Parallel) -> None:
    generator = torch.Generator().manual_seed(count)
    grads = [
        torch.randn(int(torch.randint(1, 5000, (), generator=generator)), generator=generator) for _ in range(count)
    ]
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    norm = norm_over_ranks(grads, dist.group.WORLD, CPU)
    with megatron_device():
        assert norm == get_grad_norm_fp32(grads, grad_stats_parallel_group=dist.group.WORLD)
        clip_grad_by_total_norm_fp32(parameters, most, norm)
    factor = clip_factor(norm, most)
    assert (factor < 1.0) is (most < norm)
    if factor < 1.0:
        torch._foreach_mul_(grads, factor)
    assert all(torch.equal(grad, parameter.grad) for grad, parameter in zip(grads, parameters, strict=True))


def test_a_rank_without_gradients_takes_part(rank: Parallel) -> None:
    assert norm_over_ranks([], dist.group.WORLD, CPU) == 0.0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_gradients_of_a_model_are_clipped_together(family: str, rank: Parallel, tmp_path: Path) -> None:
    """Those of experts are in an optimizer of their own, and have the same norm and factor."""
    policy = build_policy(write_tiny_model(tmp_path, family), dtype="float32", parallel=rank)
    optimizer = MegatronOptimizer(policy, OPTIMIZER, steps=10)
    generator = torch.Generator().manual_seed(0)
    optimizer.zero_grad()
    grads = [parameter.main_grad for parameter in policy.chunks[0].parameters()]  # type: ignore[attr-defined]
    for grad in grads:
        grad.copy_(torch.randn(grad.shape, generator=generator))
    before = torch.cat([grad.flatten() for grad in grads]).double()
    with megatron_device():
        optimizer.inner.prepare_grads()
        norm = clipped(optimizer.inner, 0.25, rank.device)
    after = torch.cat([grad.flatten() for grad in grads]).double()
    assert norm == pytest.approx(float(before.norm()), rel=1e-6)
    torch.testing.assert_close(after, before * (0.25 / norm), rtol=1e-5, atol=0)
