"""Pushes one after the other, and snapshots of the head in between: the work of the publisher's thread.

reserve a version -> reconcile members -> each push group, independently: begin, buckets, end -> head moves
                                                      | a member fails: evicted
an engine requests a snapshot -> written from the head's staging copy, served over HTTP

Engines that share the learner's accelerator release their memory before each step, and get it back with a push or with ``resume``.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus.client.addresses import HERE, Reach
from tidemill.bus.errors import BusError, Fenced
from tidemill.bus.http.client import open_session
from tidemill.bus.liveness.heartbeats import LiveView
from tidemill.bus.liveness.keys import admin_keys, make_keys
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import LiveRow, VersionRow
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import PartLost, PushFailed, ReceiverFailed
from tidemill.weightstore.push.accelerator_turns import AcceleratorLease
from tidemill.weightstore.push.eviction import Opener, PushGroups
from tidemill.weightstore.push.member import Check, Member, Updated
from tidemill.weightstore.push.push_group import GroupRules, PushGroup
from tidemill.weightstore.push.staged_model import StagedModel
from tidemill.weightstore.push.throughput import CUDA_HANDLES, HOST_HANDLES, Throughput
from tidemill.weightstore.store.registry import WANT, VersionRegistry
from tidemill.weightstore.store.snapshot_store import SnapshotStore
from tidemill.weightstore.transport.deadlines import Deadlines
from tidemill.weightstore.transport.handles import Memory
from tidemill.weightstore.transport.http_receiver import HttpReceiver
from tidemill.weightstore.transport.nccl import DeviceEnd
from tidemill.weightstore.transport.parts import PartPlace, RemotePart
from tidemill.weightstore.transport.port import WeightReceiver
from tidemill.weightstore.transport.staging import Staging

_log = logging.getLogger(__name__)

_POLL_S = 1.0
"""Interval at which live rows and snapshot requests are read, besides the wake-ups."""
_GATHER_S = 0.25
"""Interval of looking for more engines while there are fewer than ``min_engines``."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights are."""

    end: DeviceEnd
    """The GPU of the thread that stages."""
    memory: Memory | None
    """The staging memory, if other processes can read it."""
    others: tuple[PartPlace, ...]
    """Parts of the weights that other ranks send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """The outcome and the cost of a push."""

    version: int
    step: int
    engines: tuple[str, ...]
    """Engines that serve the version now."""
    evicted: dict[str, str]
    """Engine -> why it does not."""
    prepare_s: float
    """Seconds of copying into the staging memory, in the trainer's thread."""
    transfer_s: float
    """From the first begin to the last end."""
    stall_s: dict[str, float]
    """Engine -> seconds for which the flip paused its generation."""
    verified: tuple[str, ...]
    """Engines of ``engines`` with checksums that were compared with those of the sent weights before they served them."""
    verify_s: dict[str, float]
    """Engine -> seconds that the comparison took."""
    seconds: float
    """The whole push without preparation: reserve, join, transfer, head."""
    bytes: int
    """Size of the weights; each engine receives as many bytes."""
    gb_per_s: Mapping[str, float]
    """Transport -> bytes delivered to its engines in a second, in 10^9; from the first begin to the last end."""


