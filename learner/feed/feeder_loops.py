"""Loops of the feeder: they connect the DataSource, which decides, with the bus and the ranks.

    TASKS  <-- issue ---- wanted() --+                     +--- plan() --> PLAN --> apply() --> batches --> ranks (ZMQ)
    SAMPLES --- read ---> add() -----+---- DataSource -----+
    DEAD, KV weights ---> dead(), version(), published()   +--- done, published, checkpointed <-- rank 0
    acks of TASKS ------> lost()

Each loop documents what it consumes, produces and waits for, and what unblocks it. All run in one thread; only packing and file work run
in others. A record is in the log PLAN before it is applied, and applied before its batch is offered.
"""

import asyncio
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bus.client.retries import cancellable
from bus.client.waiter import Waiter
from bus.errors import BusError, Fenced
from bus.liveness.epoch import current_epoch, raise_epoch
from bus.liveness.heartbeats import HeartbeatPublisher
from bus.streams.bus import Bus
from bus.streams.dead import REQUEUE
from bus.system.coroutines import first_of
from bus.wire import subjects
from bus.wire.messages import Dead, Kind, LiveRow, Plan, Requeue, Sample, Sampling, Settle, Task
from bus.wire.subjects import EPOCH_KEY
from learner.checkpoints import disk
from learner.data.batch import build_batches, encode
from learner.data.datasource import Disposition, Waits
from learner.data.lost import LostTasks
from learner.data.prompts import PromptFile, sampler_seed
from learner.data.rules import DataRules
from learner.data.senders import Senders, invalid_words, refused_before
from learner.data.task_admission import TaskDemand
from learner.errors import NoProgress, PromptError
from learner.feed.copies import Copies, manifest_digest
from learner.feed.evaluations import EvalPlan, Evaluations
from learner.feed.feed_messages import Start
from learner.feed.feed_server import FeedServer
from learner.feed.outcomes import KeptCheckpoints, Outcomes, facts_of
from learner.feed.restart import Resumed, recorded_versions, resume
from weightstore.store.registry import HEAD, VersionRegistry

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Interval of the heartbeats to ranks and on the bus."""
LOOK_AGAIN_S = 5.0
"""Longest sleep of a loop that is normally woken."""
COPIES_S = 30.0
"""Time that a drained learner waits for the copies of its last checkpoint on other nodes; without them the one before stays the latest."""
END_S = 60.0
"""Deadline for the ranks to request the step after the last."""
EARLY_CHECKPOINT_FULL = 0.7
"""Share of the stream SAMPLES in use at which a step is checkpointed early, so that it can be trimmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederRules:
    """Settings of the process, beyond the rules of the DataSource."""

    run: str
    root: Path
    """Directory of the checkpoints."""
    sampling: Sampling
    group_size: int
    checkpoint_every: int
    keep_checkpoints: int
    copies: int = 0
    """Holders of each file of a checkpoint; 0 = all nodes share one directory."""
    num_nodes: int = 1
    ahead: int
    """Steps planned before a rank requests them: 0 or 1."""
    batch_timeout_s: float
    vocab_size: int | None
    pad_to: int
    """Row lengths are multiples of this number of tokens."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a response; empty = not known."""
    from_checkpoint: Path | None = None
    """Checkpoint with the initial weights of the run; None = those of the model directory."""
    epoch: int = 0
    """Epoch that was raised for this start, and for no other; 0 = the feeder raises it."""


