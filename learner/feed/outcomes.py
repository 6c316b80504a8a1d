"""Outcomes of steps and of the run: records the reports of rank 0 on the bus, trims the streams, ends the run."""

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tidemill.bus.client.layout import record_bounds
from tidemill.bus.client.rows import Value
from tidemill.bus.errors import BusUnavailable, Fenced
from tidemill.bus.exit_codes import DONE
from tidemill.bus.streams.bus import Bus, current_epoch
from tidemill.bus.streams.readers import Cursors
from tidemill.bus.streams.shard_reading import CREATED_SEPARATOR
from tidemill.bus.wire import subjects
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.messages import Done, Plan
from tidemill.bus.wire.rows import EndRow, Outcome
from tidemill.bus.wire.subjects import END_KEY, EPOCH_KEY
from tidemill.learner.algorithms.alarms import Context
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.ledger import cursor_of, read_state
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.disk import Checkpoint, kept_names
from tidemill.learner.errors import CheckpointCorrupt, FeedError, NothingTrained
from tidemill.learner.evaluation.evaluations import BestCheckpoint, Evaluations
from tidemill.learner.feed.copies import Copies
from tidemill.learner.feed.data_metrics import EpisodeAge
from tidemill.learner.feed.feed_messages import Last
from tidemill.learner.feed.feed_server import FeedServer
from tidemill.learner.feed.feeder_settings import FeederSettings
from tidemill.learner.feed.history import LETTERS_SHARE, compact, forget_letters
from tidemill.learner.feed.restart import CHECKPOINT_KEY, Resumed

log = logging.getLogger(__name__)

WEIGHTS = "weights"
GIVE_UP_HISTORY_FULL = 0.85
"""Share in use, of the stream SAMPLES or of a bound by ``bus.quota_bytes``, at which history is trimmed too."""
MAX_DEAD_BYTES = 100_000_000
"""Size to which checkpoints hold DEAD without a quota: 10,000 letters with prompts and reasons of 10 KB.

It is no setting of the stream: the server would reserve these bytes for it. Between two checkpoints DEAD may be larger,
and so it may by reports on tasks that are not settled yet.
"""


