"""Restart of a learner: finds the newest usable checkpoint and the records that were written after it."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Done, Kind, Plan, Requeue, Settle, Task
from tidemill.bus.wire.subjects import SETTINGS_KEY
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.buffer.snapshot import ROWS, read_state
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.placement import CHECKPOINT_KEY
from tidemill.learner.errors import NEW_RUN, ConfigRefused, NoCheckpoint, ReplayMismatch, RunLost
from tidemill.learner.feed.copies import Copies
from tidemill.learner.prompts.planned_rows import PlannedRows
from tidemill.learner.settings.step_settings import refuse_built_in

log = logging.getLogger(__name__)

_STORE_BACK = f"put the bus's store back, or {NEW_RUN}"


@dataclass(slots=True, kw_only=True)
class Resumed:
    """State with which a learner starts."""

    source: DataSource
    checkpoint: Path | None
    recorded: deque[tuple[int, Plan | Settle | Requeue]]
    """(sequence in PLAN, record) after the checkpoint, in order; they must be applied again unchanged."""
    recorded_until: int
    """Last recorded step; the checkpoint's if there is none."""
    done: dict[int, Done]
    """Outcomes that earlier starts recorded for steps after the checkpoint (the last one of each)."""
    executed: dict[int, int]
    """Epoch of the start that executed each of these steps first."""
    versions: dict[int, int]
    """Step of every version in tasks and plans after the checkpoint and in its own plan: all of them were published."""
    evaluation: JsonObject | None = None
    """State of the evaluation in the checkpoint; None = there is none."""
    curriculum: Sequence[Sequence[int]] = ()
    """State of the curriculum in the checkpoint."""
    eval_tasks: list[Task] = field(default_factory=list)
    """Evaluation tasks that were not settled at the checkpoint, or were issued after it."""


async def resume(
    bus: Bus, *, rules: DataRules, epoch: int, root: Path, planned: PlannedRows, copies: Copies | None = None
) -> Resumed:
    """Return the state with which this start begins. The caller has raised the epoch and fenced PLAN and TASKS before.

    ``planned``: gets the rows of the tasks of earlier starts, which the files of this one must have.
    ``copies``: the checkpoints are spread over nodes, or in a store; None = all are below ``root``. Raises StoreFailed,
    and NoCheckpoint, RunLost, ReplayMismatch, ConfigRefused: the run cannot be continued with these files, streams and
    settings.
    """
    row = await bus.rows("run").get(CHECKPOINT_KEY)
    if copies is not None:
        await copies.claim(is_new=row is None)
    checkpoint = None if row is None else await _loaded(root, row[0], copies)
    state: JsonObject = {}
    if checkpoint is None:
        # No checkpoint: the run has just begun, or ended before its first one. All samples are read again from the
        # first one there is.
        cursor = await bus.samples.cursor()
        source = DataSource(rules, epoch=epoch, created=cursor.created, floor=cursor.floor)
    else:
        data = await asyncio.to_thread(disk.read_state, checkpoint)
        source, state = DataSource.restore(rules, data, epoch=epoch), read_state(data)
        if ROWS in state:
            differences = await asyncio.to_thread(planned.load, state[ROWS])
            if state["identity"]["prompts_digest"] != rules.prompts_digest:
                log.warning(
                    "the prompts are other files than those of %s: %s; no planned row differs",
                    checkpoint.name,
                    differences,
                )
    versions, eval_tasks = await _register_tasks(bus, source, planned)
    recorded, done, executed = await _records(bus, source, versions)
    _refuse_lost_plans(bus.run, root, has_place=row is not None or bool(recorded))
    await _refuse_lost_tasks(bus, source, [record for _, record in recorded])
    for _, record in recorded:
        _refuse_other_layout(rules, record)
    steps = [record.step for _, record in recorded if isinstance(record, Plan)]
    log.info("resumed step=%d recorded=%d checkpoint=%s epoch=%d", source.step, len(steps), checkpoint, epoch)
    return Resumed(
        source=source,
        checkpoint=checkpoint,
        recorded=recorded,
        recorded_until=max(steps, default=source.step),
        done=done,
        executed=executed,
        versions=versions,
        evaluation=state.get("evaluation"),
        curriculum=state.get("curriculum", ()),
        eval_tasks=eval_tasks,
    )


async def recorded_versions(bus: Bus) -> dict[int, int]:
    """Return the step of every version in the plans of the run."""
    versions: dict[int, int] = {}
    async for _, record in bus.plans.scan():
        if isinstance(record, Plan):
            versions |= record.version_steps
    return versions


async def _loaded(root: Path, row: JsonMapping, copies: Copies | None) -> Path:
    """Return the checkpoint to load. Raises NoCheckpoint."""
    return await asyncio.to_thread(_usable, root, row) if copies is None else await copies.whole(row)


