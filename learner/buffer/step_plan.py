"""Plans: the selection of groups for a step (gate, filter, order), their assignment to ranks and micro-batches, and the
plan as a whole: its chain of digests and its size. Pure functions of groups, rules and the step.

The chain is a digest of everything trained so far, by which two histories can be compared. The assignment is balanced
by operations or tokens and deterministic, with as many micro-batches on every rank.
"""

import hashlib
import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.messages import Plan, Settle
from tidemill.learner.buffer.groups import SampleGroup
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.errors import ReplayMismatch

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
    # Equal loads are ordered by the number of the part, so the result depends on the arguments alone.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Description of the event that the next plan waits for."""

    text: str
    """For status and logs: "13 more groups for step 7, for 42 s; 20 in flight, oldest 311 s"."""
    missing: int
    """Number of missing groups; 0 = there are enough, and they wait for the buffer filters."""
    wake_in_s: float | None = None
    """Seconds after which ``plan`` must be called again even without an event; None = only after an event."""


def wait_for_groups(
    groups: Collection[SampleGroup],
    rules: DataRules,
    missing: int,
    *,
    step: int,
    now: float,
    waited_s: float,
    head: tuple[int, int] | None,
) -> Waits:
    """Return the wait for ``missing`` of all open ``groups`` for ``step``; 0 = for the buffer filters alone."""
    cause = f"{missing} more group{'s' * (missing > 1)}" if missing else "the buffer filters"
    parts = [f"{cause} for step {step}, for {waited_s:.0f} s"]
    if in_flight := [group for group in groups if not (group.full or group.is_complete(rules))]:
        oldest, silent_s = min(group.task.id for group in in_flight), now - min(group.touched_s for group in in_flight)
        parts.append(f"{len(in_flight)} in flight, oldest task {oldest}, silent for {silent_s:.0f} s")
    else:
        parts.append("none in flight")
    if judging := sum(group.is_complete(rules) and not group.is_ready(rules) for group in groups):
        parts.append(f"{judging} wait for the filters")
    if head is None:
        parts.append("no version is published yet")
    return Waits(text="; ".join(parts), missing=missing)


def wait_for_old_groups(old_groups: Sequence[SampleGroup], *, step: int, now: float, left_s: float) -> Waits:
    """Return the wait of at most ``left_s`` for groups in flight that ``step`` could train and the next one not."""
    silent_s, count = now - min(group.touched_s for group in old_groups), len(old_groups)
    text = (
        f"{count} group{'s' * (count > 1)} in flight (task {old_groups[0].task.id}, silent for {silent_s:.0f} s) that "
        f"would be too old for step {step + 1}; step {step} goes without in {left_s:.0f} s"
    )
    return Waits(text=text, missing=count, wake_in_s=left_s)


FILTERED = "filtered"
"""Reason of groups that a filter dropped; the name of a filter follows a colon."""


def is_filtered(reason: str) -> bool:
    """Return whether a group was dropped for its content, by a filter."""
    return reason == FILTERED or reason.startswith(f"{FILTERED}:")


def oldest_step(rules: DataRules, step: int) -> int:
    """Return the oldest step of weights with a lag of at most ``max_lag`` in step ``step``."""
    return step - 1 - rules.staleness.max_lag


def drop_reason(group: SampleGroup, steps: Mapping[int, int], rules: DataRules, step: int) -> str:
    """Return the reason to drop a complete group when ``step`` is the next one; empty = the group may be trained."""
    by_step, oldest = group.tokens_by_step(steps), oldest_step(rules, step)
    verdict = "" if group.verdict is None else group.verdict.reason
    if not by_step:
        return verdict or "empty"
    # mask: as long as one token is young enough, the others are masked, and the group is trained.
    if rules.staleness.gate == "mask" and max(by_step) < oldest:
        return "stale"
    if rules.staleness.gate == "drop" and min(by_step) < oldest:
        return "stale"
    if rules.staleness.filter_zero_variance and len(group.scores) == 1 and not group.demonstrations:
        return FILTERED
    return verdict or ("" if group.choice is None else group.choice.reason)


def age(group: SampleGroup, steps: Mapping[int, int]) -> tuple[int, int]:
    """Return the age of a group as a sort key: the oldest step that made a trainable token, then the task id."""
    return min(group.tokens_by_step(steps)), group.task.id


def order_groups(
    ready: Iterable[SampleGroup], steps: Mapping[int, int], rules: DataRules, step: int
) -> list[SampleGroup]:
    """Sort groups as they are trained: first groups that the next step could not train, then by priority and age."""
    oldest = oldest_step(rules, step)
    return sorted(ready, key=lambda group: (age(group, steps)[0] > oldest, -group.priority, age(group, steps)))


