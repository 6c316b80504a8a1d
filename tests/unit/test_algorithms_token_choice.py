"""Top-entropy tokens, Clip-Cov and KL-Cov by their definitions: a plain reference for every choice, the same from any
split into rows.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithm_settings import algorithm_of
from tests.examples import examples
from tidemill.learner.algorithms.aggregation import TokenLoss
from tidemill.learner.algorithms.objective import Coupled, Objective
from tidemill.learner.algorithms.policy_losses import draws, last_draw, top_cut
from tidemill.learner.algorithms.tokens import Tokens

N, EACH = 5, 8


def row(seed: int) -> tuple[Tensor, Tokens]:
    """Return log-probs of the trained policy (a leaf), and a row of five samples, the last two sequences of which are
    one episode.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(5, N * EACH, generator=generator, dtype=torch.float64)
    rollout_T = -draw[0].abs() - 0.3
    sequence_T = torch.repeat_interleave(torch.arange(N), EACH)
    tokens = Tokens(
        mask_T=draw[4] < 0.8,
        sample_T=sequence_T.clamp(max=N - 2),
        num_samples=N - 1,
        sequence_T=sequence_T,
        num_sequences=N,
        rollout_T=rollout_T,
        lag_T=torch.zeros(N * EACH, dtype=torch.int64),
        advantages_T=(torch.randn(N, generator=generator, dtype=torch.float64) * 3).repeat_interleave(EACH),
        old_T=rollout_T + 0.2 * draw[1],
        old_entropy_T=draw[2].abs(),
    )
    return (rollout_T + 0.4 * draw[3]).requires_grad_(), tokens


def part_of(whole: Tokens, at: Tensor) -> Tokens:
    """Return the tokens at these places, as a row of their own."""
    values: dict[str, Any] = {name: getattr(whole, name) for name in Tokens.__slots__}
    values |= {name: value[at] for name, value in values.items() if torch.is_tensor(value)}
    return Tokens(**values)


def coupled(objective: Objective, rows: list[Tokens]) -> Coupled:
    return objective.coupled(rows, summed=lambda x: x, gathered=lambda x: x)


def made(config: dict[str, Any], seed: int) -> tuple[Tensor, Tokens, TokenLoss, Tensor]:
    """Return (log-probs, tokens, loss, its gradient by log pi)."""
    log_probs_T, tokens = row(seed)
    objective = Objective(algorithm_of(**config))
    loss = objective.token_loss(log_probs_T, tokens, coupled(objective, [tokens]))
    slope_T = torch.autograd.grad(loss.loss_T.sum(), log_probs_T)[0]
    return log_probs_T.detach(), tokens, replace(loss, loss_T=loss.loss_T.detach()), slope_T


def trainable(tokens: Tokens) -> list[int]:
    return [t for t, on in enumerate(tokens.mask_T.tolist()) if on]


def covariance(tokens: Tokens) -> dict[int, float]:
    """Return the centred product of advantage and log-prob by token."""
    assert tokens.old_T is not None
    at = trainable(tokens)
    advantage, log_prob = tokens.advantages_T.tolist(), tokens.old_T.tolist()
    mean_a, mean_l = sum(advantage[t] for t in at) / len(at), sum(log_prob[t] for t in at) / len(at)
    return {t: (advantage[t] - mean_a) * (log_prob[t] - mean_l) for t in at}


@settings(deadline=None, max_examples=examples(40))
@given(seed=st.integers(0, 10_000), share=st.sampled_from([0.01, 0.2, 0.5, 0.99]))
def test_the_tokens_of_high_entropy_train_and_the_others_have_no_gradient(seed: int, share: float) -> None:
    config = {"correction": "bypass", "top_entropy": share}
    _, tokens, loss, slope_T = made(config, seed)
    assert tokens.old_entropy_T is not None
    entropy = tokens.old_entropy_T.tolist()
    best = sorted(trainable(tokens), key=lambda t: -entropy[t])[: max(1, int(share * len(trainable(tokens))))]
    _, _, plain, plain_T = made({"correction": "bypass"}, seed)
    for t in range(N * EACH):
        assert float(loss.loss_T[t]) == (float(plain.loss_T[t]) if t in best else 0.0)
        assert float(slope_T[t]) == (float(plain_T[t]) if t in best else 0.0)
    assert loss.left_out_T is not None
    assert loss.left_out_T.nonzero()[:, 0].tolist() == [t for t in trainable(tokens) if t not in best]
    assert plain.left_out_T is None


@settings(deadline=None, max_examples=examples(40))
@given(
    seed=st.integers(0, 10_000),
    share=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    anchor=st.sampled_from(["rollout", "proximal"]),
)
def test_kl_cov_holds_back_the_tokens_of_the_largest_covariance(seed: int, share: float, anchor: str) -> None:
    """Reference: ``-A r + coef |log r|`` there and ``-A r`` elsewhere, with the derivative by log pi by hand."""
    log_probs_T, tokens, loss, slope_T = made(
        {"correction": "kl_cov", "anchor": anchor, "covariance": {"share": share, "kl_coef": 0.7}}, seed
    )
    assert tokens.old_T is not None
    by_token = covariance(tokens)
    best = sorted(by_token, key=lambda t: -by_token[t])[: max(1, int(share * len(by_token)))]
    anchor_T = tokens.rollout_T if anchor == "rollout" else tokens.old_T
    for t in range(N * EACH):
        delta, advantage = float(log_probs_T[t] - anchor_T[t]), float(tokens.advantages_T[t])
        held = t in best
        value = -advantage * math.exp(delta) + (0.7 * abs(delta) if held else 0)
        slope = -advantage * math.exp(delta) + (math.copysign(0.7, delta) if held else 0)
        on = t in by_token
        assert float(loss.loss_T[t]) == pytest.approx(value if on else 0, abs=1e-12)
        assert float(slope_T[t]) == pytest.approx(slope if on else 0, abs=1e-12)
    assert not loss.clipped_T.any()


