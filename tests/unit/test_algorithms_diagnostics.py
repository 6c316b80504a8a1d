"""Diagnostics: against plain loops, exact under any split, and sensitive to the faults they detect."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.metric_names import undocumented
from tests.refusals import refusal
from tidemill.learner.algorithms import objective
from tidemill.learner.algorithms.aggregation import TokenLoss
from tidemill.learner.algorithms.correction import ImportanceWeights
from tidemill.learner.algorithms.diagnostics import (
    POSITIONS,
    PROBABILITIES,
    UNCERTAIN,
    Sums,
    merged,
    num_lag_buckets,
    token_sums,
)
from tidemill.learner.trainer.step_metrics import finalize, sample_metrics

LENGTHS = (9, 3, 14, 1, 20, 6)
MAX_LAG = 2
LOW, HIGH = 0.8, 1.2


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Inputs of the diagnostics, target-aligned."""

    log_probs_T: Tensor
    start_T: Tensor
    rollout_T: Tensor
    entropy_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    lag_T: Tensor
    sample_T: Tensor
    position_T: Tensor
    clipped_T: Tensor
    rejected_T: Tensor

    def part(self, at: Tensor) -> "Tokens":
        return Tokens(**{field.name: getattr(self, field.name)[at] for field in fields(self)})

    def sums(self) -> Sums:
        weight_T = (self.start_T - self.rollout_T).exp()
        weights = ImportanceWeights(
            weight_T=weight_T.clamp(LOW, HIGH),
            too_high_T=self.mask_T & (weight_T > HIGH),
            too_low_T=self.mask_T & (weight_T < LOW),
        )
        loss = TokenLoss(
            loss_T=torch.zeros_like(weight_T),
            clipped_T=self.clipped_T,
            weights=weights,
            rejected={"veto": self.rejected_T},
            metrics={"own": self.advantages_T},
        )
        seen = objective.Tokens(
            mask_T=self.mask_T,
            sample_T=self.sample_T,
            num_samples=len(LENGTHS),
            rollout_T=self.rollout_T,
            lag_T=self.lag_T,
            advantages_T=self.advantages_T,
            old_T=self.start_T,
        )
        given = {"log_probs_T": self.log_probs_T, "entropy_T": self.entropy_T, "position_T": self.position_T}
        return token_sums(seen, **given, loss=loss, lag_buckets=num_lag_buckets(MAX_LAG))


def make(seed: int = 0, *, noise: float = 0.3) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([*LENGTHS, 4])
    total = int(sizes.sum())
    draw = lambda: torch.randn(total, generator=generator, dtype=torch.float64)  # noqa: E731
    sample_T = torch.repeat_interleave(torch.tensor([*range(len(LENGTHS)), -1]), sizes)
    mask_T = (torch.rand(total, generator=generator) < 0.8) & (sample_T >= 0)
    start_T = -(2 * draw()).abs() - 1e-4
    rejected_N = torch.tensor([False, True, False, False, False, True, False])
    return Tokens(
        log_probs_T=start_T + 0.3 * draw(),
        start_T=start_T,
        rollout_T=start_T + noise * draw(),
        entropy_T=draw().abs(),
        advantages_T=torch.where(draw() > -0.5, draw(), 0.0),
        mask_T=mask_T,
        lag_T=torch.where(mask_T, torch.randint(0, 5, (total,), generator=generator) * (sample_T != 0), -1).int(),
        sample_T=sample_T,
        position_T=torch.randint(0, 300, (total,), generator=generator),
        clipped_T=mask_T & (torch.rand(total, generator=generator) < 0.3),
        rejected_T=mask_T & (rejected_N[sample_T] | (torch.rand(total, generator=generator) < 0.1)),
    )


@dataclass(frozen=True)
class Row:
    """A trainable token, as plain numbers."""

    theta: float
    pi: float
    mu: float
    entropy: float
    advantage: float
    lag: int
    sample: int
    position: int
    clipped: bool
    rejected: bool

    @property
    def d(self) -> float:
        return self.pi - self.mu

    @property
    def w(self) -> float:
        return math.exp(self.d)

    @property
    def k3(self) -> float:
        return math.exp(self.d) - 1 - self.d


