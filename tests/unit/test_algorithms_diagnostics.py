"""Diagnostics: against loops, exact under any split, and sensitive to the faults they are there for."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.diagnostics import Sums, finalize, merged, num_lag_buckets, sample_metrics, token_sums
from learner.losses import three_policy_loss

METRICS = Path(__file__).resolve().parents[2] / "docs/metrics.md"
SIZE = 60


def _tokens(seed: int = 0, *, noise: float = 0.3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(SIZE, generator=generator, dtype=torch.float64)  # noqa: E731
    old = -(draw().abs() + 0.1)
    mask = torch.rand(SIZE, generator=generator) < 0.7
    return {
        "log_probs_T": old + 0.3 * draw(),
        "old_T": old,
        "rollout_T": old + noise * draw(),
        "entropy_T": draw().abs(),
        "mask_T": mask,
        "lag_T": torch.where(mask, torch.randint(0, 5, (SIZE,), generator=generator), -1).int(),
        "advantages_T": draw(),
    }


def _sums(tokens: dict[str, torch.Tensor], part: slice = slice(None), *, max_lag: int = 2) -> Sums:
    cut: dict[str, Any] = {name: values[part] for name, values in tokens.items()}
    advantages_T = cut.pop("advantages_T")
    loss = three_policy_loss(
        cut["log_probs_T"],
        cut["old_T"],
        cut["rollout_T"],
        advantages_T,
        cut["mask_T"],
        clip_low=0.2,
        clip_high=0.28,
        tis_low=0.8,
        tis_high=1.2,
    )
    return token_sums(**cut, loss=loss, lag_buckets=num_lag_buckets(max_lag))


def test_metrics_are_those_of_a_loop() -> None:
    tokens = _tokens()
    metrics = finalize(_sums(tokens))
    rows = [i for i in range(SIZE) if tokens["mask_T"][i]]
    at = lambda name: [float(tokens[name][i]) for i in rows]  # noqa: E731
    old, mu, theta, entropy, lags = at("old_T"), at("rollout_T"), at("log_probs_T"), at("entropy_T"), at("lag_T")
    deltas = [a - b for a, b in zip(old, mu, strict=True)]
    weights, n = [math.exp(d) for d in deltas], len(rows)
    assert metrics["train/tokens"] == n
    assert metrics["offpolicy/logprob_diff_abs"] == pytest.approx(sum(map(abs, deltas)) / n)
    assert metrics["offpolicy/logprob_diff_max"] == pytest.approx(max(map(abs, deltas)))
    assert metrics["offpolicy/k1"] == pytest.approx(-sum(deltas) / n)
    assert metrics["offpolicy/k3"] == pytest.approx(sum(math.exp(d) - 1 - d for d in deltas) / n)
    assert metrics["offpolicy/weight_mean"] == pytest.approx(sum(weights) / n)
    assert metrics["offpolicy/ess"] == pytest.approx(sum(weights) ** 2 / (n * sum(w * w for w in weights)))
    assert metrics["offpolicy/chi2"] == pytest.approx(sum(w * w for w in weights) / n - 1)
    assert metrics["offpolicy/tis_clipped_high"] == pytest.approx(sum(w > 1.2 for w in weights) / n)
    assert metrics["offpolicy/tis_clipped_low"] == pytest.approx(sum(w < 0.8 for w in weights) / n)
    assert metrics["offpolicy/tis_weight_mean"] == pytest.approx(sum(min(1.2, max(0.8, w)) for w in weights) / n)
    assert metrics["train/entropy"] == pytest.approx(sum(entropy) / n)
    assert metrics["offpolicy/lag_mean"] == pytest.approx(sum(lags) / n)
    assert metrics["offpolicy/lag_max"] == max(lags) == 4
    gaps = [h + t for h, t, lag in zip(entropy, theta, lags, strict=True) if lag == 0]
    assert metrics["offpolicy/entropy_gap"] == pytest.approx(sum(gaps) / len(gaps))
    for name, wanted in (("0", {0.0}), ("1", {1.0}), ("2", {2.0}), ("over", {3.0, 4.0})):
        bucket = [d for d, lag in zip(deltas, lags, strict=True) if lag in wanted]
        assert metrics[f"offpolicy/lag_share/{name}"] == pytest.approx(len(bucket) / n)
        assert metrics[f"offpolicy/lag_logprob_diff_abs/{name}"] == pytest.approx(sum(map(abs, bucket)) / len(bucket))
        assert metrics[f"offpolicy/lag_k3/{name}"] == pytest.approx(sum(math.exp(d) - 1 - d for d in bucket) / len(bucket))
    pearson = torch.corrcoef(torch.tensor([[math.exp(x) for x in old], [math.exp(x) for x in mu]], dtype=torch.float64))[0, 1]
    assert metrics["offpolicy/pearson"] == pytest.approx(float(pearson))


@settings(deadline=None)
@given(seed=st.integers(0, 50), cuts=st.lists(st.integers(0, SIZE), max_size=4))
def test_metrics_do_not_depend_on_the_split(seed: int, cuts: list[int]) -> None:
    tokens = _tokens(seed)
    bounds = [0, *sorted(cuts), SIZE]
    parts = [_sums(tokens, slice(a, b)) for a, b in itertools.pairwise(bounds)]
    whole, split = finalize(_sums(tokens)), finalize(merged(parts))
    assert split == pytest.approx(whole, rel=1e-9, abs=1e-12)


def test_what_is_masked_never_enters() -> None:
    tokens = _tokens()
    poisoned = {name: values.clone() for name, values in tokens.items()}
    for name in ("log_probs_T", "old_T", "rollout_T", "entropy_T", "advantages_T"):
        poisoned[name][~tokens["mask_T"]] = float("nan")
    assert finalize(_sums(poisoned)) == finalize(_sums(tokens))


def test_equal_policies_have_no_mismatch_and_constant_ones_no_correlation() -> None:
    tokens = _tokens(noise=0.0)
    metrics = finalize(_sums(tokens))
    for name in ("logprob_diff_abs", "k1", "k3", "chi2"):
        assert metrics[f"offpolicy/{name}"] == pytest.approx(0, abs=1e-12)
    assert metrics["offpolicy/ess"] == pytest.approx(1)
    assert metrics["offpolicy/pearson"] == pytest.approx(1)
    flat = {**tokens, "old_T": torch.full((SIZE,), -1.0, dtype=torch.float64), "rollout_T": torch.full((SIZE,), -1.0, dtype=torch.float64)}
    assert "offpolicy/pearson" not in finalize(_sums(flat))


def test_a_step_with_nothing_to_train_says_only_that() -> None:
    tokens = _tokens()
    tokens["mask_T"][:] = False
    assert finalize(_sums(tokens)) == {"train/tokens": 0.0}


def test_the_entropy_gap_shows_a_temperature_that_ratios_do_not() -> None:
    """Sampled at 0.7, reported and recomputed at 1: every ratio is perfect, the gap is many standard errors off."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(16, generator=generator, dtype=torch.float64)
    log_p = logits.log_softmax(-1)
    entropy = float(-(log_p.exp() * log_p).sum())
    for temperature, alarming in ((1.0, False), (0.7, True)):
        drawn = torch.multinomial((logits / temperature).softmax(-1), 4000, replacement=True, generator=generator)
        tokens = {
            "log_probs_T": log_p[drawn],
            "old_T": log_p[drawn],
            "rollout_T": log_p[drawn],
            "entropy_T": torch.full((4000,), entropy, dtype=torch.float64),
            "mask_T": torch.ones(4000, dtype=torch.bool),
            "lag_T": torch.zeros(4000, dtype=torch.int32),
            "advantages_T": torch.ones(4000, dtype=torch.float64),
        }
        metrics = finalize(_sums(tokens))
        assert metrics["offpolicy/k3"] == 0
        assert (abs(metrics["offpolicy/entropy_gap_sigmas"]) > 6) == alarming
        assert (abs(metrics["offpolicy/entropy_gap_sigmas"]) > 4) == alarming


