"""Metrics of a step by name, from its sums over micro-batches and ranks, and of its samples (``docs/metrics.md``).

Shape letters: N = samples of the step on all ranks, B = buckets, C = columns.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from tidemill.learner.algorithms.advantages import group_moments
from tidemill.learner.algorithms.diagnostics import OWN, POSITIONS, PROBABILITIES, Sums


def sample_metrics(
    *, rewards_N: Tensor, groups_N: Tensor, response_lengths_N: Tensor, truncated_N: Tensor
) -> dict[str, float]:
    """Return means over the samples of the step. Every rank has all samples, so nothing is reduced."""
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


_MEANS = {
    "train/entropy": "entropy",
    "train/ppo_clip_fraction": "clipped",
    "train/ppo_kl": "moved",
    "offpolicy/logprob_diff_abs": "abs_delta",
    "offpolicy/k2": "k2",
    "offpolicy/k3": "k3",
    "offpolicy/js": "js",
    "offpolicy/weight_mean": "w",
    "offpolicy/prob_error": "prob_error",
    "offpolicy/prob_diff_mean": "prob_diff",
    "offpolicy/lag_mean": "lag",
    "offpolicy/fresh_share": "fresh",
}
"""Metrics that are a sum over the trainable tokens divided by their number."""
_SAMPLE_MEANS = {
    "offpolicy/ppl_train": "ppl_train",
    "offpolicy/ppl_rollout": "ppl_rollout",
    "offpolicy/ppl_ratio": "ppl_ratio",
    "offpolicy/log_ppl_diff": "log_ppl_diff",
    "offpolicy/log_ppl_diff_abs": "log_ppl_diff_abs",
    "offpolicy/span_mean": "span",
    "offpolicy/mixed_share": "mixed",
}
"""Metrics that are a sum over the samples divided by their number."""
_MAXIMA = {
    "offpolicy/logprob_diff_max": "abs_delta",
    "offpolicy/prob_diff_max": "prob_diff",
    "offpolicy/lag_max": "lag",
    "offpolicy/span_max": "span",
}


def finalize(sums: Sums) -> dict[str, float]:
    """Return the metrics by name (``docs/metrics.md``). A metric with an empty denominator is left out."""
    total = {name: float(value) for name, value in sums.totals.items() if value.ndim == 0}
    maximum = {name: float(value) for name, value in sums.maxima.items()}
    tokens, samples = total["tokens"], total["samples"]
    demonstrated = total.get("sft_tokens", 0.0)
    supervised = (
        {"train/sft_tokens": demonstrated, "train/sft_loss": total["sft_loss"] / demonstrated} if demonstrated else {}
    )
    if not tokens:
        return {"train/tokens": demonstrated, **supervised}
    mean = {name: value / tokens for name, value in total.items()}
    of_samples = {name: value / samples for name, value in total.items()}
    metrics = supervised | {"train/tokens": tokens + demonstrated}
    metrics |= {metric: mean[name] for metric, name in _MEANS.items()}
    metrics |= {metric: of_samples[name] for metric, name in _SAMPLE_MEANS.items()}
    metrics |= {metric: maximum[name] for metric, name in _MAXIMA.items()}
    metrics |= {
        "offpolicy/k1": -mean["delta"],
        "offpolicy/chi2": mean["w_squared"] - 1,
        "offpolicy/ess": total["w"] ** 2 / (tokens * total["w_squared"]),
        "offpolicy/sequence_chi2": of_samples["sequence_w_squared"] - 1,
        "offpolicy/sequence_ess": total["sequence_w"] ** 2 / (samples * total["sequence_w_squared"]),
        "offpolicy/prob_diff_std": math.sqrt(max(0.0, mean["prob_diff_squared"] - mean["prob_diff"] ** 2)),
    }
    metrics |= _optional(total, mean, of_samples)
    by_lag, by_position, by_probability = (
        sums.totals[f"by_{kind}_BC"].tolist() for kind in ("lag", "position", "probability")
    )
    metrics |= {name: value for name, value in mean.items() if name.startswith(OWN)}
    return (
        metrics
        | _pearson(total)
        | _entropy_gap(total)
        | _by_lag(by_lag, tokens)
        | _by_place(by_position)
        | _by_mu(by_probability)
    )


def _optional(
    total: Mapping[str, float], mean: Mapping[str, float], of_samples: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics that some steps do not have."""
    metrics: dict[str, float] = {}
    if total["fresh"]:
        metrics["offpolicy/fresh_logprob_diff_abs"] = total["fresh_abs_delta"] / total["fresh"]
        metrics["offpolicy/fresh_k3"] = total["fresh_k3"] / total["fresh"]
        metrics["offpolicy/fresh_prob_error"] = total["fresh_prob_error"] / total["fresh"]
    for name, side in (("positive", "up"), ("negative", "down")):
        if total[side]:
            metrics[f"train/ppo_clip_fraction_{name}"] = total[f"clipped_{side}"] / total[side]
    if total["entropy"] > 0:
        metrics["offpolicy/kl_entropy_ratio"] = total["k3"] / total["entropy"]
    if "weight" in total:
        metrics |= {
            "offpolicy/tis_weight_mean": mean["weight"],
            "offpolicy/tis_clipped_high": mean["too_high"],
            "offpolicy/tis_clipped_low": mean["too_low"],
        }
    if "left_out" in total:
        metrics["train/low_entropy_share"] = mean["left_out"]
    if "rejected" in total:
        metrics |= {
            "offpolicy/rejected_tokens": mean["rejected"],
            "offpolicy/rejected_samples": of_samples["rejected_samples"],
            "offpolicy/touched_samples": of_samples["touched_samples"],
        }
        metrics |= {f"offpolicy/{name}": value for name, value in mean.items() if name.startswith("rejected/")}
    divergences = {
        "train/kl_reference": "kl_reference",
        "train/teacher_kl": "teacher_kl",
        "train/teacher_top_kl": "teacher_top_kl",
    }
    return metrics | {metric: mean[name] for metric, name in divergences.items() if name in total}


