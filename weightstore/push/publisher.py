"""The learner's side of the weightstore: a thread that pushes versions to the engines and serves snapshots of the head.

    trainer's thread                     publisher's thread (own loop, own bus connection)
    publish(step, tensors)
      waits for the previous push
      copies into a staging  --------->  reserve a version, reconcile members, Push to all groups, move the head
    handle.result()  <-----------------  PushReport | PushFailed | Fenced
                                         meanwhile: snapshots of the head, for engines that join late

Engines that share the learner's accelerator release their memory before each step, and get it back with a push or with
``resume``. Consumes tensors, live rows and snapshot requests; produces rows in ``weights``, pushes and snapshots. Every
wait has a deadline.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from tidemill.bus.client.addresses import reach, route_to
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import Fenced
from tidemill.bus.keys import admin_keys
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import LoopThread, cancellable
from tidemill.bus.wire.rows import VersionRow
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import PublisherClosed
from tidemill.weightstore.format.adapters import AdapterSettings
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.push.accelerator_lease import AcceleratorLease
from tidemill.weightstore.push.push import PushHandle
from tidemill.weightstore.push.push_groups import GroupRules, open_groups
from tidemill.weightstore.push.snapshots import Head, SnapshotServer
from tidemill.weightstore.push.version_pusher import VersionPusher
from tidemill.weightstore.store.registry import VersionRegistry
from tidemill.weightstore.transport.nccl import own_end
from tidemill.weightstore.transport.parts import Division, RemotePart
from tidemill.weightstore.transport.port import Deadlines
from tidemill.weightstore.transport.staging import AdapterBase, StagedAdapter, StagedModel, StagingPool, staging_memory

_log = logging.getLogger(__name__)

T = TypeVar("T")

START_S = 60.0  # Time that the bus has to answer when the publisher starts
_CLOSE_S = 10.0  # Time that the thread has to end, beyond the deadline of the phase that a push may be in
_STAGING_S = 600.0  # A snapshot that is being written holds its staging copy for as long as the disk takes
_DEFAULT_BUS = BusConfig()


class Publisher:
    """Pushes versions and serves snapshots in a thread of its own; called from one thread, the trainer's on rank 0."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        bus_url: str,
        run: str,
        epoch: int,
        directory: Path,
        model_dir: Path | None = None,
        division: Division | None = None,
        adapters: AdapterSettings | None = None,
        bus_config: BusConfig = _DEFAULT_BUS,
    ) -> None:
        """``directory``: of the snapshots, with configuration and tokenizer of ``model_dir``.

        ``division``: the tensors that are staged here, and the parts of other ranks; None = all that the first publish
        has. ``adapters``: versions are adapters on the weights that ``stage_base`` gets, all of them in this process.
        """
        self.config, self.run, self.epoch = config, run, epoch
        self._bus_url, self._bus_config = bus_url, bus_config
        self._directory, self._model_dir = Path(directory), model_dir
        self._end = own_end()
        self._memory = staging_memory(config, self._end)
        self._deadlines = Deadlines(config.phase_deadline_s, config.load_deadline_s)
        self._division = division
        self._parts: tuple[RemotePart, ...] = ()  # Parts of the weights that other ranks send
        self._adapters = adapters
        self._base: AdapterBase | None = None
        self.pool = None if division is None or adapters is not None else self._new_pool(division.local)
        """Copies of this rank's part of the weights; None before a first push without a division, and with adapters."""
        self._thread = LoopThread("publisher", self._serve)
        self._last: PushHandle | None = None
        self._closes = False
        self.connected: VersionPusher | None = None

    # ---- the trainer's thread

    def start(self) -> None:
        """Connect, fence older learners, serve snapshots. Raises BusUnavailable, Fenced, PublisherClosed."""
        try:
            self._thread.start(START_S + _CLOSE_S)
        except TimeoutError as error:
            raise PublisherClosed(str(error)) from None

    def publish_initial(self, model_dir: Path) -> VersionRow:
        """Make the model directory version 0 unless there is a head; return the head. Raises BusUnavailable, Fenced."""
        head, digest = self._running().head, "" if self._division is None else self._division.whole.digest
        return self._submit(head.publish_initial(str(model_dir), self.epoch, digest)).result(START_S)

    def publish(self, step: int, tensors: Iterable[tuple[str, Tensor]], *, wait: bool) -> PushHandle:
        """Copy the tensors, push them as the next version, and return the push's handle; ``wait``: after it has ended.

        Waits as ``stage`` does. Raises BadManifest, Fenced, PublisherClosed.
        """
        staged = self.stage(step, tensors)
        try:
            handle = self.push(staged)
        finally:
            staged.release()
        if wait:
            handle.wait()
        return handle

    def stage_base(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights that the adapters of all versions belong to. Raises BadManifest."""
        assert self._adapters is not None and self._division is not None
        self._base = AdapterBase(self._adapters, self._new_pool, tensors, self._division.local)

    def stage(
        self, step: int, tensors: Iterable[tuple[str, Tensor]], chosen: Callable[[int], None] = lambda number: None
    ) -> StagedModel | StagedAdapter:
        """Copy the tensors, and return the copy; ``release`` it when its push is submitted, or it is not to be pushed.

        With a base they are the matrices of the adapters.
        ``chosen`` is called with the number of the copy before it is filled: other ranks fill theirs of that number.
        Waits for the previous push, and for a snapshot of the version before the head that is still being written.
        Raises BadManifest, Fenced, PublisherClosed.
        """
        if self._last is not None:
            self._last.wait()
        self._running()
        if self._base is not None:
            since = time.perf_counter()
            adapter = self._base.stage(tensors, _STAGING_S)
            return StagedAdapter(self._base, adapter, step=step, prepare_s=time.perf_counter() - since)
        if self.pool is None:
            tensors = list(tensors)
            self._division = Division(Manifest.of(tensors))
            self.pool = self._new_pool(self._division.local)
        since = time.perf_counter()
        staging = self.pool.take(_STAGING_S)
        try:
            chosen(staging.number)
            staging.fill(tensors)
        except BaseException:
            staging.release()
            raise
        prepare_s = time.perf_counter() - since
        return StagedModel(staging, self._parts, self._deadlines, step=step, prepare_s=prepare_s)

    def push(self, staged: StagedModel | StagedAdapter, gives_up: Callable[[], bool] = lambda: True) -> PushHandle:
        """Push a copy as the next version in the background; one push at a time. Raises Fenced, PublisherClosed.

        A push that fails (too few engines, or the bus was unreachable for too long) is repeated with the same copy,
        unless ``gives_up`` returns True in the publisher's thread, or the publisher is closed.
        """
        connected = self._running()
        # The push has a hold of its own, which it releases at its end, so the caller may release its copy at once.
        self._last = PushHandle(self._submit(connected.push(staged.hold(), lambda: self._closes or gives_up())))
        return self._last

    def release(self) -> tuple[str, ...]:
        """Have colocated engines release their memory, and others that start wait, after the previous push.

        Returns their ids; an engine that does not answer in time is evicted. Raises BusUnavailable, Fenced,
        PublisherClosed.
        """
        if self._last is not None:
            self._last.wait()
        return self._result_of(self._running().release())

    def resume(self) -> tuple[str, ...]:
        """Give colocated engines their memory back and push the head again. Returns their ids. Raises as ``release``.

        If this learner has no copy of the head, because another one pushed it, the engines wait for the next push.
        """
        return self._result_of(self._running().resume())

    def latest(self) -> VersionRow | None:
        """Return the newest head that this publisher knows."""
        return None if self.connected is None else self.connected.head.row

    def close(self, *, drain: bool = True) -> None:
        """End the thread, after the push under way with ``drain``. Safe to call twice, and without ``start``."""
        self._closes = True
        if drain and self._last is not None and self._thread.is_alive:
            self._last.wait()
        self._thread.close(_CLOSE_S + self.config.phase_deadline_s)
        if self._memory is not None:
            self._memory.close()

    def _new_pool(self, manifest: Manifest) -> StagingPool:
        return StagingPool(manifest, self.config.bucket_size(on_gpu=bool(self._end.uuid)), memory=self._memory)

    def _running(self) -> VersionPusher:
        failure = (None if self.connected is None else self.connected.fenced) or self._thread.failure
        if isinstance(failure, Fenced):
            raise failure
        if self.connected is None or not self._thread.is_alive:
            raise PublisherClosed(f"publisher: not running ({failure!r})" if failure else "publisher: not running")
        return self.connected

    def _submit(self, work: Coroutine[object, None, T]) -> "Future[T]":
        try:
            return self._thread.submit(work)
        except RuntimeError as error:
            raise PublisherClosed(f"publisher: {error}") from None

    def _result_of(self, work: Coroutine[object, None, T]) -> T:
        try:
            return self._submit(work).result()
        except CancelledError:
            raise PublisherClosed("publisher: closed meanwhile") from None

    # ---- the publisher's thread

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            name = f"publisher-{self.epoch}"
            bus = await stack.enter_async_context(
                connect(self._bus_url, self.run, self._bus_config, name=name, wait_s=START_S)
            )
            connected = await self._connect(bus, stack)
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(cancellable(connected.refresh_view()), name="publisher: live rows"),
                    group.create_task(
                        cancellable(connected.head.serve_requests(bus)), name="publisher: snapshot requests"
                    ),
                ]
                self.connected = connected
                self._thread.ready()
                await self._thread.closing()
                for task in background:
                    task.cancel()
                await connected.close()

    async def _connect(self, bus: Bus, stack: AsyncExitStack) -> VersionPusher:
        """Fence older learners, and serve snapshots. Raises Fenced, BusUnavailable."""
        config, remote_places = self.config, () if self._division is None else self._division.remote
        at = reach(config.host, config.advertise, await asyncio.to_thread(route_to, self._bus_url), name="weights.host")
        self._parts = tuple(
            RemotePart(place, number, connect_s=config.phase_deadline_s)
            for number, place in enumerate(remote_places, 1)
        )
        rules = GroupRules(
            config.engines_together,
            at,
            config.backend,
            self._deadlines,
            self._end,
            self._memory,
            parts=self._parts,
            adapters=self._adapters is not None,
        )
        registry, view = VersionRegistry(bus), LiveView(bus)
        snapshots = SnapshotServer(
            self._directory,
            registry,
            keep=config.keep_snapshots,
            model_dir=self._model_dir,
            at=at,
            keys=admin_keys(bus),
        )
        connected = VersionPusher(
            config,
            self.epoch,
            self._deadlines,
            registry=registry,
            lease=AcceleratorLease(bus),
            view=view,
            groups=await open_groups(stack, bus, config, epoch=self.epoch, rules=rules, view=view),
            head=Head(registry, snapshots, snapshot_every=config.snapshot_every),
        )
        await connected.fence()
        # Before ``open``, so that a failure in the middle of it closes the part that is open.
        stack.push_async_callback(snapshots.close)
        await snapshots.open()
        return connected
