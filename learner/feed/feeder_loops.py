"""Loops of the feeder: they connect the DataSource, which decides, with the bus and the ranks.

    TASKS  <-- issue ---- wanted() --+                     +--- plan() --> PLAN --> apply() --> batches --> ranks (ZMQ)
    SAMPLES --- read ---> add() -----+---- DataSource -----+
    filters ------------> judged()
    DEAD, KV weights ---> dead(), version(), published()   +--- done, published, checkpointed <-- rank 0
    acks of TASKS ------> lost()

Tasks are issued in issuing.py, SAMPLES and DEAD are read in intake.py, filters run in filtering.py, heartbeats are made
in feeder_row.py, evaluations in evaluations.py, reports of rank 0 are recorded in outcomes.py. All loops run in one
thread; only packing and file work run in others. A record is in the log PLAN before it is applied, and applied before
its batch is offered.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Plan, Requeue, Settle
from tidemill.bus.wire.subjects import EPOCH_KEY
from tidemill.learner.buffer.ledger import ROWS
from tidemill.learner.buffer.sample_index import SampleIndex
from tidemill.learner.buffer.step_plan import Waits
from tidemill.learner.debug.rollout_file import save_step
from tidemill.learner.evaluation.evaluations import BestCheckpoint, Evaluations
from tidemill.learner.feed.data_metrics import episode_metrics, facts_of
from tidemill.learner.feed.feed_messages import FeedStart, encode_metadata, step_frames
from tidemill.learner.feed.feed_server import FeedServer
from tidemill.learner.feed.feeder_row import BEAT_S, FeederRow, Parts
from tidemill.learner.feed.feeder_settings import FeederSettings
from tidemill.learner.feed.filtering import Filtering, OpenFilter
from tidemill.learner.feed.intake import Intake, LostTasks
from tidemill.learner.feed.issuing import Curriculum, TaskIssuer
from tidemill.learner.feed.outcomes import EarlyEnd, Outcomes, refuse_newer, remove_end
from tidemill.learner.feed.recorded_responses import RecordedResponses
from tidemill.learner.feed.restart import Restored, peers_of, verified
from tidemill.learner.feed.shard_readers import readers_of
from tidemill.learner.feed.trained_records import TrainedRecords
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.settings.config import MOST_PENDING
from tidemill.weightstore.store.registry import HEAD, VersionRegistry

log = logging.getLogger(__name__)

PAUSE_SHARE, PAUSE_S = 4.0, 0.02
"""Pause after a decision without a record, in times of its duration and at most in seconds, to batch events."""
COPIES_S = 30.0
"""Time that a drained learner waits for the copies of its last checkpoint, which is not the latest without them."""
END_S = 60.0
"""Deadline for the ranks to request the step after the last."""
EARLY_CHECKPOINT_FULL = 0.7
"""Share of the stream SAMPLES in use at which a step is checkpointed early, so that it can be trimmed."""

Loop = Callable[[], Coroutine[Any, Any, None]]


class Feeder:
    """The loops of one start, and the parts that they share: ``start_ranks`` first, then ``loops`` and ``finish``."""

    def __init__(
        self,
        bus: Bus,
        settings: FeederSettings,
        prompts: PromptFile,
        server: FeedServer,
        restored: Restored,
        row: FeederRow,
        filters: Sequence[OpenFilter] = (),
    ) -> None:
        resumed = restored.resumed
        self._bus, self._settings, self._prompts, self._server, self._row = bus, settings, prompts, server, row
        self._restored, self._source, self._recorded = restored, resumed.source, resumed.recorded
        self._epoch, self._decide = restored.epoch, server.waiter
        self._replayed = asyncio.Event()
        self._states: dict[int, bytes] = {}
        """State of the data after each of the last two steps; empty = its checkpoint is ordered with the batch."""
        self._curriculum = Curriculum(settings.data)
        self._curriculum.load(resumed.curriculum)
        self._issuer = TaskIssuer(bus, settings, prompts, restored, self._curriculum)
        self._lost = LostTasks(bus, self._source, self._decide.wake)
        self._evaluations = Evaluations(
            bus, settings.evaluation, restored.rounds, epoch=self._epoch, store=self._issuer.store
        )
        place = (settings.places.checkpoints, self._evaluations)
        self._best = BestCheckpoint(bus, *place, epoch=self._epoch, head=self._source.head)
        self._early_end = EarlyEnd(self._source, self._evaluations)
        on_published, copies = self._published, row.copies
        self._outcomes = Outcomes(
            bus, server, resumed, settings, epoch=self._epoch, on_published=on_published, copies=copies, best=self._best
        )
        ranks = settings.learner.data_parallel
        self._trained = TrainedRecords(bus, epoch=self._epoch, data_parallel=ranks, on=settings.records_values)
        self._filtering = Filtering(filters, self._source, may_plan=self._may_plan, decide=self._decide.wake)
        self._readers = readers_of(bus, settings)
        self._settled: dict[int, list[int]] = {}
        """Sequences that were settled up to a step, which readers keep until all ranks have fetched its samples."""
        server.on_fetched = self._release
        self._intake = Intake(
            bus,
            self._source,
            prompts,
            self._recorded,
            evaluations=self._evaluations,
            senders=restored.senders,
            lost=self._lost,
            wake=self._wake,
            readers=self._readers,
        )

    async def start_ranks(self) -> None:
        """Restore the evaluation, and let the ranks begin. Raises BusError, CheckpointCorrupt."""
        resumed, source = self._restored.resumed, self._source
        self._evaluations.on_scores, self._server.on_trained = self._best.note, self._trained.put
        await self._evaluations.restore(resumed.eval_tasks, source.head)
        if not self._outcomes.finished.is_set():
            await remove_end(self._bus)
        await self._best.begin()
        self._row.parts = Parts(
            source=source,
            prompts=self._prompts,
            curriculum=self._curriculum,
            senders=self._restored.senders,
            intake=self._intake,
            filtering=self._filtering,
            age=self._outcomes.age,
            evaluations=self._evaluations,
            replayed=self._replayed,
        )
        version, step = source.head or (-1, -1)
        await self._server.start(
            FeedStart(
                epoch=self._epoch,
                checkpoint=None if resumed.checkpoint is None else str(resumed.checkpoint),
                step=source.step,
                steps=source.rules.steps,
                head_version=version,
                head_step=step,
                initial=None if resumed.checkpoint is not None else await verified(self._settings.initial_checkpoint),
                recorded_until=resumed.recorded_until,
                settings=self._restored.settings,
                **await peers_of(self._row.copies, resumed.checkpoint),
            )
        )
        self._note_replayed()

    @property
    def loops(self) -> dict[str, Loop]:
        """All loops by name; each ends when it is cancelled."""
        loops: dict[str, Loop] = {
            "epoch": self._follow_epoch,
            "samples": self._intake.read,
            "dead tasks": self._intake.follow_dead,
            "head": self._follow_head,
            "steps": self._plan_steps,
            "refused actors": partial(self._restored.senders.publish, self._bus),
            "outcomes": self._outcomes.run,
            "copies": self._outcomes.follow_copies,
            "trained values": self._trained.run,
        }
        # These decide what is recorded next, so they begin when all recorded steps are repeated.
        live_loops: dict[str, Loop] = {
            "tasks": partial(self._issuer.run, self._decide),
            "filters": self._filtering.run,
            "lost tasks": self._lost.run,
            "evaluation": self._evaluations.run,
        }
        if self._settings.recorded:
            responses = RecordedResponses(self._bus, self._prompts, self._settings.recorded)
            live_loops["recorded responses"] = partial(responses.run, lambda: (self._source.head or (0, 0))[0])
        return loops | {name: partial(self._run_replayed, loop) for name, loop in live_loops.items()}

    async def _run_replayed(self, loop: Loop) -> None:
        await self._replayed.wait()
        await loop()

    async def finish(self, draining: asyncio.Event) -> None:
        """Wait until the run is finished and the ranks have received the end, or this process is drained."""
        waits = self._outcomes.finished.wait(), self._wait_drained(draining), self._server.refuse_leave(draining)
        _, drained, _ = await first_of(*waits)
        if drained.cancelled():  # the run has finished: ``first_of`` cancels the other wait
            self._row.phase, self._row.text = "ending", "the ranks to leave"
            if not await self._server.end_run(self._outcomes.steps, within_s=END_S):
                log.warning("not every rank requested the end of the run within %.0f s", END_S)
            self._row.text = "the last evaluation"
            await self._server.outcomes.join()  # the last version may have been reported after the last checkpoint
            evaluated, *_ = await first_of(self._evaluations.over(), draining.wait(), self._server.draining.wait())
            if not evaluated.cancelled():
                await self._outcomes.record_end()

    async def _wait_drained(self, draining: asyncio.Event) -> None:
        """Wait until this process or a rank drains, then until the ranks' newest step is in a checkpoint."""
        await first_of(draining.wait(), self._server.draining.wait())
        self._server.draining.set()
        self._row.phase, self._row.text = "draining", "the ranks to write a checkpoint and leave"
        await self._server.drain(self._states)
        await self._server.deserted.wait()
        await self._server.outcomes.join()
        self._row.text = "the copies of the last checkpoint"
        with suppress(TimeoutError):
            async with asyncio.timeout(COPIES_S):
                await self._outcomes.all_copied()
        # Not set where another program drained a rank: then ``refuse_leave`` ends this start with an error.
        await draining.wait()

    # ---- follow the run: consumes the epoch and the registry's head, produces published(); waits for the bus

    async def _follow_epoch(self) -> None:
        """Raise Fenced when another learner takes over, also while this one writes nothing that a fence rejects."""
        async for row in self._bus.rows("run").watch(EPOCH_KEY):
            refuse_newer(0 if row is None else int(row[0]["epoch"]), self._epoch)

    async def _follow_head(self) -> None:
        """Produce published(); restore the registry when its head is unreadable or older than the newest version."""
        registry = VersionRegistry(self._bus)
        async for _ in self._bus.rows("weights").watch(HEAD, unreadable=True):
            newest = -1 if self._source.head is None else self._source.head[0]
            head = await self._bus.retry(partial(registry.repaired_head, self._epoch))
            if head is not None and head.version >= newest:
                self._published(head.version, head.step)
            elif newest >= 0:
                await self._bus.retry(partial(registry.restore, self._source.versions, self._epoch))

    def _published(self, version: int, step: int) -> None:
        self._source.published(version, step)
        self._evaluations.published(version, step)
        self._issuer.waiter.wake()
        self._decide.wake()

    def _wake(self) -> None:
        self._filtering.waiter.wake()
        self._decide.wake()

    # ---- decide: consumes complete groups and recorded plans, produces PLAN and batches; waits for groups and ranks

    async def _plan_steps(self) -> None:
        while self._source.step < self._source.rules.steps and not self._server.draining.is_set():
            if self._replayed.is_set() and (reason := self._early_end.reason(self._intake.failing.reason)):
                self._issuer.stopped = True
                state = self._states.get(self._source.step, b"")
                await self._early_end.end(reason, self._server, self._outcomes, state=state)
                break
            began_s = time.monotonic()
            record, seq = self._next_record()
            if record is None:
                await asyncio.sleep(min(PAUSE_S, PAUSE_SHARE * (time.monotonic() - began_s)))
                await self._decide.wait(BEAT_S)  # at most a second: a deadline of the DataSource may have passed
                continue
            recorded = seq is not None
            if seq is None:
                # In the log before it is applied: a kill in between is repeated from the log, and nothing is trained
                # that is not in it.
                seq = await self._bus.plans.append(record)
            await self._apply(record, seq, recorded=recorded)
        if not self._server.draining.is_set():
            self._row.text = f"rank 0 to finish step {self._source.step}"

    def _may_plan(self) -> bool:
        """Return whether the ranks take another step."""
        return self._source.step < self._server.asked + self._settings.ahead

    def _next_record(self) -> tuple[Plan | Settle | Requeue | None, int | None]:
        """Return the next record, and its sequence if it is in the log already; (None, None) while there is none."""
        may_plan = self._may_plan()
        waits_for_rank = f"rank 0 to take step {self._server.asked}"
        if self._recorded:
            seq, record = self._recorded[0]
            if isinstance(record, Plan) and not may_plan:
                self._row.text = waits_for_rank
            elif lacking := self._source.lacks(record):
                samples = f"{len(lacking)} samples of the recorded step {record.step}"
                self._row.text = f"{samples} to be read again, the first at {min(lacking)}"
            else:
                self._recorded.popleft()
                return record, seq
            return None, None
        step = self._source.step
        self._row.held = self._evaluations.holds(step, self._source.head, due=self._is_evaluated(step))
        if not may_plan or self._row.held:
            evaluation = self._evaluations.rounds.open or f"the version of step {step}, which is evaluated"
            self._row.text = evaluation if self._row.held else waits_for_rank
            return self._source.settlement(), None
        proposal = self._source.plan(time.monotonic())
        if isinstance(proposal, Waits):
            self._row.text = proposal.text
            self._filtering.waiter.wake()  # the buffer filters may have to choose
            return None, None
        return proposal, None

    async def _apply(self, record: Plan | Settle | Requeue, seq: int, *, recorded: bool) -> None:
        """Apply a record. A plan becomes batches, which are offered to the ranks."""
        source = self._source
        given_up, filtered = source.accounting().given_up, source.filtered
        for task, scores in source.scored(record):
            if task.rollout not in self._settings.recorded:  # recorded rewards are of another policy
                row = int(self._prompts.order(task.prompt_epoch)[task.offset])
                self._curriculum.note(row, task.prompt_epoch, scores)
        samples = source.samples(record) if isinstance(record, Plan) else []
        limits = source.token_limits(record) if isinstance(record, Plan) else {}
        source.apply(record, seq)
        if isinstance(record, Plan):
            self._settled[record.step] = source.take_settled()
        else:
            self._readers.release(source.take_settled())
        self._issuer.waiter.wake()
        self._note_replayed()
        if isinstance(record, Plan):
            await self._offer_step(record, samples, limits, recorded=recorded, filtered=filtered)
        elif isinstance(record, Settle):
            log.info("settled reason=%s tasks=%s before_step=%d", record.reason, record.tasks.tolist(), record.step)
            if left_out := source.accounting().given_up - given_up:
                log.warning("prompts given up count=%d issued_again=%d", left_out, source.rules.staleness.max_reissues)
        else:
            log.info("requeued task=%d before_step=%d", record.task, record.step)

    def _release(self, step: int) -> None:
        """Let the readers forget the samples of steps up to ``step``."""
        for settled_step in [settled_step for settled_step in self._settled if settled_step <= step]:
            self._readers.release(self._settled.pop(settled_step))

    async def _offer_step(
        self, plan: Plan, samples: Sequence[SampleIndex], limits: Mapping[int, int], *, recorded: bool, filtered: int
    ) -> None:
        """Make the batches of a step, and offer them to the ranks. ``filtered``: groups that filters dropped for it."""
        learner = self._settings.learner
        is_checkpointed = self._wants_checkpoint(plan.step, recorded)
        snapshot = await self._snapshot()  # of every step: any may be the last one, by a drain or by an early end
        self._states = {step: state for step, state in self._states.items() if step == plan.step - 1}
        self._states[plan.step] = b"" if is_checkpointed else snapshot
        state = snapshot if is_checkpointed else b""
        columns, frames = await asyncio.to_thread(
            partial(step_frames, state=state, recorded=recorded, ports=self._readers.ports, **self._settings.packing),
            *(plan, samples, limits),
        )
        if self._settings.debug.save_rollout:
            file = Path(self._settings.debug.save_rollout.format(step=plan.step))
            await asyncio.to_thread(save_step, file, self._bus.run, plan, samples, limits)
        facts = facts_of(plan, samples, columns, filtered=filtered, pad_to=learner.row_multiple)
        facts["data/bad_rows"] = float(len(self._prompts.bad_rows))
        self._trained.planned(plan, samples)
        self._outcomes.planned(plan, facts | episode_metrics(samples, plan) | self._trained.metrics)
        metadata = b""
        if learner.algorithm.may_need_metadata and self._server.wants_metadata:
            metadata = await asyncio.to_thread(encode_metadata, samples)
        await self._server.offer(plan.step, frames, metadata)
        self._log_plan(plan, recorded=recorded)

    def _log_plan(self, plan: Plan, *, recorded: bool) -> None:
        source, num_groups = self._source, len(plan.tasks)
        log.info("planned step=%d groups=%d samples=%d recorded=%s", plan.step, num_groups, len(plan.seqs), recorded)
        if num_groups < source.rules.groups_per_step:
            log.warning("step %d runs SHORT: %d of %d groups", plan.step, num_groups, source.rules.groups_per_step)
        if source.left_out and not recorded:
            text = "groups left out, because a plan must fit in a message count=%d bytes=%d; raise max_payload of the "
            log.warning(text + "nats-server", source.left_out, source.max_record_bytes)

    async def _snapshot(self) -> bytes:
        # Under the lock: a sample of a task that is not registered yet would be in neither part of the state.
        async with self._issuer.lock:
            states: JsonObject = {ROWS: self._restored.planned.dump()}
            if self._curriculum.active:
                states["curriculum"] = self._curriculum.dump()
            return self._source.snapshot(self._evaluations.rounds.dump(), **states)

    def _is_evaluated(self, step: int) -> bool:
        source = self._source
        return self._best.due(step, versions=source.versions, head=source.head, push_every=source.rules.push_every)

    def _wants_checkpoint(self, step: int, recorded: bool) -> bool:
        every = self._settings.learner.checkpoint_every
        if step == self._source.rules.steps:
            return True
        is_due = bool(every) and step % every == 0
        is_due = is_due or (self._best.wanted and self._is_evaluated(step))
        if self._outcomes.pending >= MOST_PENDING:  # they are on the disk, which has an end
            if is_due:
                text = "no checkpoint of step %d, because %d wait: %s"
                log.warning(text, step, self._outcomes.pending, self._row.copies_waited_for)
            return False
        fullness = max(self._outcomes.fullness, self._outcomes.records_fullness)
        is_early = fullness >= EARLY_CHECKPOINT_FULL and not recorded
        return is_due or (is_early and step - self._outcomes.checkpoint_step >= max(1, every // 4))

    def _note_replayed(self) -> None:
        if not self._recorded and not self._replayed.is_set():
            self._replayed.set()
            self._issuer.waiter.wake()
