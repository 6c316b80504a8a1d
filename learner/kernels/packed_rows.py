"""Packed rows, which concatenate many sequences of any length; their layout for attention, and causal attention within
their sequences by torch's operators.

Sequences of similar length are scattered into a right-padded batch, so that a row costs one attention call per length
bucket and not one per sequence. That is exact: padding comes after every real query, and attention is causal.
Shape letters: T = tokens of the row, P = padded positions of all buckets, S = sequences, b = sequences of a bucket, n =
heads, s = padded length of a sequence, c = tokens of a prefix that several sequences share, d = head size.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def attend_row(q: Tensor, k: Tensor, v: Tensor, row: PackedRow, *, scale: float | None) -> Tensor:
    """Attend within each sequence of a whole row: q [T, n, d], k and v [T, groups, d] -> [T, n * d]."""
    pieces: tuple[Sequence[Tensor], ...] = (k.split(row.cuts), v.split(row.cuts)) if row.cuts else ()
    q, k, v = (Pad.apply(x, row.take_P, row.give_T) for x in (q, k, v))
    out, place = [], 0
    for (count, width), prefix in zip(row.buckets, row.prefixes, strict=True):
        q_P, k_P, v_P = (
            x[place : place + count * width].view(count, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
        )
        if prefix is None:
            out_P = attend(q_P, k_P, v_P, scale=scale)
        else:
            out_P = attend_behind(q_P, k_P, v_P, pieces, prefix, scale=scale)
        out.append(out_P.transpose(1, 2).reshape(count * width, -1))
        place += count * width
    out_T: Tensor = Unpad.apply(out[0] if len(out) == 1 else torch.cat(out), row.give_T)
    return out_T


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None) -> Tensor:
    """Attend causally with all tensors [b, heads, s, d]."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)


def attend_behind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Sequence[Sequence[Tensor]],
    prefix: Prefix,
    *,
    scale: float | None,
) -> Tensor:
    """Attend to the prefix, and causally within each sequence: q [b, n, s, d], k, v [b, groups, s, d] -> [b, n, s, d].

    ``pieces``: of the keys and of the values of the row, [tokens, groups, d] each.
    """
    k, v = (
        torch.cat([joined(of_row, prefix).expand(len(q), -1, -1, -1), behind], dim=2)
        for of_row, behind in zip(pieces, (k, v), strict=True)
    )
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=prefix.mask, scale=scale, enable_gqa=grouped)


def joined(pieces: Sequence[Tensor], prefix: Prefix) -> Tensor:
    """Return the tokens of the prefix, [1, groups, c, d]."""
    parts = [pieces[piece] for piece in prefix.pieces]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1)[None]


def attend_long(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, backend: SDPBackend = SDPBackend.CUDNN_ATTENTION
) -> Tensor:
    """Attend causally within one sequence by cuDNN's attention: q [L, n, d], k and v [L, groups, d] -> [L, n, d].

    cuDNN makes a plan for each new length, in 0.2 s, so the sequence is padded to one of a few. Padding comes behind
    all queries, which attend to nothing after them.
    """
    padding = padded_length(len(q)) - len(q)
    parts = (F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x for x in (q, k, v))
    with sdpa_kernel(backend):
        out = attend(*(x[None].transpose(1, 2) for x in parts), scale=scale)
    return out.transpose(1, 2)[0, : len(q)]


def padded_length(length: int) -> int:
    """Return the next one of sixteen lengths between a power of two and the next, all multiples of 128."""
    step = max(128, (1 << (length.bit_length() - 1)) // 16)
    return -(-length // step) * step


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    piece: Piece,
    *,
    operator: Callable[..., Any],
    scale: float | None,
    window: int = 0,
) -> Tensor:
    """Attend causally within each sequence of a piece: q [T, n, d], k and v [T, groups, d] -> [T, n, d].

    ``window``: tokens that a query sees, its own included; 0 = all before it. ``operator`` has the signature of
    ``torch.nn.attention.varlen.varlen_attn``, where (-1, 0) is a causal window. Where it has no ``enable_gqa`` (torch
    2.11), it takes fewer heads of keys and values as they are.
    """
    groups = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _takes_groups(operator) else {}
    bounds, longest = piece.bounds_S, piece.longest
    left = window - 1 if window else -1
    out: Tensor = operator(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0), **groups)
    return out


@functools.cache
def _takes_groups(operator: Callable[..., Any]) -> bool:
    return "enable_gqa" in inspect.signature(operator).parameters


class Pad(torch.autograd.Function):
    """Scatters the tokens of a row to padded positions. Padding reaches no output, so it gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take_P: Tensor | None, give_T: Tensor | None) -> Tensor:
        ctx.give_T = give_T
        return x if take_P is None else x.index_select(0, take_P)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.give_T is None else grad.index_select(0, ctx.give_T), None, None


class Unpad(torch.autograd.Function):
    """Gathers the tokens of a row from padded positions; the gradient of padding is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, give_T: Tensor | None) -> Tensor:
        ctx.give_T, ctx.num_places = give_T, len(x)
        return x if give_T is None else x.index_select(0, give_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.give_T is None:
            return grad, None
        return grad.new_zeros(ctx.num_places, *grad.shape[1:]).index_copy_(0, ctx.give_T, grad), None