class Outcomes:
    """Consumes ``server.outcomes``; produces Done records and the checkpoint row; trims streams; sets ``finished``."""

    def __init__(
        self,
        bus: Bus,
        server: FeedServer,
        resumed: Resumed,
        settings: FeederSettings,
        *,
        epoch: int,
        on_published: Callable[[int, int], None],
        copies: Copies | None = None,
        best: BestCheckpoint | None = None,
    ) -> None:
        """``resumed``: the checkpoint and the outcomes after it. ``copies``: None = all checkpoints are here."""
        step, rules = resumed.source.step, resumed.source.rules
        self._bus, self._server, self._epoch, self._root = bus, server, epoch, settings.places.checkpoints
        self.steps, self._ends_by = rules.steps, "learner.steps"
        """Last step of the run, and the reason why it ends there."""
        context = Context(max_lag=rules.staleness.max_lag, gate=rules.staleness.gate)
        self.age = EpisodeAge(settings.learner.algorithm.alarms, context)
        self._earlier, self._done = resumed.done, step
        self._keep, self._copies, self._best = settings.learner.keep_checkpoints, copies, best
        self._on_published = on_published
        self._written: list[tuple[Checkpoint, JsonMapping, Value]] = []
        """Checkpoints that wait for their copies, oldest first: checkpoint, state of the data, row."""
        self._any_waits, self._none_waits = asyncio.Event(), asyncio.Event()
        self._none_waits.set()
        self._plans: dict[int, tuple[str, dict[str, float]]] = {}
        """Chain and metrics of the planned steps."""
        self.checkpoint_step = step
        """Step of the latest checkpoint."""
        self.fullness = 0.0
        """Share of the stream SAMPLES in use, after the last step."""
        self._bounds = record_bounds(bus.config) or {subjects.DEAD: MAX_DEAD_BYTES}
        self.used_shares: dict[str, float] = {}
        """Share in use of each stream or bucket that only ``bus.quota_bytes`` bounds, after the last step; of DEAD also
        without a quota.
        """
        self._disks: dict[str, float] = {}
        """Metrics of the disks, as they were after the step before."""
        self.finished = asyncio.Event()
        self._note_finished()

    @property
    def records_fullness(self) -> float:
        """Largest share in use of a stream or bucket that only ``bus.quota_bytes`` bounds; 0 without a quota."""
        if not self._bus.config.quota_bytes:
            return 0.0
        # Below this share a checkpoint takes no letter out of DEAD, and an early one would be for nothing.
        used = [share for name, share in self.used_shares.items() if name != subjects.DEAD or self._is_full(name)]
        return max(used, default=0.0)

    @property
    def pending(self) -> int:
        """Number of reported checkpoints that wait for their copies, or for their upload."""
        return len(self._written)

    def planned(self, plan: Plan, facts: dict[str, float]) -> None:
        """Register the plan of a batch; call it before the batch is offered."""
        self._plans[plan.step] = (plan.chain, facts)

    async def run(self) -> None:
        """Process reports until cancelled. Raises Fenced, and FeedError for a report that is not expected."""
        while True:
            outcome = await self._server.outcomes.get()
            if outcome.kind == "done":
                await self._step_done(**outcome.values)
            elif outcome.kind == "published":
                self._on_published(outcome.values["version"], outcome.values["step"])
            else:
                await self._checkpointed(outcome.values["step"], Path(outcome.values["directory"]))
            self._server.outcomes.task_done()

    async def _step_done(self, step: int, metrics: dict[str, float], weights_digest: str | None) -> None:
        # The steps after the checkpoint are executed in order, recorded ones again, so nothing but the next one can be
        # done.
        if step != self._done + 1 or step not in self._plans:
            raise FeedError("done", f"step {self._done + 1}", step)
        self._done = step
        earlier = self._earlier.get(step)
        if earlier is not None and weights_digest and earlier.weights_digest not in (None, weights_digest):
            text = "step %d executed again gave OTHER weights: digest %s before, %s now"
            log.error(text, step, earlier.weights_digest, weights_digest)
        metrics = metrics | self._plans[step][1] | self._disks
        metrics |= self.age.done(metrics, time.monotonic(), recorded=earlier is not None)
        await record_done(self._bus, self._epoch, step, metrics, weights_digest)
        with suppress(BusUnavailable):
            await self.note_use_of_bus()
        # Plans from the checkpoint on are kept: the report of a later checkpoint is compared with them.
        self._plans = {planned: facts for planned, facts in self._plans.items() if planned >= self.checkpoint_step}

    async def note_use_of_bus(self) -> None:
        """Note how full SAMPLES and the disks of the bus are. Raises BusUnavailable."""
        shards = [state.bytes for state in await self._bus.samples.states()]
        samples, self.fullness = sum(shards), len(shards) * max(shards) / self._bus.config.samples_max_bytes
        names = {name: subjects.stream(self._bus.run, name) for name in (subjects.TASKS, subjects.PLAN, subjects.DEAD)}
        names[WEIGHTS] = subjects.bucket_stream(self._bus.run, WEIGHTS)
        for name in names.keys() & self._bounds.keys():
            self.used_shares[name] = (await self._bus.jet.state(names[name])).bytes / self._bounds[name]
        stored, _ = await self._bus.jet.store_use()
        self._disks |= {"disk/bus_bytes": float(stored), "disk/samples_bytes": float(samples)}

    async def _checkpointed(self, step: int, path: Path) -> None:
        checkpoint = disk.named(path)
        is_own = checkpoint.epoch == self._epoch and path.parent.resolve() == self._root.resolve()
        # A row that names a wrong directory would make every later start fail, so the report is not trusted.
        if not is_own or checkpoint.step != step or step > self._done or step not in self._plans:
            want = f"a directory of epoch {self._epoch} in {self._root}, of a step up to {self._done}"
            raise FeedError("checkpointed", want, (step, str(path)))
        state = read_state(await asyncio.to_thread(disk.read_state, path))
        chain = self._plans[step][0]
        if (state["step"], state["chain"]) != (step, chain):
            raise FeedError(
                f"checkpoint {path}", f"the state of step {step}, chain {chain}", (state["step"], state["chain"])
            )
        digest = await asyncio.to_thread(disk.manifest_digest, path)
        row = {"directory": str(path), "step": step, "epoch": self._epoch, "chain": chain, "manifest": digest}
        if self._copies is None:
            await self._make_latest(checkpoint, state, row)
        else:  # the reports behind this one do not wait for the copies
            self._written.append((checkpoint, state, row))
            self._any_waits.set()
            self._none_waits.clear()

    async def follow_copies(self) -> None:
        """Make the newest checkpoint that has its copies the latest, until cancelled. Raises Fenced."""
        while True:
            await self._any_waits.wait()
            assert self._copies is not None
            await self._copied(await self._copies.wait(lambda: [checkpoint.path for checkpoint, _, _ in self._written]))

    async def _copied(self, path: Path) -> None:
        """Make a checkpoint the latest, and drop those before it. Raises Fenced."""
        at = next(number for number, (checkpoint, _, _) in enumerate(self._written) if checkpoint.path == path)
        for older, _, _ in self._written[:at]:
            log.warning("checkpoint was overtaken before it had its copies path=%s latest=%s", older.path, path)
        await self._make_latest(*self._written[at])
        del self._written[: at + 1]  # those reported meanwhile are behind it
        if not self._written:
            self._any_waits.clear()
            self._none_waits.set()

    async def all_copied(self) -> None:
        """Wait until every reported checkpoint is the latest, or was, or a newer one is."""
        await self._none_waits.wait()

    async def _make_latest(self, latest: Checkpoint, state: JsonMapping, row: Value) -> None:
        """Write the row of the latest checkpoint, then trim. Raises Fenced."""
        spared = [] if self._best is None else await self._best.spared()
        row = row | {"kept": spared} if spared else row
        if self._copies is not None:
            # By its digest a later start recognizes an earlier checkpoint that it gets from another node or the store.
            row = row | {"manifests": await asyncio.to_thread(self._digests, latest, spared)}
        # Before the streams are trimmed: a restart from the checkpoint before it still needs their samples.
        await self._bus.retry(lambda: self._commit(row))
        log.info("checkpoint committed step=%d path=%s", latest.step, latest.path)
        free = (await asyncio.to_thread(shutil.disk_usage, self._root)).free
        self._disks["disk/checkpoints_free_bytes"] = float(free)
        self.checkpoint_step = latest.step
        try:
            await self._trim(latest, state, spared)
            if self._best is not None:
                await self._best.note()
        except BusUnavailable as error:
            log.warning("streams not trimmed, the next checkpoint will error=%s", error)
        self._note_finished()

    def _digests(self, latest: Checkpoint, spared: Collection[str]) -> dict[str, str]:
        """Return the digests of the manifests of the checkpoints that are kept with the latest one."""
        names = [checkpoint.path.name for checkpoint in disk.listed(self._root)]
        return disk.digests_of(self._root, kept_names(names, latest, keep=self._keep, spared=spared))

    def ends_after(self, step: int, reason: str) -> None:
        """Finish with the checkpoint of an earlier step than the last of the settings."""
        self.steps, self._ends_by = step, reason
        self._note_finished()

    async def record_end(self) -> None:
        """Record that the run is done. Raises Fenced."""
        await record_end(self._bus, self._epoch, self.checkpoint_step, self._ends_by)

    def _note_finished(self) -> None:
        if self.checkpoint_step >= self.steps:
            self.finished.set()

    async def _commit(self, row: Value) -> None:
        """Write the row. Raises Fenced for a learner that was replaced, by the newest epoch or the stored row's."""
        await self._refuse_if_replaced()

        def committed(stored: Value | None) -> Value:
            """Return the row. Raises Fenced if a newer learner has written the row."""
            refuse_newer(int((stored or {}).get("epoch", 0)), self._epoch, key=CHECKPOINT_KEY)
            return row

        await self._bus.rows("run").change(CHECKPOINT_KEY, committed, replace_unreadable=True)

    async def _refuse_if_replaced(self) -> None:
        """Raises Fenced."""
        refuse_newer(await current_epoch(self._bus), self._epoch)

    async def _trim(self, latest: Checkpoint, state: JsonMapping, spared: Collection[str]) -> None:
        """Trim checkpoints and streams to the oldest kept checkpoint, less the window of history."""
        await self._refuse_if_replaced()  # another's checkpoints are not ours to remove
        kept = await asyncio.to_thread(disk.prune, self._root, keep=self._keep, latest=latest, spared=spared)
        try:
            oldest = read_state(await asyncio.to_thread(disk.verified_state, kept[-1].path))
        except CheckpointCorrupt as error:
            # For example one that was overtaken before it had its copies. It goes with the checkpoints behind it.
            log.error("streams not trimmed, the oldest checkpoint that is kept is damaged: %s", error)
            return
        history = self._bus.config.history_samples
        give_up = self._is_full(subjects.TASKS, subjects.PLAN, WEIGHTS)
        if give_up:
            text = "records of the run are %.0f %% of their share of bus.quota_bytes: history is given up"
            log.warning(text, 100 * self.records_fullness)
            history = 0
        if self.fullness >= GIVE_UP_HISTORY_FULL:
            log.warning("SAMPLES is %.0f %% full: its history is given up", 100 * self.fullness)
            history = 0
        # Actors get the floor of the latest checkpoint: records settle its tasks in every later history. The streams
        # are kept for the oldest checkpoint, because a restart from it reads them again.
        await self._bus.tasks.raise_floor(state["tasks"]["floor"])
        await self._bus.partials.trim(state["tasks"]["floor"] + 1)
        await self._bus.turns.trim(state["tasks"]["floor"] + 1)
        await self._bus.dead.trim_reports(oldest["tasks"]["floor"] + 1)
        await forget_letters(
            self._bus,
            oldest["tasks"]["floor"] + 1,
            full_bytes=round(GIVE_UP_HISTORY_FULL * self._bounds[subjects.DEAD]),
            letters_bytes=round(LETTERS_SHARE * self._bounds[subjects.DEAD]),
        )
        cursor = cursor_of(oldest)
        created = cursor.created.split(CREATED_SEPARATOR)
        wanted = [floor + 1 - history for floor in cursor.position]
        below = [
            await self.trim_limit(first, stream) if first >= 2 else first
            for first, stream in zip(wanted, created, strict=True)
        ]
        await self._bus.samples.trim(*below)
        if (first_task := oldest["tasks"]["floor"] + 1 - history) >= 2:
            await self._bus.tasks.trim(first_task)
        await compact(self._bus, oldest, give_up=give_up)

    async def trim_limit(self, below: int, created: str) -> int:
        """Return ``below``, or less while a registered reader needs it and the stream is not too full."""
        cursors = Cursors(self._bus)
        needed = await cursors.first_needed(created)
        if needed is None or needed >= below:
            return below
        # Records of PLAN and versions stay as long as the samples that they name.
        used = {name: self.used_shares.get(name, 0.0) for name in (subjects.PLAN, WEIGHTS)}
        name, fullness = max({subjects.SAMPLES: self.fullness, **used}.items(), key=lambda share: share[1])
        if fullness < GIVE_UP_HISTORY_FULL:
            return needed
        late_readers = ", ".join(await cursors.give_up(below, created))
        log.error("%s is %.0f %% full: readers %s are left behind at %d", name, 100 * fullness, late_readers, needed)
        return below

    def _is_full(self, *names: str) -> bool:
        """Return whether one of these is almost as large as it may be."""
        return any(self.used_shares.get(name, 0.0) >= GIVE_UP_HISTORY_FULL for name in names)


