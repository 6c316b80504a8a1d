"""Restart of a learner: the state from the newest usable checkpoint, and the records that were written after it."""

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
from tidemill.bus.wire.rows import VersionRow
from tidemill.bus.wire.subjects import SETTINGS_KEY
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.failures import Senders, refused_before
from tidemill.learner.buffer.ledger import ROWS, read_state
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.disk import CHECKPOINT_KEY
from tidemill.learner.checkpoints.object_store import ObjectStore
from tidemill.learner.errors import NEW_RUN, ConfigRefused, NoCheckpoint, ReplayMismatch, RunLost
from tidemill.learner.evaluation.rounds import Rounds
from tidemill.learner.feed.copies import Copies
from tidemill.learner.feed.feeder_settings import FeederSettings
from tidemill.learner.prompts.prompt_file import PlannedRows, PromptFile
from tidemill.learner.settings.step_settings import refuse_built_in
from tidemill.weightstore.store.registry import VersionRegistry

log = logging.getLogger(__name__)

RecordAt = tuple[int, Plan | Settle | Requeue]
"""A record and its sequence in PLAN."""
_STORE_BACK = f"put the bus's store back, or {NEW_RUN}"


@dataclass(slots=True, kw_only=True)
class Resumed:
    """State with which a learner starts."""

    source: DataSource
    checkpoint: Path | None
    recorded: deque[RecordAt]
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
    checkpoint: Path | None = None
    if row is not None:
        checkpoint = await (asyncio.to_thread(_usable, root, row[0]) if copies is None else copies.whole(row[0]))
    state: JsonObject = {}
    if checkpoint is None:
        # The run has just begun, or ended before its first checkpoint: all samples are read again.
        cursor = await bus.samples.cursor()
        source = DataSource(rules, epoch=epoch, created=cursor.created, floors=cursor.position)
    else:
        source, state = await _restored_source(checkpoint, rules, planned, epoch=epoch)
    if source.step > rules.steps:
        raise ConfigRefused("learner.steps", f">= {source.step}, the step of the latest checkpoint", rules.steps)
    versions, eval_tasks = await _register_tasks(bus, source, planned)
    recorded, done, executed = await _records(bus, source, versions)
    if row is None and not recorded and (checkpoints := disk.listed(root)):
        raise RunLost(bus.run, str(checkpoints[0].path))
    await _refuse_lost_tasks(bus, source, [record for _, record in recorded])
    plans = [record for _, record in recorded if isinstance(record, Plan)]
    for plan in plans:
        if plan.data_parallel != rules.data_parallel:
            want = f"{plan.data_parallel} until the recorded step {plan.step} is in a checkpoint"
            raise ConfigRefused("learner.data_parallel", want, rules.data_parallel)
    log.info("resumed step=%d recorded=%d checkpoint=%s epoch=%d", source.step, len(plans), checkpoint, epoch)
    return Resumed(
        source=source,
        checkpoint=checkpoint,
        recorded=recorded,
        recorded_until=max((plan.step for plan in plans), default=source.step),
        done=done,
        executed=executed,
        versions=versions,
        evaluation=state.get("evaluation"),
        curriculum=state.get("curriculum", ()),
        eval_tasks=eval_tasks,
    )


async def _restored_source(
    checkpoint: Path, rules: DataRules, planned: PlannedRows, *, epoch: int
) -> tuple[DataSource, JsonObject]:
    """Return the DataSource of a checkpoint, and the state that it was restored from."""
    data = await asyncio.to_thread(disk.read_state, checkpoint)
    source, state = DataSource.restore(rules, data, epoch=epoch), read_state(data)
    if ROWS in state:
        differences = await asyncio.to_thread(planned.load, state[ROWS])
        if state["identity"]["prompts_digest"] != rules.prompts_digest:
            text = "the prompts are other files than those of %s: %s; no planned row differs"
            log.warning(text, checkpoint.name, differences)
    return source, state


async def recorded_versions(bus: Bus) -> dict[int, int]:
    """Return the step of every version in the plans of the run."""
    versions: dict[int, int] = {}
    async for _, record in bus.plans.scan():
        if isinstance(record, Plan):
            versions |= record.version_steps
    return versions


def _usable(root: Path, row: JsonMapping) -> Path:
    """Return the latest checkpoint of the run or, with an error in the log, the newest valid one before it.

    Corrupt checkpoints are set aside. Raises NoCheckpoint if none is valid.
    """
    latest = root / Path(row["directory"]).name  # only the name, because the root may have been moved
    earlier = [
        checkpoint.path
        for checkpoint in disk.listed(root)
        if checkpoint.step <= row["step"] and checkpoint.path.name != latest.name
    ]
    valid, corrupt = disk.latest_valid([latest, *earlier])
    if valid is None:
        raise NoCheckpoint(str(root), "none is whole: " + "; ".join(map(str, corrupt.values())))
    for path in corrupt:
        # One that is spread is not damaged: its other files are on nodes that this start does not have.
        if not disk.is_spread(path):
            disk.set_aside(path)
    return valid


async def _refuse_lost_tasks(bus: Bus, source: DataSource, records: Sequence[Plan | Settle | Requeue]) -> None:
    named = [int(task) for record in records if isinstance(record, Plan | Settle) for task in record.tasks]
    newest, last_id = max((source.task_floor, *named)), await bus.tasks.last_id()
    if last_id < newest:
        got = f"{last_id} as the last one: it was made anew; {_STORE_BACK}"
        raise ReplayMismatch("stream TASKS", f"tasks up to {newest}", got)