def _usable(root: Path, row: JsonMapping) -> Path:
    """Return the latest checkpoint of the run or, with an error in the log, the newest valid one before it. Corrupt
    ones are set aside.

    Raises NoCheckpoint if none is valid.
    """
    latest = root / Path(row["directory"]).name  # only the name, because the root may have been moved
    before = [one.path for one in disk.listed(root) if one.step <= row["step"] and one.path.name != latest.name]
    found, corrupt = disk.latest_valid([latest, *before])
    if found is None:
        raise NoCheckpoint(str(root), "none is whole: " + "; ".join(map(str, corrupt.values())))
    for path in corrupt:
        if not disk.is_spread(
            path
        ):  # else it is not damaged: the rest is on other nodes, which this start does not have
            disk.set_aside(path)
    return found


def _refuse_lost_plans(run: str, root: Path, *, has_place: bool) -> None:
    if not has_place and (kept := disk.listed(root)):
        raise RunLost(run, str(kept[0].path))


async def _refuse_lost_tasks(bus: Bus, source: DataSource, records: Sequence[Plan | Settle | Requeue]) -> None:
    named = [int(task) for record in records if isinstance(record, Plan | Settle) for task in record.tasks]
    wanted, last = max((source.task_floor, *named)), await bus.tasks.last_id()
    if last < wanted:
        raise ReplayMismatch(
            "stream TASKS", f"tasks up to {wanted}", f"{last} as the last one: it was made anew; {_STORE_BACK}"
        )


async def _register_tasks(bus: Bus, source: DataSource, planned: PlannedRows) -> tuple[dict[int, int], list[Task]]:
    """Register the open and the dead tasks in the source. Raises ConfigRefused for a task whose row has changed.

    Returns the versions at which tasks were issued, with their steps, and the evaluation tasks.
    """
    now = time.monotonic()
    versions: dict[int, int] = {}
    eval_tasks: list[Task] = []
    async for task in bus.tasks.scan(source.task_floor + 1):
        source.issued(task, now)
        if task.kind is Kind.TRAIN:
            planned.repeat(task)
            versions[task.min_version] = task.issue_step
        else:
            eval_tasks.append(task)
    async for _, dead in bus.dead.scan():
        source.dead(dead.task)
    return versions, eval_tasks


async def _records(
    bus: Bus, source: DataSource, versions: dict[int, int]
) -> tuple[deque[tuple[int, Plan | Settle | Requeue]], dict[int, Done], dict[int, int]]:
    """Read the records after the state, and add their versions to ``versions``.

    Returns (records to repeat, outcomes by step, epochs of the first outcomes by step).

    Raises ReplayMismatch if the last plan of the state is not in the log.
    """
    recorded: deque[tuple[int, Plan | Settle | Requeue]] = deque()
    done: dict[int, Done] = {}
    executed: dict[int, int] = {}
    found = source.plan_seq == 0
    async for seq, record in bus.plans.scan(max(1, source.plan_seq)):
        if isinstance(record, Plan):
            versions |= record.version_steps
        # The last record of the checkpoint is read as well: it shows that the log is the one that the checkpoint was
        # made with.
        if seq == source.plan_seq:
            if not isinstance(record, Plan) or record.chain != source.chain:
                raise ReplayMismatch(
                    f"log PLAN at {seq}", f"the plan of step {source.step}, chain {source.chain}", record
                )
        elif isinstance(record, Plan | Settle | Requeue):
            recorded.append((seq, record))
        elif isinstance(record, Done):
            done[record.step] = record
            executed.setdefault(record.step, record.epoch)
        found = found or seq == source.plan_seq
    if not found:
        want = f"the plan of step {source.step}"
        raise ReplayMismatch(f"log PLAN at {source.plan_seq}", want, f"nothing: it was made anew; {_STORE_BACK}")
    return recorded, done, executed


async def recorded_settings(bus: Bus, resumed: Resumed, now: JsonObject, *, epoch: int) -> list[tuple[int, JsonObject]]:
    """Record the settings of this start, and return the settings of the steps that it executes again.

    A pair is the last step with these settings, and their record; empty = as of this start. Raises ConfigRefused for a
    setting that cannot be changed between two steps.
    """
    rows = bus.rows("run")
    await rows.put(f"{SETTINGS_KEY}.{epoch}", now)
    found: list[tuple[int, JsonObject]] = []
    for step in (record.step for _, record in resumed.recorded if isinstance(record, Plan)):
        first = resumed.executed.get(step)  # a step that was planned alone has the settings of this start
        then = now if first is None else (await rows.read(f"{SETTINGS_KEY}.{first}"))[0]
        if then is None:
            log.warning(
                "step %d is executed again with the settings of this start: no row run/%s.%d", step, SETTINGS_KEY, first
            )
            then = now
        refuse_built_in(then, now, step)
        record = {} if then == now else then
        if found and found[-1][1] == record:
            found.pop()
        found.append((step, record))
    return found


def _refuse_other_layout(rules: DataRules, record: Plan | Settle | Requeue) -> None:
    if isinstance(record, Plan) and record.data_parallel != rules.data_parallel:
        want = f"{record.data_parallel} until the recorded step {record.step} is in a checkpoint"
        raise ConfigRefused("learner.data_parallel", want, rules.data_parallel)
