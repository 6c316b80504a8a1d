"""Plans: the selection of groups for a step (gate, filter, order), their assignment to ranks and micro-batches, and the
plan as a whole: its chain of digests and its size. Pure functions of groups, rules and the step.

The chain is a digest of everything trained so far, by which two histories can be compared. The assignment is balanced
by operations or tokens and deterministic, with as many micro-batches on every rank.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.messages import Plan, Settle
from tidemill.learner.buffer.assignment import assign
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
    shared, idle = _left_to_ranks(chosen, rules, step)
    packed = assign(
        lengths,
        data_parallel=rules.data_parallel,
        max_tokens=rules.max_tokens_per_micro_batch,
        minibatches=rules.minibatches,
        group_sizes=[sum(len(sample.lengths) for sample in group.rows) for group in chosen],
        pair_tokens=rules.pair_tokens,
        shared=shared,
        idle=idle,
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


def _left_to_ranks(chosen: Sequence[SampleGroup], rules: DataRules, step: int) -> tuple[list[int], list[bool]]:
    """Return what ranks need not compute, by sequence: the tokens that it shares with its group, and whether it is left
    out.
    """
    shared, idle = list[int](), list[bool]()
    for group in chosen:
        begins = [size.num_tokens - size.response_length for sample in group.rows for size in sample.sizes]
        # Sizes have no tokens: whatever stands before the first trained token is taken for the prompt.
        shared += [min(begins) if rules.shares_prompts else 0] * len(begins)
        leaves_out = 0 < rules.leaves_out_from <= step
        equal = len(group.scores) == 1 and not group.demonstrations
        for sample in group.rows:
            idle += [leaves_out and (equal or sample.seq in group.masked)] * len(sample.sizes)
    return shared, idle
