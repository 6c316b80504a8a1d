"""Training batch of one step for one data-parallel rank: a StepBatch and its packed rows.

Everything per token is *target-aligned*: index t of a row describes the token at t + 1 (its log-prob comes from the
logits at t). Shape letters: T = tokens of a packed micro-batch (padding included), S = sequences packed in it, N =
samples (episodes) of the step on all ranks, M = their token sequences, C = their turns, K = tokens that a teacher
listed at each position. Knows numpy, no torch, no bus. ``batching.py`` makes batches of samples, ``encode_batch`` of
``learner/feed/feed_messages.py`` their frames.
"""

from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.json_object import JsonMapping

Array = NDArray[Any]
"""One dimension, of the dtype in its field's annotation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Token sequences packed into one row; without any, one masked sequence, so that all ranks run as many rows."""

    tokens_T: NDArray[np.int64]
    targets_T: NDArray[np.int64]
    """The next token; 0 at the last token of a sequence and in padding (never trainable)."""
    position_ids_T: NDArray[np.int64]
    """Positions from 0 within each sequence."""
    cu_seqlens: NDArray[np.int32]
    """Starts of the sequences and the end of the last, [S + 1]; padding, if any, is the last sequence."""
    sample_T: NDArray[np.int32]
    """Index of the token's sample in the step, 0..N-1; -1 in padding."""
    sequence_T: NDArray[np.int32]
    """Index of the token's sequence in the step, 0..M-1; -1 in padding."""
    turn_T: NDArray[np.int32]
    """Index of the turn that sampled the target, 0..C-1; -1 where not trainable."""
    loss_mask_T: NDArray[np.bool_]
    """True where the target was sampled by the model and is not masked by the gate."""
    rollout_log_probs_T: NDArray[np.float32]
    """Log-prob (nats) of the target under the distribution it was sampled from; 0 where not trainable."""
    lag_T: NDArray[np.int32]
    """Step of the weights being trained less step of the version that made the target; -1 where not trainable."""
    teacher_log_probs_T: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Log-prob (nats) of the target under the sample's teacher, 0 where not trainable; empty = there is no teacher."""
    teacher_top_ids_TK: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Token ids that the teacher listed as the next token, [T x K] in one dimension; empty = it listed none (K = 0)."""
    teacher_top_log_probs_TK: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Their log-probs (nats) under the teacher, [T x K] in one dimension."""
    experts: NDArray[np.int16] = field(default_factory=lambda: np.zeros(0, np.int16))
    """Experts that the engine chose, [T x layers x top_k] in one dimension; -1 = not known. Empty = not replayed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """The batch of one step for one data-parallel rank."""

    step: int
    """Step from 1; it trains the weights of step - 1."""
    dp_rank: int
    recorded: bool
    """True for a plan of an earlier start that is executed again: only its last step is published, as head + 1."""
    micro_batches: tuple[MicroBatch, ...]
    """Rows of this rank, as many as on every other."""
    num_tokens: int
    """Trainable tokens of the step on all ranks, after the gate."""
    num_minibatches: int
    """Optimizer steps; each takes the same number of micro-batches, in order."""
    max_new_tokens: int
    """Largest limit of sampled tokens of a sample: ``budget.tokens`` of an episode, else ``max_new_tokens``."""
    num_sequences: int
    """M."""
    temperatures_N: NDArray[np.float64]
    """Sampling temperature of each sample, at which its log-probs are computed."""
    rewards_N: NDArray[np.float32]
    groups_N: NDArray[np.int64]
    """Task id of each sample; samples of one group are neighbours."""
    response_lengths_N: NDArray[np.int32]
    sampled_N: NDArray[np.int32]
    """Sampled tokens of each sample, before the gate."""
    truncated_N: NDArray[np.bool_]
    unended_N: NDArray[np.bool_]
    """True for a completed sample without its end token, which is lost (never True with stop strings)."""
    trainable_N: NDArray[np.int32]
    """Trainable tokens of each sample after the gate; the loss is normalised by them."""
    minibatches_N: NDArray[np.int32]
    """Minibatch that trains each sample."""
    demonstration_N: NDArray[np.bool_]
    """True for a demonstration, which only the cross-entropy trains: its log-probs are not known."""
    turn_samples_C: NDArray[np.int32]
    """Sample of each turn, in order of delivery; a sample that reports no turns is one turn."""
    turn_rewards_C: NDArray[np.float32]
    """Reward of each turn's own; 0 = none."""
    turn_tokens_C: NDArray[np.int32]
    """Trainable tokens of each turn, after the gate."""
    teacher_top_k: int = 0
    """K."""
    part_names: tuple[str, ...] = ()
    """Names of the parts that the rewards of the step have, K in all; empty if every reward is one number."""
    parts_NK: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Parts of the rewards, [N x K] in one dimension, sample by sample; NaN = the sample has no such part."""
    routing: tuple[int, int] = (0, 0)
    """Layers with experts and experts of a token in ``experts`` of the rows; (0, 0) = none are replayed."""
    routing_known: float = 0.0
    """Share of the tokens before a target, on all ranks, whose experts are known."""
    metadata: tuple[JsonMapping, ...] = ()
    """Metadata of each sample, N; empty unless the estimator asks for it."""
    state: bytes
    """State of the DataSource after this plan, for the checkpoint; empty = no checkpoint after this step."""

    @property
    def scored_N(self) -> NDArray[np.bool_]:
        """True for the samples in reported metrics: samples of policies; all in a step of demonstrations."""
        return np.ones_like(self.demonstration_N) if self.demonstration_N.all() else ~self.demonstration_N

    @property
    def unended_share(self) -> float | None:
        """Share of ``unended_N`` in the samples of policies; None = the step has none."""
        return None if self.demonstration_N.all() else float(self.unended_N[~self.demonstration_N].mean())

    @property
    def engine_log_probs(self) -> NDArray[np.float32]:
        """Log-probs that the engines reported for this rank's trainable tokens; demonstrations have none."""
        rows = self.micro_batches
        return np.concatenate(
            [row.rollout_log_probs_T[row.loss_mask_T & ~self.demonstration_N[row.sample_T]] for row in rows]
        )


