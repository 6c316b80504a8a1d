"""Loops of the feeder: they connect the DataSource, which decides, with the bus and the ranks.

    TASKS  <-- issue ---- wanted() --+                     +--- plan() --> PLAN --> apply() --> batches --> ranks (ZMQ)
    SAMPLES --- read ---> add() -----+---- DataSource -----+
    filters ------------> judged()
    DEAD, KV weights ---> dead(), version(), published()   +--- done, published, checkpointed <-- rank 0
    acks of TASKS ------> lost()

SAMPLES and DEAD are read in intake.py, filters run in filtering.py, heartbeats are made in feeder_row.py, evaluations in evaluations.py.
Each loop documents what it consumes, produces and waits for, and what unblocks it. All run in one thread; only packing and file work run
in others. A record is in the log PLAN before it is applied, and applied before its batch is offered.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tidemill.bus.client.connection import cancellable
from tidemill.bus.errors import BusError, Fenced, WireError
from tidemill.bus.liveness.heartbeats import HeartbeatPublisher
from tidemill.bus.streams.bus import Bus, current_epoch
from tidemill.bus.system.coroutines import Waiter, first_of
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Kind, Plan, Requeue, Sample, Settle, Task
from tidemill.bus.wire.rows import LiveRow
from tidemill.bus.wire.subjects import EPOCH_KEY
from tidemill.learner.algorithms.alarms import Context
from tidemill.learner.data.batch_frames import encode, encode_metadata
from tidemill.learner.data.batching import build_batches
from tidemill.learner.data.curriculum import Curriculum
from tidemill.learner.data.lost import LostTasks
from tidemill.learner.data.planned_rows import PlannedRows
from tidemill.learner.data.prompts import PromptFile
from tidemill.learner.data.rules import DataRules
from tidemill.learner.data.senders import Senders, refused_before
from tidemill.learner.data.snapshot import ROWS
from tidemill.learner.data.waits import Waits
from tidemill.learner.feed.beginning import copies_of, evaluations_of, first_head, initial_weights, own_epoch, peers_of
from tidemill.learner.feed.best_checkpoint import BestCheckpoint
from tidemill.learner.feed.early_end import EarlyEnd
from tidemill.learner.feed.episode_age import EpisodeAge
from tidemill.learner.feed.episode_metrics import episode_metrics
from tidemill.learner.feed.evaluations import EvalPlan
from tidemill.learner.feed.feed_messages import Start
from tidemill.learner.feed.feed_server import FeedServer
from tidemill.learner.feed.feeder_row import BEAT_S, FeederRow, Parts
from tidemill.learner.feed.feeder_rules import FeederRules
from tidemill.learner.feed.filtering import Filtering, OpenFilter
from tidemill.learner.feed.intake import Intake
from tidemill.learner.feed.new_task import task_of
from tidemill.learner.feed.outcomes import KeptCheckpoints, Outcomes, facts_of
from tidemill.learner.feed.recorded import RecordedResponses
from tidemill.learner.feed.recorded_steps import save_step
from tidemill.learner.feed.restart import Resumed, recorded_settings, recorded_versions, resume
from tidemill.learner.settings.checkpoint_store import MOST_PENDING
from tidemill.weightstore.store.registry import HEAD, VersionRegistry

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
"""Longest sleep of a loop that is normally woken."""
PAUSE_SHARE, PAUSE_S = 4.0, 0.02
"""Pause after a decision without a record, in times of its duration and at most in seconds: events meanwhile are decided on together."""
COPIES_S = 30.0
"""Time that a drained learner waits for the copies of its last checkpoint on other nodes; without them the one before stays the latest."""
END_S = 60.0
"""Deadline for the ranks to request the step after the last."""
EARLY_CHECKPOINT_FULL = 0.7
"""Share of the stream SAMPLES in use at which a step is checkpointed early, so that it can be trimmed."""


class Feeder:
    """One start of the feeder, on an open bus."""

    def __init__(
        self,
        bus: Bus,
        rules: FeederRules,
        data_rules: DataRules,
        prompts: PromptFile,
        server: FeedServer,
        evaluation: EvalPlan,
        filters: Sequence[OpenFilter] = (),
    ) -> None:
        self._bus, self._rules, self._data_rules, self._prompts, self._server = bus, rules, data_rules, prompts, server
        self._eval_plan, self._filters = evaluation, filters
        self._issuing = asyncio.Lock()
        """Held from the issue of a task until it is registered: ids are registered in their order."""
        self._admit = Waiter()
        self._decide = server.waiter
        self._replayed = asyncio.Event()
        self._row = FeederRow(server, rules)
        self._states: dict[int, bytes] = {}
        """State of the data for a checkpoint of each of the last two planned steps; empty = it is ordered with the batch."""
        self._epoch = 0

    async def run(self, draining: asyncio.Event) -> None:
        """Start, feed, end. Raises a group of errors; Fenced alone when another learner has taken over, which may cause any of them."""
        try:
            await self._run(draining)
        except BaseExceptionGroup:
            newest = 0
            with suppress(BusError):
                newest = await current_epoch(self._bus)
            self._refuse_newer(newest)
            raise

    def _refuse_newer(self, epoch: int) -> None:
        if epoch > self._epoch > 0:
            raise Fenced(f"run.{EPOCH_KEY}", self._epoch, epoch) from None

    async def _run(self, draining: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            # First, because ranks connect while the state is being restored, and get heartbeats meanwhile.
            loops = [group.create_task(self._server.run(), name="ranks")]
            self._epoch = await own_epoch(self._bus, self._rules.epoch)
            row = LiveRow(role="feeder", id="feeder", host=socket.gethostname(), pid=os.getpid(), phase="starting", epoch=self._epoch)
            async with HeartbeatPublisher(self._bus, row, BEAT_S) as heartbeat:
                loops.append(group.create_task(self._row.beat(heartbeat), name="beat"))
                await self._begin()
                works = [self._issue, self._read, self._intake.follow_dead, self._follow_head, self._judge, self._feed, self._find_lost]
                works += [self._refuse, self._evaluate, *([self._answer] if self._rules.recorded else [])]
                for loop in (self._follow_epoch, *works):
                    loops.append(group.create_task(cancellable(loop()), name=loop.__name__))
                loops.append(group.create_task(cancellable(self._outcomes.run()), name="outcomes"))
                loops.append(group.create_task(cancellable(self._outcomes.follow_copies()), name="copies"))
                await self._over(draining)
                for loop_task in loops:
                    loop_task.cancel()

    async def _begin(self) -> None:
        """Take over the streams, restore the state, and start the ranks."""
        self._row.text = "the fences of PLAN and TASKS"
        # The fences come before the state is read: an older learner that still runs writes nothing into these streams afterwards.
        await self._bus.plans.fence(self._epoch)
        await self._bus.tasks.fence(self._epoch)
        self._row.text = "the checkpoint to be verified and the streams to be read"
        self._row.copies = copies_of(self._bus, self._rules)
        self._planned, copies, root = PlannedRows(self._prompts), self._row.copies, self._rules.root
        resumed = await resume(self._bus, rules=self._data_rules, epoch=self._epoch, root=root, planned=self._planned, copies=copies)
        self._source, self._recorded, self._recorded_until = resumed.source, resumed.recorded, resumed.recorded_until
        self._source.max_record_bytes = self._bus.plans.max_record_bytes
        self._curriculum = Curriculum(self._rules.curriculum)
        self._curriculum.load(resumed.curriculum)
        now = self._rules.step_settings
        settings = await recorded_settings(self._bus, resumed, now, epoch=self._epoch) if now else []
        registry = VersionRegistry(self._bus)
        if await registry.lost(resumed.versions):
            await registry.restore(resumed.versions | await recorded_versions(self._bus), self._epoch)
        head = await first_head(registry, self._rules, self._epoch)
        if head is not None:  # a publisher fences the head before it writes one
            self._source.published(head.version, head.step)
        self._lost = LostTasks(self._bus, self._source, self._decide.wake)
        self._senders = Senders(await refused_before(self._bus))
        self._evaluations = await evaluations_of(resumed, self._bus, self._eval_plan, epoch=self._epoch, store=self._store_task)
        self._best = BestCheckpoint(self._bus, self._rules.root, self._evaluations, epoch=self._epoch, head=self._source.head)
        self._evaluations.on_scores = self._best.note
        self._outcomes = self._make_outcomes(resumed)
        self._early_end = EarlyEnd(self._bus, self._source, self._evaluations, self._data_rules, epoch=self._epoch)
        await self._early_end.begin()
        await self._best.begin()
        self._connect()
        version, step = self._source.head or (-1, -1)
        await self._server.start(
            Start(
                epoch=self._epoch,
                checkpoint=None if resumed.checkpoint is None else str(resumed.checkpoint),
                step=self._source.step,
                steps=self._data_rules.steps,
                head_version=version,
                head_step=step,
                initial=await initial_weights(self._rules, resumed),
                recorded_until=self._recorded_until,
                settings=settings,
                **await peers_of(self._row.copies, resumed.checkpoint),
            )
        )
        self._note_replayed()

    def _connect(self) -> None:
        """Make the parts that use the restored state."""
        self._intake = Intake(
            self._bus,
            self._source,
            self._prompts,
            self._recorded,
            evaluations=self._evaluations,
            senders=self._senders,
            lost=self._lost,
            wake=self._wake,
        )
        self._filtering = Filtering(
            self._filters, self._source, lambda: self._intake.samples, may_plan=self._may_plan, decide=self._decide.wake
        )
        self._row.parts = Parts(
            source=self._source,
            prompts=self._prompts,
            curriculum=self._curriculum,
            senders=self._senders,
            intake=self._intake,
            filtering=self._filtering,
            age=self._outcomes.age,
            evaluations=self._evaluations,
            replayed=self._replayed,
        )

    def _make_outcomes(self, resumed: Resumed) -> Outcomes:
        return Outcomes(
            self._bus,
            self._server,
            resumed,
            epoch=self._epoch,
            steps=self._data_rules.steps,
            age=EpisodeAge(self._rules.alarms, Context(max_lag=self._data_rules.max_lag, gate=self._data_rules.gate)),
            kept=KeptCheckpoints(self._rules.root, self._rules.keep_checkpoints, self._row.copies, self._best),
            on_published=self._published,
        )

    async def _over(self, draining: asyncio.Event) -> None:
        """Wait until the run is finished and the ranks have received the end, or this process is drained."""
        works = self._outcomes.finished.wait(), self._drained(draining), self._server.refuse_leave(draining)
        _, drained, _ = await first_of(*works)
        if drained.cancelled():  # the run has finished: ``first_of`` cancels the other wait
            self._row.phase, self._row.text = "ending", "the ranks to leave"
            if not await self._server.end_run(self._outcomes.steps, within_s=END_S):
                log.warning("not every rank requested the end of the run within %.0f s", END_S)
            self._row.text = "the last evaluation"
            await self._server.outcomes.join()  # the last version may have been reported after the last checkpoint
            await first_of(self._evaluations.over(), draining.wait(), self._server.draining.wait())

    async def _drained(self, draining: asyncio.Event) -> None:
        """Wait until this process or a rank is to drain, then until the newest step that a rank has taken is in a checkpoint."""
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
        await draining.wait()  # else a rank was drained by another program: ``refuse_leave`` ends this start with an error

    # ---- admit: consumes wanted(), produces TASKS; waits for places, which settled groups and new versions give back

    async def _issue(self) -> None:
        await self._replayed.wait()
        while True:
            # Before the task is chosen: a pause after it would issue a task at a version that may have changed meanwhile.
            await asyncio.sleep(self._senders.pause_s)
            wanted = None if self._early_end.ended else self._source.wanted()
            if wanted is None:
                await self._admit.wait(LOOK_AGAIN_S)
                continue
            task = task_of(wanted, self._prompts, self._rules, self._data_rules, self._curriculum, epoch=self._epoch)
            if task is None:
                self._source.passed(self._data_rules.num_epochs)
            else:
                try:
                    await self._store_task(task)
                except WireError as error:  # larger than a message, which no try can change
                    self._prompts.leave_out(task.prompt_epoch, task.offset, error)
            self._decide.wake()

    async def _store_task(self, task: Task) -> Task:
        """Store and register a task. Returns it with its id."""
        async with self._issuing:
            task = replace(task, id=await self._bus.tasks.issue(task))
            self._source.issued(task, time.monotonic())
            if task.kind is Kind.EVAL:
                self._evaluations.issued(task)
            else:
                self._planned.note(task)
        return task

    async def _evaluate(self) -> None:
        await self._replayed.wait()
        await self._evaluations.run()

    async def _answer(self) -> None:
        await self._replayed.wait()
        await RecordedResponses(self._bus, self._prompts, self._rules.recorded).run(lambda: (self._source.head or (0, 0))[0])

    # ---- receive: SAMPLES and DEAD in intake.py; here the epoch and the registry's head; waits for the bus

    async def _read(self) -> None:
        await self._intake.read(self._rules.vocab_size, self._rules.routed)

    async def _follow_epoch(self) -> None:
        """Raise Fenced when another learner takes over, also while this one writes nothing that a fence could reject."""
        async for row in self._bus.rows("run").watch(EPOCH_KEY):
            self._refuse_newer(0 if row is None else int(row[0]["epoch"]))

    async def _follow_head(self) -> None:
        """Produce published(); restore the registry's rows when its head is unreadable, or older than the newest published version."""
        registry = VersionRegistry(self._bus)
        async for _ in self._bus.rows("weights").watch(HEAD, unreadable=True):
            known = -1 if self._source.head is None else self._source.head[0]
            head = await self._bus.retry(partial(registry.repaired_head, self._epoch))
            if head is not None and head.version >= known:
                self._published(head.version, head.step)
            elif known >= 0:
                await self._bus.retry(partial(registry.restore, self._source.versions, self._epoch))

    def _published(self, version: int, step: int) -> None:
        self._source.published(version, step)
        self._evaluations.published(version, step)
        self._admit.wake()
        self._decide.wake()

    def _wake(self) -> None:
        self._filtering.waiter.wake()
        self._decide.wake()

    async def _judge(self) -> None:
        await self._replayed.wait()
        await self._filtering.run()

    async def _find_lost(self) -> None:
        await self._replayed.wait()
        await self._lost.run()

    async def _refuse(self) -> None:
        await self._senders.publish(self._bus)

    # ---- decide: consumes complete groups and recorded plans; produces PLAN and batches; waits for groups and for ranks that ask

    async def _feed(self) -> None:
        while self._source.step < self._data_rules.steps and not self._server.draining.is_set():
            if self._replayed.is_set() and (reason := self._early_end.reason(self._intake.failing.reason)):
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
                # In the log before it is applied: a kill in between is repeated from the log, and nothing is trained that is not in it.
                seq = await self._bus.plans.append(record)
            await self._take(record, seq, recorded=recorded)
        if not self._server.draining.is_set():
            self._row.text = f"rank 0 to finish step {self._source.step}"

    def _may_plan(self) -> bool:
        """Return whether the ranks take another step."""
        return self._source.step < self._server.asked + self._rules.ahead

    def _next_record(self) -> tuple[Plan | Settle | Requeue | None, int | None]:
        """Return the next record, and its sequence if it is in the log already; (None, None) while there is none."""
        may_plan = self._may_plan()
        if self._recorded:
            seq, record = self._recorded[0]
            if isinstance(record, Plan) and not may_plan:
                self._row.text = f"rank 0 to take step {self._server.asked}"
            elif lacking := self._source.lacks(record):
                self._row.text = f"{len(lacking)} samples of the recorded step {record.step} to be read again, the first at {min(lacking)}"
            else:
                self._recorded.popleft()
                return record, seq
            return None, None
        self._row.held = self._is_held()
        if not may_plan or self._row.held:
            evaluation = self._evaluations.waits_for or f"the version of step {self._source.step}, which is evaluated"
            self._row.text = evaluation if self._row.held else f"rank 0 to take step {self._server.asked}"
            return self._source.settlement(), None
        proposal = self._source.plan(time.monotonic())
        if isinstance(proposal, Waits):
            self._row.text = proposal.text
            self._filtering.waiter.wake()  # the buffer filters may have to choose
            return None, None
        return proposal, None

    async def _take(self, record: Plan | Settle | Requeue, seq: int, *, recorded: bool) -> None:
        if isinstance(record, Requeue):
            self._source.apply(record, seq)
            self._admit.wake()
            self._note_replayed()
            log.info("requeued task=%d before_step=%d", record.task, record.step)
            return
        samples = [self._intake.samples[int(one)] for one in record.seqs]
        given_up = self._source.accounting().given_up
        for task, scores in self._source.scored(record):
            if task.rollout not in self._rules.recorded:  # recorded rewards are not those of this policy
                self._curriculum.note(int(self._prompts.order(task.prompt_epoch)[task.offset]), task.prompt_epoch, scores)
        filtered = self._source.filtered
        limits = self._source.token_limits(record) if isinstance(record, Plan) else None
        self._source.apply(record, seq)
        self._intake.keep_only(self._source.buffered())
        self._admit.wake()
        self._note_replayed()
        if isinstance(record, Settle):
            log.info("settled reason=%s tasks=%s before_step=%d", record.reason, record.tasks.tolist(), record.step)
            if left_out := self._source.accounting().given_up - given_up:
                log.warning("prompts given up count=%d issued_again=%d", left_out, self._data_rules.max_reissues)
            return
        await self._offer(record, samples, limits or {}, recorded=recorded, filtered=filtered)

    async def _offer(self, record: Plan, samples: Sequence[Sample], limits: Mapping[int, int], *, recorded: bool, filtered: int) -> None:
        """Make the batches of a step, and offer them to the ranks. ``filtered``: groups that filters dropped for it."""
        wants = self._wants_checkpoint(record.step, recorded)
        snapshot = await self._snapshot()  # of every step: any may be the last one, by a drain or by an early end
        state = snapshot if wants else b""
        self._states = {step: kept for step, kept in self._states.items() if step == record.step - 1}
        self._states[record.step] = b"" if wants else snapshot
        pad_to, eos_ids = self._rules.pad_to, self._rules.eos_ids
        build = partial(
            build_batches,
            record,
            samples,
            recorded=recorded,
            state=state,
            pad_to=pad_to,
            eos_ids=eos_ids,
            token_limits=limits,
            routed=self._rules.routed,
        )
        batches = await asyncio.to_thread(build)
        await save_step(self._rules, record, samples, limits)
        facts = facts_of(record, batches, filtered) | {"data/bad_rows": float(len(self._prompts.bad_rows))}
        self._outcomes.planned(record, facts | episode_metrics(samples, record))
        metadata = b""
        if self._rules.metadata and self._server.wants_metadata:
            metadata = await asyncio.to_thread(encode_metadata, samples)
        await self._server.offer(record.step, [encode(batch) for batch in batches], metadata)
        log.info("planned step=%d groups=%d samples=%d recorded=%s", record.step, len(record.tasks), len(samples), recorded)
        if len(record.tasks) < self._data_rules.groups_per_step:
            log.warning("step %d runs SHORT: %d of %d groups", record.step, len(record.tasks), self._data_rules.groups_per_step)
        if self._source.left_out and not recorded:
            text = "groups left out, because a plan must fit in a message count=%d bytes=%d; raise max_payload of the nats-server"
            log.warning(text, self._source.left_out, self._source.max_record_bytes)

    async def _snapshot(self) -> bytes:
        async with self._issuing:  # a sample of a task that is not registered yet would be in neither part of the state
            more: JsonObject = {ROWS: self._planned.dump()}
            more |= {"curriculum": self._curriculum.dump()} if self._rules.curriculum.active else {}
            return self._source.snapshot(self._evaluations.dump(), **more)

    def _is_evaluated(self, step: int) -> bool:
        source = self._source
        return self._best.due(step, versions=source.versions, head=source.head, push_every=self._data_rules.push_every)

    def _is_held(self) -> bool:
        """Return whether the next step waits for an evaluation."""
        step = self._source.step
        return self._evaluations.holds(step, self._source.head, due=self._is_evaluated(step))

    def _wants_checkpoint(self, step: int, recorded: bool) -> bool:
        every = self._rules.checkpoint_every
        if step == self._data_rules.steps:
            return True
        wanted = bool(every) and step % every == 0
        wanted = wanted or (self._best.wanted and self._is_evaluated(step))
        if self._outcomes.pending >= MOST_PENDING:  # they are on the disk, which has an end
            if wanted:
                log.warning("no checkpoint of step %d, because %d wait: %s", step, self._outcomes.pending, self._row.copies_waited_for)
            return False
        if wanted:
            return True
        early = self._outcomes.fullness >= EARLY_CHECKPOINT_FULL and not recorded
        return early and step - self._outcomes.checkpoint_step >= max(1, every // 4)

    def _note_replayed(self) -> None:
        if not self._recorded and not self._replayed.is_set():
            self._replayed.set()
            self._admit.wake()
