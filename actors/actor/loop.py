"""The rollout loop.

::

    TASKS --lease--> group --n x--> engine --> reward --> SAMPLES     (acked when all n are stored)
                       |                          |
                       |                          |        a teacher, if there is one, scores the tokens, too
                       |                          +-- fails or hangs: a FAILED sample, and the task is reported
                       |                          +-- a reward of groups waits for all n
                       +-- no engine, or drained: the work so far goes into PARTIALS, then a nak returns the task

Consumes tasks of every kind, of the rollouts that it has, as many as the limit of samples in flight admits.
Produces samples, each as soon as it is scored, in no order.
Waits for a task (unblocked by the learner), an engine with the task's ``min_version`` (by an engine's heartbeat), the
engine's answer and the reward (each with a time limit), a scorer where the run has some (by a scorer's heartbeat), room
in SAMPLES (by the learner's trim), and the bus (without a limit).
Keeps no state: tasks that it holds when it dies are leased again by another actor, and samples made twice count once.
The work that it stores when it drains is not repeated: the next actor finds finished samples and unfinished responses
in PARTIALS, and makes the rest.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tidemill.actors.actor.partial_store import PartialStore
from tidemill.actors.actor.sample_scoring import SampleScorer, Scorers, complete
from tidemill.actors.actor.single_turn import failed_sample
from tidemill.actors.config import ActorConfig
from tidemill.actors.engines.activity import Activity
from tidemill.actors.engines.responses import GenerationFailed, Responses
from tidemill.actors.engines.sample_limit import EngineLoad, SampleLimit
from tidemill.actors.engines.server_pool import NoServer
from tidemill.actors.episodes.port import AlreadyStored, Made, Rollout, Unfinished
from tidemill.bus.config import SINGLE_TURN
from tidemill.bus.errors import BusError, WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.episode_turns import Superseded
from tidemill.bus.streams.tasks import Lease
from tidemill.bus.system.coroutines import Waiter, all_of
from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire.messages import Kind, Partial, Sample, Status, Task

logger = logging.getLogger(__name__)

Queue = tuple[Kind, str]
"""Kind and rollout of tasks."""

LEASE_WAIT_S = 1.0
"""Longest wait of one request for a task, in seconds; also the longest delay until a drain is noticed."""
FAILURES_IN_A_ROW = 8
"""Tasks of a queue that failed for a cause outside of their rows (an engine, a server of rewards) with no success
between them, after which an actor pauses before it leases more of that queue. The attempts at one task count once.
"""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
"""Bounds of that pause; it doubles with each further task that fails."""
NAK_DELAY_S = 1.0
"""Seconds before a task that found no engine is delivered again."""
CANCEL_NAK_DELAY_S = 0.5
"""Seconds of that delay when this actor is cancelled: until then its own last request for a task may still wait at the
bus, and a task delivered to that request would be idle until its lease ends.
"""
NAK_TIMEOUT_S = 2.0
"""Time limit in seconds of a nak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutcome:
    """Outcome of one sample of a leased task."""

    failed: str = ""
    """Reason for which the sample is FAILED; else empty."""
    unfinished: str = ""
    """Reason for which the sample was not generated; else empty."""
    seq: int = 0
    """Sequence of the finished sample in SAMPLES; 0 = there is none, or an earlier actor stored its place."""
    partial: Partial | None = None
    """The unfinished response, for the next actor that leases the task."""
    superseded: bool = False
    """True if another actor makes this sample now."""


