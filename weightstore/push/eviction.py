"""The engines that take part in pushes: new ones are added, those that have gone are dropped, those that fail are evicted.

An evicted engine misses the rest of that push. It is tried again in the next one, and after each further failure only after a longer pause.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill.bus.liveness.heartbeats import LiveView
from tidemill.bus.wire.rows import LiveRow
from tidemill.weightstore.push.member import Member, identity
from tidemill.weightstore.push.push_group import GroupRules, PushGroup
from tidemill.weightstore.transport.port import WeightReceiver

_log = logging.getLogger(__name__)

PHASES = ("joining", "catching up", "serving", "stale")
"""An engine in one of these phases takes part."""
_LONGEST_PAUSE_S = 600.0
"""Bound of the pause between two attempts with an engine that keeps failing."""

Opener = Callable[[LiveRow], WeightReceiver]
"""Makes the receiver of a live engine."""


@dataclass(slots=True)
class _Backoff:
    """An engine that failed is retried in the next push, then after longer and longer pauses: each attempt may cost a deadline."""

    failures: int = 0
    until_s: float = field(default=0.0)


class PushGroups:
    """The groups and their members, reconciled with the live rows before every push."""

    def __init__(self, view: LiveView, open_receiver: Opener, rules: GroupRules) -> None:
        self._view, self._open_receiver, self._rules = view, open_receiver, rules
        self._members: dict[str, Member] = {}
        self._groups: list[PushGroup] = []
        self._backoffs: dict[tuple[str, str, int], _Backoff] = {}
        self._without_nccl: dict[tuple[str, str, int], str] = {}
        """Engine -> why it gets no weights over NCCL, as logged."""
        self.evicted: dict[str, str] = {}
        """Live engine -> why it was evicted; removed when it has taken a version or another process has its name."""

    async def reconcile(self) -> "list[PushGroup]":
        """Drop the engines that have gone, add the new ones (they join when they are first updated).

        Returns the groups. Raises BusUnavailable.
        """
        alive = {row.id: row for row in await self._view.alive("engine")}
        rows = {row.id: row for row in alive.values() if row.phase in PHASES and row.address}
        failed = {identity(row) for row in rows.values()} & self._backoffs.keys()
        self.evicted = {id: why for id, why in self.evicted.items() if any(id == one[0] for one in failed)}
        for member in list(self._members.values()):
            row = rows.get(member.id)
            if row is None or identity(row) != member.identity:
                _log.info("push group: left engine=%s reason=%s", member.id, "restarted" if row else "no longer live and taking part")
                # An engine that is live and takes no part any more is asked to leave. One that died or restarted has no group left.
                await self._drop(member, leave=row is None and member.id in alive)
        for row in rows.values():
            # a colocated engine is never left out: the learner needs its memory
            if row.id not in self._members and (row.capabilities.colocated or self._is_due(row)) and self._add(row):
                _log.info("push group: new engine=%s url=%s", row.id, row.address)
        return list(self._groups)

    async def evict(self, member: Member, reason: str) -> None:
        """Leave the engine out of this push; it is stale until an update is completed."""
        backoff = self._backoffs.setdefault(member.identity, _Backoff())
        backoff.failures += 1
        self.evicted[member.id] = reason
        pause_s = min(self._rules.deadlines.phase_s * 2 ** (backoff.failures - 2), _LONGEST_PAUSE_S) if backoff.failures > 1 else 0.0
        backoff.until_s = time.monotonic() + pause_s
        _log.warning("push group: evicted engine=%s failures=%d next_try_in_s=%.0f reason=%s", member.id, backoff.failures, pause_s, reason)
        await self._drop(member, leave=True)

    def succeeded(self, member: Member) -> None:
        """Record that the engine has taken a version: it is no longer evicted, and its failures are forgotten."""
        self._backoffs.pop(member.identity, None)
        self.evicted.pop(member.id, None)

    async def close(self) -> None:
        """Ask all engines to leave their groups, and release their receivers."""
        await asyncio.gather(*[self._drop(member, leave=True) for member in list(self._members.values())])

    def _add(self, row: LiveRow) -> bool:
        """Add the engine to the first group that has room; the channel of that group is opened anew at the next push.

        Returns False for an engine that is refused: it cannot have NCCL, and nothing else is allowed.
        """
        receiver = self._open_receiver(row)
        backend, reason = ("", "") if receiver.carries else self._rules.backend_of(row)
        if reason:
            self._report(row, backend, reason)
            if not backend:
                receiver.close()
                self.evicted[row.id] = f"weights.backend: nccl is not possible: {reason}"
                return False
        member = Member(row, receiver, deadlines=self._rules.deadlines, backend=backend)
        group = next((group for group in self._groups if group.has_room(member)), None)
        if group is None:
            group = PushGroup(self._rules)
            self._groups.append(group)
        group.members.append(member)
        self._members[row.id] = member
        return True

    def _report(self, row: LiveRow, backend: str, reason: str) -> None:
        """Log once why an engine gets no weights over NCCL, unless learner and engine are both on CPUs, where none is expected."""
        known = self._without_nccl.get(identity(row)) == reason
        self._without_nccl[identity(row)] = reason
        if known or (backend and not self._rules.own.uuid and not row.capabilities.devices):
            return
        if backend:
            _log.warning("weights go over %s engine=%s reason=%s", backend, row.id, reason)
        else:
            _log.error("push group: refused engine=%s weights.backend=nccl reason=%s", row.id, reason)

    async def _drop(self, member: Member, *, leave: bool) -> None:
        if self._members.get(member.id) is member:
            del self._members[member.id]
        await member.close(leave=leave)
        for group in [group for group in self._groups if member in group.members]:
            group.members.remove(member)
            if not group.members:
                group.close()
                self._groups.remove(group)

    def _is_due(self, row: LiveRow) -> bool:
        backoff = self._backoffs.get(identity(row))
        return backoff is None or time.monotonic() >= backoff.until_s