def test_samples_are_counted_by_group() -> None:
    metrics = sample_metrics(
        rewards_N=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
        groups_N=torch.tensor([7, 7, 9, 9, 5, 5, 5]),
        response_lengths_N=torch.tensor([1, 2, 3, 4, 5, 6, 7]),
        truncated_N=torch.tensor([False, True, False, False, False, False, False]),
    )
    assert metrics["train/groups"] == 3
    assert metrics["train/zero_variance_group_share"] == pytest.approx(2 / 3)
    assert metrics["train/reward_mean"] == pytest.approx(3 / 7)
    assert metrics["train/response_length_mean"] == 4
    assert metrics["train/truncated_share"] == pytest.approx(1 / 7)


def test_every_metric_is_in_the_dictionary() -> None:
    listed = set(re.findall(r"^\| `([\w/<>]+)` \|", METRICS.read_text(), re.MULTILINE))
    samples = sample_metrics(
        rewards_N=torch.zeros(2), groups_N=torch.zeros(2), response_lengths_N=torch.ones(2), truncated_N=torch.zeros(2, dtype=torch.bool)
    )
    made = {re.sub(r"/(\d+|over)$", "/<lag>", name) for name in (finalize(_sums(_tokens())) | samples)}
    assert made <= listed, f"not in docs/metrics.md: {sorted(made - listed)}"
