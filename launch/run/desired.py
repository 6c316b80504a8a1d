"""Desired numbers of engines, scorers and actors: the rows of the bucket ``wanted``, and the share of each host.

A row names numbers by role: ``host.<h>`` for one host, ``pool.<p>`` for all hosts of a pool together, ``all`` for the
other hosts together. For each role the first row that names it counts, in this order; a total is shared evenly among
the live hosts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill.bus.client.rows import Row, Value
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.subjects import AUTOSCALE_KEY, token

ROLES = ("engine", "scorer", "actor")  # Roles in the order in which their processes are started
ALL = "all"
MOST = 10_000  # Most processes of a role in one row


@dataclass(frozen=True, slots=True)
class LiveHost:
    """A live host."""

    name: str
    pool: str = ""


@dataclass(frozen=True, slots=True)
class DesiredRoles:
    """All rows, read together."""

    rows: Mapping[str, Row]

    def of(self, host: LiveHost, hosts: Sequence[LiveHost], own: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return the number of processes of ``host``, by role; ``hosts``: the live ones, itself included.

        ``own``: its numbers, if it has no row.
        """
        if own and host_key(host.name) not in self.rows:
            return {role: own.get(role, 0) for role in ROLES}
        return {role: self._of(role, host, hosts) for role in ROLES}

    @property
    def revision(self) -> int:
        """Largest revision of the rows; it increases with every change."""
        return max((revision for _, revision in self.rows.values()), default=0)

    def total(self, role: str) -> int:
        """Return the number of all hosts together."""
        return self._count(ALL, role)

    def _of(self, role: str, host: LiveHost, hosts: Sequence[LiveHost]) -> int:
        row = self._row_for(role, host)
        if row == host_key(host.name):
            return self._count(row, role)
        # ``tidemill up`` first, then by name: the first hosts get one more when the total cannot be divided.
        names = [live_host.name for live_host in hosts if self._row_for(role, live_host) == row]
        sharing = sorted(names, key=lambda name: (name != "up", name))
        total, position = self._count(row, role), sharing.index(host.name)
        return total // len(sharing) + (position < total % len(sharing))

    def _row_for(self, role: str, host: LiveHost) -> str:
        for key in (host_key(host.name), pool_key(host.pool)):
            if key in self.rows and role in self.rows[key][0]:
                return key
        return ALL

    def _count(self, key: str, role: str) -> int:
        count = self.rows[key][0].get(role, 0) if key in self.rows else 0
        return max(0, min(MOST, count)) if isinstance(count, int) else 0


def host_key(host: str) -> str:
    """Return the key of the row of one host."""
    return f"host.{token(host)}"


def pool_key(pool: str) -> str:
    """Return the key of the row of a pool."""
    return f"pool.{token(pool)}"


async def read(bus: Bus) -> DesiredRoles:
    """Return the desired numbers as they are now. Raises BusUnavailable."""
    rows = await bus.rows("wanted").all()
    return DesiredRoles({key: row for key, row in rows.items() if key != AUTOSCALE_KEY})


async def change(bus: Bus, key: str, counts: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Set the numbers of some roles in one row, keep the others; return (before, after). Raises BusUnavailable."""

    def changed(before: Value | None) -> Value:
        return {**(before or {}), **counts}

    before, after = await bus.rows("wanted").change(key, changed, replace_unreadable=True)
    return before or {}, after


async def begin(bus: Bus, counts: Mapping[str, int], *, keep: bool) -> dict[str, int]:
    """Set the numbers of all hosts at a run's start; return them. ``keep``: numbers of `tidemill scale` stay.

    A row without scorers is one of a run that had none: it gets the number in ``counts``.
    """

    def begun(before: Value | None) -> Value:
        counts_before = dict(before or {}) if keep else {}
        if not counts_before.get("scorer"):
            counts_before.pop("scorer", None)
        return {**counts, **counts_before}

    _, after = await bus.rows("wanted").change(ALL, begun, replace_unreadable=True)
    return dict(after)


def parse(words: Sequence[str]) -> dict[str, int]:
    """Return numbers by role from words such as ``actors=8``. Raises ValueError for any other word."""
    counts: dict[str, int] = {}
    for word in words:
        name, equals, number = word.partition("=")
        role = name.removesuffix("s")
        if not equals or role not in ROLES or not number.isdecimal() or int(number) > MOST:
            raise ValueError(f"want actors=N, engines=N or scorers=N with N from 0 to {MOST}, got {word!r}")
        counts[role] = int(number)
    return counts