def rows_of(tokens: Tokens) -> list[Row]:
    names = (
        "log_probs_T",
        "start_T",
        "rollout_T",
        "entropy_T",
        "advantages_T",
        "lag_T",
        "sample_T",
        "position_T",
        "clipped_T",
        "rejected_T",
    )
    columns = [getattr(tokens, name)[tokens.mask_T].tolist() for name in names]
    return [Row(*values) for values in zip(*columns, strict=True)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def by_loop(rows: list[Row]) -> dict[str, float]:
    """Compute every metric again with plain loops."""
    samples: dict[int, list[Row]] = {}
    for row in rows:
        samples.setdefault(row.sample, []).append(row)
    fresh = [row for row in rows if all(other.lag == 0 for other in samples[row.sample])]
    whole = [math.exp(sum(row.d for row in one)) for one in samples.values()]
    spans = [max(row.lag for row in one) - min(row.lag for row in one) for one in samples.values()]
    log_ppl = [mean([row.mu for row in one]) - mean([row.pi for row in one]) for one in samples.values()]
    gaps = [math.exp(row.theta - row.mu) * (row.entropy + row.theta) for row in rows if row.entropy >= UNCERTAIN]
    p, q = [math.exp(row.pi) for row in rows], [math.exp(row.mu) for row in rows]
    middles = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    js = []
    for row, a, b, m in zip(rows, p, q, middles, strict=True):
        js.append(0.5 * (m / b - 1 - math.log(m / b)) + 0.5 * row.w * (m / a - 1 - math.log(m / a)))
    found = {
        "train/tokens": len(rows),
        "train/entropy": mean([row.entropy for row in rows]),
        "custom/own": mean([row.advantage for row in rows]),
        "train/ppo_clip_fraction": mean([row.clipped for row in rows]),
        "train/ppo_clip_fraction_positive": mean([row.clipped for row in rows if row.advantage > 0]),
        "train/ppo_clip_fraction_negative": mean([row.clipped for row in rows if row.advantage < 0]),
        "train/ppo_kl": mean([row.pi - row.theta for row in rows]),
        "offpolicy/logprob_diff_abs": mean([abs(row.d) for row in rows]),
        "offpolicy/logprob_diff_max": max(abs(row.d) for row in rows),
        "offpolicy/k1": -mean([row.d for row in rows]),
        "offpolicy/k2": mean([row.d**2 / 2 for row in rows]),
        "offpolicy/k3": mean([row.k3 for row in rows]),
        "offpolicy/js": mean(js),
        "offpolicy/kl_entropy_ratio": sum(row.k3 for row in rows) / sum(row.entropy for row in rows),
        "offpolicy/weight_mean": mean([row.w for row in rows]),
        "offpolicy/chi2": mean([row.w**2 for row in rows]) - 1,
        "offpolicy/ess": sum(row.w for row in rows) ** 2 / (len(rows) * sum(row.w**2 for row in rows)),
        "offpolicy/sequence_chi2": mean([w**2 for w in whole]) - 1,
        "offpolicy/sequence_ess": sum(whole) ** 2 / (len(whole) * sum(w**2 for w in whole)),
        "offpolicy/prob_error": mean([math.exp(abs(row.d)) for row in rows]),
        "offpolicy/prob_diff_mean": mean([abs(a - b) for a, b in zip(p, q, strict=True)]),
        "offpolicy/prob_diff_std": statistics.pstdev([abs(a - b) for a, b in zip(p, q, strict=True)]),
        "offpolicy/prob_diff_max": max(abs(a - b) for a, b in zip(p, q, strict=True)),
        "offpolicy/prob_std": statistics.pstdev(q),
        "offpolicy/pearson": statistics.correlation(p, q),
        "offpolicy/ppl_train": mean([math.exp(-mean([row.pi for row in one])) for one in samples.values()]),
        "offpolicy/ppl_rollout": mean([math.exp(-mean([row.mu for row in one])) for one in samples.values()]),
        "offpolicy/ppl_ratio": mean([math.exp(diff) for diff in log_ppl]),
        "offpolicy/log_ppl_diff": mean(log_ppl),
        "offpolicy/log_ppl_diff_abs": mean([abs(diff) for diff in log_ppl]),
        "offpolicy/tis_weight_mean": mean([min(max(row.w, LOW), HIGH) for row in rows]),
        "offpolicy/tis_clipped_high": mean([row.w > HIGH for row in rows]),
        "offpolicy/tis_clipped_low": mean([row.w < LOW for row in rows]),
        "offpolicy/rejected_tokens": mean([row.rejected for row in rows]),
        "offpolicy/rejected/veto": mean([row.rejected for row in rows]),
        "offpolicy/touched_samples": mean([any(row.rejected for row in one) for one in samples.values()]),
        "offpolicy/rejected_samples": mean([all(row.rejected for row in one) for one in samples.values()]),
        "offpolicy/entropy_gap": mean(gaps),
        "offpolicy/entropy_gap_tokens": len(gaps),
        "offpolicy/entropy_gap_sigmas": mean(gaps) / (statistics.pstdev(gaps) / math.sqrt(len(gaps))),
        "offpolicy/fresh_share": len(fresh) / len(rows),
        "offpolicy/lag_mean": mean([row.lag for row in rows]),
        "offpolicy/lag_max": max(row.lag for row in rows),
        "offpolicy/span_mean": mean(spans),
        "offpolicy/span_max": max(spans),
        "offpolicy/mixed_share": mean([span > 0 for span in spans]),
    }
    if fresh:
        found["offpolicy/fresh_logprob_diff_abs"] = mean([abs(row.d) for row in fresh])
        found["offpolicy/fresh_k3"] = mean([row.k3 for row in fresh])
        found["offpolicy/fresh_prob_error"] = mean([math.exp(abs(row.d)) for row in fresh])
    for name, lags in {"0": (0,), "1": (1,), "2": (2,), "over": (3, 4)}.items():
        bucket = [row for row in rows if row.lag in lags]
        found[f"offpolicy/lag_share/{name}"] = len(bucket) / len(rows)
        found |= _coupling("lag", name, bucket, ("logprob_diff_abs", "logprob_diff", "k3", "weight_mean"))
    for begin, end in zip(POSITIONS, [*POSITIONS[1:], math.inf], strict=True):
        bucket = [row for row in rows if begin <= row.position < end]
        found |= _coupling("position", str(begin), bucket, ("logprob_diff_abs", "k3", "weight_mean"))
    for low, high in zip(PROBABILITIES, [*PROBABILITIES[1:], math.inf], strict=True):
        bucket = [row for row in rows if low <= math.exp(row.mu) < high]
        found |= _coupling("prob", f"{low:g}", bucket, ("logprob_diff_abs",))
    return found


def _coupling(kind: str, name: str, bucket: list[Row], wanted: Sequence[str]) -> dict[str, float]:
    if not bucket:
        return {}
    values = {
        "logprob_diff_abs": mean([abs(row.d) for row in bucket]),
        "logprob_diff": mean([row.d for row in bucket]),
        "k3": mean([row.k3 for row in bucket]),
        "weight_mean": mean([row.w for row in bucket]),
    }
    return {f"offpolicy/{kind}_{one}/{name}": values[one] for one in wanted}


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000))
def test_every_metric_is_that_of_a_loop(seed: int) -> None:
    tokens = make(seed)
    assert finalize(tokens.sums()) == pytest.approx(by_loop(rows_of(tokens)), rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000), parts=st.lists(st.integers(0, 3), min_size=len(LENGTHS) + 1, max_size=len(LENGTHS) + 1)
)
def test_metrics_do_not_depend_on_the_split(seed: int, parts: list[int]) -> None:
    """S6: whole samples, distributed over micro-batches and ranks in any way; some of them may be empty."""
    tokens, part_T = make(seed), torch.tensor(parts)
    split = merged([tokens.part((part_T[tokens.sample_T] == number).nonzero()[:, 0]).sums() for number in range(4)])
    assert finalize(split) == pytest.approx(finalize(tokens.sums()), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_what_is_masked_never_enters(rubbish: float) -> None:
    tokens = make()
    names = ("log_probs_T", "start_T", "rollout_T", "entropy_T", "advantages_T")
    dirty = replace(tokens, **{name: torch.where(tokens.mask_T, getattr(tokens, name), rubbish) for name in names})
    assert finalize(dirty.sums()) == finalize(tokens.sums())


def test_values_that_a_loss_reports_are_averaged_over_the_trainable_tokens() -> None:
    tokens = make()
    want = statistics.fmean(row.advantage for row in rows_of(tokens))
    assert finalize(tokens.sums())["custom/own"] == pytest.approx(want)
    some, other = tokens.sums(), tokens.sums()
    with refusal(ValueError, place="loss"):
        merged(
            [some, replace(other, totals={name: value for name, value in other.totals.items() if name != "custom/own"})]
        )


def test_equal_policies_have_no_mismatch_and_constant_ones_no_correlation() -> None:
    """35, 38."""
    tokens = make(noise=0.0)
    metrics = finalize(tokens.sums())
    for name in (
        "logprob_diff_abs",
        "k1",
        "k2",
        "k3",
        "js",
        "chi2",
        "sequence_chi2",
        "prob_diff_mean",
        "log_ppl_diff",
        "fresh_k3",
    ):
        assert metrics[f"offpolicy/{name}"] == pytest.approx(0, abs=1e-12), name
    for name in ("ess", "sequence_ess", "pearson", "prob_error", "ppl_ratio", "weight_mean"):
        assert metrics[f"offpolicy/{name}"] == pytest.approx(1), name
    flat_T = torch.full_like(tokens.start_T, -1.0)
    assert "offpolicy/pearson" not in finalize(replace(tokens, start_T=flat_T, rollout_T=flat_T).sums())


def test_a_step_with_nothing_to_train_reports_only_that() -> None:
    tokens = make()
    assert finalize(replace(tokens, mask_T=torch.zeros_like(tokens.mask_T)).sums()) == {"train/tokens": 0.0}


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(("temperature", "alarming"), [(1.0, False), (0.7, True)])
def test_the_entropy_gap_shows_a_temperature_that_ratios_do_not(
    stale: bool, temperature: float, alarming: bool
) -> None:
    """39: sampled at 0.7, reported at 1. Fresh data has ratios of 1 and old data those of its age: only the gap shows
    the fault.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(16, generator=generator, dtype=torch.float64)
    log_mu = logits.log_softmax(-1)
    log_pi = (logits + (0.5 * torch.randn(16, generator=generator, dtype=torch.float64) if stale else 0)).log_softmax(
        -1
    )
    drawn = torch.multinomial((logits / temperature).softmax(-1), 4000, replacement=True, generator=generator)
    ones_T, none_T = torch.ones(4000, dtype=torch.int64), torch.zeros(4000, dtype=torch.bool)
    tokens = Tokens(
        log_probs_T=log_pi[drawn],
        start_T=log_pi[drawn],
        rollout_T=log_mu[drawn],
        entropy_T=torch.full((4000,), float(-(log_pi.exp() * log_pi).sum()), dtype=torch.float64),
        advantages_T=ones_T.double(),
        mask_T=ones_T.bool(),
        lag_T=torch.zeros(4000, dtype=torch.int32),
        sample_T=ones_T,
        position_T=ones_T,
        clipped_T=none_T,
        rejected_T=none_T,
    )
    metrics = finalize(tokens.sums())
    assert stale or metrics["offpolicy/k3"] == 0
    assert (abs(metrics["offpolicy/entropy_gap_sigmas"]) > 8) == alarming
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
    assert metrics["train/reward_std"] == pytest.approx(math.sqrt(3 / 7 * 4 / 7))
    assert metrics["train/response_length_mean"] == 4
    assert metrics["train/response_length_max"] == 7
    assert metrics["train/truncated_share"] == pytest.approx(1 / 7)


def test_every_metric_is_in_the_dictionary() -> None:
    samples = sample_metrics(
        rewards_N=torch.zeros(2),
        groups_N=torch.zeros(2),
        response_lengths_N=torch.ones(2),
        truncated_N=torch.zeros(2, dtype=torch.bool),
    )
    assert not undocumented(finalize(make().sums()) | samples)
