"""What a step says about itself: mismatch, staleness, clipping, rewards. Pure functions of tensors.

Everything is returned as *sums* (numerators and denominators apart), so that adding them over micro-batches and ranks and dividing
once at the end is exact; a mean of means would not be. Names, units and healthy ranges: ``docs/metrics.md``.
Shape letters: T = tokens of a micro-batch, M = trainable tokens in it, B = lag buckets, N = samples of the step on all ranks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.advantages import group_moments
from learner.correction import log_ratio
from learner.losses import TokenLoss

MAX_LAG_BUCKETS = 16
"""Lags from here on share the bucket ``over``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Additive parts (float64 tensors of any shape) and maxima (float64 scalars) under fixed names."""

    totals: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


def merged(parts: Iterable[Sums]) -> Sums:
    """The sums of several micro-batches. At least one part; all have the same names."""
    first, *rest = parts
    totals, maxima = dict(first.totals), dict(first.maxima)
    for part in rest:
        totals = {name: value + part.totals[name] for name, value in totals.items()}
        maxima = {name: torch.maximum(value, part.maxima[name]) for name, value in maxima.items()}
    return Sums(totals=totals, maxima=maxima)


def all_reduced(sums: Sums, group: dist.ProcessGroup | None) -> Sums:
    """The sums over the ranks of ``group`` (None = this rank alone): two all-reduces, whatever the number of names."""
    if group is None or dist.get_world_size(group) == 1:
        return sums
    return Sums(
        totals=_reduce_flat(sums.totals, group, dist.ReduceOp.SUM),
        maxima=_reduce_flat(sums.maxima, group, dist.ReduceOp.MAX),
    )


def _reduce_flat(values: Mapping[str, Tensor], group: dist.ProcessGroup, operation: Any) -> dict[str, Tensor]:
    names = sorted(values)
    flat = torch.cat([values[name].reshape(-1) for name in names])
    dist.all_reduce(flat, operation, group=group)
    pieces = flat.split([values[name].numel() for name in names])
    return {name: piece.view(values[name].shape) for name, piece in zip(names, pieces, strict=True)}


def num_lag_buckets(max_lag: int) -> int:
    """Buckets 0 .. max_lag (at most 16 of them) and ``over``."""
    return min(max_lag + 1, MAX_LAG_BUCKETS) + 1


@torch.no_grad()
def token_sums(
    *,
    log_probs_T: Tensor,
    old_T: Tensor,
    rollout_T: Tensor,
    entropy_T: Tensor,
    mask_T: Tensor,
    lag_T: Tensor,
    loss: TokenLoss,
    lag_buckets: int,
) -> Sums:
    """Sums over the trainable tokens of one micro-batch; what is masked never enters.

    ``d = log pi_old - log mu`` and ``w = e^d`` are of the policy at the start of the step and before truncation.
    """
    at_M = mask_T.nonzero()[:, 0]
    delta_M = log_ratio(old_T, rollout_T, mask_T)[at_M].double()
    log_pi_M, log_mu_M = old_T[at_M].double(), rollout_T[at_M].double()
    entropy_M, lag_M = entropy_T[at_M].double(), lag_T[at_M]
    w_M, pi_M, mu_M = delta_M.exp(), log_pi_M.exp(), log_mu_M.exp()
    k3_M, fresh_M = w_M - 1 - delta_M, (lag_M == 0).double()
    gap_M = (entropy_M + log_probs_T[at_M].double()) * fresh_M
    columns: dict[str, Tensor] = {
        "tokens": torch.ones_like(w_M),
        "delta": delta_M,
        "abs_delta": delta_M.abs(),
        "k3": k3_M,
        "w": w_M,
        "w_squared": w_M.square(),
        "entropy": entropy_M,
        "fresh": fresh_M,
        "gap": gap_M,
        "gap_squared": gap_M.square(),
        "pi": pi_M,
        "mu": mu_M,
        "pi_squared": pi_M.square(),
        "mu_squared": mu_M.square(),
        "pi_mu": pi_M * mu_M,
        "lag": lag_M.double(),
        "ppo_clipped": loss.clipped_T[at_M].double(),
    }
    if loss.weights is not None:
        columns |= {
            "weight": loss.weights.weight_T[at_M].double(),
            "too_high": loss.weights.too_high_T[at_M].double(),
            "too_low": loss.weights.too_low_T[at_M].double(),
        }
    totals = dict(zip(columns, torch.stack(list(columns.values())).sum(-1), strict=True))
    buckets_MB = torch.nn.functional.one_hot(lag_M.long().clamp(0, lag_buckets - 1), lag_buckets).double()
    totals["by_lag_B3"] = buckets_MB.T @ torch.stack([torch.ones_like(w_M), delta_M.abs(), k3_M], dim=-1)
    return Sums(totals=totals, maxima={"lag": _maximum(lag_M), "abs_delta": _maximum(delta_M.abs())})


def _maximum(values: Tensor) -> Tensor:
    return values.max().double() if values.numel() else torch.zeros((), dtype=torch.float64, device=values.device)


def sample_metrics(*, rewards_N: Tensor, groups_N: Tensor, response_lengths_N: Tensor, truncated_N: Tensor) -> dict[str, float]:
    """Means over the samples of the step; every rank has them all, so there is nothing to reduce."""
    moments = group_moments(rewards_N.double(), groups_N)
    per_group_N = 1 / moments.sizes_N
    lengths_N = response_lengths_N.double()
    return {
        "train/reward_mean": float(rewards_N.double().mean()),
        "train/reward_std": float(rewards_N.double().std(correction=0)),
        "train/groups": float(per_group_N.sum().round()),
        "train/zero_variance_group_share": float((per_group_N * moments.constant_N).sum() / per_group_N.sum()),
        "train/response_length_mean": float(lengths_N.mean()),
        "train/response_length_max": float(lengths_N.max()),
        "train/truncated_share": float(truncated_N.double().mean()),
    }


def finalize(sums: Sums) -> dict[str, float]:
    """Metrics by stable names (``docs/metrics.md``). A name is left out where it is undefined (no token in its denominator)."""
    total = {name: float(value) for name, value in sums.totals.items() if value.ndim == 0}
    tokens = total["tokens"]
    if not tokens:
        return {"train/tokens": 0.0}
    metrics = {
        "train/tokens": tokens,
        "train/entropy": total["entropy"] / tokens,
        "train/ppo_clip_fraction": total["ppo_clipped"] / tokens,
        "offpolicy/logprob_diff_abs": total["abs_delta"] / tokens,
        "offpolicy/logprob_diff_max": float(sums.maxima["abs_delta"]),
        "offpolicy/k1": -total["delta"] / tokens,
        "offpolicy/k3": total["k3"] / tokens,
        "offpolicy/weight_mean": total["w"] / tokens,
        "offpolicy/chi2": total["w_squared"] / tokens - 1,
        "offpolicy/ess": total["w"] ** 2 / (tokens * total["w_squared"]),
        "offpolicy/lag_mean": total["lag"] / tokens,
        "offpolicy/lag_max": float(sums.maxima["lag"]),
    }
    if "weight" in total:
        metrics |= {
            "offpolicy/tis_weight_mean": total["weight"] / tokens,
            "offpolicy/tis_clipped_high": total["too_high"] / tokens,
            "offpolicy/tis_clipped_low": total["too_low"] / tokens,
        }
    return metrics | _pearson(total) | _entropy_gap(total) | _by_lag(sums.totals["by_lag_B3"])


def _pearson(total: Mapping[str, float]) -> dict[str, float]:
    """Correlation of the probabilities e^{log pi} and e^{log mu}."""
    n = total["tokens"]
    spread_pi = total["pi_squared"] - total["pi"] ** 2 / n
    spread_mu = total["mu_squared"] - total["mu"] ** 2 / n
    if spread_pi <= 1e-12 * total["pi_squared"] or spread_mu <= 1e-12 * total["mu_squared"]:
        return {}
    covariance = total["pi_mu"] - total["pi"] * total["mu"] / n
    return {"offpolicy/pearson": min(1.0, max(-1.0, covariance / math.sqrt(spread_pi * spread_mu)))}


def _entropy_gap(total: Mapping[str, float]) -> dict[str, float]:
    """Mean of ``H + log pi`` over the tokens of lag 0, and in standard errors of that mean."""
    n = total["fresh"]
    if n < 2:
        return {}
    gap = total["gap"] / n
    variance = max(0.0, total["gap_squared"] / n - gap**2)
    metrics = {"offpolicy/entropy_gap": gap}
    if variance > 0:
        metrics["offpolicy/entropy_gap_sigmas"] = gap / math.sqrt(variance / n)
    return metrics


def _by_lag(by_lag_B3: Tensor) -> dict[str, float]:
    rows = by_lag_B3.tolist()
    tokens = sum(row[0] for row in rows)
    metrics = {}
    for bucket, (count, abs_delta, k3) in enumerate(rows):
        name = "over" if bucket == len(rows) - 1 else str(bucket)
        metrics[f"offpolicy/lag_share/{name}"] = count / tokens
        if count:
            metrics[f"offpolicy/lag_logprob_diff_abs/{name}"] = abs_delta / count
            metrics[f"offpolicy/lag_k3/{name}"] = k3 / count
    return metrics
