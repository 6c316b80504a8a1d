"""Metrics of a step by name (``docs/metrics.md``): of its minibatches, from sums over micro-batches and ranks, and of
its samples; and a bounded part of the values of its trained tokens, for viewers of the run.

    begin (which tokens) -> each row's loss: its tensors are kept -> end: one copy to the CPU, in columns

Nothing is computed for the values: log-probs, entropies, advantages and weights are those of the loss. Shape letters:
as in ``batch.py``; N = samples of the step on all ranks, B = buckets, C = columns, K = recorded tokens of this rank.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tidemill.bus.wire.trained_values import TOKEN_BYTES, TrainedStep, by_run
from tidemill.learner.algorithms import diagnostics
from tidemill.learner.algorithms.advantages import group_moments
from tidemill.learner.algorithms.aggregation import TokenLoss
from tidemill.learner.algorithms.diagnostics import OWN, POSITIONS, PROBABILITIES, Sums
from tidemill.learner.algorithms.tokens import Tokens
from tidemill.learner.batch.batch import MicroBatch, StepBatch
from tidemill.learner.layout.parallel import Parallel, is_last_stage
from tidemill.learner.settings.config import RecordConfig
from tidemill.learner.trainer.rows import Step, tensor_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of the optimizer step of one minibatch."""

    sums: Sums  # diagnostics of the minibatch's rows on this rank
    norm: float | None  # norm of the gradient before clipping; None = skipped, on all ranks
    rate: float  # learning rate


def of_updates(updates: list[Update], step: Step, skipped_N: Tensor, group: dist.ProcessGroup) -> dict[str, float]:
    """Return the metrics of the minibatches that were not skipped. ``skipped_N``: samples that no row has.
    Collective over ``group``.
    """
    done = [update for update in updates if update.norm is not None]
    metrics = {
        "train/zero_samples_skipped": float(skipped_N.sum()),
        "train/skipped_minibatches": float(len(updates) - len(done)),
        "train/lr": sum(update.rate for update in updates) / len(updates),
    }
    # Nothing was trained, and means over no token would be NaN.
    if not done:
        return metrics | {"train/tokens": 0.0}
    sums = diagnostics.all_reduced(diagnostics.merged(update.sums for update in done), group)
    norms = [update.norm for update in done if update.norm is not None]
    trained_minibatches = torch.tensor([number for number, update in enumerate(updates) if update.norm is not None])
    of_rows = finalize(sums)
    of_rows["train/tokens"] += float(
        step.trainable_N[skipped_N & torch.isin(step.minibatches_N, trained_minibatches)].sum()
    )
    if "mtp" in sums.totals:
        of_rows["train/mtp_loss"] = float(sums.totals["mtp"] / sums.totals["mtp_tokens"].clamp(min=1))
    return {
        **metrics,
        **of_rows,
        "train/shared_tokens": float(sums.totals["shared_tokens"]),
        "train/loss": float(sums.totals["loss"]) / len(done),
        "train/grad_norm": sum(norms) / len(norms),
        "train/grad_norm_max": max(norms),
    }


def of_samples(batch: StepBatch) -> dict[str, float]:
    """Return the metrics of the samples of a batch, whether trained or not."""
    names = ("rewards_N", "groups_N", "response_lengths_N", "truncated_N")
    kept_N, unended = batch.scored_N, batch.unended_share
    columns = {name: tensor_of(getattr(batch, name)[kept_N]) for name in names}
    metrics = sample_metrics(**columns) | ({} if unended is None else {"train/unended_share": unended})
    return metrics if batch.routing == (0, 0) else metrics | {"train/routing_known": batch.routing_known}


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


_HASH, _RANGE = 2654435761, 2**32  # Knuth's multiplicative hash: neighbouring task ids are spread over the range


