"""The body of one rank: build the model, load the checkpoint, then take steps until the feeder sends the end of the
run.

    feeder -- batch --> train (all ranks together) --> done --> push (rank 0, beside the next step) --> checkpoint

Each rank requests its part of every step from the feeder. Only rank 0 reports outcomes, published versions and
checkpoints. Waits for the feeder (bounded by its silence) and for its peers (bounded by the process group's timeout);
at max_lag 0, or without overlap, for the push as well. SIGTERM is passed on to the feeder, which answers the next
request of all ranks with ``Last``: they finish the step, write its checkpoint and the model, and leave together.
"""

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tidemill.bus import exit_codes
from tidemill.learner.algorithms.alarms import AlarmWatch, Context
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.objective import Objective
from tidemill.learner.backends.choice import backend_for
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.errors import AlarmStop
from tidemill.learner.feed.feed_client import FeedClient, Heartbeats, note_step
from tidemill.learner.feed.feed_messages import FeedEnd, FeedStart, Last
from tidemill.learner.feed.feeder_settings import RankPlaces, RankSettings
from tidemill.learner.layout import parallel
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.layout.sizes import StepFlops
from tidemill.learner.ranks.checkpoints import Checkpoints
from tidemill.learner.ranks.debugging import Meter, RankDebug, WaitClock, agreed
from tidemill.learner.ranks.pushes import AllTheTime, Pushes, TurnByTurn
from tidemill.learner.ranks.saved_models import SavedModels
from tidemill.learner.ranks.weight_parts import WeightParts
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.step_settings import StepSettings
from tidemill.learner.trainer.backups import OtherModels, WeightBackup, open_reference
from tidemill.learner.trainer.critic import open_critic
from tidemill.learner.trainer.port import AnyBackend, Policy
from tidemill.learner.trainer.trainer import Trainer
from tidemill.weightstore.push.publisher import Publisher

log = logging.getLogger(__name__)


LONG_ROW_TOKENS = 2048
"""Maximum tokens for attention in float32 on CUDA, which keeps a score for every pair, in every head and layer."""


def main(settings: RankSettings) -> int:
    """Run this rank (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Returns the process's exit code."""
    return exit_codes.run(partial(_take_steps, settings), log)


def _take_steps(settings: RankSettings) -> None:
    places, learner = settings.places, settings.learner
    with ExitStack() as stack:
        backend = backend_for(learner, places.model_dir, megatron_checkpoint=places.megatron_checkpoint is not None)
        here, rank = _join(stack, backend, learner), None

        def collect(waits_for: str) -> None:
            # A push that ends during a long wait is reported within a second: the feeder admits tasks by published
            # versions, and trims streams behind a checkpoint.
            log.debug("waiting for=%s", waits_for)
            if rank is not None:
                rank.collect()

        if places.silence_s:
            stack.enter_context(
                Heartbeats(places.feeder_url, keys=places.feeder_keys, rank=here.rank, silence_s=places.silence_s)
            )
        feed = stack.enter_context(_feed_client(places, here, learner.algorithm, on_wait=collect))
        start = _start_of_turns(here, feed, settings) if learner.colocated else None
        policy = backend.open_policy(
            learner,
            places.model_dir,
            here,
            dtype=_chosen_dtype(learner, here),
            initial=places.megatron_checkpoint,
        )
        root = places.final_dir.parent
        tools = RankDebug(
            settings.debug, learner, backend=backend, policy=policy, model_dir=places.model_dir, root=root
        )
        stack.callback(tools.close)
        rank = Rank(settings, backend, policy, feed, tools)
        rank.run(start)


def _meter(policy: Policy, learner: LearnerConfig, model_dir: Path) -> Meter:
    of_critic = None
    if learner.algorithm.by_critic:
        of_critic = StepFlops.read(Path(learner.critic.path) if learner.critic.path else model_dir, value_head=True)
    return Meter(policy, StepFlops.read(model_dir), of_critic, warmup_steps=learner.critic.warmup_steps)


