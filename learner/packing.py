"""Which rank and which micro-batch trains a sample: balanced by tokens, deterministic, the same number of micro-batches on every rank."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Where each of N samples goes."""

    ranks: NDArray[np.int32]
    """[N]."""
    micro_batches: NDArray[np.int32]
    """Micro-batch on that rank, [N]."""
    num_micro_batches: int
    """On every rank; some may be empty."""


def assign(lengths: Sequence[int], *, data_parallel: int, max_tokens: int) -> Assignment:
    """Spread samples of these token counts over ranks and micro-batches of at most ``max_tokens`` tokens.

    A sample longer than that has a micro-batch to itself. Depends on nothing but the arguments.
    Source: longest processing time first, Graham 1969 (ranks, and levelling inside a rank); first-fit decreasing, Johnson 1973 (count).
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    by_rank = _level(order, lengths, data_parallel)
    packed = [_first_fit(rows, lengths, max_tokens) for rows in by_rank]
    count = max(1, *(len(bins) for bins in packed))
    ranks, micro_batches = np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.int32)
    for rank, (rows, bins) in enumerate(zip(by_rank, packed, strict=True)):
        levelled = _level(rows, lengths, count)
        chosen = levelled if _fits(levelled, lengths, max_tokens) else bins
        for number, members in enumerate(chosen):
            ranks[members], micro_batches[members] = rank, number
    return Assignment(ranks=ranks, micro_batches=micro_batches, num_micro_batches=count)


def _level(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """``order`` (longest first) dealt out, each to the part with the fewest tokens so far."""
    parts: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for row in order:
        tokens, number = heap[0]
        parts[number].append(row)
        heapq.heapreplace(heap, (tokens + lengths[row], number))
    return parts


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    loads: list[int] = []
    for row in order:
        for number, load in enumerate(loads):
            if load + lengths[row] <= max_tokens:
                bins[number].append(row)
                loads[number] += lengths[row]
                break
        else:
            bins.append([row])
            loads.append(lengths[row])
    return bins


def _fits(bins: Sequence[Sequence[int]], lengths: Sequence[int], max_tokens: int) -> bool:
    return all(len(rows) <= 1 or sum(lengths[row] for row in rows) <= max_tokens for rows in bins)
