"""Choice of the engine for a request: one that serves the requested version and has the fewest requests in flight.

Knows the addresses of engines (URLs of the config, or live rows on the bus) and their failures, not the content of requests.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, TypedDict

from actors.engines.port import Engine
from actors.errors import EngineError, EngineFailed, EngineUnavailable, VersionUnavailable
from bus.client.waiter import Waiter
from bus.errors import BusError
from bus.liveness.heartbeats import LiveView

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two reads of the engines' states."""
POLL_WAITING_S = 0.1
"""Seconds between two reads while a request waits (at max_lag 0 every step waits for the new version) and no change is notified."""
ANSWER_S = 5.0
"""Time limit in seconds of an engine's health check."""
QUARANTINE_S = (0.5, 10.0)
"""Seconds without requests after the first failure in a row, doubled with each further one; and their bound."""


class NoEngine(EngineError):
    """No suitable engine was found in time; the request was not made."""

    def __init__(self, wanted: str, waited_s: float) -> None:
        super().__init__(wanted, waited_s)
        self.wanted, self.waited_s = wanted, waited_s

    def __str__(self) -> str:
        return f"waited {self.waited_s:.1f} s for {self.wanted}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Observed state of an engine."""

    url: str
    id: str
    serving: bool
    version: int
    remark: str = ""
    """Reason for which it does not serve; else empty."""
    process: str = ""
    """Identity of the process that is now at this URL; empty = unknown."""
    nonce: str = ""
    """Nonce of its live row; empty = unknown."""