def _join(stack: ExitStack, backend: AnyBackend, learner: LearnerConfig) -> Parallel:
    torch.manual_seed(learner.seed)
    torch.set_num_threads(learner.threads)
    if learner.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass over every new tensor; nothing reads one
    device = parallel.choose_device(learner.device)
    here = backend.join(learner, device=device, timeout_s=_timeout_s(learner))
    stack.callback(backend.leave)
    return here


def _timeout_s(learner: LearnerConfig) -> float:
    # A peer may be waiting for its batch, or writing a checkpoint.
    return learner.batch_timeout_s + 600


def _chosen_dtype(learner: LearnerConfig, here: Parallel) -> str:
    dtype = parallel.choose_dtype(learner.dtype, here.device)
    if here.rank == 0:
        log.info("learner device=%s dtype=%s configured=%s", here.device, dtype, learner.dtype)
        if dtype == "float32" and here.device.type == "cuda" and learner.max_tokens_per_micro_batch > LONG_ROW_TOKENS:
            log.warning(
                "learner.dtype: float32 on CUDA: for shared keys and values torch has only attention there "
                "that keeps a score for every "
                "pair of tokens of a sequence, in every head and layer; with long sequences use bfloat16"
            )
    return dtype


def _feed_client(
    places: RankPlaces, here: Parallel, algorithm: AlgorithmConfig, *, on_wait: Callable[[str], None]
) -> FeedClient:
    return FeedClient(
        places.feeder_url,
        keys=places.feeder_keys,
        rank=here.rank,
        dp_rank=here.dp_rank,
        dp_size=here.dp_size,
        metadata="metadata" in Objective(algorithm).asks,
        on_wait=on_wait,
    )


def _start_of_turns(here: Parallel, feed: FeedClient, settings: RankSettings) -> FeedStart:
    """Wait until colocated engines have released their memory. Returns the feeder's start. Fenced, BusUnavailable."""
    start = feed.hello()
    if here.rank == 0:
        places = settings.places
        publisher = Publisher(
            settings.weights,
            bus_url=places.bus_url,
            run=places.run,
            epoch=start.epoch,
            directory=places.snapshots,
            bus_config=settings.bus,
        )
        try:
            publisher.start()
            publisher.release()
        finally:
            publisher.close()
    dist.barrier()
    return start


