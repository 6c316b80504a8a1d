"""Every algorithm runs in deterministic mode on CUDA: it uses no operation that torch refuses there (a step:
test_megatron_layouts).
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.algorithm_cases import CASES, algorithm
from tests.cuda_kernels import RaisingOnCuda
from tidemill.learner.algorithms import diagnostics
from tidemill.learner.algorithms.aggregation import Denominators
from tidemill.learner.algorithms.choices import RUNNING
from tidemill.learner.algorithms.objective import Objective, sequence_weight_sums
from tidemill.learner.algorithms.tokens import Tokens, running_sums
from tidemill.learner.trainer import step_metrics

NUMBERS = torch.rand(6, generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cumsum", lambda: NUMBERS.cumsum(0)),
        ("cumsum", lambda: INDEX.cumsum(0, dtype=torch.float64)),
        ("cumsum_", lambda: NUMBERS.clone().cumsum_(0)),
        ("put_", lambda: NUMBERS.clone().put_(INDEX, NUMBERS)),
        ("histc", lambda: NUMBERS.histc(3)),
        ("bincount", lambda: INDEX.bincount(NUMBERS)),
        ("median", lambda: NUMBERS.median(0)),
        ("scatter_reduce", lambda: NUMBERS.scatter_reduce(0, INDEX, NUMBERS, "prod")),
        ("nll_loss_forward", lambda: F.cross_entropy(NUMBERS.view(3, 2), INDEX[:3])),
        (
            "reflection_pad1d_backward",
            lambda: F.pad(NUMBERS.clone().requires_grad_()[None], (1, 1), mode="reflect").sum().backward(),
        ),
    ],
)
def test_an_operation_of_torchs_list_is_found(name: str, call: Callable[[], object]) -> None:
    with RaisingOnCuda() as seen:
        call()
    assert seen.found == [name]


def test_operations_with_deterministic_kernels_are_not() -> None:
    with RaisingOnCuda() as seen:
        INDEX.cumsum(0)
        INDEX.bincount()
        NUMBERS.median()
        NUMBERS.scatter_reduce(0, INDEX, NUMBERS, "amax")
        NUMBERS.index_add(0, INDEX, NUMBERS).clone().scatter_add_(0, INDEX, NUMBERS)
    assert seen.found == []


def _tokens(*, with_old: bool, with_reference: bool) -> tuple[Tensor, Tensor, Tokens]:
    """Return log-probs and entropies with gradient, and the other inputs: four samples of six tokens, padding behind
    them.
    """
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(28, generator=generator) for _ in range(5)]
    sample_T = torch.cat([torch.arange(4).repeat_interleave(6), torch.full((4,), -1)])
    mask_T = (torch.arange(28) % 6 > 0) & (sample_T >= 0)
    rollout_T = -draw[0].abs() - 0.1
    log_probs_T = (rollout_T + 0.3 * draw[1]).requires_grad_()
    seen = Tokens(
        mask_T=mask_T,
        sample_T=sample_T,
        num_samples=4,
        rollout_T=rollout_T,
        lag_T=torch.where(mask_T, sample_T % 3, -1),
        advantages_T=torch.zeros(28),
        old_T=rollout_T + 0.5 * draw[2] if with_old else None,
        reference_T=rollout_T + 0.2 * draw[3] if with_reference else None,
        teacher_T=rollout_T - 0.2 * draw[3].abs(),
        teacher_top_TK=torch.stack([rollout_T - 1.0, rollout_T - 2.0], dim=1),
        old_entropy_T=draw[0].abs() if with_old else None,
    )
    return log_probs_T, draw[4].abs().requires_grad_(), seen


@pytest.mark.parametrize("name", CASES)
def test_no_algorithm_uses_one(name: str) -> None:
    config, minibatches = algorithm(name), CASES[name][1]
    objective = Objective(config)
    needs_old = objective.config.needs_old(minibatches=minibatches, published_every=1) or bool(config.kl.reward_coef)
    log_probs_T, entropy_T, seen = _tokens(with_old=needs_old, with_reference=config.needs_reference)
    rewards_N, groups_N = torch.tensor([1.0, 0.0, 0.5, 0.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    lengths_N, trainable_N = torch.full((4,), 6), torch.full((4,), 5)
    with RaisingOnCuda() as found:
        kl_N = torch.rand(4, dtype=torch.float64) if config.kl.reward_coef and config.kl.reward_by == "sample" else None
        rewards_N = objective.shaped_rewards(rewards_N, lengths_N, max_tokens=8, kl_N=kl_N)
        if config.advantage in RUNNING:
            advantages_N = objective.over_running_baselines(rewards_N, trainable_N, (), {"": 0.5})[0].float()
        else:
            advantages_N = objective.advantages(rewards_N, groups_N, lengths_N, trainable_N).float()
        advantages_T = torch.where(seen.sample_T >= 0, advantages_N[seen.sample_T.clamp(min=0)], 0.0)
        seen = objective.advised(replace(seen, advantages_T=advantages_T), log_probs_T)
        if objective.by_token:
            (seen,) = objective.with_token_returns([seen], kl_scale=1.0, summed=lambda values: values)
        coupled = objective.coupled([seen], summed=lambda values: values, gathered=lambda values_M: values_M)
        denominators = Denominators(tokens=20, sequences=4, trainable_N=trainable_N, constant=8.0, groups_N=groups_N)
        listed_TK = torch.stack([log_probs_T - 1.0, log_probs_T - 1.5], dim=1)
        total, loss, _ = objective.total(log_probs_T, entropy_T, seen, denominators, coupled, listed_TK=listed_TK)
        total.backward()
        position_T = torch.arange(28) % 6
        sums = diagnostics.token_sums(
            seen,
            log_probs_T=log_probs_T,
            entropy_T=entropy_T,
            position_T=position_T,
            loss=loss,
            lag_buckets=diagnostics.num_lag_buckets(2),
        )
        step_metrics.finalize(sums)
        sequence_weight_sums(log_probs_T, seen)
    assert found.found == []
    assert log_probs_T.grad is not None and bool(log_probs_T.grad.isfinite().all())


@pytest.mark.parametrize("length", [0, 1, 2, 3, 8, 13, 100])
def test_running_sums_are_those_of_cumsum(length: int) -> None:
    values_T = torch.randn(length, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(running_sums(values_T), values_T.cumsum(0), atol=1e-13, rtol=0)
