"""Records the values of trained tokens of a step, a bounded part of them, for those who look at the run.

    begin (which tokens) -> each row's loss: its tensors are kept -> end: one copy to the CPU, in columns

Nothing is computed for it: log-probs, entropies, advantages and weights are those of the loss. Shape letters: as in
``batch.py``; G = groups, K = recorded tokens of this rank.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.bus.wire.trained_values import TOKEN_BYTES, TrainedStep, by_run
from tidemill.learner.algorithms.aggregation import TokenLoss
from tidemill.learner.algorithms.tokens import Tokens
from tidemill.learner.batch.batch import MicroBatch, StepBatch
from tidemill.learner.layout.parallel import Parallel, is_last_stage
from tidemill.learner.settings.config import RecordConfig

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
            chosen_N = self._chosen(batch)
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

    def _chosen(self, batch: StepBatch) -> NDArray[np.bool_]:
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
