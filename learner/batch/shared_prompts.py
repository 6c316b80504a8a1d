"""The rows of a rank packed anew: without the samples that have no gradient, and by groups that share a prompt; and a
row as a tree, in which the tokens that several sequences begin with are computed once.

    row:   prompt response-1 | prompt response-2 | prompt response-3
    tree:  prompt response-1, response-2 behind the prompt, response-3 behind the prompt

A hidden state depends on the tokens before it alone, so the states of a common beginning serve every sequence. Tokens
behind the last one that predicts a trainable token are not computed. Only rows change: the columns of the step keep
every sample, so denominators, baselines and counts are as before. Knows numpy, no torch, no bus.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tidemill.learner.batch.batch import TOKEN_DTYPES, Array, MicroBatch, StepBatch
from tidemill.learner.batch.batching import concatenate
from tidemill.learner.buffer.assignment import SAVED_SHARE, SHARED_FROM, rows_by_work, work_of

Runs = tuple[tuple[int, int], ...]
"""Begin and length of neighbouring computed tokens, in the order of their positions."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tree:
    """The computed tokens of a row, P."""

    take_P: NDArray[np.int64]
    """Place of each in the row."""
    source_T: NDArray[np.int64]
    """Computed token of each token of the row; -1 = it is not needed."""
    lengths: tuple[int, ...]
    """Tokens of each segment: the tokens of a sequence behind its prefix. Segments lie one behind the other."""
    prefixes: tuple[Runs, ...]
    """Computed tokens before each segment, which its tokens attend to; empty = it begins a sequence."""


def any_common(rows: Sequence[MicroBatch]) -> bool:
    """Return whether any two sequences of the rows begin with the same tokens: a fast look before a tree is made."""
    begins = [
        row.tokens_T[start : start + SHARED_FROM].tobytes()
        for row in rows
        for start, end in pairwise(row.cu_seqlens.tolist())
        if end - start >= SHARED_FROM and row.sample_T[start] >= 0
    ]
    return len(set(begins)) < len(begins)


def num_needed(sequence: MicroBatch) -> int:
    """Return the number of tokens of a sequence up to the last one with a trainable target."""
    trainable = np.flatnonzero(sequence.loss_mask_T)
    return int(trainable[-1]) + 1 if len(trainable) else 0


def num_shared(tokens: NDArray[np.int64], before: NDArray[np.int64]) -> int:
    """Return the number of tokens that ``tokens`` need not compute again behind the sequence ``before``."""
    shortest = min(len(tokens), len(before))
    differing = np.flatnonzero(tokens[:shortest] != before[:shortest])
    common = int(differing[0]) if len(differing) else shortest
    return common if common >= SHARED_FROM else 0


def tree_of(row: MicroBatch) -> Tree | None:
    """Return the tree of a row, each sequence beside the one before it; None if it saves less than ``SAVED_SHARE``."""
    take: list[NDArray[np.int64]] = []
    source_T = np.full(len(row.tokens_T), -1, np.int64)
    lengths, prefixes = list[int](), list[Runs]()
    computed, before, path = 0, slice(0, 0), Runs()
    for start, end in zip(row.cu_seqlens[:-1].tolist(), row.cu_seqlens[1:].tolist(), strict=True):
        trainable = np.flatnonzero(row.loss_mask_T[start:end])
        if not len(trainable):
            continue
        needed = slice(start, start + int(trainable[-1]) + 1)
        shared = num_shared(row.tokens_T[needed], row.tokens_T[before])
        source_T[start : start + shared] = source_T[before][:shared]
        path, length = _first(path, shared), needed.stop - start - shared
        if length:
            source_T[start + shared : needed.stop] = np.arange(computed, computed + length)
            take.append(np.arange(start + shared, needed.stop))
            lengths.append(length)
            prefixes.append(path)
            path = (*path, (computed, length))
            computed += length
        before = needed
    if not take or computed > (1 - SAVED_SHARE) * np.count_nonzero(source_T >= 0):
        return None
    return Tree(take_P=np.concatenate(take), source_T=source_T, lengths=tuple(lengths), prefixes=tuple(prefixes))


