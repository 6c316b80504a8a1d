"""Plans as a whole: their chain of digests, their size, and the assignment of samples to ranks and micro-batches.

The chain is a digest of everything trained so far, by which two histories can be compared. The assignment is balanced
by operations or tokens and deterministic, with as many micro-batches on every rank.
"""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.messages import Plan

GENESIS = "0" * 64
"""Value of the chain before the first plan."""
_RECORD_BYTES = 1024
"""Scalars, digests, field names and headers of arrays; a plan has less than 600 bytes of them."""
_VERSION_BYTES = 18
"""One entry of ``version_steps``, two integers of msgpack at their longest."""


def plan_bytes(*, groups: int, samples: int, sequences: int, versions: int = 1, masked: int = 0) -> int:
    """Return an upper bound of the bytes of a stored plan; it exceeds them by < 1 kB and 17 bytes a version."""
    rows = 4 * samples if sequences > samples else 0
    return _RECORD_BYTES + 12 * groups + 8 * samples + rows + 8 * sequences + _VERSION_BYTES * versions + 8 * masked


def settle_bytes(*, groups: int, samples: int) -> int:
    """Return an upper bound of the bytes of a Settle as it is stored."""
    return _RECORD_BYTES + 8 * groups + 8 * samples


def chain_of(previous: str, plan: Plan) -> str:
    """Return the SHA-256 (hex) of the previous chain and the plan's content, without its epoch and its own ``chain``.

    Each column is little-endian and length-prefixed, so no two different plans have the same bytes.
    """
    digest = hashlib.sha256(bytes.fromhex(previous))
    for part in _columns(plan):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _columns(plan: Plan) -> list[bytes]:
    scalars = (
        plan.step,
        sorted((int(version), int(step)) for version, step in plan.version_steps.items()),
        plan.oldest_step,
        plan.data_parallel,
        plan.num_micro_batches,
        plan.num_minibatches,
        plan.config_digest,
    )
    columns: list[tuple[NDArray[Any], str]] = [(plan.tasks, "<i8"), (plan.seqs, "<i8")]
    columns += [(column, "<i4") for column in (plan.group_sizes, plan.ranks, plan.micro_batches)]
    # Only where a sample has several sequences, so that chains of runs without such samples are as in earlier releases.
    if plan.rows is not None and (plan.rows != 1).any():
        columns.append((plan.rows, "<i4"))
    if plan.masked is not None:
        # The empty column marks it: without, a plan with ``masked`` and one with ``rows`` have as many columns.
        columns += [(np.zeros(0), "<i4"), (plan.masked, "<i8")]
    return [msgpack.packb(scalars), *(np.ascontiguousarray(column, dtype).tobytes() for column, dtype in columns)]


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


def assign(
    lengths: Sequence[int],
    *,
    data_parallel: int,
    max_tokens: int,
    minibatches: int = 1,
    group_sizes: Sequence[int] | None = None,
    pair_tokens: int = 0,
) -> Assignment:
    """Return an assignment of sequences of these token counts to ranks, minibatches and micro-batches of at most
    ``max_tokens`` tokens.

    A sample is one sequence, or several. Whole groups (``group_sizes``: their sequences, in order; None = every
    sequence is one) go to the ``minibatches`` in turn, so that each has old and young ones; there are no more
    minibatches than groups, so that none is empty. A sequence longer than ``max_tokens`` has a micro-batch to itself.
    ``pair_tokens``: pairs of tokens whose attention costs as much as the weights for one token, for ranks with equal
    work; 0 = with equal numbers of tokens.
    The result depends only on the arguments.
    Source: longest processing time first, Graham 1969 (ranks, and levelling inside a rank); first-fit decreasing,
    Johnson 1973 (count).
    """
    sizes = [1] * len(lengths) if group_sizes is None else list(group_sizes)
    assert sum(sizes) == len(lengths), f"groups of {sum(sizes)} samples, lengths of {len(lengths)}"
    minibatches = max(1, min(minibatches, len(sizes)))
    minibatch_of = [group % minibatches for group, size in enumerate(sizes) for _ in range(size)]
    rows = [np.flatnonzero(np.equal(minibatch_of, number)).tolist() for number in range(minibatches)]
    parts = [_assign([lengths[row] for row in part_rows], data_parallel, max_tokens, pair_tokens) for part_rows in rows]
    count = max(part_count for _, _, part_count in parts)
    ranks, micro_batches = np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.int32)
    for number, (part_rows, (part_ranks, part_micro_batches, _)) in enumerate(zip(rows, parts, strict=True)):
        ranks[part_rows], micro_batches[part_rows] = part_ranks, part_micro_batches + number * count
    return Assignment(
        ranks=ranks, micro_batches=micro_batches, num_micro_batches=count * minibatches, num_minibatches=minibatches
    )


def _assign(
    lengths: Sequence[int], data_parallel: int, max_tokens: int, pair_tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Return (ranks, micro-batches) of the samples of one minibatch, and the number of micro-batches."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    work = [length * pair_tokens + length * (length + 1) // 2 for length in lengths] if pair_tokens else lengths
    by_rank = _level(order, work, data_parallel)
    packed = [_first_fit(rows, lengths, max_tokens) for rows in by_rank]
    count = max(1, *(len(bins) for bins in packed))
    ranks, micro_batches = np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.int32)
    for rank, (rows, bins) in enumerate(zip(by_rank, packed, strict=True)):
        # First fit gives the number of micro-batches, but fills the first ones and leaves little for the last. The same
        # number of levelled ones has a smaller largest one, and so a lower peak of memory; it may fail to fit.
        levelled = _level(rows, lengths, count)
        chosen = levelled if _fits(levelled, lengths, max_tokens) else bins
        for number, members in enumerate(chosen):
            ranks[members], micro_batches[members] = rank, number
    return ranks, micro_batches, count


def _level(order: Sequence[int], work: Sequence[int], count: int) -> list[list[int]]:
    """Distribute the rows of ``order`` (longest first), each to the part with the least work so far."""
    parts: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for row in order:
        load, number = heap[0]
        parts[number].append(row)
        heapq.heapreplace(heap, (load + work[row], number))
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
