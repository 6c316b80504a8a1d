"""Overlong filtering: a step's batch in which truncated samples are not trained."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.learner.data.batch import MicroBatch, StepBatch


def without_truncated(batch: StepBatch) -> StepBatch:
    """Return the batch with the tokens of truncated samples masked, and without them in every denominator.

    Rewards and groups are unchanged, so a truncated sample still counts in the baseline of its group.
    Source: overlong filtering, DAPO 2503.14476.
    """
    trainable_N = np.where(batch.truncated_N, 0, batch.trainable_N).astype(batch.trainable_N.dtype)
    rows = tuple(_masked(row, batch) for row in batch.micro_batches)
    turn_tokens_C = np.where(batch.truncated_N[batch.turn_samples_C], 0, batch.turn_tokens_C).astype(batch.turn_tokens_C.dtype)
    return replace(batch, micro_batches=rows, trainable_N=trainable_N, turn_tokens_C=turn_tokens_C, num_tokens=int(trainable_N.sum()))


def _masked(row: MicroBatch, batch: StepBatch) -> MicroBatch:
    kept_T = row.loss_mask_T & ~batch.truncated_N[np.maximum(row.sample_T, 0)]
    return replace(
        row,
        loss_mask_T=kept_T,
        rollout_log_probs_T=np.where(kept_T, row.rollout_log_probs_T, np.float32(0)),
        lag_T=np.where(kept_T, row.lag_T, -1).astype(row.lag_T.dtype),
        **_taught(row, kept_T, batch.teacher_top_k),
        turn_T=np.where(kept_T, row.turn_T, -1).astype(row.turn_T.dtype),
    )


def _taught(row: MicroBatch, kept_T: NDArray[np.bool_], top_k: int) -> dict[str, NDArray[Any]]:
    """Return the teacher's scores of a row where its tokens are kept, 0 elsewhere; nothing for a row without scores."""
    if not len(row.teacher_log_probs_T):
        return {}
    listed = {name: getattr(row, name).reshape(-1, top_k) for name in ("teacher_top_ids_TK", "teacher_top_log_probs_TK") if top_k}
    return {
        "teacher_log_probs_T": np.where(kept_T, row.teacher_log_probs_T, np.float32(0)),
        **{name: np.where(kept_T[:, None], value_TK, value_TK.dtype.type(0)).ravel() for name, value_TK in listed.items()},
    }