def urgent_groups(
    in_flight: Iterable[SampleGroup],
    chosen: Sequence[SampleGroup],
    steps: Mapping[int, int],
    rules: DataRules,
    step: int,
) -> list[SampleGroup]:
    """Return the groups in flight that would be too old for step + 1, and would be chosen now if they were complete."""
    if step >= rules.steps:
        return []
    oldest = oldest_step(rules, step)
    last = max(age(group, steps) for group in chosen) if len(chosen) >= rules.groups_per_step else None
    return [
        group
        for group in in_flight
        if group.task.issue_step == oldest and (last is None or (oldest, group.task.id) < last)
    ]


def fit_groups(chosen: Sequence[SampleGroup], max_bytes: int) -> Sequence[SampleGroup]:
    """Return the first groups, at least one, whose plan has at most ``max_bytes``; 0 = any number."""
    samples = sequences = masked = 0
    versions: set[int] = set()
    for count, group in enumerate(chosen):
        samples += len(group.samples)
        sequences += sum(len(sample.lengths) for sample in group.rows)
        masked += len(group.masked)
        versions |= group.versions
        num_bytes = plan_bytes(
            groups=count + 1, samples=samples, sequences=sequences, versions=len(versions), masked=masked
        )
        if max_bytes and count and num_bytes > max_bytes:
            return chosen[:count]
    return chosen


def settled_at_once(groups: Sequence[SampleGroup], max_bytes: int) -> Sequence[SampleGroup]:
    """Return the first groups, at least one, that a Settle of at most ``max_bytes`` can name; 0 = any number."""
    samples = 0
    for count, group in enumerate(groups):
        samples += len(group.samples)
        if max_bytes and count and settle_bytes(groups=count + 1, samples=samples) > max_bytes:
            return groups[:count]
    return groups


def make_settle(groups: Sequence[SampleGroup], reason: str, *, epoch: int, step: int) -> Settle:
    """Return the record that settles these groups, before step ``step``, for ``reason``."""
    return Settle(
        epoch=epoch,
        reason=reason,
        tasks=np.array(sorted(group.task.id for group in groups), np.int64),
        seqs=np.array(sorted(seq for group in groups for seq in group.seqs), np.int64),
        step=step,
    )


def make_plan(
    chosen: Sequence[SampleGroup], steps: Mapping[int, int], rules: DataRules, *, epoch: int, step: int, chain: str
) -> Plan:
    """Return the plan of ``step`` over these groups, packed and chained to the plan before. Raises ReplayMismatch."""
    samples = [sample for group in chosen for sample in group.rows]
    lengths = [length for sample in samples for length in sample.lengths]
    rows = np.array([len(sample.lengths) for sample in samples], np.int32)
    sizes = [len(group.samples) for group in chosen]  # a dead task may have fewer than it asked for
    packed = assign(
        lengths,
        data_parallel=rules.data_parallel,
        max_tokens=rules.max_tokens_per_micro_batch,
        minibatches=rules.minibatches,
        group_sizes=[sum(len(sample.lengths) for sample in group.rows) for group in chosen],
        pair_tokens=rules.pair_tokens,
    )
    masked = [sample.seq for group in chosen for sample in group.rows if sample.seq in group.masked]
    version_steps = {
        version: steps[version] for version in sorted({version for group in chosen for version in group.versions})
    }
    # Tokens of weights that this step has yet to make: the registry and the plans belong to different histories.
    if max(version_steps.values()) >= step:
        raise ReplayMismatch(
            f"samples for step {step}", "versions of earlier steps only", f"steps of versions: {version_steps}"
        )
    plan = Plan(
        epoch=epoch,
        step=step,
        tasks=np.array([group.task.id for group in chosen], np.int64),
        seqs=np.array([sample.seq for sample in samples], np.int64),
        group_sizes=np.array(sizes, np.int32),
        ranks=packed.ranks,
        micro_batches=packed.micro_batches,
        version_steps=version_steps,
        oldest_step=None if rules.staleness.gate == "train" else oldest_step(rules, step),
        data_parallel=rules.data_parallel,
        num_micro_batches=packed.num_micro_batches,
        num_minibatches=packed.num_minibatches,
        config_digest=rules.digest,
        chain="",
        rows=rows if (rows > 1).any() else None,
        masked=np.array(masked, np.int64) if masked else None,
    )
    return replace(plan, chain=chain_of(chain, plan))