class Pusher:
    """The version protocol of the learner, in one event loop: ``open``, then ``push`` one version at a time.

    ``refresh_view`` and ``serve_requests`` run in the background meanwhile.
    """

    def __init__(
        self,
        bus: Bus,
        config: WeightsConfig,
        *,
        epoch: int,
        directory: Path,
        model_dir: Path | None,
        source: Source,
        at: Reach = HERE,
    ) -> None:
        """``at``: the address at which engines reach this process."""
        self._parts = tuple(RemotePart(place, number, connect_s=config.phase_deadline_s) for number, place in enumerate(source.others, 1))
        self._own, self._memory = source.end, source.memory
        self._deadlines = Deadlines(config.phase_deadline_s, config.load_deadline_s)
        self._bus, self._config, self._epoch, self._at = bus, config, epoch, at
        self._view = LiveView(bus)
        self._registry, self._lease = VersionRegistry(bus), AcceleratorLease(bus)
        self._owns = False
        """The learner has the accelerator: colocated engines have no memory."""
        self._snapshots = SnapshotStore(
            directory, self._registry, keep=config.keep_snapshots, model_dir=model_dir, at=at, keys=admin_keys(bus)
        )
        self._head_staging: StagedModel | None = None
        self.head: VersionRow | None = None
        self._recorded: dict[str, str] | None = None
        """Evicted engines as recorded on the bus; None = as an earlier learner recorded them."""

    async def open(self, stack: AsyncExitStack) -> None:
        """Fence older learners, and serve snapshots. Raises Fenced, BusUnavailable."""
        config = self._config
        keys = await make_keys(self._bus)
        session = await stack.enter_async_context(open_session(headers=keys.headers))
        for part in self._parts:
            stack.push_async_callback(part.close)

        def over_http(row: LiveRow) -> WeightReceiver:
            """Make the HTTP receiver of a live engine."""
            return HttpReceiver(session, row.address, epoch=self._epoch, deadlines=self._deadlines)

        self._groups = PushGroups(
            self._view,
            over_http if config.transport != "handles" else self._by_handles(stack, over_http),
            GroupRules(config.engines_together, self._at, config.backend, self._deadlines, self._own, self._memory, parts=self._parts),
        )
        stack.push_async_callback(self._groups.close)
        self.head = await self._registry.fence(self._epoch)
        await self._record_evicted()
        # Before ``open``, so that a failure in the middle of it closes the part that is open.
        stack.push_async_callback(self._snapshots.close)
        await self._snapshots.open()

    def _by_handles(self, stack: AsyncExitStack, otherwise: Opener) -> Opener:
        """Pass handles to engines that can read this memory; the others get ``otherwise``, and are logged once."""
        from tidemill.weightstore.push.handle_receiver import HandleReceivers

        memory, gpu = self._memory, self._own.uuid if self._config.staging == "cuda" else ""
        assert memory is not None, "weights.transport: handles is staged in memory that engines can read"
        receivers = HandleReceivers(memory, otherwise, epoch=self._epoch, deadlines=self._deadlines, gpu=gpu, parts=self._parts)
        stack.callback(receivers.close)
        return receivers.open

    async def publish_initial(self, where: str, digest: str) -> VersionRow:
        """Publish the weights in the directory ``where`` as version 0, unless there is a head. Returns the head. Raises Fenced."""
        self.head = await self._registry.publish_initial(where, self._epoch, digest=digest)
        return self.head

    async def push(self, copy: Staging, step: int, prepare_s: float) -> PushReport:
        """Push a filled copy as the next version, and release it at the end. Returns the report. Raises PushFailed, Fenced.

        Other ranks have filled theirs of the same number.
        """
        since, row = time.perf_counter(), None
        staging = StagedModel(copy, self._parts, self._deadlines)
        self._deadlines.num_bytes = staging.manifest.num_bytes
        evicted: dict[str, str] = {}
        try:
            # The order matters. Colocated engines need the accelerator for the new weights. The row of a version is there before any engine
            # has it, so a reader of its tokens finds the step; the head moves when the engines have it.
            await self._release_accelerator()
            row = await self._registry.reserve(step, self._epoch, digest=staging.manifest.digest)
            staging.label(row.version, step)
            groups = await self._gather()
            begun = time.perf_counter()
            throughput = Throughput()
            updated = await self._update(groups, staging, evicted, throughput)
            transfer_s = time.perf_counter() - begun
            if len(updated) < self._config.min_engines:
                raise PushFailed(row.version, f"want >= {self._config.min_engines} engines, {len(updated)} took it", evicted)
            await self._publish(row, staging)
            await self._record_evicted()
        except (PushFailed, PartLost, BusError) as error:
            await self._give_up(row, error)
            if isinstance(error, PushFailed | Fenced):
                raise
            raise PushFailed(-1 if row is None else row.version, str(error), evicted) from error
        finally:
            staging.release()
        return _logged(
            PushReport(
                version=row.version,
                step=step,
                engines=tuple(sorted(updated)),
                evicted=evicted,
                prepare_s=prepare_s,
                transfer_s=transfer_s,
                stall_s={id: one.stall_s for id, one in updated.items()},
                verified=tuple(sorted(id for id, one in updated.items() if one.verify_s is not None)),
                verify_s={id: one.verify_s for id, one in updated.items() if one.verify_s is not None},
                seconds=time.perf_counter() - since,
                bytes=staging.manifest.num_bytes,
                gb_per_s=throughput.gb_per_s(staging.manifest.num_bytes),
            )
        )

    async def release(self) -> tuple[str, ...]:
        """Acquire the accelerator: no colocated engine works or has memory until ``resume`` or the next push.

        Waits for engines that are taking memory by themselves (``AcceleratorLease``). Returns the ids of the engines that released their
        memory; the others are evicted and logged. Raises BusUnavailable, Fenced.
        """
        await self._lease.acquire(self._epoch)
        self._owns = True
        await self._lease.wait_until_free()
        groups = await self._groups.reconcile()
        return await self._each([member for group in groups for member in group.members if member.colocated], Member.release)

    async def resume(self) -> tuple[str, ...]:
        """Release the accelerator, and push the head to the colocated engines once more. Returns the ids of those that serve it.

        If this learner has no copy of the head, because another one pushed it, the engines wait for the next push.
        Raises BusUnavailable, Fenced.
        """
        await self._release_accelerator()
        groups = [group for group in await self._groups.reconcile() if group.is_colocated]
        members = [member for group in groups for member in group.members]
        if not members or self.head is None:
            return ()
        head, staging = self.head, None if self._head_staging is None else self._head_staging.hold()
        try:
            if staging is not None:
                return tuple(sorted(await self._update(groups, staging, {}, Throughput())))
            # Version 0 was never pushed; its weights are in the model directory.
            if head.version == 0 and head.snapshot:
                return await self._each(members, lambda member: member.load(head.snapshot, 0))
        except PartLost as error:
            _log.error("engines wait for the next version, this one cannot be sent version=%d error=%s", head.version, error)
            return ()
        finally:
            if staging is not None:
                staging.release()
        _log.warning("engines wait for the next version, there is no copy of version=%d here engines=%d", head.version, len(members))
        return ()

    async def _release_accelerator(self) -> None:
        if self._owns:
            await self._lease.release(self._epoch)
            self._owns = False

    async def _each(self, members: list[Member], work: Callable[[Member], Awaitable[object]]) -> tuple[str, ...]:
        """Run ``work`` for all members at once. Returns the ids of those that succeeded; the others are evicted."""

        async def one(member: Member) -> str:
            """Run ``work`` for one member. Returns its id; "" if it failed and was evicted."""
            try:
                await work(member)
            except ReceiverFailed as error:
                await self._groups.evict(member, str(error))
                return ""
            return member.id

        found = await asyncio.gather(*[one(member) for member in members], return_exceptions=True)
        for id in found:
            if isinstance(id, BaseException):
                raise id
        return tuple(sorted(id for id in found if isinstance(id, str) and id))

    async def _gather(self) -> list[PushGroup]:
        """Return the members in their groups; with fewer than ``min_engines``, wait for more until the deadline."""
        deadline = time.monotonic() + self._config.phase_deadline_s
        while True:
            groups = await self._groups.reconcile()
            present = sum(len(group.members) for group in groups)
            if present >= self._config.min_engines or time.monotonic() >= deadline:
                return groups
            await asyncio.sleep(_GATHER_S)

    async def refresh_view(self) -> None:
        """Run until cancelled: keep the view of the live rows fresh, so that a push knows at once which engines have been silent."""
        while True:
            try:
                await self._view.refresh()
            except BusError as error:
                _log.warning("live rows not read error=%s", error)
            await asyncio.sleep(_POLL_S)

    async def serve_requests(self) -> None:
        """Run until cancelled: write a snapshot when an engine requests one by a row, which it writes again while it waits."""
        while True:
            try:
                async for row in self._bus.rows("weights").watch(WANT, _POLL_S):
                    if row is not None:
                        await self._serve_request(row[0]["version"])
            except BusError as error:
                _log.warning("snapshot requests not read error=%s", error)
            await asyncio.sleep(_POLL_S)

    async def _serve_request(self, version: int) -> None:
        if self._head_staging is not None and self._head_staging.version >= version:
            await self._snapshot_head()
        elif version == 0 and self.head is not None and self.head.version == 0:
            try:
                await self._snapshots.adopt(self.head)
            except (BusError, OSError) as error:
                _log.error("snapshot of version 0 failed error=%s", error)

    async def _update(
        self, groups: list[PushGroup], staging: StagedModel, evicted: dict[str, str], throughput: Throughput
    ) -> dict[str, Updated]:
        """Push to all groups at once. Returns the engines that took the version; the others are evicted, and added to ``evicted``."""
        handles = CUDA_HANDLES if self._config.staging == "cuda" else HOST_HANDLES

        def check_of(member: Member) -> Check | None:
            """Return the comparison of a member's checksums if it is due, else None."""
            return staging.differences if self._config.verify == "always" or self._is_unverified(member) else None

        async def update_group(group: PushGroup) -> dict[str, Updated]:
            """Push to one group and evict the members that failed. Returns the times of the others. Raises PartLost."""
            since, by = time.perf_counter(), group.transport or handles
            outcome = await group.update(staging.version, staging.buckets, check_of)
            throughput.add(by, sum(isinstance(how, Updated) for how in outcome.values()), time.perf_counter() - since)
            failed = {member: how for member, how in outcome.items() if not isinstance(how, Updated)}
            evicted.update({member.id: f"{how.phase}: {how.reason}" for member, how in failed.items()})
            await asyncio.gather(*[self._groups.evict(member, str(how)) for member, how in failed.items()])
            for member in outcome.keys() - failed.keys():
                self._groups.succeeded(member)
            return {member.id: how for member, how in outcome.items() if isinstance(how, Updated)}

        # All groups end before an error is raised: none may go on with a copy that the caller then releases.
        found = await asyncio.gather(*[update_group(group) for group in groups], return_exceptions=True)
        updated: dict[str, Updated] = {}
        for took in found:
            if isinstance(took, BaseException):
                raise took
            updated |= took
        return updated

    def _is_unverified(self, member: Member) -> bool:
        return self._config.verify == "first" and not member.verified

    async def _publish(self, row: VersionRow, staging: StagedModel) -> None:
        """Move the head. Its copy is held until there is a copy of the next head."""
        self.head = await self._registry.publish(row)
        # The copy stays filled as long as it is the head: snapshots of it are written on demand.
        old, self._head_staging = self._head_staging, staging.hold()
        if old is not None:
            old.release()
        if self._config.snapshot_every and row.version % self._config.snapshot_every == 0:
            await self._snapshot_head()

    async def _record_evicted(self) -> None:
        """Record which engines are not pushed to, and why, for `tidemill status`."""
        evicted = dict(self._groups.evicted)
        if evicted == self._recorded:
            return
        try:
            await self._registry.set_evicted(evicted)
            self._recorded = evicted
        except BusError as error:  # the version is published all the same
            _log.warning("evicted engines not recorded error=%s", error)

    async def _give_up(self, row: VersionRow | None, error: Exception) -> None:
        _log.error("push failed version=%s error=%s", None if row is None else row.version, error)
        if row is None:
            return
        try:
            await self._registry.fail(row)
            await self._record_evicted()
        except BusError as second:
            _log.warning("failed push not recorded version=%d error=%s", row.version, second)

    async def _snapshot_head(self) -> None:
        """Write the snapshot of the head from its copy, which is held meanwhile."""
        assert self._head_staging is not None
        staging = self._head_staging.hold()
        try:
            await self._snapshots.put(staging)
        except (BusError, OSError) as error:
            _log.error("snapshot failed version=%d error=%s", staging.version, error)
        finally:
            staging.release()


def _logged(report: PushReport) -> PushReport:
    _log.info(
        "pushed version=%d step=%d engines=%d verified=%d evicted=%d prepare_s=%.3f transfer_s=%.3f seconds=%.3f max_stall_s=%.4f",
        report.version,
        report.step,
        len(report.engines),
        len(report.verified),
        len(report.evicted),
        report.prepare_s,
        report.transfer_s,
        report.seconds,
        max(report.stall_s.values(), default=0.0),
    )
    return report
