"""The beginning of PLAN, of the versions and of DEAD, which is removed behind a summary in one row.

    oldest kept checkpoint --> mark --(history_steps later, its samples and tasks trimmed)--> summary --> PLAN trimmed

A checkpoint's cursor is exactly what the records up to its plan have settled. So an audit needs of the removed records
their counts and the cursor of one mark: a later record that names a sample behind it would train it twice. The row is
written before PLAN is trimmed, and an audit begins behind the mark, so a kill in between counts nothing twice.
"""

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from tidemill.bus.client.pull import MAX_REMOVALS
from tidemill.bus.client.rows import Value
from tidemill.bus.errors import UnreadableRow
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.messages import Done, Plan, Settle
from tidemill.bus.wire.row_reader import MAX_ROW_BYTES
from tidemill.bus.wire.rows import HistoryRow, PlanMark, row_of
from tidemill.bus.wire.subjects import HISTORY_KEY, Shards
from tidemill.learner.buffer.ledger import cursor_of
from tidemill.weightstore.store.registry import VersionRegistry

log = logging.getLogger(__name__)
Reading = TypeVar("Reading")

MAX_READINGS = 5
LETTERS_SHARE = 0.5
"""Share of the bound of DEAD from which its dead letters are thinned, once all of it is almost full. The rest is of
reports: forged ones must not cost the operator letters.
"""
LEAST_VERSIONS = 100
"""Steps before the removed records whose versions stay: open tasks and buffered samples may be as old."""


async def read_history(bus: Bus) -> HistoryRow:
    """Return the summary of the removed records. Raises BusUnavailable, UnreadableRow."""
    row = await bus.rows("run").get(HISTORY_KEY)
    return HistoryRow() if row is None else row_of(HistoryRow, row[0])


async def shown_history(bus: Bus) -> HistoryRow:
    """Return the summary for a viewer: one that cannot be read is empty, and counted as refused."""
    row, _ = await bus.rows("run").read(HISTORY_KEY)
    return HistoryRow() if row is None else row_of(HistoryRow, row)


async def read_with_summary(
    bus: Bus,
    read: Callable[[HistoryRow], Awaitable[Reading]],
    summary: Callable[[Bus], Awaitable[HistoryRow]] = read_history,
) -> Reading:
    """Return what ``read`` makes of the summary and of the records and dead letters behind it.

    It is called again when a learner has removed some meanwhile, which may be in neither; after ``MAX_READINGS`` with
    a warning instead.
    """
    history = await summary(bus)
    for _ in range(MAX_READINGS):
        value = await read(history)
        # The row is written before anything is removed: while it is the same, all behind it is there.
        before, history = history, await summary(bus)
        if (history.removed, history.letters_to) == (before.removed, before.letters_to):
            return value
    text = "records were removed during each of %d readings: some of them may be missing in the counts"
    log.warning(text, MAX_READINGS)
    return value


async def removed_steps(bus: Bus) -> int:
    """Return the last step whose records are removed; 0 where none are, or where the summary cannot be read."""
    removed = (await shown_history(bus)).removed
    return 0 if removed is None else removed.step


async def compact(bus: Bus, oldest: JsonMapping, *, give_up: bool = False) -> None:
    """Remove records and versions that nothing needs any more. ``oldest``: state in the oldest kept checkpoint.

    For the newest learner alone, after the streams of samples and tasks were trimmed. ``give_up``: the log is almost
    full, so nothing is kept for curves and replays. Raises BusUnavailable.
    """
    try:
        history, place = await read_history(bus), mark_of(oldest)
    except UnreadableRow as error:  # what it summed up is in no other place: it is not written anew
        log.error("records of PLAN not removed: %s", error)
        return
    # Not the plan of the oldest checkpoint itself, which a restart from it reads
    kept = 1 if give_up else bus.config.history_steps
    if history.next is None:
        await _replace(bus, history, dataclasses.replace(history, next=place))
    elif history.next.step <= place.step - kept and await _is_trimmed(bus, history.next):
        after = await _summed(bus, history, history.next)
        if not await _replace(bus, history, dataclasses.replace(after, next=place)):
            return
        await bus.plans.trim(history.next.seq + 1)
        await VersionRegistry(bus).forget(history.next.step - max(kept, LEAST_VERSIONS))
        log.info("records of PLAN removed to_step=%d", history.next.step)


