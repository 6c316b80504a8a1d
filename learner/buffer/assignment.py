"""The assignment of a step's sequences to minibatches, ranks and micro-batches, balanced by the work of the ranks.

A rank computes a prompt that several samples of a group share once, and leaves out samples without a gradient, so whole
groups go to a rank as long as that leaves the ranks equal, and a group is divided where it does not. Pure functions of
sizes: deterministic, with as many micro-batches on every rank. Knows no samples and no tokens.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHARED_FROM = 16
"""Least number of common tokens that are computed once: fewer do not pay for the calls of attention, which each prompt
has of its own (digits: 6 tokens of prompt, hidden 64).
"""
SAVED_SHARE = 0.1
"""Least share of the needed tokens that computing a prompt once must save, for the same reason."""
EVEN = 1.01
"""Work of the fullest rank in that of the mean at which no group is divided further: lengths vary more by step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Rank and micro-batch of each of M sequences."""

    ranks: NDArray[np.int32]
    """Rank of each sequence, [M]."""
    micro_batches: NDArray[np.int32]
    """Micro-batch on that rank, counted over all minibatches, [M]."""
    num_micro_batches: int
    """Micro-batches on every rank; some may be empty."""
    num_minibatches: int
    """Minibatch k has micro-batches k c .. (k + 1) c - 1, with c = num_micro_batches / num_minibatches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sizes:
    """Sizes of the M sequences of a minibatch, and the work that they are."""

    lengths: Sequence[int]
    units: Sequence[int]
    """Unit of each sequence: its group where it shares a prompt, else one of its own."""
    shared: Sequence[int]
    max_tokens: int
    prompts: Sequence[int]
    """Work of the shared tokens of each sequence."""
    tails: Sequence[int]
    """Work of its other tokens; 0 where it is idle."""
    idle: Sequence[bool]

    def cost(self, rows: Sequence[int]) -> int:
        """Return the work of sequences of one unit on one rank: a prompt for each micro-batch that they fill."""
        if not rows:
            return 0
        prompt, tails, shared = self.prompts[rows[0]], sum([self.tails[row] for row in rows]), self.shared[rows[0]]
        if not shared:
            return tails
        behind = sum([self.lengths[row] for row in rows]) - len(rows) * shared
        chunks = min(len(rows), -(-behind // max(1, self.max_tokens - shared)))
        return tails + prompt * max(1, chunks)


def work_of(spans: Iterable[tuple[int, int]], pair_tokens: int) -> int:
    """Return the work of tokens ``begin`` to ``end - 1`` of sequences, in pairs of tokens."""
    return sum((end - begin) * pair_tokens + (end * (end + 1) - begin * (begin + 1)) // 2 for begin, end in spans)


def assign(
    lengths: Sequence[int],
    *,
    data_parallel: int,
    max_tokens: int,
    minibatches: int = 1,
    group_sizes: Sequence[int] | None = None,
    pair_tokens: int = 0,
    shared: Sequence[int] | None = None,
    idle: Sequence[bool] | None = None,
) -> Assignment:
    """Return an assignment of sequences of these token counts to ranks, minibatches and micro-batches of at most
    ``max_tokens`` tokens.

    A sample is one sequence, or several. Whole groups (``group_sizes``: their sequences, in order; None = every
    sequence is one) go to the ``minibatches`` in turn, so that each has old and young ones; there are no more
    minibatches than groups, so that none is empty. A sequence longer than ``max_tokens`` has a micro-batch to itself.
    ``pair_tokens``: pairs of tokens whose attention costs as much as the weights for one token, for ranks and
    micro-batches with equal work; 0 = with equal numbers of tokens. With it, ``shared``: number of first tokens that a
    sequence has in common with its group, and that a rank computes once; ``idle``: sequences that ranks leave out.
    The result depends only on the arguments.
    Source: longest processing time first, Graham 1969 (ranks, and levelling inside a rank); first-fit decreasing,
    Johnson 1973 (count).
    """
    group_sizes = [1] * len(lengths) if group_sizes is None else list(group_sizes)
    assert sum(group_sizes) == len(lengths), f"groups of {sum(group_sizes)} samples, lengths of {len(lengths)}"
    groups = [group for group, size in enumerate(group_sizes) for _ in range(size)]
    minibatches = max(1, min(minibatches, len(group_sizes)))
    rows = [[row for row, group in enumerate(groups) if group % minibatches == number] for number in range(minibatches)]
    shared, idle = shared or [0] * len(lengths), idle or [False] * len(lengths)
    assert pair_tokens or not (any(shared) or any(idle)), "what ranks leave out is known by operations alone"
    parts = []
    for part_rows in rows:
        sizes = _sizes(
            [lengths[row] for row in part_rows],
            [groups[row] for row in part_rows],
            [shared[row] for row in part_rows],
            [idle[row] for row in part_rows],
            max_tokens=max_tokens,
            pair_tokens=pair_tokens,
        )
        parts.append(_assign(sizes, data_parallel, by_work=pair_tokens > 0))
    count = max(part_count for _, _, part_count in parts)
    ranks, micro_batches = np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.int32)
    for number, (part_rows, (part_ranks, part_micro_batches, _)) in enumerate(zip(rows, parts, strict=True)):
        ranks[part_rows], micro_batches[part_rows] = part_ranks, part_micro_batches + number * count
    return Assignment(
        ranks=ranks, micro_batches=micro_batches, num_micro_batches=count * minibatches, num_minibatches=minibatches
    )


def _sizes(
    lengths: Sequence[int],
    groups: Sequence[int],
    shared: Sequence[int],
    idle: Sequence[bool],
    *,
    max_tokens: int,
    pair_tokens: int,
) -> _Sizes:
    totals: dict[int, tuple[int, int]] = {}  # tokens and sequences that are computed, by group
    for length, group, is_idle in zip(lengths, groups, idle, strict=True):
        if not is_idle:
            tokens, count = totals.get(group, (0, 0))
            totals[group] = (tokens + length, count + 1)
    kept = []
    for group, prompt, is_idle in zip(groups, shared, idle, strict=True):
        tokens, count = totals.get(group, (0, 0))
        saves = prompt >= SHARED_FROM and (count - 1) * prompt > SAVED_SHARE * tokens
        kept.append(prompt if saves and not is_idle else 0)
    return _Sizes(
        lengths=lengths,
        units=[group if prompt else -1 - row for row, (group, prompt) in enumerate(zip(groups, kept, strict=True))],
        shared=kept,
        max_tokens=max_tokens,
        prompts=[work_of([(0, prompt)], pair_tokens) for prompt in kept],
        tails=[
            0 if is_idle else work_of([(prompt, length)], pair_tokens) if pair_tokens else length
            for length, prompt, is_idle in zip(lengths, kept, idle, strict=True)
        ],
        idle=idle,
    )


def _assign(sizes: _Sizes, data_parallel: int, *, by_work: bool) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Return (ranks, micro-batches) of the samples of one minibatch, and the number of micro-batches."""
    lengths, count_of = sizes.lengths, len(sizes.lengths)
    order = sorted(range(count_of), key=lambda row: (-lengths[row], row))
    by_rank = _by_rank(order, sizes, data_parallel)
    packed = [_first_fit(rows, lengths, sizes.max_tokens) for rows in by_rank]
    count = max(1, *(len(bins) for bins in packed))
    work = [prompt + tail for prompt, tail in zip(sizes.prompts, sizes.tails, strict=True)] if by_work else None
    ranks, micro_batches = np.zeros(count_of, np.int32), np.zeros(count_of, np.int32)
    for rank, (rows, bins) in enumerate(zip(by_rank, packed, strict=True)):
        for number, members in enumerate(_levelled(rows, lengths, work, bins, count, sizes.max_tokens)):
            ranks[members], micro_batches[members] = rank, number
    return ranks, micro_batches, count


def rows_by_work(
    lengths: Sequence[int], work: Sequence[int] | None, max_tokens: int, count: int = 0
) -> list[list[int]]:
    """Return rows of at most ``max_tokens`` tokens, levelled by ``work``; None = by their tokens. ``count``: number of
    rows, if they need fewer.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    bins = _first_fit(order, lengths, max_tokens)
    return _levelled(order, lengths, work, bins, max(count, len(bins)), max_tokens)


# ---- ranks


def _by_rank(order: Sequence[int], sizes: _Sizes, count: int) -> list[list[int]]:
    """Return the sequences of each rank, longest first."""
    if not (any(sizes.shared) or any(sizes.idle)):
        return _level(order, sizes.tails, count)
    chunks = _chunks(sizes)
    costs = [sizes.cost(chunk) for chunk in chunks]
    placed = _level(sorted(range(len(chunks)), key=lambda chunk: (-costs[chunk], chunk)), costs, count)
    parts: list[dict[int, list[int]]] = [{} for _ in range(count)]
    for part, numbers in zip(parts, placed, strict=True):
        for number in numbers:
            part.setdefault(sizes.units[chunks[number][0]], []).extend(chunks[number])
    _divide(parts, sizes)
    rank_of = {row: rank for rank, part in enumerate(parts) for rows in part.values() for row in rows}
    tokens = [sum(sizes.lengths[row] for rows in part.values() for row in rows) for part in parts]
    for row in order:
        if sizes.idle[row]:  # in case that it has a gradient after all, and for equally many micro-batches
            rank_of[row] = min(range(count), key=lambda rank: (tokens[rank], rank))
            tokens[rank_of[row]] += sizes.lengths[row]
    return [[row for row in order if rank_of[row] == rank] for rank in range(count)]


def _chunks(sizes: _Sizes) -> list[list[int]]:
    """Return the sequences of each unit that is not idle, in chunks of one prompt that a micro-batch can hold."""
    chunks: dict[int, list[list[int]]] = {}
    room: dict[int, int] = {}
    for row, unit in enumerate(sizes.units):
        if sizes.idle[row]:
            continue
        behind = sizes.lengths[row] - sizes.shared[row]
        if unit not in chunks or behind > room[unit]:
            chunks.setdefault(unit, []).append([])
            room[unit] = sizes.max_tokens - sizes.shared[row]
        chunks[unit][-1].append(row)
        room[unit] -= behind
    return [chunk for parts in chunks.values() for chunk in parts]


def _divide(parts: list[dict[int, list[int]]], sizes: _Sizes) -> None:
    """Move sequences, or all of a group, from the fullest rank to the emptiest until that makes no rank less full."""
    loads = [sum(map(sizes.cost, part.values())) for part in parts]
    ranks = range(len(parts))
    for _ in sizes.lengths:
        full, empty = max(ranks, key=lambda rank: (loads[rank], -rank)), min(ranks, key=lambda rank: loads[rank])
        if loads[full] * len(parts) <= EVEN * sum(loads):
            return
        moves = [
            (max(after), after, unit, moved)
            for unit, rows in parts[full].items()
            for moved in ([[row] for row in rows] if len(rows) > 1 else []) + [rows]
            if (after := _after(parts, loads, sizes, (full, empty), unit, moved))
        ]
        peak, (loads_full, loads_empty), unit, moved = min(moves)
        if peak >= loads[full]:
            return
        loads[full], loads[empty] = loads_full, loads_empty
        rows = [row for row in parts[full].pop(unit) if row not in moved]
        if rows:
            parts[full][unit] = rows
        parts[empty][unit] = parts[empty].get(unit, []) + moved


def _after(
    parts: Sequence[dict[int, list[int]]],
    loads: Sequence[int],
    sizes: _Sizes,
    ranks: tuple[int, int],
    unit: int,
    moved: list[int],
) -> tuple[int, int]:
    """Return the loads of two ranks after sequences of a unit have moved from the first to the second."""
    full, empty = ranks
    left, there = [row for row in parts[full][unit] if row not in moved], parts[empty].get(unit, [])
    return (
        loads[full] - sizes.cost(parts[full][unit]) + sizes.cost(left),
        loads[empty] - sizes.cost(there) + sizes.cost([*there, *moved]),
    )


def _level(order: Sequence[int], work: Sequence[int], count: int) -> list[list[int]]:
    """Distribute the rows of ``order`` (longest first), each to the part with the least work so far."""
    parts: list[list[int]] = [[] for _ in range(count)]
    # Equal loads are ordered by the number of the part, so the result depends on the arguments alone.
    heap = [(0, number) for number in range(count)]
    for row in order:
        load, number = heap[0]
        parts[number].append(row)
        heapq.heapreplace(heap, (load + work[row], number))
    return parts


# ---- micro-batches


def _levelled(
    order: Sequence[int],
    lengths: Sequence[int],
    work: Sequence[int] | None,
    bins: list[list[int]],
    count: int,
    max_tokens: int,
) -> list[list[int]]:
    """Return ``count`` micro-batches with equal work, or equal numbers of tokens; ``bins``: where that does not fit.

    First fit gives the number of micro-batches, but fills the first ones and leaves little for the last. The same
    number of levelled ones has a smaller largest one, and so a lower peak of memory.
    """
    if work is not None and (levelled := _level_within(order, lengths, work, count, max_tokens)):
        # Ranks and stages that wait for each other in every micro-batch do their largest ones at the same time.
        return sorted(levelled, key=lambda rows: -sum(work[row] for row in rows))
    levelled = _level(order, lengths, count)
    return levelled if _fits(levelled, lengths, max_tokens) else bins


def _level_within(
    order: Sequence[int], lengths: Sequence[int], work: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Distribute rows as ``_level``, among the parts with room for their tokens; None if there is none for a row."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads, tokens = [0] * count, [0] * count
    for row in sorted(order, key=lambda row: (-work[row], -lengths[row], row)):
        room = [part for part in range(count) if not parts[part] or tokens[part] + lengths[row] <= max_tokens]
        if not room:
            return None
        number = min(room, key=lambda part: (loads[part] if work[row] else 0, tokens[part], part))
        parts[number].append(row)
        loads[number] += work[row]
        tokens[number] += lengths[row]
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
