"""Pushes of staged copies as versions, one at a time, over one connection to the bus. Runs in the publisher's thread.

    reserve a version -> gather engines -> Push to all groups -> move the head

With engines that share its accelerator, the learner owns it from ``release`` until the next push, or until ``resume``.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from tidemill.bus.errors import BusError, Fenced
from tidemill.bus.liveness import LiveView
from tidemill.bus.wire.rows import VersionRow
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import PartLost, PushFailed
from tidemill.weightstore.push.accelerator_lease import AcceleratorLease
from tidemill.weightstore.push.member import Check, Member
from tidemill.weightstore.push.push import CUDA_HANDLES, HOST_HANDLES, Push, PushReport
from tidemill.weightstore.push.push_groups import PushGroup, PushGroups
from tidemill.weightstore.push.snapshots import Head
from tidemill.weightstore.store.registry import VersionRegistry
from tidemill.weightstore.transport.port import Deadlines
from tidemill.weightstore.transport.staging import StagedAdapter, StagedModel

_log = logging.getLogger(__name__)

_POLL_S = 1.0  # Interval at which live rows are read
_AGAIN_S = 1.0  # Pause before a failed push is repeated, because a bus may refuse it immediately
_GATHER_S = 0.25  # Interval of looking for more engines while there are fewer than ``min_engines``


class VersionPusher:
    """The order of a push, and the ownership of the accelerator that colocated engines share with the learner."""

    def __init__(
        self,
        config: WeightsConfig,
        epoch: int,
        deadlines: Deadlines,
        *,
        registry: VersionRegistry,
        lease: AcceleratorLease,
        view: LiveView,
        groups: PushGroups,
        head: Head,
    ) -> None:
        self._config, self._epoch, self._deadlines = config, epoch, deadlines
        self._registry, self._lease = registry, lease
        self.view, self.groups, self.head = view, groups, head
        self.fenced: Fenced | None = None  # Error of a push: a newer learner has taken over
        self._pushing: asyncio.Task[object] | None = None
        self._owns_accelerator = False  # True = colocated engines have no memory

    async def fence(self) -> None:
        """Fence older learners, and record the engines that they evicted. Raises Fenced, BusUnavailable."""
        await self.head.fence(self._epoch)
        await self.groups.record_evicted(self._registry)

    async def refresh_view(self) -> None:
        """Keep the view of the live rows fresh, so that a push knows at once which engines have been silent."""
        while True:
            try:
                await self.view.refresh()
            except BusError as error:
                _log.warning("live rows not read error=%s", error)
            await asyncio.sleep(_POLL_S)

    async def push(self, copy: StagedModel | StagedAdapter, gives_up: Callable[[], bool]) -> PushReport:
        """Push a copy as the next version, again after a failure unless ``gives_up``, and release the copy. Raises
        Fenced, PushFailed.
        """
        self._pushing = asyncio.current_task()
        self._deadlines.num_bytes = copy.manifest.num_bytes
        try:
            # The same copy: the trainer goes on meanwhile, and no other rank would take part in another export.
            while True:
                try:
                    return await self._push_copy(copy)
                except PushFailed as error:
                    if gives_up():
                        raise
                    _log.error("pushing again the weights of step %d: %s", copy.step, error)
                await asyncio.sleep(_AGAIN_S)
        except Fenced as error:
            self.fenced = error
            raise
        finally:
            self._pushing = None
            copy.release()

    async def close(self) -> None:
        """Cancel the push under way, and wait for its end."""
        # No task group has it: ``run_coroutine_threadsafe`` made it, and nothing else would wait for its end.
        if self._pushing is not None:
            self._pushing.cancel()
            await asyncio.gather(self._pushing, return_exceptions=True)

    async def release(self) -> tuple[str, ...]:
        """Acquire the accelerator. Returns the ids of the engines that released their memory; the others are evicted.
        Raises BusUnavailable, Fenced.
        """
        await self._lease.acquire(self._epoch)
        self._owns_accelerator = True
        await self._lease.wait_until_free()
        members = [member for group in await self.groups.reconcile() for member in group.members if member.colocated]
        return await self.groups.succeeding(members, Member.release)

    async def resume(self) -> tuple[str, ...]:
        """Release the accelerator, and push the head to colocated engines again. Returns their ids. Raises as
        ``release``.
        """
        await self._release_accelerator()
        groups = [group for group in await self.groups.reconcile() if group.is_colocated]
        members, head = [member for group in groups for member in group.members], self.head.row
        if not members or head is None:
            return ()
        copy = None if self.head.copy is None else self.head.copy.hold()
        try:
            if copy is not None:
                push = await self._push_of(copy, groups)
                await push.send(groups, self.groups)
                return tuple(sorted(push.updated))
            # Version 0 was never pushed; its weights are in the model directory.
            if head.version == 0 and head.snapshot:
                return await self.groups.succeeding(members, lambda member: member.load(head.snapshot, 0))
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

    async def _push_copy(self, copy: StagedModel | StagedAdapter) -> PushReport:
        since, row, evicted = time.perf_counter(), None, dict[str, str]()
        try:
            # The order matters. Colocated engines need the accelerator for the new weights. The row of a version is
            # there before any engine has it, so a reader of its tokens finds the step; the head moves when the engines
            # have it.
            await self._release_accelerator()
            row = await self._registry.reserve(copy.step, self._epoch, digest=copy.manifest.digest)
            copy.version = row.version
            groups = await self._gather()
            push = await self._push_of(copy, groups)
            evicted = push.evicted
            await push.send(groups, self.groups)
            if len(push.updated) < self._config.min_engines:
                raise PushFailed(
                    row.version, f"want >= {self._config.min_engines} engines, {len(push.updated)} took it", evicted
                )
            await self.head.move(row, copy)
            await self.groups.record_evicted(self._registry)
        except (PushFailed, PartLost, BusError) as error:
            await self._record_failure(row, error)
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
            is_due = self._config.verify == "always" or (self._config.verify == "first" and not member.verified)
            return copy.differences if is_due else None

        handles = CUDA_HANDLES if self._config.staging == "cuda" else HOST_HANDLES
        return Push(copy.version, copy.buckets, check_of, handles=handles, adapter=adapter)

    async def _gather(self) -> list[PushGroup]:
        """Return the members in their groups; with fewer than ``min_engines``, wait for more until the deadline."""
        deadline = time.monotonic() + self._config.phase_deadline_s
        while True:
            formed = await self.groups.reconcile()
            if sum(len(group.members) for group in formed) >= self._config.min_engines or time.monotonic() >= deadline:
                return formed
            await asyncio.sleep(_GATHER_S)

    async def _release_accelerator(self) -> None:
        if self._owns_accelerator:
            await self._lease.release(self._epoch)
            self._owns_accelerator = False

    async def _record_failure(self, row: VersionRow | None, error: Exception) -> None:
        _log.error("push failed version=%s error=%s", None if row is None else row.version, error)
        if row is None:
            return
        try:
            await self._registry.fail(row)
            await self.groups.record_evicted(self._registry)
        except BusError as second:
            _log.warning("failed push not recorded version=%d error=%s", row.version, second)