async def forget_letters(bus: Bus, below: int, *, full_bytes: int, letters_bytes: int) -> None:
    """Remove dead letters that name no task of the run; the older half of those of tasks with ids < ``below``, which
    are counted, once DEAD has ``full_bytes`` and its letters alone have ``letters_bytes``.

    For the newest learner alone. Raises BusUnavailable.
    """
    try:
        history = await read_history(bus)
    except UnreadableRow as error:
        log.error("dead letters not removed: %s", error)
        return
    # Also the letters counted by a start that was killed before it removed them
    await bus.dead.trim_letters(history.letters_to + 1)
    # Read anew at each checkpoint: two of them may follow each other without a step.
    if await bus.dead.size_bytes() < full_bytes or await bus.dead.letters_bytes() < letters_bytes:
        return
    tasks = [task for task in await bus.dead.letters() if history.letters_to < task < below]
    oldest = tasks[: min((len(tasks) + 1) // 2, MAX_REMOVALS)]
    counted = dataclasses.replace(history, letters=history.letters + len(oldest), letters_to=max(oldest, default=0))
    if oldest and await _replace(bus, history, counted):
        await bus.dead.trim_letters(counted.letters_to + 1)
        text = "DEAD is almost full: removed the dead letters of %d tasks, up to task %d"
        log.warning(text, len(oldest), counted.letters_to)


def mark_of(state: JsonMapping) -> PlanMark:
    """Return the place of a checkpoint's plan."""
    cursor, tasks = cursor_of(dict(state)), state["tasks"]
    return PlanMark(
        step=state["step"],
        seq=state["plan_seq"],
        task=max((tasks["floor"], *tasks["settled"])),
        floors=cursor.position,
        settled=cursor.settled,
    )


def largest_lag(plan: Plan) -> int:
    """Return the largest lag of the tokens that a plan may train: an upper bound, for samples that are trimmed."""
    oldest = min(plan.version_steps.values(), default=plan.step - 1)
    return plan.step - 1 - (oldest if plan.oldest_step is None else max(oldest, plan.oldest_step))


async def _is_trimmed(bus: Bus, mark: PlanMark) -> bool:
    """Return whether no message is left of the samples and tasks that are settled at a mark."""
    states = await bus.samples.states()
    shards = Shards(len(states))
    settled = [*mark.settled, *(seq for seq in mark.floors if len(mark.floors) == len(states))]
    firsts = [state.first_seq for state in states]
    if any(local >= firsts[shard] for shard, local in map(shards.place, settled)):
        return False
    async with aclosing(bus.tasks.scan()) as tasks:  # type: ignore[type-var]
        async for task in tasks:  # the first one: fences stay before it
            return bool(task.id > mark.task)
    return True


async def _summed(bus: Bus, history: HistoryRow, mark: PlanMark) -> HistoryRow:
    """Return the summary with the records up to a mark."""
    trained, tasks, max_lag = history.trained, history.trained_tasks, history.max_lag
    skipped = {0: float(history.skipped)}  # by step, because a step may be taken again
    dropped, given_up = Counter(history.dropped), Counter(history.given_up)
    start = 1 if history.removed is None else history.removed.seq + 1
    async with aclosing(bus.plans.scan(start)) as records:  # type: ignore[type-var]
        async for seq, record in records:
            if seq > mark.seq:
                break
            if isinstance(record, Plan):
                trained, tasks = trained + len(record.seqs), tasks + len(record.tasks)
                max_lag = max(max_lag, largest_lag(record))
            elif isinstance(record, Done):
                skipped[record.step] = record.metrics.get("train/skipped_minibatches", 0.0)
            elif isinstance(record, Settle):
                dropped[record.reason] += len(record.seqs)
                given_up[record.reason] += len(record.tasks)
    return dataclasses.replace(
        history,
        removed=mark,
        next=None,
        trained=trained,
        trained_tasks=tasks,
        skipped=int(sum(skipped.values())),
        dropped=dict(dropped),
        given_up=dict(given_up),
        max_lag=max_lag,
    )


async def _replace(bus: Bus, before: HistoryRow, after: HistoryRow) -> bool:
    """Write the row unless another learner has changed it meanwhile. Returns whether it was written."""
    value = dataclasses.asdict(after)

    def replaced(row: Value | None) -> Value | None:
        return value if before == (HistoryRow() if row is None else row_of(HistoryRow, row)) else None

    if len(json.dumps(value)) > MAX_ROW_BYTES:  # no reader would take it, and the summary would be lost with it
        log.warning("records of PLAN not removed: more samples are open than a row of the bus can tell apart")
        return False
    return (await bus.rows("run").change(HISTORY_KEY, replaced)).after is value
