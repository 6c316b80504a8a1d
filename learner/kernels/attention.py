"""Causal attention within the sequences of a packed row (``packed_rows.py``), by torch's operators.

Shape letters: T = tokens of the row, P = padded positions of all buckets, b = sequences, n = heads, s = their padded
length, c = tokens of a prefix that several sequences share, d = head size.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tidemill.learner.kernels.packed_rows import PackedRow, Piece, Prefix


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