class Rank:
    """One rank from its handshake to its end."""

    def __init__(
        self, settings: RankSettings, backend: AnyBackend, policy: Policy, feed: FeedClient, debug: RankDebug
    ) -> None:
        places, learner = settings.places, settings.learner
        staleness, weights = settings.staleness, settings.weights
        self._places, self._policy, self._feed, self._learner = places, policy, feed, learner
        self._backend = backend
        self._push_every = weights.push_every
        self._here, self._debug = policy.parallel, debug
        self._own_settings = self._settings = StepSettings.of(learner)
        self._optimizer = backend.open_optimizer(
            policy, learner.optimizer, steps=learner.steps, offload=learner.offload_optimizer
        )
        self._proximal = WeightBackup(policy) if weights.push_every > 1 else None
        self._reference = open_reference(policy, learner.algorithm)
        critic = open_critic(backend, learner, policy, places.model_dir, debug.critic_collector)
        others = OtherModels(proximal=self._proximal, reference=self._reference.weights, critic=critic)
        self._trainer = self._open_trainer(others, staleness.max_lag)
        self._parts = WeightParts(policy, places, weights)
        self.pushes = Pushes(
            policy,
            self._parts,
            feed,
            places,
            bus=settings.bus,
            weights=weights,
            wait=staleness.max_lag == 0 or not weights.overlap,
            colocated=learner.colocated,
            draining=lambda: feed.draining,
        )
        self.checkpoints = self._open_checkpoints(replace(others, reference=self._reference.saved))
        self._models = SavedModels(policy, self._parts, places, every=learner.save_hf_every, keep=learner.keep_hf)
        self._turns = TurnByTurn(policy.memory, self.pushes) if learner.colocated else AllTheTime()
        context = Context(max_lag=staleness.max_lag, dtype=policy.dtype, gate=staleness.gate)
        self._alarms = AlarmWatch(learner.algorithm.alarms, context)
        self._clock, self._meter = WaitClock(), _meter(policy, learner, places.model_dir)

    def _open_trainer(self, others: OtherModels, max_lag: int) -> Trainer:
        return Trainer(
            self._policy,
            self._optimizer,
            self._learner.algorithm,
            max_lag=max_lag,
            others=others,
            turn_gamma=self._settings.turn_gamma,
            collector=self._debug.collector,
            hooks=self._learner.hooks,
            mtp_factor=self._learner.mtp_loss_scaling_factor,
            record=self._learner.record,
            row_tokens=self._learner.max_tokens_per_micro_batch if self._learner.levels_rows else 0,
            pair_tokens=StepFlops.read(self._places.model_dir).pair_tokens if self._learner.levels_rows else 0,
        )

    def _open_checkpoints(self, others: OtherModels) -> Checkpoints:
        return Checkpoints(
            self._places,
            self._feed.checkpointed,
            self._backend,
            self._policy,
            self._optimizer,
            config=self._learner.checkpoint,
            timeout_s=_timeout_s(self._learner),
            others=others,
        )

    def run(self, start: FeedStart | None = None) -> None:
        """Run the session: handshake (unless in ``start``), restore, steps, end. Raises AlarmStop, Fenced."""
        with self._feed.drained_by_sigterm(self._places.progress):
            start = start or self._feed.hello()
            self._configure(start.step + 1, start)  # first: a checkpoint's numbers belong to its settings
            if start.checkpoint is not None:
                self._trainer.restore(self.checkpoints.load(start))
            elif start.initial is not None:
                self._begin_with(Path(start.initial))
            log.info(
                "begins rank=%d epoch=%d step=%d recorded_until=%d",
                self._here.rank,
                start.epoch,
                start.step,
                start.recorded_until,
            )
            with self._parts.open(), self.pushes.open(start):
                try:
                    self._turns.give()
                    self._end(self._take_steps(start), start)
                finally:
                    self.checkpoints.leave()

    def collect(self) -> None:
        """Report a push that has ended and a checkpoint that is written to the feeder."""
        self.pushes.collect()
        self.checkpoints.collect()

    def _begin_with(self, directory: Path) -> None:
        # A reference model keeps the initial weights of the model.
        step = self._backend.load_weights(directory, policy=self._policy, optimizer=self._optimizer)
        if self._proximal is not None:
            self._proximal.refresh()
        log.info("begins with the weights of step=%d checkpoint=%s", step, directory)

    def _take_steps(self, start: FeedStart) -> Last:
        for step in range(start.step + 1, start.steps + 1):
            batch = self._next(step)
            with self._turns.mine():
                if isinstance(batch, Last):
                    self._make_last(batch, start)
                    return batch
                self._step(batch, start)
        return Last(step=start.steps, state=b"")

    def _make_last(self, last: Last, start: FeedStart) -> None:
        """Checkpoint, and publish unless drained, a step that was not known to be the last, unless that is done."""
        if last.drained:
            log.info("drained rank=%d after step=%d", self._here.rank, last.step)
        elif self.pushes.published_step != last.step:
            self.pushes.publish()
        if last.state:
            self.checkpoints.begin(last.step, start.epoch, last.state, numbers=self._trainer.numbers)

    def _configure(self, step: int, start: FeedStart) -> None:
        """Take over the settings of a step: a repeated step has the settings of its first execution."""
        record = next((record for last, record in start.settings if step <= last), {})
        settings = StepSettings.read(record) if record else self._own_settings
        if settings != self._settings:
            self._trainer.configure(settings)
            self._settings = settings
            log.info("step %d has the settings of %s", step, "its first execution" if record else "this start")

    def _step(self, batch: StepBatch, start: FeedStart) -> None:
        self._configure(batch.step, start)
        with self._debug.around(batch):
            trained = self._trainer.train(batch)
        reported = self._debug.after(batch, trained)
        metrics = (
            reported
            | self._watched(batch, trained)
            | self._clock.metrics()
            | self._meter.metrics(batch.step, self._trainer.spans, trained["train/step_seconds"])
            | {"train/tokens_per_second_per_device": trained["train/tokens_per_second"] / dist.get_world_size()}
        )
        note_step(self._places.progress)
        self.pushes.step = batch.step
        digest = self._policy.digest() if self._learner.weights_digest else None
        if self._proximal is not None and batch.step % self._push_every == 0:
            self._proximal.refresh()
        self._reference.follow(batch.step)
        push = batch.step % self._push_every == 0 or batch.step == start.steps
        if batch.recorded:  # an earlier start pushed it; only the weights of the last recorded step become head + 1
            push = batch.step == start.recorded_until
        # Before the checkpoint, so that the engines receive the version while it is written.
        if push:
            self.pushes.publish()
        if self._trainer.values is not None:
            self._feed.trained(self._trainer.values)
        if self._here.rank == 0:
            self._feed.done(batch.step, metrics | self.pushes.metrics() | self._turns.metrics(), digest)
            log.info(
                "step=%d reward=%.4f loss=%.5f grad_norm=%.4f lag=%.2f wait_share=%.3f step_s=%.3f skipped=%d",
                batch.step,
                metrics["train/reward_mean"],
                metrics.get("train/loss", math.nan),
                metrics.get("train/grad_norm", math.nan),
                metrics.get("offpolicy/lag_mean", 0.0),
                metrics["train/wait_share"],
                metrics["train/step_seconds"],
                metrics["train/skipped_minibatches"],
            )
        if batch.state:
            self.checkpoints.begin(batch.step, start.epoch, batch.state, numbers=self._trainer.numbers)
        self._models.after(batch.step, checkpointed=bool(batch.state))

    def _watched(self, batch: StepBatch, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics with the numbers of alarms. Raises AlarmStop, before these weights are published."""
        alarms = self._alarms.step(metrics, recorded=batch.recorded)
        if self._here.rank == 0:
            for alarm in alarms:
                log.log(
                    logging.ERROR if alarm.level == "error" else logging.WARNING, "alarm step=%d %s", batch.step, alarm
                )
        if self._alarms.stop is not None:
            raise AlarmStop(batch.step, str(self._alarms.stop))
        levels = [alarm.level for alarm in alarms]
        return metrics | {"alarm/warnings": float(levels.count("warn")), "alarm/errors": float(levels.count("error"))}

    def _end(self, last: Last, start: FeedStart) -> None:
        if last.drained:  # reported first: a deadline may end this process while it writes the model
            self.checkpoints.collect(wait=True)
        self.pushes.collect(wait=True)
        if not last.drained or last.step > start.step:  # else nothing was trained
            with self._turns.mine():
                self._models.write_trained(self.pushes.step, self.pushes.version)
        self.checkpoints.collect(wait=True)
        self._models.wait()
        with self._clock.waiting():
            answer = self._feed.next(last.step + 1)
        assert isinstance(answer, FeedEnd), f"the feeder has a step after the last, {last.step}"

    def _next(self, step: int) -> StepBatch | Last:
        """Return the batch of ``step``, or that the one before was the last."""
        self.collect()
        with self._clock.waiting():
            batch = self._feed.next(step)
        assert not isinstance(batch, FeedEnd), f"the feeder ends before step {step}"
        if (request := agreed(self._debug.take_request(), self._here)) is not None:
            self._debug.profile(request)
        return batch