def _pearson(total: Mapping[str, float]) -> dict[str, float]:
    """Return the correlation of the probabilities pi and mu, and the standard deviation of mu."""
    n = total["tokens"]
    spread_pi = total["pi_squared"] - total["pi"] ** 2 / n
    spread_mu = total["mu_squared"] - total["mu"] ** 2 / n
    metrics = {"offpolicy/prob_std": math.sqrt(max(0.0, spread_mu / n))}
    # A spread of the size of rounding errors, as where all probabilities are equal, has no correlation.
    if spread_pi <= 1e-12 * total["pi_squared"] or spread_mu <= 1e-12 * total["mu_squared"]:
        return metrics
    covariance = total["pi_mu"] - total["pi"] * total["mu"] / n
    return metrics | {"offpolicy/pearson": min(1.0, max(-1.0, covariance / math.sqrt(spread_pi * spread_mu)))}


def _entropy_gap(total: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of ``pi / mu (H + log pi)`` over the tokens at which the policy is uncertain, also in standard
    errors of that mean.

    pi is the policy that is trained, H its entropy. The expectation is 0 at every token, for data of any age, if and
    only if the token was sampled from the mu that the engine reported.
    """
    n = total["unsure"]
    if n < 2:
        return {}
    gap = total["gap"] / n
    variance = max(0.0, total["gap_squared"] / n - gap**2)
    metrics = {"offpolicy/entropy_gap": gap, "offpolicy/entropy_gap_tokens": n}
    if variance > 0:
        metrics["offpolicy/entropy_gap_sigmas"] = gap / math.sqrt(variance / n)
    return metrics


def _by_lag(rows: list[list[float]], tokens: float) -> dict[str, float]:
    metrics = {}
    for bucket, (count, abs_delta, delta, k3, w) in enumerate(rows):
        name = "over" if bucket == len(rows) - 1 else str(bucket)
        metrics[f"offpolicy/lag_share/{name}"] = count / tokens
        if count:
            metrics[f"offpolicy/lag_logprob_diff_abs/{name}"] = abs_delta / count
            metrics[f"offpolicy/lag_logprob_diff/{name}"] = delta / count
            metrics[f"offpolicy/lag_k3/{name}"] = k3 / count
            metrics[f"offpolicy/lag_weight_mean/{name}"] = w / count
    return metrics


def _by_place(rows: list[list[float]]) -> dict[str, float]:
    metrics = {}
    for begin, (count, abs_delta, _, k3, w) in zip(POSITIONS, rows, strict=True):
        if count:
            metrics[f"offpolicy/position_logprob_diff_abs/{begin}"] = abs_delta / count
            metrics[f"offpolicy/position_k3/{begin}"] = k3 / count
            metrics[f"offpolicy/position_weight_mean/{begin}"] = w / count
    return metrics


def _by_mu(rows: list[list[float]]) -> dict[str, float]:
    return {
        f"offpolicy/prob_logprob_diff_abs/{begin:g}": abs_delta / count
        for begin, (count, abs_delta, _, _, _) in zip(PROBABILITIES, rows, strict=True)
        if count
    }
