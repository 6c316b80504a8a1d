"""Loops of the feeder: they connect the DataSource, which decides, with the bus and the ranks.

    TASKS  <-- issue ---- wanted() --+                     +--- plan() --> PLAN --> apply() --> batches --> ranks (ZMQ)
    SAMPLES --- read ---> add() -----+---- DataSource -----+
    filters ------------> judged()
    DEAD, KV weights ---> dead(), version(), published()   +--- done, published, checkpointed <-- rank 0
    acks of TASKS ------> lost()

SAMPLES and DEAD are read in intake.py, filters run in filtering.py, heartbeats are made in feeder_row.py, evaluations
in evaluations.py. Each loop documents what it consumes, produces and waits for, and what unblocks it. All run in one
thread; only packing and file work run in others. A record is in the log PLAN before it is applied, and applied before
its batch is offered.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from tidemill.bus.errors import Fenced, WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter, first_of
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Kind, Plan, Requeue, Sample, Settle, Task
from tidemill.bus.wire.subjects import EPOCH_KEY
from tidemill.learner.algorithms.alarms import Context
from tidemill.learner.batch.batching import build_batches
from tidemill.learner.batch.frames import encode, encode_metadata
from tidemill.learner.buffer.admission import TaskDemand
from tidemill.learner.buffer.arrivals import SampleStore
from tidemill.learner.buffer.lost import LostTasks
from tidemill.learner.buffer.selection import Waits
from tidemill.learner.buffer.snapshot import ROWS
from tidemill.learner.evaluation.best import BestCheckpoint
from tidemill.learner.evaluation.evaluations import Evaluations
from tidemill.learner.feed.early_end import EarlyEnd
from tidemill.learner.feed.episode_metrics import EpisodeAge, episode_metrics
from tidemill.learner.feed.feed_messages import Start
from tidemill.learner.feed.feed_server import FeedServer
from tidemill.learner.feed.feeder_row import BEAT_S, FeederRow, Parts
from tidemill.learner.feed.feeder_settings import FeederSettings
from tidemill.learner.feed.feeder_start import Restored, peers_of, verified
from tidemill.learner.feed.filtering import Filtering, OpenFilter
from tidemill.learner.feed.intake import Intake
from tidemill.learner.feed.new_task import prompt_for, task_of
from tidemill.learner.feed.outcomes import KeptCheckpoints, Outcomes, facts_of
from tidemill.learner.feed.recorded_responses import RecordedResponses
from tidemill.learner.feed.recorded_steps import save_step
from tidemill.learner.prompts.curriculum import Curriculum
from tidemill.learner.prompts.prompt_file import Drawn, PromptFile
from tidemill.learner.settings.checkpoint_store import MOST_PENDING
from tidemill.weightstore.store.registry import HEAD, VersionRegistry

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
"""Longest sleep of a loop that is normally woken."""
PAUSE_SHARE, PAUSE_S = 4.0, 0.02
"""Pause after a decision without a record, in times of its duration and at most in seconds: events meanwhile are
decided on together.
"""
COPIES_S = 30.0
"""Time that a drained learner waits for the copies of its last checkpoint on other nodes; without them the one before
stays the latest.
"""
END_S = 60.0
"""Deadline for the ranks to request the step after the last."""
EARLY_CHECKPOINT_FULL = 0.7
"""Share of the stream SAMPLES in use at which a step is checkpointed early, so that it can be trimmed."""


def refuse_newer(newest: int, epoch: int) -> None:
    """Raise Fenced if a later epoch than this start's was raised. ``epoch``: 0 = this start has none yet."""
    if newest > epoch > 0:
        raise Fenced(f"run.{EPOCH_KEY}", epoch, newest) from None