class EngineDiscovery(Protocol):
    """Discovery of engines."""

    async def discover(self) -> list[EngineStatus]:
        """Return all engines, serving or not. Raises only BusError."""
        ...

    def watch(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """While entered, ``wake`` is called when an engine has changed. Some changes may be missed."""
        ...

    async def close(self) -> None:
        """Close the clients."""
        ...


class BusDiscovery:
    """Discovers engines by their live rows on the bus."""

    def __init__(self, view: LiveView) -> None:
        self._view = view

    async def discover(self) -> list[EngineStatus]:
        """Return the engines with a live row that has an address; a row's phase is the remark."""
        return [
            EngineStatus(
                url=row.address,
                id=row.id,
                serving=row.phase == "serving",
                version=row.version,
                remark=row.phase,
                process=f"{row.host} {row.id} {row.pid}",
                nonce=row.nonce,
            )
            for row in await self._view.alive("engine")
            if row.address
        ]

    def watch(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Call ``wake`` when a live row of an engine changes."""
        return self._view.on_change("engine", wake)

    async def close(self) -> None:
        pass


class UrlDiscovery:
    """Checks the health of the engines at given URLs."""

    def __init__(self, urls: Sequence[str], engine: Callable[[str], Engine]) -> None:
        self._engines = {url: engine(url) for url in urls}

    async def discover(self) -> list[EngineStatus]:
        """Return one status per URL, from health checks made at the same time, in ``ANSWER_S`` seconds at most."""
        return list(await asyncio.gather(*(self._check(url, engine) for url, engine in self._engines.items())))

    def watch(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Return a context that never calls ``wake``: engines at fixed URLs announce no changes."""
        return nullcontext()

    async def close(self) -> None:
        """Close the clients of the health checks."""
        for engine in self._engines.values():
            await engine.close()

    async def _check(self, url: str, engine: Engine) -> EngineStatus:
        try:
            async with asyncio.timeout(ANSWER_S):
                serving, info = await engine.healthy(), await engine.info()
        except (EngineError, TimeoutError) as error:
            return EngineStatus(url=url, id=url, serving=False, version=-1, remark=str(error) or "no answer")
        return EngineStatus(url=url, id=url, serving=serving, version=info.version, remark="" if serving else "not healthy")


@dataclass(slots=True, kw_only=True)
class _PooledEngine:
    """State of one engine in the pool."""

    engine: Engine
    status: EngineStatus
    in_flight: int = 0
    failures: int = 0
    """Number of failures in a row."""
    error: str = ""
    """The last of them."""
    quarantined_until: float = 0.0
    chosen: int = 0
    """Number of the pool's choice that last selected it."""

    def remark(self, min_version: int) -> str:
        """Return why the engine is not chosen for a request of ``min_version``, given that it is not."""
        if not self.status.serving:
            return self.status.remark or "not serving"
        if self.status.version < min_version:
            return f"version {self.status.version}"
        return f"quarantined after {self.failures} failures"


class EngineOverview(TypedDict):
    """State of one engine, for status answers and totals."""

    url: str
    id: str
    serving: bool
    version: int
    in_flight: int
    failures: int
    remark: str
    """Reason why it does not serve; empty if it does."""
    nonce: str
    error: str
    """The last failure, when the newest request has failed."""


class EnginePool:
    """The known engines. The one with the fewest requests in flight is chosen; one that fails is quarantined, twice as long each time.

    ``run`` reads the engines' states; it must be running while requests are made.
    """

    def __init__(
        self,
        discovery: EngineDiscovery,
        engine: Callable[[str], Engine],
        *,
        quarantine_s: tuple[float, float] = QUARANTINE_S,
        in_turn: bool = False,
    ) -> None:
        """``engine(url)`` returns a client; it is closed when its engine is gone, and by ``run`` at the end.

        ``in_turn``: of equally busy engines choose the one chosen longest ago, else the first by id.
        """
        self._discovery, self._engine, self._quarantine_s, self._in_turn = discovery, engine, quarantine_s, in_turn
        self._entries: dict[str, _PooledEngine] = {}
        self._changed = Waiter()
        self._tickets, self._choices = itertools.count(), itertools.count(1)
        self._waiting: dict[int, tuple[int, float]] = {}
        """Ticket -> (requested version, monotonic time of the request)."""
        self._refresh_now = Waiter()
        self._reads = 0
        self._closing = False

    async def run(self) -> None:
        """Background loop: read the engines' states, more often while a request waits."""
        try:
            async with AsyncExitStack() as stack:
                await self._watch(stack)
                while True:
                    try:
                        await self._update(await self._discovery.discover())
                    except BusError as error:  # the last known states are still the best guess
                        logger.debug("engine discovery failed error=%s", error)
                    self._reads += 1
                    self._changed.wake()
                    await self._refresh_now.wait(POLL_WAITING_S if self._waiting else POLL_S)
        finally:
            await self._discovery.close()
            for entry in self._entries.values():
                await entry.engine.close()

    async def _watch(self, stack: AsyncExitStack) -> None:
        """Read the states at once when an engine changes while a request waits for one."""

        def wake() -> None:
            """Start a read of the states, if a request waits."""
            if self._waiting:
                self._refresh_now.wake()

        try:
            await stack.enter_async_context(self._discovery.watch(wake))
        except BusError as error:
            logger.warning("cannot subscribe to changes of engines, polling only error=%s", error)

    @asynccontextmanager
    async def acquire(
        self, *, min_version: int = 0, timeout_s: float, avoid: str = "", prefer: str = ""
    ) -> AsyncIterator[tuple[str, Engine]]:
        """Yield (id, client) of an engine that serves ``min_version`` or newer: the id ``avoid`` only if there is no other, ``prefer`` if
        possible, else the one with the fewest requests.

        EngineUnavailable and EngineFailed that leave the block put the engine into quarantine (not when only its version is too old).
        Raises NoEngine when there is none within ``timeout_s``, or none at once after ``give_up``.
        """
        entry = await self._wait(min_version, timeout_s, avoid, prefer)
        entry.in_flight += 1
        entry.chosen = next(self._choices)
        try:
            yield entry.status.id, entry.engine
        except (EngineUnavailable, EngineFailed) as error:
            if not isinstance(error, VersionUnavailable):
                self._quarantine(entry, error)
            raise
        else:
            entry.failures = 0
        finally:
            entry.in_flight -= 1
            self._changed.wake()

    async def refresh(self) -> None:
        """Read the engines' states at once and return when they are known. Raises TimeoutError after ``ANSWER_S``."""
        async with asyncio.timeout(ANSWER_S):
            for _ in range(2):  # the first may have begun before this call
                seen = self._reads
                self._refresh_now.wake()
                while self._reads == seen:
                    await self._changed.wait()

    def give_up(self) -> None:
        """From now on ``acquire`` raises NoEngine instead of waiting."""
        self._closing = True
        self._changed.wake()

    def waits_for(self) -> str:
        """Return a description of the wait for an engine and its duration; empty when no request waits."""
        if not self._waiting:
            return ""
        min_version, since = min(self._waiting.values(), key=lambda waiting: waiting[1])
        return f"{self._describe(min_version)}, for {time.monotonic() - since:.0f} s ({len(self._waiting)} samples wait)"

    def overview(self) -> list[EngineOverview]:
        """Return the state of each engine, for status answers and totals."""
        now = time.monotonic()
        return [
            {
                "url": entry.status.url,
                "id": entry.status.id,
                "serving": entry.status.serving and entry.quarantined_until <= now,
                "version": entry.status.version,
                "in_flight": entry.in_flight,
                "failures": entry.failures,
                "remark": entry.remark(0) if not entry.status.serving or entry.quarantined_until > now else "",
                "nonce": entry.status.nonce,
                "error": entry.error if entry.failures else "",
            }
            for entry in self._entries.values()
        ]

    async def _wait(self, min_version: int, timeout_s: float, avoid: str, prefer: str) -> _PooledEngine:
        begin = time.monotonic()
        ticket = next(self._tickets)
        try:
            while (entry := self._best(min_version, avoid, prefer)) is None:
                left_s = begin + timeout_s - time.monotonic()
                if self._closing or left_s <= 0:
                    raise NoEngine(self._describe(min_version), time.monotonic() - begin)
                if ticket not in self._waiting:
                    self._waiting[ticket] = (min_version, begin)
                    self._refresh_now.wake()
                await self._changed.wait(min(left_s, self._next_return_s()))
            return entry
        finally:
            self._waiting.pop(ticket, None)

    def _best(self, min_version: int, avoid: str, prefer: str) -> _PooledEngine | None:
        now = time.monotonic()
        able = [
            entry
            for entry in self._entries.values()
            if entry.status.serving and entry.status.version >= min_version and entry.quarantined_until <= now
        ]

        def rank(entry: _PooledEngine) -> tuple[bool, bool, int, int, str]:
            """Return the sort key of an engine, the best one first."""
            id = entry.status.id
            return id == avoid, id != prefer, entry.in_flight, entry.chosen if self._in_turn else 0, id

        return min(able, key=rank, default=None)

    def _next_return_s(self) -> float:
        """Return the seconds until the next engine leaves quarantine; about ``POLL_S`` when none is in it."""
        now = time.monotonic()
        ends = [entry.quarantined_until - now for entry in self._entries.values() if entry.quarantined_until > now]
        return min(ends, default=POLL_S) + 0.001  # a little later, so that the quarantine is over when the waiter looks again

    def _describe(self, min_version: int) -> str:
        known = ", ".join(f"{entry.status.id}: {entry.remark(min_version)}" for entry in self._entries.values())
        return f"an engine that serves version {min_version} or newer ({known or 'none known'})"

    def _quarantine(self, entry: _PooledEngine, error: EngineError) -> None:
        now = time.monotonic()
        if entry.quarantined_until > now:  # one death fails many requests, and counts once
            return
        first_s, longest_s = self._quarantine_s
        pause_s = min(first_s * 2**entry.failures, longest_s)
        entry.failures += 1
        entry.error = str(error)
        entry.quarantined_until = now + pause_s
        logger.warning("engine quarantined id=%s pause_s=%.1f failures=%d error=%s", entry.status.id, pause_s, entry.failures, error)

    async def _update(self, statuses: Sequence[EngineStatus]) -> None:
        """Apply the observed states. An engine that serves again after it did not leaves quarantine."""
        seen = {status.url: status for status in statuses}
        # An engine with requests in flight stays, as they use its client.
        gone = [url for url, entry in self._entries.items() if url not in seen and not entry.in_flight]
        for entry in [self._entries.pop(url) for url in gone]:  # all at once, or one might be chosen while another is closed
            await entry.engine.close()
        for url, entry in self._entries.items():
            status = seen.get(url) or replace(entry.status, serving=False, remark="gone")
            if status.serving and not entry.status.serving:
                entry.failures, entry.quarantined_until = 0, 0.0
            entry.status = status
        for url, status in seen.items():
            if url not in self._entries:
                self._entries[url] = _PooledEngine(engine=self._engine(url), status=status)
        self._changed.wake()