class Actor:
    """Works on tasks until it is drained. Call ``run`` once."""

    def __init__(
        self,
        bus: Bus,
        *,
        actor_id: str,
        config: ActorConfig,
        responses: Responses,
        rollouts: Mapping[str, Rollout],
        scorers: Scorers,
        activity: Activity,
    ) -> None:
        """``rollouts``: by name; the empty name makes samples of tasks without one. Other tasks are not leased."""
        self._bus, self._actor_id, self._config, self._activity = bus, actor_id, config, activity
        self._responses, self._rollouts, self._scorers = responses, dict(rollouts), scorers
        self._partials = PartialStore(bus, actor_id, activity.counters, enabled=config.partials)
        self._scorer = SampleScorer(actor_id, config, scorers, activity, self._note_outage)
        self._repeated = FailureLog(logger)
        self._limit = SampleLimit(config.max_samples_in_flight)
        self._in_flight_of: Counter[str] = Counter()
        """Samples in flight, by rollout."""
        self._changed = Waiter()
        self._draining = asyncio.Event()
        self._failing: defaultdict[Queue, set[int]] = defaultdict(set)
        """Tasks that failed for a cause outside of their rows since the last one that did not fail, by queue."""
        self._idle_since_s = time.monotonic()

    async def run(self, draining: asyncio.Event) -> None:
        """Lease tasks and work on them until ``draining`` is set and every leased task is done or returned by a nak."""
        async with asyncio.TaskGroup() as work:
            work.create_task(self._drain(draining))
            for name in self._rollouts:
                for kind in Kind:
                    work.create_task(self._lease_tasks(kind, name, work), name=f"lease {kind} {name}".strip())

    @property
    def in_flight(self) -> int:
        """Number of samples of leased tasks that are not done."""
        return self._in_flight_of.total()

    def observe(self, engines: Sequence[EngineLoad]) -> float:
        """Adapt the limit of the samples in flight to the engines that serve, and return it."""
        self._limit.observe(engines, self.in_flight, scoring=self._scorer.running)
        self._changed.wake()
        return float(self._limit.value)

    def phase(self) -> tuple[str, str]:
        """Return the phase for the live row, and a description of the current wait; empty when there is none."""
        waits_for, waiting_full = "", self._bus.samples.stats.waiting_full
        failing = max(map(len, self._failing.values()), default=0)
        if self.in_flight:
            waits_for = self._responses.waits_for() or self._scorers.waits_for()
            if not waits_for and waiting_full:
                waits_for = f"room in SAMPLES ({waiting_full} samples wait)"
        elif not self._draining.is_set() and failing >= FAILURES_IN_A_ROW:
            waits_for = f"the end of a pause: the last {failing} tasks failed"
        elif not self._draining.is_set():
            waits_for = f"a task, for {time.monotonic() - self._idle_since_s:.0f} s"
        if self._draining.is_set():
            return "draining", waits_for or f"{self.in_flight} samples"
        return ("working" if self._activity.busy else "waiting"), waits_for

    async def _drain(self, draining: asyncio.Event) -> None:
        """Wait for the drain. Then work on for ``drain_finish_s``, or a rollout's own time, wait for no scorer any
        longer, and cut short the unfinished responses.

        Single turns go on for as long as episodes with a longer time do: a cut ends all requests.
        """
        await draining.wait()
        logger.info("draining in_flight=%d", self.in_flight)
        self._draining.set()
        self._responses.stop_waiting()
        self._changed.wake()
        began_s = asyncio.get_running_loop().time()
        drains_s = {
            name: self._config.drain_finish_s if rollout.drain_s is None else rollout.drain_s
            for name, rollout in self._rollouts.items()
        }
        for drain_s in sorted(set(drains_s.values())):
            await self._wait_for([name for name in drains_s if drains_s[name] >= drain_s], began_s + drain_s)
            for name, rollout in self._rollouts.items():
                if drains_s[name] == drain_s and self._config.partials and self._in_flight_of[name]:
                    logger.info("handing back rollout=%s in_flight=%d", name or SINGLE_TURN, self._in_flight_of[name])
                    rollout.interrupt()
        if not self.in_flight:
            return
        self._scorers.stop_waiting()
        if self._config.partials:
            logger.info("cutting short the unfinished responses in_flight=%d", self.in_flight)
            await self._responses.cut_short()

    async def _wait_for(self, rollouts: Sequence[str], deadline_s: float) -> None:
        """Wait until no samples of these rollouts are in flight, or until this time of the loop's clock."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline_s):
                while any(self._in_flight_of[name] for name in rollouts):
                    await self._changed.wait()

    async def _lease_tasks(self, kind: Kind, rollout: str, work: asyncio.TaskGroup) -> None:
        while not self._draining.is_set():
            if not self._limit.admits(self.in_flight):
                await self._changed.wait()
                continue
            await self._pause(self._failing[kind, rollout])
            lease = await self._next_lease(kind, rollout)
            if lease is None:
                continue
            if self._draining.is_set():
                await self._nak(lease, 0.0)
            else:
                self._add_in_flight(lease.task.rollout, lease.task.group_size)
                work.create_task(self._work(lease), name=f"task {lease.task.id}")

    async def _pause(self, failing: Collection[int]) -> None:
        """Wait while every task of a queue fails for a cause outside of its row, or an outage uses up all prompts."""
        excess = len(failing) - FAILURES_IN_A_ROW
        if excess >= 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(FIRST_PAUSE_S * 2 ** min(excess, 20), MAX_PAUSE_S)):
                    await self._draining.wait()

    async def _next_lease(self, kind: Kind, rollout: str) -> Lease | None:
        """Wait up to ``LEASE_WAIT_S`` for a task. Returns None when there is none, or no bus."""
        begin = time.monotonic()
        try:
            lease = await self._bus.tasks.lease(LEASE_WAIT_S, kind=kind, rollout=rollout)
        except BusError as error:
            logger.warning("no task leased kind=%s rollout=%s error=%s", kind, rollout, error)
            lease = None
        if lease is None and time.monotonic() - begin < LEASE_WAIT_S / 2:  # no bus, or no queue yet: do not spin
            await asyncio.sleep(LEASE_WAIT_S / 2)
        return lease

    async def _work(self, lease: Lease) -> None:
        """Generate and store the missing samples of a task, then ack it, nak it or report the failure."""
        task = lease.task
        try:
            async with lease.kept():
                outcomes = await self._make_group(lease, await self._partials.read(lease))
                failures = [outcome.failed for outcome in outcomes if outcome.failed]
                unfinished = [outcome.unfinished for outcome in outcomes if outcome.unfinished]
                # An ack or nak by this actor would count for the other actor's lease.
                if any(outcome.superseded for outcome in outcomes):
                    logger.info("task left to another actor task=%d", task.id)
                    return
                if failures or unfinished:
                    begun = [outcome.partial for outcome in outcomes if outcome.partial is not None]
                    seqs = {index: outcome.seq for index, outcome in enumerate(outcomes) if outcome.seq}
                    await self._partials.store(lease, begun, seqs)
            if failures:
                await self._fail(lease, f"{len(failures)} of {task.group_size} samples: {failures[0]}")
            elif unfinished:
                text = "task returned to the queue task=%d missing=%d reason=%s"
                logger.info(text, task.id, len(unfinished), unfinished[0])
                await self._nak(lease, 0.0 if self._draining.is_set() else NAK_DELAY_S)
            else:
                await lease.ack()
                self._failing[task.kind, task.rollout].clear()
                self._activity.counters.tasks_done += 1
        except asyncio.CancelledError:
            await self._nak(lease, CANCEL_NAK_DELAY_S)
            raise
        except BusError as error:  # the lease runs out, and another actor takes it
            logger.warning("task not finished, its lease expires task=%d error=%s", task.id, error)
        except Exception as error:
            logger.exception("task failed task=%d", task.id)
            self._note_outage(task)
            await self._fail(lease, repr(error))

    async def _make_group(self, lease: Lease, partials: dict[int, Partial]) -> list[RolloutOutcome]:
        """Generate and store the samples of a task; a reward of groups scores all of them first."""
        task, unfinished = lease.task, lease.task.group_size

        def end(num_samples: int = 1) -> None:
            nonlocal unfinished
            num_samples = min(num_samples, unfinished)
            unfinished -= num_samples
            self._add_in_flight(task.rollout, -num_samples)

        try:
            begun: dict[int, Made | Partial | None] = {**partials}
            if not partials:
                begun |= enumerate(await self._rollouts[task.rollout].group(task, lease.attempt))
            if self._scorer.scores_together(task):
                return await self._make_together(lease, {} if partials else begun)
            outcomes = await self._store_all(lease, {i: made for i, made in begun.items() if isinstance(made, Made)})
            end(len(outcomes))
            missing = [index for index in range(task.group_size) if index not in outcomes]
            works = [self._complete_sample(lease, index, begun.get(index)) for index in missing]
            outcomes |= zip(missing, await all_of(works, on_end=end), strict=True)
            return [outcomes[index] for index in range(task.group_size)]
        except Unfinished as error:
            return [RolloutOutcome(unfinished=error.reason)] * task.group_size
        finally:
            end(unfinished)

    async def _make_together(self, lease: Lease, begun: Mapping[int, Made | Partial | None]) -> list[RolloutOutcome]:
        # Without partials: a finished sample of an earlier actor is in the stream, and cannot be scored together with
        # the samples of this attempt.
        indices = range(lease.task.group_size)
        results = await all_of(self._make_sample(lease, index, begun.get(index)) for index in indices)
        samples = [result.sample for result in results if isinstance(result, Made)]
        unfinished = [result for result in results if isinstance(result, RolloutOutcome)]
        if unfinished:
            return [replace(unfinished[0], partial=None)] * len(results)
        try:
            samples = await self._scorer.score_group(lease.task, samples)
        except NoServer as error:
            return [RolloutOutcome(unfinished=str(error))] * len(samples)
        return await self._publish(samples)

    async def _store_all(self, lease: Lease, made: Mapping[int, Made]) -> dict[int, RolloutOutcome]:
        """Score and store samples of a group that were generated together."""
        works = [self._make_sample(lease, index, sample) for index, sample in made.items()]
        # A task for each sample costs more than a short reward.
        results = [await work for work in works] if self._scorer.scores_at_once(lease.task) else await all_of(works)
        outcomes = {i: result for i, result in zip(made, results, strict=True) if isinstance(result, RolloutOutcome)}
        scored = {i: result.sample for i, result in zip(made, results, strict=True) if isinstance(result, Made)}
        return outcomes | dict(zip(scored, await self._publish([*scored.values()]), strict=True))

    async def _complete_sample(self, lease: Lease, index: int, begun: Made | Partial | None) -> RolloutOutcome:
        """Generate, score and store one sample, if it is missing."""
        if isinstance(begun, Partial) and begun.sample_seq:
            self._activity.counters.samples_found += 1
            return RolloutOutcome()
        result = await self._make_sample(lease, index, begun)
        if isinstance(result, RolloutOutcome):
            return result
        [outcome] = await self._publish([result.sample])
        if result.stored is not None and outcome.seq:
            with suppress(Superseded):  # the other actor stores it once more, and it counts once
                await result.stored(outcome.seq)
        return outcome

    async def _make_sample(self, lease: Lease, index: int, begun: Made | Partial | None) -> Made | RolloutOutcome:
        """Generate and score one sample; return it, FAILED too, or the outcome of one that is not to be stored."""
        task, counters = lease.task, self._activity.counters
        try:
            made = begun if isinstance(begun, Made) else await self._generate(lease, index, begun)
            counters.tokens_generated += made.sample.response_length
            counters.partials_continued += made.continued
            made.sample = await self._scorer.score(task, made)
            return made
        except Unfinished as error:
            counters.turns_redone += error.turns
            if error.turns:
                logger.info("episode handed back task=%d index=%d turns_redone=%d", task.id, index, error.turns)
            return RolloutOutcome(unfinished=error.reason, partial=error.partial)
        except NoServer as error:
            return RolloutOutcome(unfinished=str(error))
        except AlreadyStored as error:
            counters.samples_found += 1
            return RolloutOutcome(seq=error.seq)
        except Superseded:
            return RolloutOutcome(superseded=True)
        except GenerationFailed as error:
            if error.outside:
                self._note_outage(task)
            return Made(sample=failed_sample(task, index, lease.attempt, str(error)))
        except WireError as error:  # the tokens of the engines are no valid sample
            self._note_outage(task)
            text = f"task={task.id} index={index} error={error}"
            self._repeated("sample invalid", text, level=logging.ERROR, error=error)
            return Made(sample=failed_sample(task, index, lease.attempt, f"invalid sample: {error}"))

    async def _generate(self, lease: Lease, index: int, partial: Partial | None) -> Made:
        rollout, first = self._rollouts[lease.task.rollout], lease.deliveries == 1
        return await rollout.sample(lease.task, index, lease.attempt, partial, first=first)

    async def _publish(self, samples: Sequence[Sample]) -> list[RolloutOutcome]:
        for sample in samples:
            if not sample.created_s:  # a scored sample has both
                complete(sample, actor=self._actor_id, created_s=time.time())
        seqs = await self._bus.samples.publish_group(samples)
        self._activity.counters.samples_published += len(samples)
        return [self._outcome_of(sample, seq) for sample, seq in zip(samples, seqs, strict=True)]

    def _outcome_of(self, sample: Sample, seq: int) -> RolloutOutcome:
        if sample.status is not Status.FAILED:
            return RolloutOutcome(seq=seq)
        reason = str(sample.metadata["error"])
        self._activity.failed(reason)
        return RolloutOutcome(failed=reason)

    def _note_outage(self, task: Task) -> None:
        """Register a task that fails for a cause outside of its row."""
        # A reward or a program that raises on a row is no reason to pause: rows of others are not to wait for it, and
        # the learner ends a run in which all of them fail.
        self._failing[task.kind, task.rollout].add(task.id)

    async def _fail(self, lease: Lease, reason: str) -> None:
        self._repeated("task failed", f"task={lease.task.id} deliveries={lease.deliveries} reason={reason}")
        try:
            await lease.fail(reason, actor=self._actor_id)
        except BusError as error:
            logger.warning("failure not reported task=%d error=%s", lease.task.id, error)

    async def _nak(self, lease: Lease, delay_s: float) -> None:
        """Nak the task. If the nak does not reach the bus, the lease runs out instead."""
        self._activity.counters.tasks_handed_back += 1
        with suppress(BusError, TimeoutError):
            async with asyncio.timeout(NAK_TIMEOUT_S):
                await lease.nak(delay_s)

    def _add_in_flight(self, rollout: str, num_samples: int) -> None:
        self._in_flight_of[rollout] += num_samples
        if not self.in_flight:
            self._idle_since_s = time.monotonic()
        self._changed.wake()
