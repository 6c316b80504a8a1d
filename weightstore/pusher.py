"""One push after the other, and snapshots of the head in between: the work of the publisher's thread.

reserve a version -> reconcile members -> each cohort, at its own pace: begin, buckets, end -> head moves
                                                      | a member fails: evicted
an engine wants a snapshot -> written from the head's staging, served over HTTP

Where engines share the learner's accelerator they are released before each step, and a push, or ``resume``, gives them memory again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from bus.connection import Bus
from bus.errors import BusError, Fenced
from bus.keys import admin_keys, make_keys
from bus.live import LiveView
from bus.messages import LiveRow, VersionRow
from bus.reach import HERE, Reach
from weightstore.cohort import Cohort, Cohorts
from weightstore.config import WeightsConfig
from weightstore.errors import PushFailed, ReceiverFailed
from weightstore.handles import Memory
from weightstore.http_receiver import HttpReceiver
from weightstore.member import Check, Member, Updated
from weightstore.membership import Membership, Opener
from weightstore.port import WeightReceiver
from weightstore.push import PushReport
from weightstore.registry import WANT, VersionRegistry
from weightstore.shelf import Shelf
from weightstore.staging import Staging
from weightstore.turns import Turns

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
_GATHER_S = 0.25


class Pusher:
    """Everything it owns lives in one loop. ``open`` it, run ``look`` and ``answer_wants`` beside, ``push`` one at a time."""

    def __init__(
        self,
        bus: Bus,
        config: WeightsConfig,
        *,
        epoch: int,
        directory: Path,
        model_dir: Path | None,
        memory: Memory | None = None,
        at: Reach = HERE,
    ) -> None:
        """``memory``: what the stagings are made of, where handles of it can be given; ``at``: where engines reach this process."""
        self._bus, self._config, self._epoch, self._memory, self._at = bus, config, epoch, memory, at
        self._view = LiveView(bus)
        self._registry, self._turns = VersionRegistry(bus), Turns(bus)
        self._has_turn = False
        """The learner's memory is in use: colocated engines are to have none."""
        self._shelf = Shelf(directory, self._registry, keep=config.keep_snapshots, model_dir=model_dir, at=at, keys=admin_keys(bus))
        self._head_staging: Staging | None = None
        self.head: VersionRow | None = None
        self._noted: dict[str, str] | None = None
        """Evicted engines, as they are recorded; None = as an earlier learner left it."""

    async def open(self, stack: AsyncExitStack) -> None:
        """Shut out older learners, and serve snapshots. Raises Fenced, BusUnavailable."""
        config = self._config
        keys = await make_keys(self._bus)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, headers=keys.headers))

        def over_http(row: LiveRow) -> WeightReceiver:
            return HttpReceiver(session, row.address, epoch=self._epoch, deadline_s=config.phase_deadline_s)

        self._members = Membership(
            self._view,
            over_http if self._memory is None else self._by_handles(stack, self._memory, over_http),
            Cohorts(config.engines_together, self._at, resolve_backend(config.backend), config.phase_deadline_s),
        )
        stack.push_async_callback(self._members.close)
        self.head = await self._registry.fence(self._epoch)
        await self._note_evicted()
        stack.push_async_callback(self._shelf.close)
        await self._shelf.open()

    def _by_handles(self, stack: AsyncExitStack, memory: Memory, otherwise: Opener) -> Opener:
        """Handles to engines of this place, and what there is otherwise to the others, which are named once."""
        from weightstore.handle_receiver import HandleReceivers

        receivers = HandleReceivers(memory, otherwise, epoch=self._epoch, deadline_s=self._config.phase_deadline_s)
        stack.callback(receivers.close)
        return receivers.open

    async def publish_initial(self, where: str, digest: str) -> VersionRow:
        self.head = await self._registry.publish_initial(where, self._epoch, digest=digest)
        return self.head

    async def push(self, staging: Staging, step: int, prepare_s: float) -> PushReport:
        """Push a filled copy, which this releases in the end. Raises PushFailed, Fenced."""
        since, row = time.perf_counter(), None
        evicted: dict[str, str] = {}
        try:
            await self._give_turn()
            row = await self._registry.reserve(step, self._epoch, digest=staging.manifest.digest)
            staging.version, staging.step = row.version, step
            cohorts = await self._gather()
            begun = time.perf_counter()
            updated = await self._update(cohorts, staging, evicted)
            transfer_s = time.perf_counter() - begun
            if len(updated) < self._config.min_engines:
                raise PushFailed(row.version, f"want >= {self._config.min_engines} engines, {len(updated)} took it", evicted)
            await self._publish(row, staging)
            await self._note_evicted()
        except (PushFailed, BusError) as error:
            await self._give_up(row, error)
            if isinstance(error, PushFailed | Fenced):
                raise
            raise PushFailed(-1 if row is None else row.version, str(error), evicted) from error
        finally:
            staging.release()
        return _told(
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
            )
        )

    async def release(self) -> tuple[str, ...]:
        """Take the turn: no colocated engine works, or has memory, until ``resume`` or the next push; those that gave it up.

        Those that take memory by themselves (``Turns``) are waited for.
        One that does not is evicted, and named in the log. Raises BusUnavailable, Fenced.
        """
        await self._turns.take(self._epoch)
        self._has_turn = True
        await self._turns.until_nobody_takes()
        cohorts = await self._members.reconcile()
        return await self._each([member for cohort in cohorts for member in cohort.members if member.colocated], Member.release)

    async def resume(self) -> tuple[str, ...]:
        """Give the turn, and colocated engines the head once more; those that serve it.

        Whoever cannot be given it (this learner has no copy of a head that another one has pushed) waits for the next push.
        Raises BusUnavailable, Fenced.
        """
        await self._give_turn()
        cohorts = [cohort for cohort in await self._members.reconcile() if cohort.is_colocated]
        members = [member for cohort in cohorts for member in cohort.members]
        if not members or self.head is None:
            return ()
        head, staging = self.head, None if self._head_staging is None else self._head_staging.hold()
        try:
            if staging is not None:
                return tuple(sorted(await self._update(cohorts, staging, {})))
            if head.version == 0 and head.snapshot:
                return await self._each(members, lambda member: member.load(head.snapshot, 0))
        finally:
            if staging is not None:
                staging.release()
        _log.warning("engines wait for the next version, there is no copy of version=%d here engines=%d", head.version, len(members))
        return ()

    async def _give_turn(self) -> None:
        if self._has_turn:
            await self._turns.give(self._epoch)
            self._has_turn = False

    async def _each(self, members: list[Member], work: Callable[[Member], Awaitable[object]]) -> tuple[str, ...]:
        """All at once; the ids of those that did it. Those that fail are evicted."""

        async def one(member: Member) -> str:
            try:
                await work(member)
            except ReceiverFailed as error:
                await self._members.evict(member, str(error))
                return ""
            return member.id

        found = await asyncio.gather(*[one(member) for member in members], return_exceptions=True)
        for id in found:
            if isinstance(id, BaseException):
                raise id
        return tuple(sorted(id for id in found if isinstance(id, str) and id))

    async def _gather(self) -> list[Cohort]:
        """The members in their cohorts; with too few of them, those that come within the deadline are waited for."""
        deadline = time.monotonic() + self._config.phase_deadline_s
        while True:
            cohorts = await self._members.reconcile()
            present = sum(len(cohort.members) for cohort in cohorts)
            if present >= self._config.min_engines or time.monotonic() >= deadline:
                return cohorts
            await asyncio.sleep(_GATHER_S)

    async def look(self) -> None:
        """For ever: keep the view of the live rows fresh, so that a push knows at once who has been silent."""
        while True:
            try:
                await self._view.refresh()
            except BusError as error:
                _log.warning("live rows not read error=%s", error)
            await asyncio.sleep(_LOOK_S)

    async def answer_wants(self) -> None:
        """For ever: an engine that wants a snapshot writes a row, and writes it again while it waits."""
        while True:
            try:
                async for row in self._bus.rows("weights").watch(WANT, _LOOK_S):
                    if row is not None:
                        await self._answer_want(row[0]["version"])
            except BusError as error:
                _log.warning("wants not read error=%s", error)
            await asyncio.sleep(_LOOK_S)

    async def _answer_want(self, version: int) -> None:
        if self._head_staging is not None and self._head_staging.version >= version:
            await self._snapshot_head()
        elif version == 0 and self.head is not None and self.head.version == 0:
            try:
                await self._shelf.adopt(self.head)
            except (BusError, OSError) as error:
                _log.error("snapshot of version 0 failed error=%s", error)

    async def _update(self, cohorts: list[Cohort], staging: Staging, evicted: dict[str, str]) -> dict[str, Updated]:
        """To all cohorts at once, each at its own pace; those that took it. Those that fail are evicted, and named."""

        def check_of(member: Member) -> Check | None:
            return staging.differences if self._config.verify == "always" or self._wants_first(member) else None

        async def one(cohort: Cohort) -> dict[str, Updated]:
            outcome = await cohort.update(staging.version, staging.buckets, check_of)
            failed = {member: how for member, how in outcome.items() if not isinstance(how, Updated)}
            evicted.update({member.id: f"{how.phase}: {how.reason}" for member, how in failed.items()})
            await asyncio.gather(*[self._members.evict(member, str(how)) for member, how in failed.items()])
            for member in outcome.keys() - failed.keys():
                self._members.succeeded(member)
            return {member.id: how for member, how in outcome.items() if isinstance(how, Updated)}

        found = await asyncio.gather(*[one(cohort) for cohort in cohorts], return_exceptions=True)
        updated: dict[str, Updated] = {}
        for took in found:
            if isinstance(took, BaseException):
                raise took
            updated |= took
        return updated

    def _wants_first(self, member: Member) -> bool:
        return self._config.verify == "first" and not member.verified

    async def _publish(self, row: VersionRow, staging: Staging) -> None:
        """Move the head; its copy is kept until the next head's is."""
        self.head = await self._registry.publish(row)
        old, self._head_staging = self._head_staging, staging.hold()
        if old is not None:
            old.release()
        if self._config.snapshot_every and row.version % self._config.snapshot_every == 0:
            await self._snapshot_head()

    async def _note_evicted(self) -> None:
        """Who looks at the run sees which engines are not pushed to, and why."""
        evicted = dict(self._members.evicted)
        if evicted == self._noted:
            return
        try:
            await self._registry.set_evicted(evicted)
            self._noted = evicted
        except BusError as error:  # the version is published all the same
            _log.warning("evicted engines not recorded error=%s", error)

    async def _give_up(self, row: VersionRow | None, error: Exception) -> None:
        _log.error("push failed version=%s error=%s", None if row is None else row.version, error)
        if row is None:
            return
        try:
            await self._registry.fail(row)
            await self._note_evicted()
        except BusError as second:
            _log.warning("failed push not recorded version=%d error=%s", row.version, second)

    async def _snapshot_head(self) -> None:
        """Write the head's snapshot from its copy, which is held meanwhile."""
        assert self._head_staging is not None
        staging = self._head_staging.hold()
        try:
            await self._shelf.put(staging)
        except (BusError, OSError) as error:
            _log.error("snapshot failed version=%d error=%s", staging.version, error)
        finally:
            staging.release()


def resolve_backend(name: str) -> str:
    """``auto`` is gloo: it works between any two processes, and an engine lost over NCCL can take this process with it."""
    return "gloo" if name == "auto" else name


def _told(report: PushReport) -> PushReport:
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
