"""Feeder of recorded steps: the steps in files, or steps that the learner of another run plans, are fed to the ranks.

    files of debug.load_rollout -> plan for this layout -> batches -> ranks (ZMQ);  done <- rank 0 -> log PLAN
    run debug.shadow_of ---------^   its PLAN -> plan of step k -> its samples by their sequences

Consumes each step and the reports of rank 0; produces batches and Done records. Waits for ranks that request steps, and
for steps. It ends when the last step is done, or when it is drained. It reads no samples from its own run's streams and
writes no checkpoint: a restart begins at step 1.

Of the other run it writes nothing: no consumer, lease, cursor or row of it changes, and trimming does not wait. A
shadow that falls so far behind that samples are trimmed ends.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from tidemill.bus.errors import NotFound
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import cancellable, first_of
from tidemill.bus.wire.messages import Plan, Sample
from tidemill.learner.batch.batching import build_batches
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.buffer.step_plan import GENESIS
from tidemill.learner.checkpoints import disk
from tidemill.learner.debug.rollout_file import DumpedRollout, Packing, load_rollout, planned_again
from tidemill.learner.errors import FeedError, SamplesGone
from tidemill.learner.feed.data_metrics import facts_of
from tidemill.learner.feed.feed_messages import FeedStart, encode_batch, encode_metadata
from tidemill.learner.feed.feed_server import FeedServer, Frames
from tidemill.learner.feed.feeder import opened_ends, own_epoch, row_publisher
from tidemill.learner.feed.feeder_loops import END_S
from tidemill.learner.feed.feeder_row import BEAT_S
from tidemill.learner.feed.feeder_settings import FeederSettings
from tidemill.learner.feed.outcomes import record_done, record_end, remove_end
from tidemill.learner.feed.restart import verified
from tidemill.weightstore.store.registry import VersionRegistry

_AT_ONCE = 32  # Samples that are requested at a time
log = logging.getLogger(__name__)


class ShadowSteps:
    """The steps of the run behind ``after_step``, in order."""

    def __init__(self, run: Bus, *, after_step: int) -> None:
        self._run, self._last = run, after_step
        self._plans = self._planned()

    async def read(self) -> DumpedRollout:
        """Return the next step, once it is planned. Raises SamplesGone when it was trimmed."""
        plan = await anext(self._plans)
        return DumpedRollout(
            run=self._run.run, plan=plan, samples=await self._samples(plan), token_limits=await self._limits(plan)
        )

    async def _planned(self) -> AsyncIterator[Plan]:
        async for _, record in self._run.plans.follow():
            if isinstance(record, Plan) and record.step > self._last:
                if record.step > self._last + 1:
                    raise SamplesGone(self._run.run, self._last + 1, f"PLAN begins with step {record.step}")
                self._last = record.step
                yield record

    async def _samples(self, plan: Plan) -> Sequence[Sample]:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def fetch(seq: int) -> Sample:
            async with limit:
                return await self._run.retry(partial(self._run.samples.fetch, seq))

        try:
            return await asyncio.gather(*[fetch(seq) for seq in plan.seqs.tolist()])
        except NotFound:
            raise SamplesGone(self._run.run, plan.step, "samples of it are trimmed from SAMPLES") from None

    async def _limits(self, plan: Plan) -> dict[int, int]:
        """Return the bound of sampled tokens of every task that has a budget of them and is still in TASKS."""
        limits = dict[int, int]()
        if not self._run.config.rollouts:
            return limits
        for task_id in plan.tasks.tolist():
            try:
                task = await self._run.retry(partial(self._run.tasks.fetch, task_id))
            except NotFound:
                raise SamplesGone(self._run.run, plan.step, f"task {task_id} of it is trimmed from TASKS") from None
            if task.budget is not None and task.budget.tokens:
                limits[task_id] = task.budget.tokens
        return limits


async def run_recorded_feeder(settings: FeederSettings, draining: asyncio.Event) -> None:
    """Feed the ranks with the steps in the files of ``debug.load_rollout`` until ``learner.steps`` are done.

    Raises as ``run_feeder``, and DebugFileRefused, CheckpointCorrupt.
    """
    async with opened_ends(settings) as (server, bus), steps_of(settings) as read:
        await cancellable(RecordedFeeder(bus, settings, server, read).run(draining))


ReadStep = Callable[[int], Awaitable[DumpedRollout]]


@asynccontextmanager
async def steps_of(settings: FeederSettings) -> AsyncIterator[ReadStep]:
    """Yield the function that returns a step by its number, from 1; it is called once for each, in order."""
    places, debug, initial = settings.places, settings.debug, settings.initial_checkpoint
    if not debug.shadow_of:
        yield lambda step: asyncio.to_thread(load_rollout, Path(debug.load_rollout.format(step=step)))
        return
    async with connect(places.bus_url, debug.shadow_of, places.bus, name="shadow") as run:
        steps = ShadowSteps(run, after_step=0 if initial is None else disk.named(initial).step)
        yield lambda step: steps.read()


class RecordedFeeder:
    """One start of a feeder that reads no samples of its own run."""

    def __init__(self, bus: Bus, settings: FeederSettings, server: FeedServer, read: ReadStep) -> None:
        self._bus, self._settings, self._server, self._read = bus, settings, server, read
        self._num_steps = settings.learner.steps
        self._epoch, self._step, self._done, self._chain = 0, 0, 0, GENESIS
        self._facts: dict[int, dict[str, float]] = {}
        self._finished = asyncio.Event()
        self._text = "the bus"

    async def run(self, draining: asyncio.Event) -> None:
        """Start, feed, end. Raises a group of errors."""
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(self._server.run(), name="ranks")]
            self._epoch = await own_epoch(self._bus, self._settings.places.epoch)
            async with row_publisher(self._bus, self._epoch, phase="working") as heartbeat:
                await self._bus.plans.fence(self._epoch)
                await remove_end(self._bus)
                head = await VersionRegistry(self._bus).repaired_head(self._epoch)
                start = FeedStart(
                    epoch=self._epoch,
                    checkpoint=None,
                    step=0,
                    steps=self._num_steps,
                    head_version=-1 if head is None else head.version,
                    head_step=-1 if head is None else head.step,
                    initial=await verified(self._settings.initial_checkpoint),
                    recorded_until=0,
                )
                await self._server.start(start)
                for loop in (partial(self._beat, heartbeat), self._feed_steps, self._report_steps):
                    loops.append(group.create_task(cancellable(loop())))
                await self._finish(draining)
            for loop_task in loops:
                loop_task.cancel()

    async def _finish(self, draining: asyncio.Event) -> None:
        _, drained, _ = await first_of(
            self._finished.wait(), self._wait_drained(draining), self._server.refuse_leave(draining)
        )
        if not drained.cancelled():
            return
        if not await self._server.end_run(self._num_steps, within_s=END_S):
            log.warning("not every rank requested the end of the run within %.0f s", END_S)
        await record_end(self._bus, self._epoch, self._num_steps, "learner.steps")

    async def _wait_drained(self, draining: asyncio.Event) -> None:
        await first_of(draining.wait(), self._server.draining.wait())
        self._text = "the ranks to leave"
        await self._server.drain({})
        await self._server.deserted.wait()
        await self._server.outcomes.join()
        await draining.wait()

    async def _beat(self, heartbeat: HeartbeatPublisher) -> None:
        while True:
            await self._server.beat(self._text)
            heartbeat.update(waits_for=self._text, load={"step": float(self._step)})
            await asyncio.sleep(BEAT_S)

    async def _feed_steps(self) -> None:
        while self._step < self._num_steps:
            if self._step >= self._server.asked + int(self._settings.learner.prefetch):
                self._text = f"rank 0 to take step {self._server.asked}"
                await self._server.waiter.wait(BEAT_S)
                continue
            source = f"run {self._settings.debug.shadow_of}" if self._settings.debug.shadow_of else "its file"
            self._text = f"step {self._step + 1}, from {source}"
            frames, metadata = await asyncio.to_thread(self._packed, await self._read(self._step + 1))
            await self._server.offer(self._step, frames, metadata)
        self._text = f"rank 0 to finish step {self._step}"

    def _packed(self, rollout: DumpedRollout) -> tuple[list[Frames], bytes]:
        """Pack the next step: frames of each data-parallel rank, and metadata."""
        step, learner = self._step + 1, self._settings.learner
        packing = Packing(
            data_parallel=learner.data_parallel,
            max_tokens=learner.max_tokens_per_micro_batch,
            minibatches=learner.minibatches,
        )
        plan = planned_again(rollout, step, packing, chain=self._chain)
        packing_options, routed = self._settings.packing, self._settings.replayed_routing
        indices = [
            index_of(int(seq), sample, routed=routed) for seq, sample in zip(plan.seqs, rollout.samples, strict=True)
        ]
        batches = build_batches(
            plan, rollout.samples, indices=indices, token_limits=rollout.token_limits, **packing_options
        )
        self._facts[step] = facts_of(plan, indices, batches[0], pad_to=learner.row_multiple)
        self._chain, self._step = plan.chain, step
        text = "loaded step=%d run=%s recorded_step=%d samples=%d"
        log.info(text, step, rollout.run, rollout.plan.step, len(rollout.samples))
        with_metadata = learner.algorithm.may_need_metadata and self._server.wants_metadata
        return [encode_batch(batch) for batch in batches], encode_metadata(indices) if with_metadata else b""

    async def _report_steps(self) -> None:
        """Record the steps that rank 0 reports as done. Versions are in the registry, and there are no checkpoints."""
        while True:
            outcome = await self._server.outcomes.get()
            if outcome.kind == "done":
                await self._step_done(**outcome.values)
            self._server.outcomes.task_done()

    async def _step_done(self, step: int, metrics: dict[str, float], weights_digest: str | None) -> None:
        if step != self._done + 1 or step not in self._facts:
            raise FeedError("done", f"step {self._done + 1}", step)
        self._done = step
        await record_done(self._bus, self._epoch, step, metrics | self._facts.pop(step), weights_digest)
        if step == self._num_steps:
            self._finished.set()