async def record_done(
    bus: Bus, epoch: int, step: int, metrics: Mapping[str, float], weights_digest: str | None
) -> None:
    """Record that a step is done, and publish its metrics. A lost message is harmless: the record has the same."""
    numbers = {name: value for name, value in metrics.items() if math.isfinite(value)}  # readers write JSON
    await bus.plans.append(Done(epoch=epoch, step=step, metrics=numbers, weights_digest=weights_digest))
    try:
        await bus.announce("learner", {"step": step, "epoch": epoch, "metrics": numbers})
    except BusUnavailable as error:
        log.info("metrics unsent error=%s", error)


async def record_end(bus: Bus, epoch: int, step: int, reason: str) -> None:
    """Write the row of a run that is done. Retries until it is stored. Raises Fenced."""
    row = EndRow(outcome=Outcome.DONE, code=DONE, reason=reason, step=step, time_s=time.time(), epoch=epoch)

    async def write() -> None:  # checked at every try: the bus may be away for so long that another learner begins
        refuse_newer(await current_epoch(bus), epoch)
        await bus.rows("run").put(END_KEY, asdict(row))

    await bus.retry(write)


async def remove_end(bus: Bus) -> None:
    """Remove the row of an earlier start: the run goes on."""
    rows = bus.rows("run")
    if (await rows.read(END_KEY))[1]:  # only where there is one: a user that may not purge leaves a marker instead
        await rows.delete(END_KEY)


