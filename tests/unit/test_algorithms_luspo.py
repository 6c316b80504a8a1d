"""LUSPO: the preset computes the published objective, and its gradient does not depend on the length of a response."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithm_settings import algorithm_of
from tidemill.learner.algorithms.aggregation import Denominators
from tidemill.learner.algorithms.objective import Coupled, Objective
from tidemill.learner.algorithms.tokens import Tokens

LOW, HIGH = 3e-4, 4e-4
CONFIG = algorithm_of(correction="luspo", weight={"level": "none", "high": 0.0})
"""Without the weight for old data, which is of every preset with a proximal anchor."""


def row(
    lengths: list[int], advantages: list[float], shift: float, seed: int
) -> tuple[torch.Tensor, Tokens, Denominators]:
    """Return log-probs and a packed row of responses, each with a masked token of NaN in front and behind."""
    generator = torch.Generator().manual_seed(seed)
    sample_T = torch.cat([torch.full((length + 2,), number) for number, length in enumerate(lengths)])
    mask_T = torch.cat([torch.tensor([False, *[True] * length, False]) for length in lengths])
    old_T = torch.where(mask_T, -torch.rand(len(mask_T), generator=generator, dtype=torch.float64), math.nan)
    moved_T = shift * torch.randn(len(mask_T), generator=generator, dtype=torch.float64)
    values: dict[str, Any] = {"rollout_T": old_T, "old_T": old_T, "lag_T": torch.zeros_like(sample_T)}
    tokens = Tokens(
        mask_T=mask_T,
        sample_T=sample_T,
        num_samples=len(lengths),
        advantages_T=torch.where(mask_T, torch.tensor(advantages, dtype=torch.float64)[sample_T], math.nan),
        **values,
    )
    counts_N = torch.tensor(lengths)
    denominators = Denominators(tokens=sum(lengths), sequences=len(lengths), trainable_N=counts_N, constant=1.0)
    return (old_T + moved_T).requires_grad_(), tokens, denominators


SAMPLES = st.lists(st.tuples(st.integers(1, 9), st.floats(-2, 2)), min_size=1, max_size=6)


@settings(deadline=None)
@given(samples=SAMPLES, shift=st.sampled_from([0.0, 1e-4, 1e-3, 0.3]), seed=st.integers(0, 10_000))
def test_a_response_counts_by_its_length_times_the_clipped_geometric_ratio(
    samples: list[tuple[int, float]], shift: float, seed: int
) -> None:
    """-1/G sum_i |y_i| min(s_i A_i, clip(s_i) A_i), s_i = (pi / pi_old)^(1 / |y_i|), and its gradient where nothing is
    clipped.
    """
    lengths, advantages = [length for length, _ in samples], [advantage for _, advantage in samples]
    log_probs_T, tokens, denominators = row(lengths, advantages, shift, seed)
    loss, made, _ = Objective(CONFIG).total(log_probs_T, torch.zeros_like(log_probs_T), tokens, denominators, Coupled())
    (got_T,) = torch.autograd.grad(loss, log_probs_T)
    assert tokens.old_T is not None
    wanted, slopes = 0.0, torch.zeros_like(got_T)
    for number, (length, advantage) in enumerate(samples):
        at_T = tokens.mask_T & (tokens.sample_T == number)
        ratio = math.exp(math.fsum((log_probs_T - tokens.old_T).detach()[at_T].tolist()) / length)
        held = min(max(ratio, 1 - LOW), 1 + HIGH)
        wanted -= length * min(ratio * advantage, held * advantage) / len(samples)
        if ratio * advantage <= held * advantage:
            slopes[at_T] = -advantage * ratio / len(samples)
        assert bool((made.clipped_T[at_T] == (ratio * advantage > held * advantage)).all())
    assert float(loss.detach()) == pytest.approx(wanted, abs=1e-9)
    torch.testing.assert_close(got_T, slopes, atol=1e-9, rtol=0)


@settings(deadline=None)
@given(short=st.integers(1, 5), times=st.integers(2, 6), advantage=st.sampled_from([-1.5, 0.7]))
def test_the_gradient_of_a_token_does_not_depend_on_the_length_of_its_response(
    short: int, times: int, advantage: float
) -> None:
    """The bias of GSPO that it takes away: there a token of a response ``times`` as long gets one part of ``times``."""
    found = {}
    for name, config in (
        ("luspo", CONFIG),
        ("gspo", algorithm_of(correction="gspo", weight={"level": "none", "high": 0.0})),
    ):
        log_probs_T, tokens, denominators = row([short, short * times], [advantage, advantage], 0.0, 1)
        loss, _, _ = Objective(config).total(
            log_probs_T, torch.zeros_like(log_probs_T), tokens, denominators, Coupled()
        )
        (got_T,) = torch.autograd.grad(loss, log_probs_T)
        found[name] = [got_T[tokens.mask_T & (tokens.sample_T == number)] for number in (0, 1)]
    for one_T in found["luspo"]:
        torch.testing.assert_close(one_T, torch.full_like(one_T, -advantage / 2))
    torch.testing.assert_close(found["gspo"][1], (found["gspo"][0][0] / times).expand(short * times))
