"""Packed rows, which concatenate many sequences of any length, and their layout for attention.

Sequences of similar length are scattered into a right-padded batch, so that a row costs one attention call per length
bucket and not one per sequence. That is exact: padding comes after every real query, and attention is causal.
Shape letters: T = tokens of the row, P = padded positions of all buckets, S = sequences, s = padded length of one,
c = tokens of a prefix that several share.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.learner.kernels.choices import LONG_SEQUENCE

Runs = Sequence[tuple[int, int]]  # begin and length of neighbouring tokens of a row, in the order of their positions


class Prefix(NamedTuple):
    """The tokens before the sequences of a bucket."""

    pieces: tuple[int, ...]
    """Their pieces of the row (``PackedRow.cuts``), in order."""
    mask: Tensor
    """True where a query attends to a key, [s, c + s]: all of the prefix, and no later token of its sequence."""


class Piece(NamedTuple):
    """Neighbouring sequences of a row: one long one, or all between two long ones."""

    tokens: int
    longest: int
    """Tokens of the longest sequence."""
    bounds_S: Tensor | None
    """Boundaries of the sequences from the first of them on, as in ``PackedRow``; None = a long sequence."""


@dataclass
class PackedRow:
    """Positions of the sequences in a row, and their layout for attention."""

    position_ids_T: Tensor
    """Positions of this rank's tokens. Fields without such a note are of the whole row."""
    longest: int
    """Tokens of the longest sequence."""
    padding_T: Tensor | None = None
    """True for padding in this rank's tokens; None = the whole row has none. Routers do not count it."""
    bounds_S: Tensor | None = None
    """Boundaries of the sequences, [S + 1], int32 on the device, for flash attention."""
    pieces: tuple[Piece, ...] = ()
    """The row cut before and after each long sequence; empty = it has none."""
    spans: tuple[tuple[int, int], ...] = ()
    """(tokens of its prefix, tokens) of each sequence."""
    buckets: tuple[tuple[int, int], ...] = ()
    """(sequences, padded length) of each bucket."""
    prefixes: tuple[Prefix | None, ...] = ()
    """Tokens that the sequences of each bucket share; None = they have no prefix."""
    cuts: tuple[int, ...] = ()
    """Lengths of the pieces of the row that prefixes are made of; empty = there is no prefix."""
    take_P: Tensor | None = None
    """Row's token at each padded position (padding repeats its sequence's last); None = the row is the batch."""
    give_T: Tensor | None = None
    """Padded position of each token."""
    experts: tuple[Tensor, ...] = ()
    """Experts of this rank's tokens in each layer with experts, [T, K] int16, recorded or given; -1 = not known."""
    routed: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Layer of this stage -> (experts of all tokens, ascending, [T, K] int32; their weights, [T, K]; affinities, [T,
    E]) of the last pass, where routers are observed; in host memory, complete after a synchronization.
    """


def packed_row(
    cu_seqlens: NDArray[np.int32],
    position_ids_T: Tensor,
    padding_T: Tensor | None = None,
    prefixes: Sequence[Runs] = (),
) -> PackedRow:
    """Return the layout of a row with sequence boundaries ``cu_seqlens`` ([S + 1], from 0 to T).

    ``prefixes``: tokens of the row before each sequence, which it attends to too; empty = none has any.
    """
    device = position_ids_T.device
    starts, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens).astype(np.int64)
    behind = dict.fromkeys([(), *map(tuple, prefixes)])  # in order, and without a prefix first
    places = list(behind)
    prefix_S = np.array([places.index(tuple(runs)) for runs in prefixes] or [0] * len(starts))[lengths > 0]
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    buckets, of_buckets, take, give = _bucketed(starts, lengths, prefix_S)
    cuts = cuts_of(places, int(lengths.sum()))
    in_order = len(take) == len(give) and bool((take == np.arange(len(take))).all())
    return PackedRow(
        position_ids_T=position_ids_T,
        longest=int(lengths.max()),
        padding_T=padding_T,
        bounds_S=_bounds(lengths, device),
        pieces=_cut(lengths, device),
        spans=tuple(
            (sum(length for _, length in places[number]), length)
            for number, length in zip(prefix_S.tolist(), lengths.tolist(), strict=True)
        ),
        buckets=buckets,
        prefixes=tuple(
            prefix_of(places[number], cuts, width, device)
            for number, (_, width) in zip(of_buckets, buckets, strict=True)
        ),
        cuts=cuts,
        take_P=None if in_order else torch.from_numpy(take).to(device),
        give_T=None if in_order else torch.from_numpy(give).to(device),
    )


def _bounds(lengths: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)).to(device)


def _cut(lengths: NDArray[np.int64], device: torch.device) -> tuple[Piece, ...]:
    long = lengths >= LONG_SEQUENCE
    if not long.any():
        return ()
    starts = np.flatnonzero(
        long | np.append(True, long[:-1])
    )  # each long sequence begins a piece, and so does the one behind it
    pieces = []
    for first, after in itertools.pairwise([*starts.tolist(), len(lengths)]):
        part = lengths[first:after]
        pieces.append(Piece(int(part.sum()), int(part.max()), None if long[first] else _bounds(part, device)))
    return tuple(pieces)


def _bucketed(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], prefix_S: NDArray[np.int64]
) -> tuple[tuple[tuple[int, int], ...], list[int], NDArray[np.int64], NDArray[np.int64]]:
    """Assign sequences of (2^k, 2^(k+1)] tokens behind one prefix to one bucket: less than half of it is padding.

    Returns (buckets, number of the prefix of each, ``take_P``, ``give_T``) of ``PackedRow``.
    """
    # ceil, so that a length of exactly 2^k closes the bucket of the shorter ones.
    powers = np.ceil(np.log2(lengths)).astype(np.int64)
    buckets, of_buckets, take = [], [], []
    give = np.empty(int(lengths.sum()), np.int64)
    place = 0
    for prefix, power in np.unique(np.stack([prefix_S, powers]), axis=1).T.tolist():
        members = np.flatnonzero((prefix_S == prefix) & (powers == power))
        width = int(lengths[members].max())
        offsets = np.arange(width)
        index = starts[members, None] + np.minimum(offsets, lengths[members, None] - 1)
        real = offsets < lengths[members, None]
        places = place + np.arange(index.size).reshape(index.shape)
        give[index[real]] = places[real]
        take.append(index.reshape(-1))
        buckets.append((len(members), width))
        of_buckets.append(prefix)
        place += index.size
    return tuple(buckets), of_buckets, np.concatenate(take), give


def cuts_of(prefixes: Sequence[Runs], tokens: int) -> tuple[int, ...]:
    """Return the lengths of the pieces of a row that is cut where a run begins or ends; empty = nowhere."""
    edges = {edge for runs in prefixes for begin, length in runs for edge in (begin, begin + length)}
    return tuple(end - begin for begin, end in pairwise(sorted({0, tokens, *edges}))) if edges else ()


def prefix_of(runs: Runs, cuts: Sequence[int], width: int, device: torch.device) -> Prefix | None:
    """Return the prefix of sequences that are padded to ``width`` tokens; None for no tokens."""
    if not runs:
        return None
    begins = list(accumulate(cuts, initial=0))
    pieces = [piece for begin, length in runs for piece in range(begins.index(begin), begins.index(begin + length))]
    tokens = sum(length for _, length in runs)
    mask = torch.ones(width, tokens + width, dtype=torch.bool, device=device).tril(tokens)
    return Prefix(tuple(pieces), mask)
