"""The rows of a rank packed anew: without the samples that have no gradient, and by groups that share a prompt.

Knows numpy, no torch, no bus.

Only rows change. The columns of the step keep every sample, so denominators, baselines and counts are as before.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tidemill.learner.batch import prefixes
from tidemill.learner.batch.batch import TOKEN_DTYPES, Array, MicroBatch, StepBatch
from tidemill.learner.batch.batching import concatenate
from tidemill.learner.buffer.plans import assign

Packing = list[list[MicroBatch]]
"""Sequences of each row of a minibatch, as rows of their own."""


def packings(batch: StepBatch, skipped_N: NDArray[np.bool_], *, by_prompt: bool = False) -> list[Packing]:
    """Return the packing of every minibatch without the ``skipped_N`` samples, and without the rows that become empty.

    The rows of other samples are those of the batch, in their order. ``by_prompt``: put the samples of a group into one
    row where that saves tokens (``prefixes``); no row becomes longer than the longest of the batch.
    """
    capacity = max(len(row.tokens_T) for row in batch.micro_batches)
    rows = [[part for part in _sequences(row) if not skipped_N[part.sample_T[0]]] for row in batch.micro_batches]
    count = len(rows) // batch.num_minibatches
    minibatches = [rows[start : start + count] for start in range(0, len(rows), count)]
    filled = [[row for row in minibatch if row] for minibatch in minibatches]
    return [_by_prompt(packing, batch, capacity) for packing in filled] if by_prompt else filled


def _by_prompt(packing: Packing, batch: StepBatch, capacity: int) -> Packing:
    """Return the rows with the sequences of each group side by side, or as they are if that saves too little."""
    parts = [part for row in packing for part in row]
    chunks = prefixes.by_prompt(parts, batch.groups_N, capacity)
    sizes = [prefixes.num_computed(chunk) for chunk in chunks]
    if sum(sizes) >= (1 - prefixes.SAVED_SHARE) * sum(map(prefixes.num_needed, parts)):
        return packing
    placed = assign(sizes, data_parallel=1, max_tokens=capacity)
    rows: Packing = [[] for _ in range(placed.num_micro_batches)]
    for chunk, number in zip(chunks, placed.micro_batches.tolist(), strict=True):
        rows[number] += chunk
    return rows


def repacked(batch: StepBatch, minibatches: Sequence[Packing], counts: Sequence[int], *, pad_to: int) -> StepBatch:
    """Return the batch with these rows. ``counts``: number of rows of each minibatch, at least those of its packing;
    the rows that it lacks are padding. ``pad_to``: as for ``build_batches``.
    """
    top_k = batch.teacher_top_k if len(batch.micro_batches[0].teacher_log_probs_T) else -1
    experts = batch.routing[0] * batch.routing[1]
    rows = [
        row
        for packing, count in zip(minibatches, counts, strict=True)
        for row in (*packing, *([[]] * (count - len(packing))))
    ]
    return replace(batch, micro_batches=tuple(concatenate(row, pad_to, top_k, experts) for row in rows))


def _sequences(row: MicroBatch) -> list[MicroBatch]:
    """Return the sequences of a row as rows of their own, without padding."""
    bounds = row.cu_seqlens.tolist()
    return [_part(row, start, end) for start, end in pairwise(bounds) if row.sample_T[start] >= 0]


def _part(row: MicroBatch, start: int, end: int) -> MicroBatch:
    length, arrays = len(row.tokens_T), dict[str, Array]()
    for name in TOKEN_DTYPES.keys() - {"cu_seqlens"}:
        values = getattr(row, name)
        width = len(values) // length  # several values of a token stand side by side, and an empty array has none
        arrays[name] = values[start * width : end * width]
    return MicroBatch(cu_seqlens=np.array([0, end - start], np.int32), **arrays)