def _dtypes(kind: type) -> dict[str, str]:
    """Return the little-endian dtype of each array among the fields, from its annotation ``NDArray[dtype]``."""
    hints = {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is np.ndarray}
    return {name: np.dtype(get_args(dtype)[0]).newbyteorder("<").str for name, (_, dtype) in hints.items()}


STEP_DTYPES, TOKEN_DTYPES = _dtypes(StepBatch), _dtypes(MicroBatch)
"""Dtypes of the arrays of a StepBatch and of a MicroBatch, in the order of their frames."""
TEACHER_ARRAYS = ("teacher_log_probs_T", "teacher_top_ids_TK", "teacher_top_log_probs_TK")
"""Arrays that are empty unless a teacher has scored the samples."""


def without_truncated(batch: StepBatch) -> StepBatch:
    """Return the batch with the tokens of truncated samples masked, and without them in every denominator.

    Rewards and groups are unchanged, so a truncated sample still counts in the baseline of its group.
    Source: overlong filtering, DAPO 2503.14476.
    """
    # Denominators as if the samples were not there; rejected tokens, by contrast, stay in them (``aggregation.py``).
    trainable_N = np.where(batch.truncated_N, 0, batch.trainable_N).astype(batch.trainable_N.dtype)
    truncated_C = batch.truncated_N[batch.turn_samples_C]
    return replace(
        batch,
        micro_batches=tuple(_masked(row, batch) for row in batch.micro_batches),
        trainable_N=trainable_N,
        turn_tokens_C=np.where(truncated_C, 0, batch.turn_tokens_C).astype(batch.turn_tokens_C.dtype),
        num_tokens=int(trainable_N.sum()),
    )


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
    scores: dict[str, NDArray[Any]] = {"teacher_log_probs_T": np.where(kept_T, row.teacher_log_probs_T, np.float32(0))}
    for name in TEACHER_ARRAYS[1:] if top_k else ():
        value_TK = getattr(row, name).reshape(-1, top_k)
        scores[name] = np.where(kept_T[:, None], value_TK, value_TK.dtype.type(0)).ravel()
    return scores
