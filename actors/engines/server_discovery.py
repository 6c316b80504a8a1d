"""Discovery of servers, engines or scorers: by their live rows on the bus, or by health checks at given URLs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from tidemill.actors.engines.port import Engine
from tidemill.actors.errors import EngineError
from tidemill.bus.liveness.heartbeats import LiveView

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