class Feeder:
    """One start of the feeder, on an open bus."""

    def __init__(
        self, bus: Bus, rules: FeederRules, data_rules: DataRules, prompts: PromptFile, server: FeedServer, evaluation: EvalPlan
    ) -> None:
        self._bus, self._rules, self._data_rules, self._prompts, self._server = bus, rules, data_rules, prompts, server
        self._eval_plan = evaluation
        self._issuing = asyncio.Lock()
        """Held from the issue of a task until it is registered: ids are registered in their order."""
        self._samples: dict[int, Sample] = {}
        self._behind = 0
        self._admit = Waiter()
        self._decide = server.waiter
        self._replayed = asyncio.Event()
        self._text = "the bus"
        self._phase = "starting"
        self._epoch = 0
        self._copies: Copies | None = None
        """Set when each node has checkpoints of its own."""

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
            self._epoch = await self._own_epoch()
            row = LiveRow(role="feeder", id="feeder", host=socket.gethostname(), pid=os.getpid(), phase="starting", epoch=self._epoch)
            async with HeartbeatPublisher(self._bus, row, BEAT_S) as heartbeat:
                loops.append(group.create_task(self._beat(heartbeat), name="beat"))
                await self._begin()
                works = (
                    self._issue,
                    self._read,
                    self._follow_dead,
                    self._follow_head,
                    self._feed,
                    self._find_lost,
                    self._refuse,
                    self._evaluate,
                )
                for loop in (self._follow_epoch, *works):
                    loops.append(group.create_task(cancellable(loop()), name=loop.__name__))
                loops.append(group.create_task(cancellable(self._outcomes.run()), name="outcomes"))
                loops.append(group.create_task(cancellable(self._outcomes.follow_copies()), name="copies"))
                await self._over(draining)
                for loop_task in loops:
                    loop_task.cancel()

    async def _own_epoch(self) -> int:
        """Return the epoch of this start. Raises Fenced when a later one was raised."""
        if not self._rules.epoch:
            return await raise_epoch(self._bus)
        newest = await current_epoch(self._bus)
        if newest > self._rules.epoch:
            raise Fenced(f"run.{EPOCH_KEY}", self._rules.epoch, newest)
        return self._rules.epoch

    async def _begin(self) -> None:
        """Take over the streams, restore the state, and start the ranks."""
        self._text = "the fences of PLAN and TASKS"
        # The fences come before the state is read: an older learner that still runs writes nothing into these streams afterwards.
        await self._bus.plans.fence(self._epoch)
        await self._bus.tasks.fence(self._epoch)
        self._text = "the checkpoint to be verified and the streams to be read"
        if self._rules.copies and self._rules.num_nodes > 1:
            self._copies = Copies(self._bus, self._rules.root, num_nodes=self._rules.num_nodes, copies=self._rules.copies)
        resumed = await resume(self._bus, rules=self._data_rules, epoch=self._epoch, root=self._rules.root, copies=self._copies)
        self._source, self._recorded, self._recorded_until = resumed.source, resumed.recorded, resumed.recorded_until
        registry = VersionRegistry(self._bus)
        if await registry.lost(resumed.versions):
            await registry.restore(resumed.versions | await recorded_versions(self._bus), self._epoch)
        head = await registry.head()
        if head is not None:  # a publisher fences the head before it writes one
            self._source.published(head.version, head.step)
        plans = [record for _, record in resumed.recorded if isinstance(record, Plan)]
        self._recorded_steps = {version: step for plan in plans for version, step in plan.version_steps.items()}
        self._lost = LostTasks(self._bus, self._source, self._decide.wake)
        self._senders = Senders(await refused_before(self._bus))
        self._outcomes = self._make_outcomes(resumed)
        await self._begin_evaluation(resumed)
        version, step = self._source.head or (-1, -1)
        await self._server.start(
            Start(
                epoch=self._epoch,
                checkpoint=None if resumed.checkpoint is None else str(resumed.checkpoint),
                step=self._source.step,
                steps=self._data_rules.steps,
                head_version=version,
                head_step=step,
                initial=await self._initial(resumed),
                recorded_until=self._recorded_until,
                **await self._peers(resumed.checkpoint),
            )
        )
        self._note_replayed()

    async def _begin_evaluation(self, resumed: Resumed) -> None:
        """Restore the evaluation: the state in the checkpoint, then the tasks after it, then the published version."""
        rounds = await asyncio.to_thread(self._eval_plan.rounds)
        if resumed.evaluation is not None:
            rounds.load(resumed.evaluation)
        self._evaluations = Evaluations(self._bus, self._eval_plan, rounds, epoch=self._epoch, store=self._store_task)
        for task in resumed.eval_tasks:
            self._evaluations.issued(task)
        if self._source.head is not None:
            self._evaluations.published(*self._source.head)

    async def _peers(self, checkpoint: Path | None) -> dict[str, Any]:
        """Return the fields of ``Start`` with the nodes that serve the checkpoint's files; none where this node has all of them."""
        if self._copies is None or checkpoint is None:
            return {}
        peers = {str(peer.node): peer for peer in await self._copies.peers()}
        keys = {peer.key for peer in peers.values()}
        return {
            "manifest": await asyncio.to_thread(manifest_digest, checkpoint),
            "peers": {node: peer.url for node, peer in peers.items()},
            "peer_key": keys.pop() if keys else "",
        }

    async def _initial(self, resumed: Resumed) -> str | None:
        """Return the verified checkpoint with the initial weights, if the run starts from one. Raises CheckpointCorrupt."""
        if resumed.checkpoint is not None or self._rules.from_checkpoint is None:
            return None
        await asyncio.to_thread(disk.verify, self._rules.from_checkpoint)
        return str(self._rules.from_checkpoint)

    def _make_outcomes(self, resumed: Resumed) -> Outcomes:
        return Outcomes(
            self._bus,
            self._server,
            resumed,
            epoch=self._epoch,
            steps=self._data_rules.steps,
            kept=KeptCheckpoints(self._rules.root, self._rules.keep_checkpoints, self._copies),
            on_published=self._published,
        )

    async def _over(self, draining: asyncio.Event) -> None:
        """Wait until the run is finished and the ranks have received the end, or this process is drained."""
        _, drained = await first_of(self._outcomes.finished.wait(), self._drained(draining))
        if drained.cancelled():  # the run has finished: ``first_of`` cancels the other wait
            self._phase, self._text = "ending", "the ranks to leave"
            await self._farewell()
            self._text = "the last evaluation"
            await first_of(self._evaluations.over(), draining.wait())

    async def _drained(self, draining: asyncio.Event) -> None:
        await draining.wait()
        self._phase, self._text = "draining", "the ranks to leave"
        await self._server.deserted.wait()
        await self._server.outcomes.join()
        self._text = "the copies of the last checkpoint"
        with suppress(TimeoutError):
            async with asyncio.timeout(COPIES_S):
                await self._outcomes.all_copied()

    async def _farewell(self) -> None:
        """Send the end of the run, and wait (with a deadline) until every rank has received it."""
        await self._server.end_after(self._data_rules.steps)
        try:
            async with asyncio.timeout(END_S):
                await self._server.all_ended.wait()
        except TimeoutError:
            log.warning("not every rank requested the end of the run within %.0f s", END_S)

    # ---- admit: consumes wanted(), produces TASKS; waits for places, which settled groups and new versions give back

    async def _issue(self) -> None:
        await self._replayed.wait()
        while True:
            # Before the task is chosen: a pause after it would issue a task at a version that may have changed meanwhile.
            await asyncio.sleep(self._senders.pause_s)
            wanted = self._source.wanted()
            if wanted is None:
                await self._admit.wait(LOOK_AGAIN_S)
                continue
            await self._store_task(self._task(wanted))
            self._decide.wake()

    async def _store_task(self, task: Task) -> Task:
        """Store and register a task. Returns it with its id."""
        async with self._issuing:
            task = replace(task, id=await self._bus.tasks.issue(task))
            self._source.issued(task, time.monotonic())
            if task.kind is Kind.EVAL:
                self._evaluations.issued(task)
        return task

    async def _evaluate(self) -> None:
        await self._replayed.wait()
        await self._evaluations.run()

    def _task(self, wanted: TaskDemand) -> Task:
        find = self._prompts.after if wanted.reissue_of is None else self._prompts.at
        drawn = find(wanted.prompt_epoch, wanted.offset)
        seed = sampler_seed(self._data_rules.seed, drawn.epoch, drawn.offset, wanted.reissues)
        return Task(
            run=self._rules.run,
            epoch=self._epoch,
            prompt=drawn.row.prompt,
            prompt_tokens=drawn.tokens,
            label=drawn.row.label,
            metadata=drawn.row.metadata,
            group_size=self._rules.group_size,
            sampling=replace(self._rules.sampling, seed=seed),
            prompt_epoch=drawn.epoch,
            offset=drawn.offset,
            reissue_of=wanted.reissue_of,
            reissues=wanted.reissues,
            min_version=wanted.min_version,
            issue_step=wanted.issue_step,
        )

    # ---- receive: consumes SAMPLES, DEAD and the registry; waits for the bus

    async def _read(self) -> None:
        cursor, registry = self._source.cursor(), VersionRegistry(self._bus)
        recorded = {seq for _, record in self._recorded if not isinstance(record, Requeue) for seq in record.seqs.tolist()}
        reading = self._bus.samples.read(cursor, vocab_size=self._rules.vocab_size, checked_before=recorded, on_passed=self._lost.passed)
        async for received in reading:
            if isinstance(received.sample, Sample):
                await self._look_up(registry, received.seq, received.sample)
            before = self._source.changes
            arrival = self._source.add(received.seq, received.sample, time.monotonic(), received.actor)
            self._behind = received.pending
            if arrival.name is Disposition.EVAL and isinstance(received.sample, Sample):
                self._evaluations.arrived(received.sample)
            if arrival.name is Disposition.BUFFERED and isinstance(received.sample, Sample):
                self._samples[received.seq] = received.sample
                self._senders.usable(received.actor)
            elif arrival.name is Disposition.INVALID:
                self._senders.invalid(received.actor, invalid_words(received, arrival.reason))
            # While recorded steps are repeated, any sample may be the one that is lacking.
            if self._source.changes != before or self._recorded:
                self._decide.wake()

    async def _look_up(self, registry: VersionRegistry, seq: int, sample: Sample) -> None:
        """Read the rows of versions that are new here. A row is written before engines get the weights: no row means no such version."""
        # The newest first, because it is the likeliest to have no row, and one such version is enough.
        for version in sorted(self._source.unread_versions(sample), reverse=True):
            row = await self._bus.retry(partial(registry.row_for, version, seq))
            if row is not None:
                self._source.version(version, row.step, max(0, row.after))
            elif version in self._recorded_steps:  # the registry has lost its row, and a recorded plan with it must be repeated
                self._source.version(version, self._recorded_steps[version])
            else:
                return

    async def _follow_dead(self) -> None:
        letters: dict[int, Dead] = {}
        async for seq, told in self._bus.dead.follow():
            if isinstance(told, Dead):
                letters[told.task] = replace(told, prompt="", reason="")  # without its texts: all dead letters of the run are kept here
                self._source.dead(told.task)
                self._evaluations.gone(told.task)
            elif told.word == REQUEUE and (letter := letters.get(told.task)) is not None and self._has_prompt(letter, seq):
                self._source.requeue(letter)
            self._decide.wake()

    def _has_prompt(self, dead: Dead, seq: int) -> bool:
        """Return whether the position in a dead letter has a prompt, because later starts must be able to repeat a recorded requeue."""
        try:
            self._prompts.at(dead.prompt_epoch, dead.offset)
        except (PromptError, IndexError) as error:
            self._bus.refusals.refuse(subjects.DEAD, f"{seq} (requeue of task {dead.task})", error)
            return False
        return True

    async def _follow_epoch(self) -> None:
        """Raise Fenced when another learner takes over, also while this one writes nothing that a fence could reject."""
        async for row in self._bus.rows("run").watch(EPOCH_KEY):
            self._refuse_newer(0 if row is None else int(row[0]["epoch"]))

    async def _follow_head(self) -> None:
        """Produce published(); restore the registry's rows when its head is older than the newest published version."""
        registry = VersionRegistry(self._bus)
        async for _ in self._bus.rows("weights").watch(HEAD):
            known = -1 if self._source.head is None else self._source.head[0]
            head = await self._bus.retry(registry.head)
            if head is not None and head.version >= known:
                self._published(head.version, head.step)
            elif known >= 0:
                await self._bus.retry(partial(registry.restore, self._source.versions, self._epoch))

    def _published(self, version: int, step: int) -> None:
        self._source.published(version, step)
        self._evaluations.published(version, step)
        self._admit.wake()
        self._decide.wake()

    async def _find_lost(self) -> None:
        await self._replayed.wait()
        await self._lost.run()

    async def _refuse(self) -> None:
        await self._senders.publish(self._bus)

    # ---- decide: consumes complete groups and recorded plans; produces PLAN and batches; waits for groups and for ranks that ask

    async def _feed(self) -> None:
        while self._source.step < self._data_rules.steps:
            record, seq = self._next_record()
            if record is None:
                await self._wait_for_change()
                continue
            recorded = seq is not None
            if seq is None:
                # In the log before it is applied: a kill in between is repeated from the log, and nothing is trained that is not in it.
                seq = await self._bus.plans.append(record)
            await self._take(record, seq, recorded=recorded)
        self._text = f"rank 0 to finish step {self._data_rules.steps}"

    def _next_record(self) -> tuple[Plan | Settle | Requeue | None, int | None]:
        """Return the next record, and its sequence if it is in the log already; (None, None) while there is none."""
        may_plan = self._source.step < self._server.asked + self._rules.ahead
        if self._recorded:
            seq, record = self._recorded[0]
            if isinstance(record, Plan) and not may_plan:
                self._text = f"rank 0 to take step {self._server.asked}"
            elif lacking := self._source.lacks(record):
                self._text = f"{len(lacking)} samples of the recorded step {record.step} to be read again, the first at {min(lacking)}"
            else:
                self._recorded.popleft()
                return record, seq
            return None, None
        if not may_plan:
            self._text = f"rank 0 to take step {self._server.asked}"
            return self._source.settlement(), None
        proposal = self._source.plan(time.monotonic())
        if isinstance(proposal, Waits):
            self._text = proposal.text
            return None, None
        return proposal, None

    async def _wait_for_change(self) -> None:
        """Wait for an event, at most a second: a deadline of the DataSource may have passed."""
        await self._decide.wait(BEAT_S)

    async def _take(self, record: Plan | Settle | Requeue, seq: int, *, recorded: bool) -> None:
        if isinstance(record, Requeue):
            self._source.apply(record, seq)
            self._admit.wake()
            self._note_replayed()
            log.info("requeued task=%d before_step=%d", record.task, record.step)
            return
        samples = [self._samples[int(one)] for one in record.seqs]
        given_up = self._source.accounting().given_up
        limits = self._source.token_limits(record) if isinstance(record, Plan) else None
        self._source.apply(record, seq)
        buffered = self._source.buffered()
        self._samples = {one: sample for one, sample in self._samples.items() if one in buffered}
        self._admit.wake()
        self._note_replayed()
        if isinstance(record, Settle):
            log.info("settled reason=%s tasks=%s before_step=%d", record.reason, record.tasks.tolist(), record.step)
            if left_out := self._source.accounting().given_up - given_up:
                log.warning("prompts given up count=%d issued_again=%d", left_out, self._data_rules.max_reissues)
            return
        state = await self._snapshot() if self._wants_checkpoint(record.step, recorded) else b""
        pad_to, eos_ids = self._rules.pad_to, self._rules.eos_ids
        build = partial(build_batches, record, samples, recorded=recorded, state=state, pad_to=pad_to, eos_ids=eos_ids, token_limits=limits)
        batches = await asyncio.to_thread(build)
        self._outcomes.planned(record, facts_of(record, batches))
        await self._server.offer(record.step, [encode(batch) for batch in batches])
        log.info("planned step=%d groups=%d samples=%d recorded=%s", record.step, len(record.tasks), len(samples), recorded)
        if len(record.tasks) < self._data_rules.groups_per_step:
            log.warning("step %d runs SHORT: %d of %d groups", record.step, len(record.tasks), self._data_rules.groups_per_step)

    async def _snapshot(self) -> bytes:
        async with self._issuing:  # a sample of a task that is not registered yet would be in neither part of the state
            return self._source.snapshot(self._evaluations.dump())

    def _wants_checkpoint(self, step: int, recorded: bool) -> bool:
        every = self._rules.checkpoint_every
        if step == self._data_rules.steps or (every and step % every == 0):
            return True
        early = self._outcomes.fullness >= EARLY_CHECKPOINT_FULL and not recorded
        return early and step - self._outcomes.checkpoint_step >= max(1, every // 4)

    def _note_replayed(self) -> None:
        if not self._recorded and not self._replayed.is_set():
            self._replayed.set()
            self._admit.wake()

    # ---- heartbeats

    async def _beat(self, heartbeat: HeartbeatPublisher) -> None:
        """Produce heartbeats on the bus and for waiting ranks. Raises NoProgress when a rank has waited too long for a batch."""
        while True:
            starved_s = self._server.starved_s(time.monotonic())
            await self._server.beat(self._waits_for())
            if starved_s > self._rules.batch_timeout_s:
                raise NoProgress("feeder", starved_s, self._waits_for())
            heartbeat.update(**self._appearance(starved_s))
            await asyncio.sleep(BEAT_S)

    def _waits_for(self) -> str:
        copies = "" if self._copies is None else self._copies.waits_for
        evaluation = self._evaluations.waits_for if self._phase == "ending" else ""
        return "; ".join(text for text in (self._text, evaluation, copies) if text)

    def _appearance(self, starved_s: float) -> dict[str, object]:
        if not hasattr(self, "_outcomes"):  # heartbeats begin before the state is restored
            return {"phase": self._phase, "waits_for": self._text}
        if self._phase not in ("ending", "draining"):
            self._phase = "waiting" if starved_s else ("working" if self._replayed.is_set() else "replaying")
        accounting = self._source.accounting()
        load = {
            "step": self._source.step,
            "buffered": accounting.buffered,
            "trained": accounting.trained,
            "open_tasks": accounting.open,
            "tasks_dead": accounting.settled.get("dead", 0),
            "failed": accounting.dropped.get("failed", 0),
            "prompts_too_long": self._prompts.num_too_long,
            "behind": self._behind,
        }
        load |= {"invalid": sum(accounting.invalid.values()), **self._senders.load(accounting.invalid, accounting.invalid_of)}
        version = self._source.head[0] if self._source.head else -1
        return {
            "phase": self._phase,
            "waits_for": self._waits_for(),
            "trouble": self._prompts.trouble,
            "version": version,
            "load": {key: float(value) for key, value in load.items()},
        }
