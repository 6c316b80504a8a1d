"""Liveness of processes: rows renewed by heartbeats, aged by the reader's own clock, and rows of waits."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from tidemill.bus.client.rows import Value
from tidemill.bus.errors import BusError, WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter, beside, ended
from tidemill.bus.system.usage import UseMeter, log_file
from tidemill.bus.wire.rows import LiveRow, row_of
from tidemill.bus.wire.subjects import token

_log = logging.getLogger(__name__)

_BUCKET = "live"
_PARENTS = ("host", "up")  # Roles with children that have rows of their own
_WAITING_UPDATE_S, _WAITING_LOG_S = 1.0, 30.0  # Intervals in which ``Waiting`` writes its row, and its log line
_PERIODS = 5  # Heartbeat periods after which a write that is not acknowledged is made again
_OBSERVED: ContextVar["list[HeartbeatPublisher] | None"] = ContextVar("observed", default=None)


@contextmanager
def observed_heartbeats() -> Iterator["Sequence[HeartbeatPublisher]"]:
    """Yield a list that has, while entered, the publishers of this task and of the tasks below it; the newest last."""
    publishers = list[HeartbeatPublisher]()
    token = _OBSERVED.set(publishers)
    try:
        yield publishers
    finally:
        _OBSERVED.reset(token)


@cache
def release() -> str:
    """Return the version of the installed package; empty when it runs from files alone."""
    try:
        return version("tidemill")
    except PackageNotFoundError:
        return ""


class HeartbeatPublisher:
    """Async context manager: writes the row ``<role>.<id>`` every ``every_s``, and removes it on a clean exit.

    It does not end because the bus is away: it retries, and ``last_error`` has the reason.
    """

    def __init__(self, bus: Bus, row: LiveRow, every_s: float = 1.0) -> None:
        self.row, self.run = dataclasses.replace(row, release=release(), log=log_file()), bus.run
        self.last_error = ""  # Empty = the last write succeeded
        self.written_s = float("-inf")  # Monotonic time of the last write that succeeded
        self._bus, self._rows, self._every_s = bus, bus.rows(_BUCKET), every_s
        self._waiter, self._meter = Waiter(), UseMeter(children=row.role not in _PARENTS)
        self._use_failed = False
        self._beating: asyncio.Task[None] | None = None
        self._ending = False
        # States of the row so far, and the number of them at the state that was stored last
        self._changes, self._stored = 1, 0
        self._written = Waiter()
        self._observed = _OBSERVED.get()

    def update(self, **changes: Any) -> None:
        """Change fields of the row, which is written at once."""
        self.row = dataclasses.replace(self.row, **changes)
        self._changes += 1
        self._waiter.wake()

    async def stored(self) -> None:
        """Return when the bus has the row as it is now, or a newer one, however long the bus is away."""
        changes = self._changes
        while self._stored < changes:
            await self._written.wait()

    async def __aenter__(self) -> Self:
        self._beating = asyncio.create_task(self._beat(), name=f"heartbeat {_key(self.row)}")
        if self._observed is not None:
            self._observed.append(self)
        return self

    async def __aexit__(self, exc_type: object, *exc: object) -> None:
        assert self._beating is not None
        if self._observed is not None:
            self._observed.remove(self)
        self._ending = True
        self._meter.end()
        self._waiter.wake()
        within_s = (_PERIODS if self._bus.connected else 1) * self._every_s
        if exc_type is None:  # a row in flight may be stored after its own removal: wait for it
            await asyncio.wait({self._beating}, timeout=within_s)
        await ended(self._beating)
        if exc_type is not None:
            return
        try:
            async with asyncio.timeout(within_s):
                await self._rows.delete(_key(self.row))
        except (BusError, TimeoutError) as error:
            _log.warning("live row not removed key=%s error=%s", _key(self.row), error)

    async def _beat(self) -> None:
        timeout_s = _PERIODS * self._every_s
        while not self._ending:
            changes = self._changes
            try:
                row = dataclasses.asdict(self.row) | {"unreadable": str(self._bus.refusals), "use": self._use()}
                async with asyncio.timeout(timeout_s):
                    await self._rows.put(_key(self.row), row)
                self.last_error, self.written_s, self._stored = "", time.monotonic(), changes
                self._written.wake()
            except (BusError, TimeoutError) as error:
                self.last_error = str(error) or await self._bus.full() or f"no answer for {timeout_s:.1f} s"
                _log.warning("heartbeat unsent key=%s error=%s", _key(self.row), self.last_error)
            await self._waiter.wait(self._every_s)

    def _use(self) -> dict[str, Any]:
        """Return the use of the machine; empty where it cannot be read: the row matters more."""
        try:
            return self._meter.read(self.row.capabilities.devices)
        except Exception as error:  # for example no further thread may be started
            if not self._use_failed:
                _log.warning(
                    "use of the machine not read, its row goes on without key=%s error=%r", _key(self.row), error
                )
            self._use_failed = True
            return {}


class LiveView:
    """The rows, with the times of their changes on this process' monotonic clock: no clocks are compared."""

    def __init__(self, bus: Bus, dead_after_s: float = 5.0) -> None:
        self._bus, self._rows, self._refusals, self.dead_after_s = bus, bus.rows(_BUCKET), bus.refusals, dead_after_s
        self._seen: dict[str, tuple[int, float]] = {}

    async def refresh(self, role: str = "") -> list[tuple[LiveRow, float]]:
        """Return (row, seconds since its revision changed), by role and id, of all roles or one. Raises BusUnavailable.

        A row seen for the first time counts as just changed, and so does every row while the bus is full. Time in which
        the bus was away counts as age: check ``bus.connected`` too, or an outage looks like dead processes.
        """
        rows, now = await self._rows.all(role), time.monotonic()
        kept = {key: change for key, change in self._seen.items() if role and not key.startswith(f"{role}.")}
        self._seen = kept | {key: self._changed(key, revision, now) for key, (_, revision) in rows.items()}
        if any(now - self._seen[key][1] > self.dead_after_s for key in rows) and await self._bus.full():
            self._seen = kept | {key: (revision, now) for key, (_, revision) in rows.items()}
        parsed = [(self._row(key, *row), now - self._seen[key][1]) for key, row in sorted(rows.items())]
        return [(row, age) for row, age in parsed if row is not None]

    def _row(self, key: str, value: Value, revision: int) -> LiveRow | None:
        return self._refusals.read(_BUCKET, f"{key} (revision {revision})", partial(_parse, key, value))

    async def alive(self, role: str = "") -> list[LiveRow]:
        """Return the rows, of all roles or one, that changed within ``dead_after_s``, after a refresh."""
        return [row for row, age in await self.refresh(role) if age <= self.dead_after_s]

    def on_change(self, role: str, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """While entered, call ``wake`` at writes of a role's rows. Some may be missed, so callers also refresh."""
        return self._rows.on_change(f"{token(role)}.*", wake)

    def _changed(self, key: str, revision: int, now: float) -> tuple[int, float]:
        change = self._seen.get(key)
        return change if change is not None and change[0] == revision else (revision, now)


async def processes(bus: Bus, *, look_s: float = 2.0) -> list[tuple[LiveRow, float]]:
    """Return (row, age) of every process, by two reads ``look_s`` apart: for a command that has just started.

    Age is 0 when the row changed in between, else ``look_s``.
    """
    view = LiveView(bus)
    await view.refresh()
    await asyncio.sleep(look_s)
    return await view.refresh()


def _key(row: LiveRow) -> str:
    return f"{token(row.role)}.{token(row.id)}"


def _parse(key: str, value: Value) -> LiveRow:
    """Return the row. Raises WireError for a row that names another process than its key."""
    row = row_of(LiveRow, value)
    if _key(row) != key:
        raise WireError("role, id", f"those of the key {key}", _key(row))
    return row


class Waiting:
    """Async context manager: while entered, the row names the event that is waited for."""

    def __init__(self, bus: Bus, row: LiveRow, what: str) -> None:
        self._heartbeat, self._what, self._since_s = HeartbeatPublisher(bus, row), what, time.monotonic()
        self._stack = AsyncExitStack()

    def set(self, what: str) -> None:
        """Change the thing that is waited for; empty = as before."""
        if what and what != self._what:
            self._what = what
            self._update()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._heartbeat)
        await self._stack.enter_async_context(beside(self._update_for_ever()))
        return self

    async def __aexit__(self, exc_type: object, *exc: object) -> None:
        await self._stack.aclose()

    def _update(self) -> None:
        self._heartbeat.update(phase="waiting", waits_for=f"{self._what}, for {time.monotonic() - self._since_s:.0f} s")

    async def _update_for_ever(self) -> None:
        logged_s = float("-inf")
        while True:
            self._update()
            if time.monotonic() - logged_s >= _WAITING_LOG_S:
                logged_s = time.monotonic()
                _log.info("waiting for %s", self._heartbeat.row.waits_for)
            await asyncio.sleep(_WAITING_UPDATE_S)
