"""Discovery of servers, engines or scorers: by their live rows on the bus, by health checks at given URLs, or, for a
router, by both.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from tidemill.actors.config import RouterConfig
from tidemill.actors.engines.port import Engine
from tidemill.actors.errors import EngineError, EngineUnavailable
from tidemill.bus.errors import BusError
from tidemill.bus.liveness import LiveView

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Time limit in seconds of an engine's health check, and of a read of the states that is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """Observed state of an engine or scorer."""

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
    load: Mapping[str, float] = field(default_factory=dict)
    """Gauges of its live row; empty = unknown."""


class Discovery(Protocol):
    """Discovery of servers."""

    async def discover(self) -> list[ServerStatus]:
        """Return all servers, serving or not. Raises only BusError."""
        ...

    def watch(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """While entered, ``wake`` is called when a server has changed. Some changes may be missed."""
        ...

    async def close(self) -> None:
        """Close the clients."""
        ...


class BusDiscovery:
    """Discovers servers of a role by their live rows on the bus."""

    def __init__(self, view: LiveView, role: str = "engine") -> None:
        self._view, self._role = view, role

    async def discover(self) -> list[ServerStatus]:
        """Return the servers with a live row that has an address; a row's phase is the remark."""
        return [
            ServerStatus(
                url=row.address,
                id=row.id,
                serving=row.phase == "serving",
                version=row.version,
                remark=row.phase,
                process=f"{row.host} {row.id} {row.pid}",
                nonce=row.nonce,
                load=row.load,
            )
            for row in await self._view.alive(self._role)
            if row.address
        ]

    def watch(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return self._view.on_change(self._role, wake)

    async def close(self) -> None:
        pass


class UrlDiscovery:
    """Checks the health of the engines at given URLs."""

    def __init__(self, urls: Sequence[str], engine: Callable[[str], Engine]) -> None:
        self._engines = {url: engine(url) for url in urls}

    async def discover(self) -> list[ServerStatus]:
        """Return one status per URL, from health checks made at the same time, in ``ANSWER_S`` seconds at most."""
        return list(await asyncio.gather(*(self._check(url, engine) for url, engine in self._engines.items())))

    def watch(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Return a context that never calls ``wake``: engines at fixed URLs announce no changes."""
        return nullcontext()

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()

    async def _check(self, url: str, engine: Engine) -> ServerStatus:
        try:
            async with asyncio.timeout(ANSWER_S):
                serving, version = await engine.healthy(), await engine.version()
        except (EngineError, TimeoutError) as error:
            return ServerStatus(url=url, id=url, serving=False, version=-1, remark=str(error) or "no answer")
        remark = "" if serving else "not healthy"
        return ServerStatus(url=url, id=url, serving=serving, version=version, remark=remark)


READ_S = 1.0
"""Time limit in seconds of one read from the bus. After it, the last known rows and the health checks are used."""
Ask = Callable[[str, str], Awaitable[int]]
"""Function that returns the version served at a URL by the process with a nonce (empty = any). Raises NotServing for
another process, or one that does not serve, EngineError without an answer.
"""


class NotServing(EngineUnavailable):
    """The engine answers, and reports that it does not serve now; or another process answers."""


@dataclass(slots=True)
class _Health:
    """Results of the health checks of one engine."""

    version: int = -1
    """Version at the last answer; -1 = it has never answered."""
    failures: int = 0
    """Number of checks in a row without an answer."""
    reason: str = ""
    """Reported reason for which it does not serve; else empty."""


class WorkerDiscovery:
    """Discovers a router's engines: those on the bus and those added by hand. ``check_for_ever`` must be running."""

    def __init__(self, config: RouterConfig, ask: Ask, view: LiveView | None = None) -> None:
        self._config, self._ask = config, ask
        self._by_hand: dict[str, None] = dict.fromkeys(config.workers)
        self._removed: dict[str, str] = {}
        """Engines removed by hand: URL -> process, until added again or in another process. A row may come back."""
        self._on_bus = BusDiscovery(view) if view is not None else None
        self._rows: dict[str, ServerStatus] = {}
        """Last known rows by URL."""
        self._health: dict[str, _Health] = {}
        self._wake: Callable[[], None] = lambda: None

    async def add(self, url: str) -> None:
        """Add an engine and check it at once, so that it gets requests from now on if it serves."""
        self._removed.pop(url, None)
        self._by_hand[url] = None
        await self._check(url)
        self._wake()

    def remove(self, url: str) -> bool:
        """Send an engine no more requests, wherever it is known from. Returns False when it is not known."""
        is_known = url in self.urls()
        self._by_hand.pop(url, None)
        if is_known:
            self._removed[url] = self._rows[url].process if url in self._rows else ""
            self._health.pop(url, None)
        return is_known

    def urls(self) -> list[str]:
        """Return the URLs of all known engines."""
        return [url for url in dict.fromkeys([*self._by_hand, *self._rows]) if url not in self._removed]

    async def discover(self) -> list[ServerStatus]:
        """Return the engines on the bus and those added by hand, without removed ones, by their last health checks.
        Without the bus the last known rows are used.
        """
        if self._on_bus is not None:
            try:
                async with asyncio.timeout(READ_S):
                    self._rows = {row.url.rstrip("/"): row for row in await self._on_bus.discover()}
            # The last known rows are still the best guess, and the checks go on.
            except (BusError, TimeoutError) as error:
                log.debug("live rows of engines not read error=%s", error or "time-out")
        self._removed = {url: process for url, process in self._removed.items() if not self._another(url, process)}
        return [self._status(url) for url in self.urls()]

    def _another(self, url: str, process: str) -> bool:
        return bool(process) and url in self._rows and self._rows[url].process != process

    @asynccontextmanager
    async def watch(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        """While entered, call ``wake`` when an engine's row changes, or it begins or ceases to serve by its checks."""
        self._wake = wake
        on_bus: AbstractAsyncContextManager[None] = nullcontext() if self._on_bus is None else self._on_bus.watch(wake)
        async with on_bus:
            yield

    async def close(self) -> None:
        pass

    async def check_for_ever(self) -> None:
        """Check every engine every ``health_every_s``; one that does not answer delays no requests to others."""
        while True:
            urls = self.urls()
            await asyncio.gather(*(self._check(url) for url in urls))
            for gone in self._health.keys() - set(self.urls()):
                del self._health[gone]
            await asyncio.sleep(self._config.health_every_s)

    async def _check(self, url: str) -> None:
        health = self._health.setdefault(url, _Health())
        before = self._serves(health)
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                # Another process may have the address of a row by now: nothing is sent to one with another nonce.
                row = self._rows.get(url)
                health.version = await self._ask(url, "" if row is None else row.nonce)
            health.failures, health.reason = 0, ""
        except NotServing as error:
            health.version, health.failures, health.reason = max(health.version, 0), 0, error.reason
        except (EngineError, TimeoutError) as error:
            health.failures += 1
            if health.failures == self._config.health_failures:
                reason = error or "time-out"
                log.warning("worker quarantined url=%s unanswered checks=%d error=%s", url, health.failures, reason)
        if self._serves(health) != before:
            log.info("worker url=%s serves=%s", url, not before)
            self._wake()

    def _serves(self, health: _Health) -> bool:
        return health.version >= 0 and health.failures < self._config.health_failures and not health.reason

    def _status(self, url: str) -> ServerStatus:
        row, health = self._rows.get(url), self._health.get(url, _Health())
        remark = f"{health.failures} health checks without an answer" if health.failures else health.reason
        if row is None:
            serves, version, remark = self._serves(health), max(health.version, 0), remark or "not checked yet"
            return ServerStatus(url=url, id=url, serving=serves, version=version, remark=remark)
        serves = row.serving and health.failures < self._config.health_failures and not health.reason
        remark = remark if row.serving else row.remark
        return ServerStatus(url=url, id=row.id, serving=serves, version=row.version, remark=remark)
