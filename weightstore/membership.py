"""Who takes part in a push, and with whom: the engines that say they live, less those that failed lately, in cohorts."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bus.live import LiveView
from bus.messages import LiveRow
from weightstore.cohort import Cohort, Cohorts
from weightstore.member import Member, identity
from weightstore.port import WeightReceiver

_log = logging.getLogger(__name__)

PHASES = ("joining", "catching up", "serving", "stale")
"""An engine in one of these phases takes part."""
_LONGEST_REST_S = 600.0
Opener = Callable[[LiveRow], WeightReceiver]
"""Makes the receiver of an engine that lives."""


@dataclass(slots=True)
class _Rest:
    """An engine that failed is asked again at once, then after ever longer rests: each try may cost a deadline."""

    failures: int = 0
    until_s: float = field(default=0.0)


class Membership:
    """The members, reconciled with the live rows before every push."""

    def __init__(self, view: LiveView, open_receiver: Opener, cohorts: Cohorts) -> None:
        self._view, self._open_receiver, self._together = view, open_receiver, cohorts
        self._members: dict[str, Member] = {}
        self._cohorts: list[Cohort] = []
        self._rests: dict[tuple[str, str, int], _Rest] = {}
        self.evicted: dict[str, str] = {}
        """Engine that lives -> why it was evicted; until it has taken a version, or another process has its name."""

    async def reconcile(self) -> list[Cohort]:
        """Forget the engines that have gone, take in the new ones (they join when they are first updated). Raises BusUnavailable."""
        alive = {row.id: row for row in await self._view.alive("engine")}
        rows = {row.id: row for row in alive.values() if row.phase in PHASES and row.address}
        resting = {identity(row) for row in rows.values()} & self._rests.keys()
        self.evicted = {id: why for id, why in self.evicted.items() if any(id == one[0] for one in resting)}
        for member in list(self._members.values()):
            row = rows.get(member.id)
            if row is None or identity(row) != member.identity:
                _log.info("push group: left engine=%s reason=%s", member.id, "restarted" if row else "no longer live and taking part")
                await self._drop(member, leave=row is None and member.id in alive)
        for row in rows.values():
            # one whose memory the learner needs cannot be left alone
            if row.id not in self._members and (row.capabilities.colocated or self._rested(row)):
                self._take_in(row)
                _log.info("push group: new engine=%s url=%s", row.id, row.address)
        return list(self._cohorts)

    async def evict(self, member: Member, reason: str) -> None:
        """Take no further part in this push; the engine is stale until a completed update."""
        rest = self._rests.setdefault(member.identity, _Rest())
        rest.failures += 1
        self.evicted[member.id] = reason
        pause_s = min(self._together.deadline_s * 2 ** (rest.failures - 2), _LONGEST_REST_S) if rest.failures > 1 else 0.0
        rest.until_s = time.monotonic() + pause_s
        _log.warning("push group: evicted engine=%s failures=%d next_try_in_s=%.0f reason=%s", member.id, rest.failures, pause_s, reason)
        await self._drop(member, leave=True)

    def succeeded(self, member: Member) -> None:
        self._rests.pop(member.identity, None)
        self.evicted.pop(member.id, None)

    async def close(self) -> None:
        await asyncio.gather(*[self._drop(member, leave=True) for member in list(self._members.values())])

    def _take_in(self, row: LiveRow) -> None:
        """Into the first cohort that has room: its channel is opened anew at the next push."""
        member = Member(row, self._open_receiver(row), deadline_s=self._together.deadline_s)
        cohort = next((cohort for cohort in self._cohorts if cohort.has_room(member)), None)
        if cohort is None:
            cohort = Cohort(self._together)
            self._cohorts.append(cohort)
        cohort.members.append(member)
        self._members[row.id] = member

    async def _drop(self, member: Member, *, leave: bool) -> None:
        if self._members.get(member.id) is member:
            del self._members[member.id]
        await member.close(leave=leave)
        for cohort in [cohort for cohort in self._cohorts if member in cohort.members]:
            cohort.members.remove(member)
            if not cohort.members:
                cohort.close()
                self._cohorts.remove(cohort)

    def _rested(self, row: LiveRow) -> bool:
        rest = self._rests.get(identity(row))
        return rest is None or time.monotonic() >= rest.until_s