@settings(deadline=None, max_examples=examples(40))
@given(seed=st.integers(0, 10_000), share=st.sampled_from([0.01, 0.1, 1.0]), low=st.sampled_from([0.0, 0.5, 1.0]))
def test_clip_cov_drops_tokens_within_its_bounds_and_no_more_than_its_share(
    seed: int, share: float, low: float
) -> None:
    bounds = {"low": low, "high": low + 2.0}
    _, tokens, loss, slope_T = made(
        {"correction": "clip_cov", "weight": {"level": "none"}, "covariance": {"share": share, **bounds}}, seed
    )
    _, _, plain, plain_T = made({"correction": "decoupled", "weight": {"level": "none"}}, seed)
    by_token = covariance(tokens)
    candidates = [t for t, value in by_token.items() if low < value < low + 2]
    dropped = [t for t in by_token if float(loss.loss_T[t]) == 0 and float(plain.loss_T[t]) != 0]
    assert set(dropped) <= set(candidates)
    assert len(dropped) == min(len(candidates), max(1, int(share * len(by_token))))
    for t in range(N * EACH):
        assert float(slope_T[t]) == (0.0 if t in dropped else float(plain_T[t]))
        assert bool(loss.clipped_T[t]) == (t in dropped or bool(plain.clipped_T[t]))


@pytest.mark.parametrize(
    "config",
    [
        {"correction": "bypass", "top_entropy": 0.3},
        {"correction": "kl_cov", "covariance": {"share": 0.2}},
        {"correction": "clip_cov", "weight": {"level": "none"}, "covariance": {"share": 0.1, "low": 0.2}},
    ],
)
def test_a_choice_does_not_depend_on_the_split_into_rows(config: dict[str, Any]) -> None:
    objective = Objective(algorithm_of(**config))
    for seed in range(20):
        log_probs_T, whole = row(seed)
        assert whole.sequence_T is not None
        at = [(whole.sequence_T % 3 == part).nonzero()[:, 0] for part in range(3)]
        rows = [part_of(whole, one) for one in at]
        wanted_T = objective.token_loss(log_probs_T, whole, coupled(objective, [whole])).loss_T
        both = coupled(objective, rows)
        for one, tokens in zip(at, rows, strict=True):
            torch.testing.assert_close(
                objective.token_loss(log_probs_T[one], tokens, both).loss_T, wanted_T[one], atol=1e-12, rtol=0
            )


def test_an_update_without_trainable_tokens_chooses_none() -> None:
    log_probs_T, tokens = row(1)
    empty = replace(tokens, mask_T=torch.zeros_like(tokens.mask_T))
    for config in ({"top_entropy": 0.2}, {"correction": "kl_cov"}, {"correction": "clip_cov"}):
        objective = Objective(algorithm_of(**config))
        assert not objective.token_loss(log_probs_T, empty, coupled(objective, [empty])).loss_T.any()


def test_equal_values_go_together() -> None:
    assert top_cut(torch.tensor([1.0, 3.0, 3.0, 2.0]), 0.25) == 3.0
    assert top_cut(torch.tensor([1.0, 3.0, 3.0, 2.0]), 1.0) == 1.0
    assert last_draw(torch.tensor([0.3, 0.1, 0.2]), 2) == pytest.approx(0.2)
    assert last_draw(torch.tensor([0.3, 0.1]), 2) == math.inf


def test_draws_are_even_over_tokens_and_differ_from_step_to_step() -> None:
    """Tokens of the same places with new log-probs, as in another step, get other draws; neighbours of one sequence are
    not correlated.
    """
    size = 4096
    mask_T, sequence_T = torch.ones(size, dtype=torch.bool), torch.arange(size) // 64
    first_T, other_T = (-torch.rand(size, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    one_T, two_T = (draws(log_mu_T, mask_T, sequence_T, size // 64) for log_mu_T in (first_T, other_T))
    same_T = draws(torch.zeros(size), mask_T, sequence_T, size // 64)
    for drawn_T in (one_T, two_T, same_T):
        assert 0 <= float(drawn_T.min()) <= float(drawn_T.max()) < 1
        counts = torch.histc(drawn_T, 16, 0, 1)
        assert float(((counts - size / 16).square() / (size / 16)).sum()) < 60, "chi square of 15 degrees of freedom"
        assert abs(float(torch.corrcoef(torch.stack([drawn_T[1:], drawn_T[:-1]]))[0, 1])) < 0.08
    assert abs(float(torch.corrcoef(torch.stack([one_T, two_T]))[0, 1])) < 0.08
