"""Values of the tokens that a step has trained on one data-parallel rank, in columns: a message of TRAINED.

A rank sends the same message to the feeder with sequences of the step in ``owners_R`` and without samples; the feeder,
which knows the samples, names them. S = samples, R = runs of neighbouring trained tokens, K = trained tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.errors import WireError
from tidemill.bus.wire.message_format import MessageFormat

TOKEN_BYTES = 16
"""Bytes of a token in a message, at most, without its run."""


def _no_numbers() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedValues:
    """Values of the trained tokens of one sample, as the loss of its optimizer step saw them."""

    step: int
    epoch: int
    rank: int
    """Data-parallel rank."""
    seq: int
    """Sequence of the sample in SAMPLES."""
    task: int
    index: int
    places: NDArray[np.int32]
    """Place of each trained token in the response, [K]: index into ``Sample.rollout_log_probs``."""
    log_probs: NDArray[np.float32]
    """Log-prob (nats) under the trained policy, at the sampling temperature, [K]."""
    entropies: NDArray[np.float32]
    """Entropy (nats) of the policy there, [K]."""
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    """Factor of the policy loss: the importance weight; 1 without a correction, 0 = rejected or left out, [K]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedStep:
    """Values of a step's trained tokens on one rank, of all its samples or of some."""

    epoch: int
    step: int
    rank: int
    seqs: NDArray[np.int64] = field(default_factory=_no_numbers)
    """Sequence in SAMPLES of each sample, [S]; empty on the way from a rank to the feeder."""
    tasks: NDArray[np.int64] = field(default_factory=_no_numbers)
    indexes: NDArray[np.int64] = field(default_factory=_no_numbers)
    owners_R: NDArray[np.int32]
    """Sample of each run, 0..S-1; from a rank its sequence in the step."""
    places_R: NDArray[np.int32]
    """Place of the run's first token in the response; from a rank its index among the tokens of its sequence."""
    lengths_R: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    entropies: NDArray[np.float32]
    advantages: NDArray[np.float32]
    """[K], or [R] where it is the same for all tokens of each run."""
    weights: NDArray[np.float32]
    """As ``advantages``."""

    def check(self) -> None:
        """Raise WireError for columns that do not fit together."""
        num_runs, num_tokens = len(self.owners_R), len(self.log_probs)
        if num_runs and (self.lengths_R.min(initial=1) < 1 or self.places_R.min(initial=0) < 0):
            raise WireError("places_R, lengths_R", "places >= 0, lengths >= 1", "others")
        total = int(self.lengths_R.sum(dtype=np.int64))
        sizes = (len(self.places_R), len(self.lengths_R), total, len(self.entropies))
        if sizes != (num_runs, num_runs, num_tokens, num_tokens):
            raise WireError("lengths_R", f"{num_runs} runs with {num_tokens} tokens", sizes)
        for name in ("advantages", "weights"):
            if len(getattr(self, name)) not in (num_runs, num_tokens):
                raise WireError(name, f"{num_runs} or {num_tokens} values", len(getattr(self, name)))

    def check_samples(self) -> None:
        """Raise WireError where a run has no sample, or a column of the samples is incomplete."""
        num_samples = len(self.seqs)
        if (len(self.tasks), len(self.indexes)) != (num_samples, num_samples):
            raise WireError("tasks, indexes", f"{num_samples} values", (len(self.tasks), len(self.indexes)))
        if len(self.owners_R) and not 0 <= self.owners_R.min() <= self.owners_R.max() < num_samples:
            raise WireError("owners_R", f"samples 0 to {num_samples - 1}", int(self.owners_R.max()))

    def named(self, sequences_M: NDArray[np.int32], offsets_M: NDArray[np.int32], samples_N: NDArray[np.int64]) -> Self:
        """Return a rank's message with its samples. Raises WireError for a sequence that the step does not have.

        ``sequences_M``: sample of each sequence. ``offsets_M``: place in the response of a sequence's first token.
        ``samples_N``: (seq, task, index) of each sample, [N, 3].
        """
        if len(self.owners_R) and not 0 <= self.owners_R.min() <= self.owners_R.max() < len(sequences_M):
            raise WireError("owners_R", f"sequences 0 to {len(sequences_M) - 1}", int(self.owners_R.max()))
        chosen, owners_R = np.unique(sequences_M[self.owners_R], return_inverse=True)
        seqs, tasks, indexes = np.ascontiguousarray(samples_N[chosen].T)
        places_R = self.places_R + offsets_M[self.owners_R]
        columns = {"seqs": seqs, "tasks": tasks, "indexes": indexes, "owners_R": owners_R.astype(np.int32)}
        step = replace(self, places_R=places_R.astype(np.int32), **columns)
        step.check()
        return step

    def by_sample(self) -> Iterator[TrainedValues]:
        """Yield the values of each sample, in the order of ``seqs``."""
        lengths_R = self.lengths_R.astype(np.int64)
        starts_R = np.cumsum(lengths_R) - lengths_R
        owners_K = np.repeat(self.owners_R, lengths_R)
        places_K = (np.arange(len(self.log_probs)) + np.repeat(self.places_R - starts_R, lengths_R)).astype(np.int32)
        columns_K = {
            "places": places_K,
            "log_probs": self.log_probs,
            "entropies": self.entropies,
            "advantages": _of_tokens(self.advantages, lengths_R),
            "weights": _of_tokens(self.weights, lengths_R),
        }
        order_K = np.lexsort((places_K, owners_K))
        ends_S = np.searchsorted(owners_K[order_K], np.arange(len(self.seqs)), side="right")
        begin = 0
        for seq, task, index, end in zip(self.seqs, self.tasks, self.indexes, ends_S.tolist(), strict=True):
            at_K, begin = order_K[begin:end], end
            yield TrainedValues(
                step=self.step,
                epoch=self.epoch,
                rank=self.rank,
                seq=int(seq),
                task=int(task),
                index=int(index),
                **{name: column[at_K] for name, column in columns_K.items()},
            )


def _of_tokens(values: NDArray[np.float32], lengths_R: NDArray[np.int64]) -> NDArray[np.float32]:
    return values if len(values) == lengths_R.sum() else np.repeat(values, lengths_R)


def by_run(values_K: NDArray[np.float32], lengths_R: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return one value for each run, where all its tokens have the same; else the values."""
    firsts = values_K[np.cumsum(lengths_R) - lengths_R]
    return firsts if np.array_equal(np.repeat(firsts, lengths_R), values_K) else values_K


_FORMAT = MessageFormat(TrainedStep, "trained")


def encode_trained(step: TrainedStep) -> bytes:
    """Return the bytes of a message. Raises WireError."""
    return _FORMAT.encode(step)


def decode_trained(data: bytes) -> TrainedStep:
    """Return the message in ``data``, of a rank or of the stream. Raises WireError."""
    step = _FORMAT.read(data)
    step.check()
    return step