def _first(runs: Runs, count: int) -> Runs:
    """Return the first ``count`` tokens of the runs."""
    kept: list[tuple[int, int]] = []
    for begin, length in runs:
        if count <= 0:
            break
        kept.append((begin, min(length, count)))
        count -= length
    return tuple(kept)


def chunks_by_prompt(parts: Sequence[MicroBatch], groups_N: NDArray[np.int64], capacity: int) -> list[list[MicroBatch]]:
    """Return the sequences in chunks of one group and ``capacity`` computed tokens; a longer sequence is alone."""
    ordered = sorted(parts, key=lambda part: int(part.sequence_T[0]))
    chunks: list[list[MicroBatch]] = []
    size = 0
    for part in ordered:
        tokens, last = part.tokens_T[: num_needed(part)], chunks[-1][-1] if chunks else None
        same = last is not None and groups_N[last.sample_T[0]] == groups_N[part.sample_T[0]]
        if last is not None and same:
            more = len(tokens) - num_shared(tokens, last.tokens_T[: num_needed(last)])
            if size + more <= capacity:
                chunks[-1].append(part)
                size += more
                continue
        chunks.append([part])
        size = len(tokens)
    return chunks


def computed_spans(chunk: Sequence[MicroBatch]) -> list[tuple[int, int]]:
    """Return begin and end of the computed tokens of each sequence of a chunk."""
    needed = [part.tokens_T[: num_needed(part)] for part in chunk]
    shared = [num_shared(tokens, before) for tokens, before in zip(needed[1:], needed, strict=False)]
    return [(begin, len(tokens)) for begin, tokens in zip([0, *shared], needed, strict=True)]


def num_computed(chunk: Sequence[MicroBatch]) -> int:
    """Return the number of computed tokens of a chunk."""
    return sum(end - begin for begin, end in computed_spans(chunk))


Packing = list[list[MicroBatch]]
"""Sequences of each row of a minibatch, as rows of their own."""


def packings(
    batch: StepBatch,
    skipped_N: NDArray[np.bool_],
    *,
    by_prompt: bool = False,
    max_tokens: int = 0,
    pair_tokens: int = 0,
    counts: Sequence[int] = (),
) -> list[Packing]:
    """Return the packing of every minibatch without the ``skipped_N`` samples, and without the rows that become empty.

    The rows of other samples are those of the batch, in their order. ``by_prompt``: put the samples of a group into one
    row where that saves tokens (``Tree``), of at most ``max_tokens`` or as many as the longest row of the batch has.
    ``pair_tokens``: as for ``assign``. ``counts``: number of rows over which each minibatch is spread.
    """
    capacity = max(max_tokens, *(len(row.tokens_T) for row in batch.micro_batches))
    rows = [[part for part in _sequences(row) if not skipped_N[part.sample_T[0]]] for row in batch.micro_batches]
    count = len(rows) // batch.num_minibatches
    minibatches = [rows[start : start + count] for start in range(0, len(rows), count)]
    filled = [[row for row in minibatch if row] for minibatch in minibatches]
    if not by_prompt:
        return filled
    return [
        _by_prompt(packing, batch, capacity, pair_tokens, count)
        for packing, count in zip(filled, counts or [0] * len(filled), strict=True)
    ]


def _by_prompt(packing: Packing, batch: StepBatch, capacity: int, pair_tokens: int, count: int) -> Packing:
    """Return the rows with the sequences of each group side by side, or as they are if that saves too little."""
    parts = [part for row in packing for part in row]
    chunks = chunks_by_prompt(parts, batch.groups_N, capacity)
    sizes = [num_computed(chunk) for chunk in chunks]
    if sum(sizes) >= (1 - SAVED_SHARE) * sum(map(num_needed, parts)):
        return packing
    work = [work_of(computed_spans(chunk), pair_tokens) for chunk in chunks] if pair_tokens else None
    rows = rows_by_work(sizes, work, capacity, count)
    return [[part for number in sorted(row) for part in chunks[number]] for row in rows]


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