class Feeder:
    """The loops of one start, and the parts that they share. ``start_ranks`` first, then ``loops`` and ``finish``
    beside each other.
    """

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
        self._restored, self._epoch, self._planned, self._senders = (
            restored,
            restored.epoch,
            restored.planned,
            restored.senders,
        )
        self._source, self._recorded = resumed.source, resumed.recorded
        self._issuing = asyncio.Lock()
        """Held from the issue of a task until it is registered: ids are registered in their order."""
        self._admit = Waiter()
        self._decide = server.waiter
        self._replayed = asyncio.Event()
        self._states: dict[int, bytes] = {}
        """State of the data for a checkpoint of each of the last two planned steps; empty = it is ordered with the
        batch.
        """
        self._buffered = SampleStore()
        self._curriculum = Curriculum(settings.curriculum)
        self._curriculum.load(resumed.curriculum)
        self._lost = LostTasks(bus, self._source, self._decide.wake)
        self._evaluations = Evaluations(
            bus, settings.evaluation, restored.rounds, epoch=self._epoch, store=self._store_task
        )
        root, head = settings.places.checkpoints, self._source.head
        self._best = BestCheckpoint(bus, root, self._evaluations, epoch=self._epoch, head=head)
        self._evaluations.on_scores = self._best.note
        self._early_end = EarlyEnd(bus, self._source, self._evaluations, self._source.rules, epoch=self._epoch)
        age = EpisodeAge(
            settings.learner.algorithm.alarms, Context(max_lag=self._source.rules.max_lag, gate=self._source.rules.gate)
        )
        kept = KeptCheckpoints(root, settings.learner.keep_checkpoints, row.copies, self._best)
        self._outcomes = Outcomes(
            bus,
            server,
            resumed,
            epoch=self._epoch,
            steps=self._source.rules.steps,
            age=age,
            kept=kept,
            on_published=self._published,
        )
        self._intake = Intake(
            bus,
            self._source,
            prompts,
            self._recorded,
            evaluations=self._evaluations,
            senders=self._senders,
            lost=self._lost,
            buffered=self._buffered,
            wake=self._wake,
        )
        self._filtering = Filtering(
            filters, self._source, self._buffered, may_plan=self._may_plan, decide=self._decide.wake
        )

    async def start_ranks(self) -> None:
        """Restore the evaluation, and let the ranks begin. Raises BusError, CheckpointCorrupt."""
        resumed, source = self._restored.resumed, self._source
        await self._evaluations.restore(resumed.eval_tasks, source.head)
        await self._early_end.begin()
        await self._best.begin()
        self._row.parts = Parts(
            source=source,
            prompts=self._prompts,
            curriculum=self._curriculum,
            senders=self._senders,
            intake=self._intake,
            filtering=self._filtering,
            age=self._outcomes.age,
            evaluations=self._evaluations,
            replayed=self._replayed,
        )
        version, step = source.head or (-1, -1)
        await self._server.start(
            Start(
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
    def loops(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """All loops; each ends when it is cancelled."""
        loops = [self._follow_epoch, self._issue_tasks, self._read_samples, self._intake.follow_dead, self._follow_head]
        loops += [self._judge_groups, self._plan_steps, self._find_lost, self._refuse_actors, self._evaluate]
        loops += [self._answer_recorded] if self._settings.recorded else []
        return [*loops, self._outcomes.run, self._outcomes.follow_copies]

    async def finish(self, draining: asyncio.Event) -> None:
        """Wait until the run is finished and the ranks have received the end, or this process is drained."""
        works = self._outcomes.finished.wait(), self._wait_drained(draining), self._server.refuse_leave(draining)
        _, drained, _ = await first_of(*works)
        if drained.cancelled():  # the run has finished: ``first_of`` cancels the other wait
            self._row.phase, self._row.text = "ending", "the ranks to leave"
            if not await self._server.end_run(self._outcomes.steps, within_s=END_S):
                log.warning("not every rank requested the end of the run within %.0f s", END_S)
            self._row.text = "the last evaluation"
            await self._server.outcomes.join()  # the last version may have been reported after the last checkpoint
            await first_of(self._evaluations.over(), draining.wait(), self._server.draining.wait())

    async def _wait_drained(self, draining: asyncio.Event) -> None:
        """Wait until this process or a rank is to drain, then until the newest step that a rank has taken is in a
        checkpoint.
        """
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
        await (
            draining.wait()
        )  # else a rank was drained by another program: ``refuse_leave`` ends this start with an error

    # ---- admit: consumes wanted(), produces TASKS; waits for places, which settled groups and new versions give back

    async def _issue_tasks(self) -> None:
        await self._replayed.wait()
        while True:
            # Before the task is chosen: a pause after it would issue a task at a version that may have changed
            # meanwhile.
            await asyncio.sleep(self._senders.pause_s)
            demand = None if self._early_end.ended else self._source.wanted()
            if demand is None:
                await self._admit.wait(LOOK_AGAIN_S)
                continue
            drawn = await prompt_for(demand, self._prompts, self._curriculum, num_epochs=self._source.rules.num_epochs)
            if drawn is None:
                self._source.passed(self._source.rules.num_epochs)
            else:
                await self._issue_prompt(drawn, demand)
            self._decide.wake()

    async def _issue_prompt(self, drawn: Drawn, demand: TaskDemand) -> None:
        """Issue the task of a prompt that was drawn for ``demand``, unless another prompt is to be issued by now."""
        # Asked again, because a version may have been published while the prompt was tokenized, or a prompt requeued.
        newest = None if self._early_end.ended else self._source.wanted()
        if newest is None or replace(newest, min_version=demand.min_version, issue_step=demand.issue_step) != demand:
            return
        try:
            await self._store_task(task_of(newest, drawn, self._settings, seed=self._prompts.seed, epoch=self._epoch))
        except WireError as error:  # larger than a message, which no try can change
            self._prompts.leave_out(drawn.epoch, drawn.offset, error)

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

    async def _answer_recorded(self) -> None:
        await self._replayed.wait()
        await RecordedResponses(self._bus, self._prompts, self._settings.recorded).run(
            lambda: (self._source.head or (0, 0))[0]
        )

    # ---- receive: SAMPLES and DEAD in intake.py; here the epoch and the registry's head; waits for the bus

    async def _read_samples(self) -> None:
        await self._intake.read(self._settings.model.vocab_size, self._settings.replayed_routing)

    async def _follow_epoch(self) -> None:
        """Raise Fenced when another learner takes over, also while this one writes nothing that a fence could
        reject.
        """
        async for row in self._bus.rows("run").watch(EPOCH_KEY):
            refuse_newer(0 if row is None else int(row[0]["epoch"]), self._epoch)

    async def _follow_head(self) -> None:
        """Produce published(); restore the registry's rows when its head is unreadable, or older than the newest
        published version.
        """
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

    async def _judge_groups(self) -> None:
        await self._replayed.wait()
        await self._filtering.run()

    async def _find_lost(self) -> None:
        await self._replayed.wait()
        await self._lost.run()

    async def _refuse_actors(self) -> None:
        await self._senders.publish(self._bus)

    # ---- decide: consumes complete groups and recorded plans; produces PLAN and batches; waits for groups and for
    # ranks that ask

    async def _plan_steps(self) -> None:
        while self._source.step < self._source.rules.steps and not self._server.draining.is_set():
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
        if self._recorded:
            seq, record = self._recorded[0]
            if isinstance(record, Plan) and not may_plan:
                self._row.text = f"rank 0 to take step {self._server.asked}"
            elif lacking := self._source.lacks(record):
                self._row.text = (
                    f"{len(lacking)} samples of the recorded step {record.step} to be read again, the first at "
                    f"{min(lacking)}"
                )
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

    async def _apply(self, record: Plan | Settle | Requeue, seq: int, *, recorded: bool) -> None:
        if isinstance(record, Requeue):
            self._source.apply(record, seq)
            self._admit.wake()
            self._note_replayed()
            log.info("requeued task=%d before_step=%d", record.task, record.step)
            return
        samples = self._buffered.of(record.seqs.tolist())
        given_up = self._source.accounting().given_up
        for task, scores in self._source.scored(record):
            if task.rollout not in self._settings.recorded:  # recorded rewards are of another policy
                self._curriculum.note(
                    int(self._prompts.order(task.prompt_epoch)[task.offset]), task.prompt_epoch, scores
                )
        filtered = self._source.filtered
        limits = self._source.token_limits(record) if isinstance(record, Plan) else None
        self._source.apply(record, seq)
        self._buffered.keep_only(self._source.buffered())
        self._admit.wake()
        self._note_replayed()
        if isinstance(record, Settle):
            log.info("settled reason=%s tasks=%s before_step=%d", record.reason, record.tasks.tolist(), record.step)
            if left_out := self._source.accounting().given_up - given_up:
                log.warning("prompts given up count=%d issued_again=%d", left_out, self._source.rules.max_reissues)
            return
        await self._offer_step(record, samples, limits or {}, recorded=recorded, filtered=filtered)

    async def _offer_step(
        self, record: Plan, samples: Sequence[Sample], limits: Mapping[int, int], *, recorded: bool, filtered: int
    ) -> None:
        """Make the batches of a step, and offer them to the ranks. ``filtered``: groups that filters dropped for it."""
        wants = self._wants_checkpoint(record.step, recorded)
        snapshot = await self._snapshot()  # of every step: any may be the last one, by a drain or by an early end
        state = snapshot if wants else b""
        self._states = {step: kept for step, kept in self._states.items() if step == record.step - 1}
        self._states[record.step] = b"" if wants else snapshot
        pad_to, eos_ids = self._settings.learner.row_multiple, self._settings.model.eos_ids
        build = partial(
            build_batches,
            record,
            samples,
            recorded=recorded,
            state=state,
            pad_to=pad_to,
            eos_ids=eos_ids,
            token_limits=limits,
            routed=self._settings.replayed_routing,
        )
        batches = await asyncio.to_thread(build)
        await save_step(self._settings, record, samples, limits)
        facts = facts_of(record, batches, filtered) | {"data/bad_rows": float(len(self._prompts.bad_rows))}
        self._outcomes.planned(record, facts | episode_metrics(samples, record))
        metadata = b""
        if self._settings.learner.algorithm.may_need_metadata and self._server.wants_metadata:
            metadata = await asyncio.to_thread(encode_metadata, samples)
        await self._server.offer(record.step, [encode(batch) for batch in batches], metadata)
        log.info(
            "planned step=%d groups=%d samples=%d recorded=%s", record.step, len(record.tasks), len(samples), recorded
        )
        if len(record.tasks) < self._source.rules.groups_per_step:
            log.warning(
                "step %d runs SHORT: %d of %d groups",
                record.step,
                len(record.tasks),
                self._source.rules.groups_per_step,
            )
        if self._source.left_out and not recorded:
            text = (
                "groups left out, because a plan must fit in a message count=%d bytes=%d; raise max_payload of "
                "the nats-server"
            )
            log.warning(text, self._source.left_out, self._source.max_record_bytes)

    async def _snapshot(self) -> bytes:
        async with self._issuing:  # a sample of a task that is not registered yet would be in neither part of the state
            more: JsonObject = {ROWS: self._planned.dump()}
            more |= {"curriculum": self._curriculum.dump()} if self._settings.curriculum.active else {}
            return self._source.snapshot(self._evaluations.dump(), **more)

    def _is_evaluated(self, step: int) -> bool:
        source = self._source
        return self._best.due(
            step, versions=source.versions, head=source.head, push_every=self._source.rules.push_every
        )

    def _is_held(self) -> bool:
        """Return whether the next step waits for an evaluation."""
        step = self._source.step
        return self._evaluations.holds(step, self._source.head, due=self._is_evaluated(step))

    def _wants_checkpoint(self, step: int, recorded: bool) -> bool:
        every = self._settings.learner.checkpoint_every
        if step == self._source.rules.steps:
            return True
        wanted = bool(every) and step % every == 0
        wanted = wanted or (self._best.wanted and self._is_evaluated(step))
        if self._outcomes.pending >= MOST_PENDING:  # they are on the disk, which has an end
            if wanted:
                log.warning(
                    "no checkpoint of step %d, because %d wait: %s",
                    step,
                    self._outcomes.pending,
                    self._row.copies_waited_for,
                )
            return False
        if wanted:
            return True
        early = self._outcomes.fullness >= EARLY_CHECKPOINT_FULL and not recorded
        return early and step - self._outcomes.checkpoint_step >= max(1, every // 4)

    def _note_replayed(self) -> None:
        if not self._recorded and not self._replayed.is_set():
            self._replayed.set()
            self._admit.wake()
