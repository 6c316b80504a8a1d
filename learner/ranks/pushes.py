"""Pushes of weights as new versions, and their reports to the feeder. Knows the publisher and the policy; no batch.

Weights are copied in the trainer's thread and pushed during the next step; at max_lag 0, or without overlap, the step
waits for the push. On an accelerator that engines share, a version is staged while the learner owns the memory
(``take``) and pushed when the engines own it (``give``), so that the learner and the engines never work at the same
time (``TurnByTurn``):

    batch -> engines release -> all ranks resume -> step, staging -> all ranks release
          -> engines resume, with the new version or the head

Only rank 0 has a publisher. Other ranks with a part of the weights keep copies of it, from which they send it when rank
0 asks for it (``weight_parts.py``).
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, Fenced
from tidemill.learner.feed.feed_client import FeedClient
from tidemill.learner.feed.feed_messages import FeedStart
from tidemill.learner.feed.feeder_settings import RankPlaces
from tidemill.learner.ranks.weight_parts import WeightParts
from tidemill.learner.trainer.memory import Memory
from tidemill.learner.trainer.port import Policy
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import PushFailed
from tidemill.weightstore.push.publisher import Publisher
from tidemill.weightstore.push.push import PushHandle, PushReport
from tidemill.weightstore.transport.staging import StagedAdapter, StagedModel

log = logging.getLogger(__name__)


class Pushes:
    """The pushes of one start. Every rank calls every method at the same place, except ``collect`` and ``metrics``."""

    def __init__(
        self,
        policy: Policy,
        parts: WeightParts,
        feed: FeedClient,
        places: RankPlaces,
        *,
        bus: BusConfig,
        weights: WeightsConfig,
        wait: bool,
        colocated: bool = False,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """``wait``: ``publish`` waits for the push. ``colocated``: the push takes place inside ``give``.

        While ``draining()``, a push that fails is not repeated, because the next start publishes its weights.
        """
        self._draining = draining
        self._policy, self._parts, self._feed, self._places = policy, parts, feed, places
        self._bus, self._weights, self._wait, self._colocated = bus, weights, wait, colocated
        self._staged: StagedModel | StagedAdapter | None = None
        """Weights whose push waits for ``give``."""
        self._engines_released = 0
        self._leads = policy.parallel.rank == 0
        self._publisher: Publisher | None = None
        self._handle: PushHandle | None = None
        self._report: PushReport | None = None
        self.step = -1
        """Step of the current weights. The code that changes the weights sets it."""
        self.published_step = -1
        """Step of the weights that this start has last published, or begun to publish."""
        self._waited_s = 0.0

    @contextmanager
    def open(self, start: FeedStart) -> Iterator[None]:
        """Publish the version that a start needs first, then run the context with the publisher; the parts are open.

        It is version 0, or head + 1 if no recorded step is to be repeated. Raises Fenced, BusUnavailable,
        PublisherClosed.
        """
        if not self._leads:
            for _ in self._parts.export_base() if self._parts.adapters is not None else ():
                pass
            self._begin(start)
            yield
            return
        publisher = Publisher(
            self._weights,
            bus_url=self._places.bus_url,
            run=self._places.run,
            epoch=start.epoch,
            directory=self._places.snapshots,
            model_dir=self._places.model_dir,
            division=self._parts.division,
            adapters=self._parts.adapters,
            bus_config=self._bus,
        )
        try:
            publisher.start()
            if self._parts.adapters is not None:
                publisher.stage_base(self._parts.export_base())
            self._publisher = publisher
            if self._colocated:
                self.take()
            self._begin(start)
            yield
        finally:
            publisher.close()

    def _begin(self, start: FeedStart) -> None:
        self.step = start.step
        if start.head_version >= 0:
            if start.recorded_until == start.step:
                self.publish()
        elif start.initial is not None or self._policy.begins_apart:
            # Not publish_initial: engines load version 0 from the model directory, which has other weights.
            self.publish()
        else:
            self.published_step = start.step
            if self._publisher is not None:
                row = self._publisher.publish_initial(self._places.model_dir)
                self._feed.published(row.version, row.step)

    def publish(self) -> None:
        """Publish the current weights, after the previous push has ended. Raises as ``open``.

        A failed push is repeated with the staged weights, because this rank alone cannot gather the current ones. While
        the learner drains it is left to the next start.
        """
        self.collect(wait=True)
        self.published_step = self.step
        if self._publisher is None:
            self._parts.stage()
            return
        self._staged = self._publisher.stage(self.step, self._parts.export_pushed(), self._parts.choose)
        self._parts.staged()
        if not self._colocated:
            self._push_staged(self._publisher, wait=self._wait)

    def take(self) -> None:
        """Wait until colocated engines have released their memory, also over an outage of the bus. Raises Fenced."""
        self.collect(wait=True)
        if self._publisher is not None:
            self._engines_released = len(_repeat_until_reachable(self._publisher.release))

    def give(self) -> None:
        """Resume colocated engines with the staged version or the head, and wait until they generate. Raises Fenced."""
        if self._publisher is None:
            return
        if self._staged is None:
            _repeat_until_reachable(self._publisher.resume)
        else:
            self._push_staged(self._publisher, wait=True)

    def _push_staged(self, publisher: Publisher, *, wait: bool) -> None:
        assert self._staged is not None
        staged, self._staged = self._staged, None
        try:
            self._handle = publisher.push(staged, self._draining)
        finally:
            staged.release()
        self.collect(wait=wait)

    def collect(self, *, wait: bool = False) -> None:
        """Report a push that has ended to the feeder; with ``wait``, wait for the current push first."""
        handle = self._handle
        if handle is None or not (wait or handle.done):
            return
        began = time.monotonic()
        try:
            self._report = handle.result()
        except PushFailed as error:
            log.warning("not pushed again, because the learner drains: %s", error)
        else:
            self._feed.published(self._report.version, self._report.step)
        self._handle = None
        self._waited_s += time.monotonic() - began

    @property
    def version(self) -> int:
        """Version of the current weights; -1 = they have not been published."""
        return self._report.version if self._report is not None and self._report.step == self.step else -1

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last push that has ended, and the time waited for pushes since the last call; on
        rank 0."""
        waited_s, self._waited_s = self._waited_s, 0.0
        turns = {"turn/engines": float(self._engines_released)} if self._colocated else {}
        if self._report is None:
            return turns
        report = self._report
        return {
            "push/version": report.version,
            "push/engines": len(report.engines),
            "push/evicted": len(report.evicted),
            "push/engines_verified": len(report.verified),
            "push/engines_adapter": len(report.adapter_engines),
            "push/prepare_seconds": report.prepare_s,
            "push/seconds": report.seconds,
            "push/transfer_seconds": report.transfer_s,
            "push/stall_seconds_max": max(report.stall_s.values(), default=0.0),
            "push/bytes": report.num_bytes,
            "push/wait_seconds": waited_s,
            **{f"weights/push_gb_per_s/{transport}": rate for transport, rate in report.gb_per_s.items()},
            **turns,
        }