class ValueRecord:
    """Values of one step at a time, on the rank that has them; ``end`` gives nothing on other ranks."""

    def __init__(self, config: RecordConfig, parallel: Parallel) -> None:
        self._config, self._dp_rank = config, parallel.dp_rank
        first = (parallel.tp_rank, parallel.cp_rank) == (0, 0)
        self._records = config.trained > 0 and first and is_last_stage(parallel)
        self._at: Sequence[NDArray[np.int64]] | None = None
        """Places of the recorded tokens in each row; None outside of a step that is recorded."""
        self._rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def begin(self, batch: StepBatch) -> None:
        """Begin a step with the rows that are trained."""
        self._rows = []
        if self._records:
            chosen_N = self.chosen(batch)
            self._at = [np.flatnonzero(row.loss_mask_T & chosen_N[row.sample_T]) for row in batch.micro_batches]

    def row(self, tokens: Tokens, log_probs_T: Tensor, entropy_T: Tensor, loss: TokenLoss) -> None:
        """Take the values of the next row, in the order of the batch."""
        if self._at is not None:
            weight_T = torch.ones_like(log_probs_T) if loss.weights is None else loss.weights.weight_T
            if loss.rejected:
                weight_T = torch.where(loss.rejected_T, 0.0, weight_T)
            if loss.left_out_T is not None:
                weight_T = torch.where(loss.left_out_T, 0.0, weight_T)
            self._rows.append((log_probs_T.detach(), entropy_T.detach(), tokens.advantages_T, weight_T.detach()))

    def end(self, batch: StepBatch) -> TrainedStep | None:
        """Return the columns of the step; None without a recorded token."""
        places, self._at = self._at, None
        if places is None or len(self._rows) != len(places) or not any(map(len, places)):
            return None
        parts = [
            torch.stack([value_T.float() for value_T in values])[:, torch.from_numpy(at).to(values[0].device)]
            for values, at in zip(self._rows, places, strict=True)
            if len(at)
        ]
        self._rows = []
        values_4K = torch.cat(parts, dim=1).cpu().numpy()
        owners_K, tokens_K = _places(batch.micro_batches, places)
        starts_K = np.ones(len(owners_K), np.bool_)
        starts_K[1:] = (np.diff(owners_K) != 0) | (np.diff(tokens_K) != 1)
        starts_R = np.flatnonzero(starts_K)
        lengths_R = np.diff(starts_R, append=len(owners_K)).astype(np.int32)
        log_probs, entropies, advantages, weights = (np.ascontiguousarray(column) for column in values_4K)
        return TrainedStep(
            epoch=0,  # the feeder's
            step=batch.step,
            rank=self._dp_rank,
            owners_R=owners_K[starts_R],
            places_R=tokens_K[starts_R],
            lengths_R=lengths_R,
            log_probs=log_probs,
            entropies=entropies,
            advantages=by_run(advantages, lengths_R),
            weights=by_run(weights, lengths_R),
        )

    def chosen(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Return the recorded samples, [N]: groups in the order of a hash, so that a repeated step has the same."""
        rows = batch.micro_batches
        samples_K = np.concatenate([row.sample_T[row.loss_mask_T] for row in rows])
        bytes_N = np.bincount(samples_K, minlength=len(batch.groups_N)) * TOKEN_BYTES
        hash_N = (batch.groups_N.astype(np.uint64) * np.uint64(_HASH) % np.uint64(_RANGE)) / _RANGE
        fits_N = (bytes_N > 0) & (bytes_N <= self._config.step_bytes) & (hash_N < self._config.trained)
        order = np.flatnonzero(fits_N)
        order = order[np.argsort(hash_N[order], kind="stable")]
        chosen_N = np.zeros(len(hash_N), np.bool_)
        chosen_N[order[np.cumsum(bytes_N[order]) <= self._config.step_bytes]] = True
        return chosen_N


def _places(
    rows: Sequence[MicroBatch], places: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the sequence in the step and the index in its sequence of each recorded token."""
    pairs = [(row.sequence_T[at], row.position_ids_T[at] + 1) for row, at in zip(rows, places, strict=True)]
    owners, tokens = zip(*pairs, strict=True)  # targets: the value at t belongs to token t + 1
    return np.concatenate(owners).astype(np.int32), np.concatenate(tokens).astype(np.int32)
