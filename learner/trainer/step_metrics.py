"""Metrics of a step: of its minibatches, reduced over the ranks, and of its samples."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.learner.algorithms import diagnostics
from tidemill.learner.algorithms.diagnostics import Sums
from tidemill.learner.algorithms.metrics import finalize, sample_metrics
from tidemill.learner.batch.batch import StepBatch
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