async def _register_tasks(bus: Bus, source: DataSource, planned: PlannedRows) -> tuple[dict[int, int], list[Task]]:
    """Register the open tasks in the source. Raises ConfigRefused for a task whose row has changed.

    Dead ones are marked later, behind their samples (``Intake.follow_dead``). Returns the versions at which tasks were
    issued, with their steps, and the evaluation tasks.
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
    return versions, eval_tasks


async def _records(
    bus: Bus, source: DataSource, versions: dict[int, int]
) -> tuple[deque[RecordAt], dict[int, Done], dict[int, int]]:
    """Read the records after the state, and add their versions to ``versions``.

    Returns (records to repeat, outcomes by step, epochs of the first outcomes by step).

    Raises ReplayMismatch if the last plan of the state is not in the log.
    """
    recorded: deque[RecordAt] = deque()
    done: dict[int, Done] = {}
    executed: dict[int, int] = {}
    has_last_plan = source.plan_seq == 0
    async for seq, record in bus.plans.scan(max(1, source.plan_seq)):
        if isinstance(record, Plan):
            versions |= record.version_steps
        # The last record of the checkpoint is read as well: it shows that this is the log that the checkpoint was
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
        has_last_plan = has_last_plan or seq == source.plan_seq
    if not has_last_plan:
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
    settings: list[tuple[int, JsonObject]] = []
    for step in (record.step for _, record in resumed.recorded if isinstance(record, Plan)):
        first = resumed.executed.get(step)  # a step that was planned alone has the settings of this start
        then = now if first is None else (await rows.read(f"{SETTINGS_KEY}.{first}"))[0]
        if then is None:
            log.warning(
                "step %d is executed again with the settings of this start: no row run/%s.%d", step, SETTINGS_KEY, first
            )
            then = now
        # A setting that is built into the models cannot be changed for the repeated steps alone.
        refuse_built_in(then, now, step)
        record = {} if then == now else then
        if settings and settings[-1][1] == record:
            settings.pop()
        settings.append((step, record))
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The state with which the parts of a feeder begin."""

    epoch: int
    resumed: Resumed
    planned: PlannedRows
    rounds: Rounds
    """State of the evaluation in the checkpoint."""
    senders: Senders
    settings: list[tuple[int, JsonObject]]
    """Settings with which recorded steps are repeated, see ``Start.settings``."""


async def restore(
    bus: Bus, settings: FeederSettings, prompts: PromptFile, *, epoch: int, copies: Copies | None
) -> Restored:
    """Restore the state from the checkpoint and the streams, and the registry from both. The caller has fenced PLAN and
    TASKS.

    Raises as ``resume``.
    """
    planned, root = PlannedRows(prompts), settings.places.checkpoints
    resumed = await resume(
        bus, rules=settings.data_rules(prompts), epoch=epoch, root=root, planned=planned, copies=copies
    )
    resumed.source.max_record_bytes = bus.plans.max_record_bytes
    now = settings.step_settings
    recorded = await recorded_settings(bus, resumed, now, epoch=epoch) if now else []
    registry = VersionRegistry(bus)
    if await registry.lost(resumed.versions):
        await registry.restore(resumed.versions | await recorded_versions(bus), epoch)
    head = await first_head(registry, settings.initial_model, epoch)
    if head is not None:  # a publisher fences the head before it writes one
        resumed.source.published(head.version, head.step)
    rounds = await asyncio.to_thread(settings.evaluation.rounds)
    if resumed.evaluation is not None:
        rounds.load(resumed.evaluation)
    senders = Senders(await refused_before(bus))
    return Restored(epoch=epoch, resumed=resumed, planned=planned, rounds=rounds, senders=senders, settings=recorded)


def copies_of(bus: Bus, settings: FeederSettings) -> Copies | None:
    """Return the checkpoints as they are spread over nodes or a store; None where one directory has all of them."""
    places, store = settings.places, settings.learner.checkpoint.url
    if store:
        return Copies(bus, places.checkpoints, num_nodes=places.num_nodes, store=ObjectStore(store, places.run))
    if settings.num_copies and places.num_nodes > 1:
        return Copies(bus, places.checkpoints, num_nodes=places.num_nodes, copies=settings.num_copies)
    return None


async def peers_of(copies: Copies | None, checkpoint: Path | None) -> JsonObject:
    """Return the fields of ``Start`` with the nodes that serve the checkpoint; none where this node has all files."""
    if copies is None or checkpoint is None:
        return {}
    peers = {str(peer.node): peer for peer in await copies.peers()}
    keys = {peer.key for peer in peers.values()}
    return {
        "manifest": await asyncio.to_thread(disk.manifest_digest, checkpoint),
        "peers": {node: peer.url for node, peer in peers.items()},
        "peer_key": keys.pop() if keys else "",
    }


async def verified(checkpoint: Path | None) -> str | None:
    """Return the directory after its files were compared with the manifest. Raises CheckpointCorrupt."""
    if checkpoint is None:
        return None
    await asyncio.to_thread(disk.verify, checkpoint)
    return str(checkpoint)


async def first_head(registry: VersionRegistry, initial_model: str, epoch: int) -> VersionRow | None:
    """Return the head, restored if it cannot be read. Raises Fenced.

    ``initial_model``: published as version 0 first, because no rank publishes any; empty = a rank does.
    """
    if initial_model:
        await registry.fence(epoch)
        await registry.publish_initial(initial_model, epoch)
    return await registry.repaired_head(epoch)
