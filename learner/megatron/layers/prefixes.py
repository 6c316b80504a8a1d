"""Attention of sequences to a prefix that several of them share. Knows torch alone.

Shape letters: b = sequences behind one prefix, n = heads, s = their padded length, c = tokens of the prefix, d = head
size.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Runs = Sequence[tuple[int, int]]  # begin and length of neighbouring tokens of a row, in the order of their positions


class Prefix(NamedTuple):
    """The tokens before the sequences of a bucket."""

    pieces: tuple[int, ...]
    """Their pieces of the row (``PackedRow.cuts``), in order."""
    mask: Tensor
    """True where a query attends to a key, [s, c + s]: all of the prefix, and no later token of its sequence."""


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
        torch.cat([_joined(of_row, prefix).expand(len(q), -1, -1, -1), behind], dim=2)
        for of_row, behind in zip(pieces, (k, v), strict=True)
    )
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=prefix.mask, scale=scale, enable_gqa=grouped)


def _joined(pieces: Sequence[Tensor], prefix: Prefix) -> Tensor:
    """Return the tokens of the prefix, [1, groups, c, d]."""
    parts = [pieces[piece] for piece in prefix.pieces]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1)[None]
