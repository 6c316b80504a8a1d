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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from tidemill.bus.client.addresses import reach, route_to
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, Fenced
from tidemill.bus.keys import admin_keys
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import LoopThread, cancellable
from tidemill.bus.wire.rows import VersionRow
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import PartLost, PublisherClosed, PushFailed
from tidemill.weightstore.format.adapters import AdapterSettings
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.push.accelerator_lease import AcceleratorLease
from tidemill.weightstore.push.member import Check, Member
from tidemill.weightstore.push.push import CUDA_HANDLES, HOST_HANDLES, Push, PushHandle, PushReport
from tidemill.weightstore.push.push_groups import GroupRules, PushGroup, PushGroups, open_groups
from tidemill.weightstore.push.snapshots import Head, SnapshotServer
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
_POLL_S = 1.0  # Interval at which live rows are read
_AGAIN_S = 1.0  # Pause before a failed push is repeated, because a bus may refuse it immediately
_GATHER_S = 0.25  # Interval of looking for more engines while there are fewer than ``min_engines``
_DEFAULT_BUS = BusConfig()


@dataclass(slots=True)
class _Connected:
    registry: VersionRegistry
    lease: AcceleratorLease
    view: LiveView
    groups: PushGroups
    head: Head
    parts: tuple[RemotePart, ...]
    """Parts of the weights that other ranks send."""
    owns_accelerator: bool = False
    """The learner has the accelerator: colocated engines have no memory."""


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
        self._adapters = adapters
        self._base: AdapterBase | None = None
        self.pool = None if division is None or adapters is not None else self._new_pool(division.local)
        """Copies of this rank's part of the weights; None before a first push without a division, and with adapters."""
        self._thread = LoopThread("publisher", self._serve)
        self._fenced: Fenced | None = None
        self._last: PushHandle | None = None
        self._closes = False
        self.connected: _Connected | None = None
        self._pushing: asyncio.Task[object] | None = None

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
        connected = self._running()
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
        return StagedModel(staging, connected.parts, self._deadlines, step=step, prepare_s=prepare_s)

    def push(self, staged: StagedModel | StagedAdapter, gives_up: Callable[[], bool] = lambda: True) -> PushHandle:
        """Push a copy as the next version in the background; one push at a time. Raises Fenced, PublisherClosed.

        A push that fails (too few engines, or the bus was unreachable for too long) is repeated with the same copy,
        unless ``gives_up`` returns True in the publisher's thread, or the publisher is closed.
        """
        connected = self._running()
        # The push has a hold of its own, which it releases at its end, so the caller may release its copy at once.
        self._last = PushHandle(self._submit(self._push(connected, staged.hold(), gives_up)))
        return self._last

    def release(self) -> tuple[str, ...]:
        """Have colocated engines release their memory, and others that start wait, after the previous push.

        Returns their ids; an engine that does not answer in time is evicted. Raises BusUnavailable, Fenced,
        PublisherClosed.
        """
        if self._last is not None:
            self._last.wait()
        return self._result_of(self._acquire_accelerator(self._running()))

    def resume(self) -> tuple[str, ...]:
        """Give colocated engines their memory back and push the head again. Returns their ids. Raises as ``release``.

        If this learner has no copy of the head, because another one pushed it, the engines wait for the next push.
        """
        return self._result_of(self._resume(self._running()))

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

    def _running(self) -> _Connected:
        failure = self._fenced or self._thread.failure
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
                    group.create_task(cancellable(_refresh(connected.view)), name="publisher: live rows"),
                    group.create_task(
                        cancellable(connected.head.serve_requests(bus)), name="publisher: snapshot requests"
                    ),
                ]
                self.connected = connected
                self._thread.ready()
                await self._thread.closing()
                # The push is no task of the group: ``run_coroutine_threadsafe`` made it, and nothing else would wait
                # for its end.
                for task in [*background, self._pushing]:
                    if task is not None:
                        task.cancel()
                if self._pushing is not None:
                    await asyncio.gather(self._pushing, return_exceptions=True)

    async def _connect(self, bus: Bus, stack: AsyncExitStack) -> _Connected:
        """Fence older learners, and serve snapshots. Raises Fenced, BusUnavailable."""
        config, remote_places = self.config, () if self._division is None else self._division.remote
        at = reach(config.host, config.advertise, await asyncio.to_thread(route_to, self._bus_url), name="weights.host")
        parts = tuple(
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
            parts=parts,
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
        connected = _Connected(
            registry=registry,
            lease=AcceleratorLease(bus),
            view=view,
            groups=await open_groups(stack, bus, config, epoch=self.epoch, rules=rules, view=view),
            head=Head(registry, snapshots, snapshot_every=config.snapshot_every),
            parts=parts,
        )
        await connected.head.fence(self.epoch)
        await connected.groups.record_evicted(connected.registry)
        # Before ``open``, so that a failure in the middle of it closes the part that is open.
        stack.push_async_callback(snapshots.close)
        await snapshots.open()
        return connected

    async def _push(
        self, connected: _Connected, copy: StagedModel | StagedAdapter, gives_up: Callable[[], bool]
    ) -> PushReport:
        self._pushing = asyncio.current_task()
        self._deadlines.num_bytes = copy.manifest.num_bytes
        try:
            # The same copy: the trainer goes on meanwhile, and no other rank would take part in another export.
            while True:
                try:
                    return await self._push_copy(connected, copy)
                except PushFailed as error:
                    if self._closes or gives_up():
                        raise
                    _log.error("pushing again the weights of step %d: %s", copy.step, error)
                await asyncio.sleep(_AGAIN_S)
        except Fenced as error:
            self._fenced = error
            raise
        finally:
            self._pushing = None
            copy.release()

    async def _push_copy(self, connected: _Connected, copy: StagedModel | StagedAdapter) -> PushReport:
        since, row, evicted = time.perf_counter(), None, dict[str, str]()
        try:
            # The order matters. Colocated engines need the accelerator for the new weights. The row of a version is
            # there before any engine has it, so a reader of its tokens finds the step; the head moves when the engines
            # have it.
            await self._release_accelerator(connected)
            row = await connected.registry.reserve(copy.step, self.epoch, digest=copy.manifest.digest)
            copy.version = row.version
            groups = await self._gather(connected.groups)
            push = await self._push_of(copy, groups)
            evicted = push.evicted
            await push.send(groups, connected.groups)
            if len(push.updated) < self.config.min_engines:
                raise PushFailed(
                    row.version, f"want >= {self.config.min_engines} engines, {len(push.updated)} took it", evicted
                )
            await connected.head.move(row, copy)
            await connected.groups.record_evicted(connected.registry)
        except (PushFailed, PartLost, BusError) as error:
            await _record_failure(connected, row, error)
            if isinstance(error, PushFailed | Fenced):
                raise
            raise PushFailed(-1 if row is None else row.version, str(error), evicted) from error
        return push.report(copy, seconds=time.perf_counter() - since)

    async def _push_of(self, copy: StagedModel | StagedAdapter, groups: Sequence[PushGroup]) -> Push:
        """Return the push of a copy; weights with an adapter are merged if an engine of ``groups`` needs them so."""
        adapter = copy if isinstance(copy, StagedAdapter) else None
        if adapter is not None and not all(member.adapters for group in groups for member in group.members):
            await adapter.merge()

        def check_of(member: Member) -> Check | None:
            is_due = self.config.verify == "always" or (self.config.verify == "first" and not member.verified)
            return copy.differences if is_due else None

        handles = CUDA_HANDLES if self.config.staging == "cuda" else HOST_HANDLES
        return Push(copy.version, copy.buckets, check_of, handles=handles, adapter=adapter)

    async def _gather(self, groups: PushGroups) -> list[PushGroup]:
        """Return the members in their groups; with fewer than ``min_engines``, wait for more until the deadline."""
        deadline = time.monotonic() + self.config.phase_deadline_s
        while True:
            formed = await groups.reconcile()
            if sum(len(group.members) for group in formed) >= self.config.min_engines or time.monotonic() >= deadline:
                return formed
            await asyncio.sleep(_GATHER_S)

    async def _acquire_accelerator(self, connected: _Connected) -> tuple[str, ...]:
        """Return the ids of the engines that released their memory; the others are evicted. Raises BusUnavailable,
        Fenced.
        """
        await connected.lease.acquire(self.epoch)
        connected.owns_accelerator = True
        await connected.lease.wait_until_free()
        members = [
            member for group in await connected.groups.reconcile() for member in group.members if member.colocated
        ]
        return await connected.groups.succeeding(members, Member.release)

    async def _release_accelerator(self, connected: _Connected) -> None:
        if connected.owns_accelerator:
            await connected.lease.release(self.epoch)
            connected.owns_accelerator = False

    async def _resume(self, connected: _Connected) -> tuple[str, ...]:
        await self._release_accelerator(connected)
        groups = [group for group in await connected.groups.reconcile() if group.is_colocated]
        members, head = [member for group in groups for member in group.members], connected.head.row
        if not members or head is None:
            return ()
        copy = None if connected.head.copy is None else connected.head.copy.hold()
        try:
            if copy is not None:
                push = await self._push_of(copy, groups)
                await push.send(groups, connected.groups)
                return tuple(sorted(push.updated))
            # Version 0 was never pushed; its weights are in the model directory.
            if head.version == 0 and head.snapshot:
                return await connected.groups.succeeding(members, lambda member: member.load(head.snapshot, 0))
        except PartLost as error:
            _log.error(
                "engines wait for the next version, this one cannot be sent version=%d error=%s", head.version, error
            )
            return ()
        finally:
            if copy is not None:
                copy.release()
        _log.warning(
            "engines wait for the next version, there is no copy of version=%d here engines=%d",
            head.version,
            len(members),
        )
        return ()


async def _refresh(view: LiveView) -> None:
    """Keep the view of the live rows fresh, so that a push knows at once which engines have been silent."""
    while True:
        try:
            await view.refresh()
        except BusError as error:
            _log.warning("live rows not read error=%s", error)
        await asyncio.sleep(_POLL_S)


async def _record_failure(connected: _Connected, row: VersionRow | None, error: Exception) -> None:
    _log.error("push failed version=%s error=%s", None if row is None else row.version, error)
    if row is None:
        return
    try:
        await connected.registry.fail(row)
        await connected.groups.record_evicted(connected.registry)
    except BusError as second:
        _log.warning("failed push not recorded version=%d error=%s", row.version, second)