def _repeat_until_reachable(ask: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Repeat ``ask`` until the bus is reachable. Raises Fenced."""
    while True:
        try:
            return ask()
        except Fenced:
            raise
        except BusError as error:
            log.error("the turn is not changed, trying on: %s", error)


class AllTheTime:
    """Ownership of an accelerator that is not shared; with the methods of ``TurnByTurn``."""

    def give(self) -> None:
        """Do nothing: there are no colocated engines."""

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Do nothing: the learner always owns the accelerator."""
        yield

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}


class TurnByTurn:
    """Ownership that alternates with colocated engines. The learner has it at first; ``memory`` is this rank's."""

    def __init__(self, memory: Memory, pushes: Pushes) -> None:
        self._memory, self._pushes = memory, pushes
        self._seconds: dict[str, float] = {}

    def give(self) -> None:
        """Release the memory of all ranks, then have the engines resume with the staged version, or the head."""
        with self._timed("release"):
            self._memory.release()
            self._together()
        with self._timed("engines_resume"):
            self._pushes.give()

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Have the engines release, resume the memory of all ranks, and give it back when the body has succeeded.

        After an exception it is kept: the end of the process frees the memory.
        """
        with self._timed("engines_release"):
            # Rank 0 waits for the engines, the others for rank 0: no rank takes memory that an engine still has.
            self._pushes.take()
            self._together()
        with self._timed("resume"):
            self._memory.resume()
        log.info("turn of the learner engines_release_s=%.3f", self._seconds["engines_release"])
        yield
        self.give()
        log.info("turn of the engines engines_resume_s=%.3f", self._seconds["engines_resume"])

    def metrics(self) -> dict[str, float]:
        """Return ``turn/...`` (docs/metrics.md). Times after the end of a step are in the metrics of the next one."""
        return {f"turn/{name}_seconds": seconds for name, seconds in self._seconds.items()}

    def _together(self) -> None:
        """Wait for all ranks, so that no rank allocates memory that another one, or an engine, has not released yet."""
        if dist.get_world_size() > 1:
            dist.barrier()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - began
