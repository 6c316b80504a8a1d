"""Further readers of SAMPLES, registered by name: trimming waits for them or not, by the policy of each.

A row ``cursor.<name>`` of the bucket ``run`` holds a reader's row: all samples up to its floor are processed. The
learner's own row is in its checkpoint, and in no row.
"""

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from tidemill.bus.client.rows import Rows, Value
from tidemill.bus.errors import BusError, DetailedError, NotFound, StreamReplaced
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.samples import Received
from tidemill.bus.wire.messages import Cursor
from tidemill.bus.wire.rows import ReaderRow, row_of
from tidemill.bus.wire.subjects import nonce, token

WAIT, LEAVE = "wait", "leave"
"""Policies: trimming waits for the reader (until the stream is too full), or goes on without it."""
_PREFIX = "cursor"


class CursorTaken(DetailedError, BusError):
    """Another process has taken over this name."""

    name: str
    template = "cursor {name}: taken over by another reader of this name; this one ends"


class Cursors:
    """The registered readers of a run, for trimming and for display."""

    def __init__(self, bus: Bus) -> None:
        self._rows = bus.rows("run")

    async def all(self) -> dict[str, ReaderRow]:
        """Return the readers by name. Raises BusUnavailable."""
        rows = await self._rows.all(_PREFIX)
        return {key.removeprefix(f"{_PREFIX}."): row_of(ReaderRow, value) for key, (value, _) in rows.items()}

    async def first_needed(self, created: str) -> int | None:
        """Return the smallest sequence that a waiting reader of the stream needs; None for none."""
        waiting = [row.floor + 1 for row in (await self.all()).values() if _waits(row, created)]
        return min(waiting, default=None)

    async def give_up(self, below: int, created: str) -> list[str]:
        """Stop waiting for readers that need a message before ``below``. Returns their names."""
        late = [name for name, row in (await self.all()).items() if _waits(row, created) and row.floor + 1 < below]
        for name in late:
            await _change(self._rows, name, given_up=True)
        return late

    async def drop(self, name: str) -> None:
        """Remove a reader. Raises NotFound."""
        if not (await self._rows.read(_key(name)))[1]:
            raise NotFound("cursor", name)
        await self._rows.delete(_key(name))


class Reader:
    """A registered reader of SAMPLES: reads from its position on, and moves it."""

    def __init__(self, bus: Bus, name: str, row: ReaderRow, *, is_new: bool) -> None:
        self._bus, self._rows, self.name, self.row = bus, bus.rows("run"), name, row
        self._is_new = is_new

    @classmethod
    async def open(cls, bus: Bus, name: str, *, policy: str = WAIT, owner: str = "") -> "Reader":
        """Register under ``name``, or continue from the last reader of this name, which is refused from now on.

        A new one begins at the first sample there is. Raises StreamReplaced when the row is of another stream,
        ValueError for an unknown policy, BusUnavailable.
        """
        if policy not in (WAIT, LEAVE):
            raise ValueError(f"policy: want {WAIT} or {LEAVE}, got {policy!r}")
        start, mine = await bus.samples.cursor(), f"{owner or bus.name} {nonce()}"

        def taken_over(value: Value | None) -> Value:
            before = None if value is None else row_of(ReaderRow, value)
            if before is not None and before.created != start.created:
                raise StreamReplaced(f"cursor {name}", before.created, start.created)
            floor = start.floor if before is None else before.floor
            return dataclasses.asdict(ReaderRow(created=start.created, floor=floor, policy=policy, owner=mine))

        before, after = await bus.rows("run").change(_key(name), taken_over, replace_unreadable=True)
        return cls(bus, name, row_of(ReaderRow, after), is_new=before is None)

    async def read(self, *, vocab_size: int | None = None, check: bool = True) -> AsyncIterator[Received]:
        """Yield every sample after its position, in stream order, for ever. Raises StreamTrimmed, StreamReplaced."""
        # A new reader begins at the first sample there is when it reads, even if those at its position have been
        # trimmed meanwhile.
        cursor = None if self._is_new else Cursor(created=self.row.created, floor=self.row.floor)
        async for received in self._bus.samples.read(cursor, vocab_size=vocab_size, check=check):
            yield received

    async def advance(self, floor: int) -> None:
        """Record that samples up to ``floor``, which never falls, are processed. Raises CursorTaken, BusUnavailable."""
        if floor > self.row.floor:
            self._is_new = False
            self.row = await _change(self._rows, self.name, owner=self.row.owner, floor=floor)

    async def leave(self) -> None:
        """Remove the registration. Raises CursorTaken."""
        value, _ = await self._rows.read(_key(self.name))
        if value is not None and value.get("owner") != self.row.owner:
            raise CursorTaken(self.name)
        await self._rows.delete(_key(self.name))


def _waits(row: ReaderRow, created: str) -> bool:
    return row.policy == WAIT and not row.given_up and row.created == created


async def _change(rows: Rows, name: str, *, owner: str | None = None, **changes: Any) -> ReaderRow:
    """Change a row by compare-and-set; with ``owner``, only while the row names it. Raises NotFound, CursorTaken."""

    def changed(value: Value | None) -> Value:
        if value is None:
            raise NotFound("cursor", name)
        row = row_of(ReaderRow, value)
        if owner is not None and row.owner != owner:
            raise CursorTaken(name)
        new = dataclasses.replace(row, **changes)
        return dataclasses.asdict(dataclasses.replace(new, floor=max(row.floor, new.floor)))

    return row_of(ReaderRow, (await rows.change(_key(name), changed, replace_unreadable=True)).after)


def _key(name: str) -> str:
    return f"{_PREFIX}.{token(name)}"