def refuse_newer(newest: int, epoch: int, *, key: str = EPOCH_KEY) -> None:
    """Raise Fenced if a later epoch than this start's was raised. ``epoch``: 0 = this start has none yet."""
    if newest > epoch > 0:
        raise Fenced(f"run.{key}", epoch, newest) from None


class EarlyEnd:
    """End of a run before ``learner.steps``: its prompts are used up, or its scores have stopped to rise.

    The reason follows from the records of PLAN and from the settings, so a restart finds it again; with other settings
    it may not hold, and then the run goes on. Ranks learn of it when they request the step after the last, which is
    planned by then: they publish its weights and write its checkpoint, if they have not yet.
    """

    def __init__(self, source: DataSource, evaluations: Evaluations) -> None:
        self._source, self._evaluations = source, evaluations

    def reason(self, last_failure: str = "") -> str:
        """Return the reason to end after the last planned step; empty = there is none.

        ``last_failure``: of a task, in words. Raises NothingTrained when there is no step.
        """
        if stopped := self._evaluations.best.stopped:
            return stopped
        if not self._source.exhausted:
            return ""
        num_epochs = self._source.rules.num_epochs
        if not self._source.step:
            raise NothingTrained(num_epochs, self._source.accounting().settled, last_failure)
        return f"all prompts of {num_epochs} pass{'es' * (num_epochs > 1)} are used (learner.num_epochs)"

    async def end(self, reason: str, server: FeedServer, outcomes: Outcomes, *, state: bytes) -> None:
        """End the run after the last planned step.

        ``state``: of the data after that step; empty = its checkpoint is ordered.
        """
        step = self._source.step
        log.warning("the run ends after step %d of %d: %s", step, self._source.rules.steps, reason)
        self._evaluations.ends_after(step, self._source.head)
        await server.last(Last(step=step, state=state))
        outcomes.ends_after(step, reason)
