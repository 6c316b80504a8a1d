"""The engines of a run: their discovery at fixed URLs, and an overview of their states."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypedDict

from tidemill.actors.engines.port import Engine
from tidemill.actors.engines.server_pool import ANSWER_S, ServerPool, ServerStatus
from tidemill.actors.errors import EngineError


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
        """Close the clients of the health checks."""
        for engine in self._engines.values():
            await engine.close()

    async def _check(self, url: str, engine: Engine) -> ServerStatus:
        try:
            async with asyncio.timeout(ANSWER_S):
                serving, info = await engine.healthy(), await engine.info()
        except (EngineError, TimeoutError) as error:
            return ServerStatus(url=url, id=url, serving=False, version=-1, remark=str(error) or "no answer")
        return ServerStatus(url=url, id=url, serving=serving, version=info.version, remark="" if serving else "not healthy")


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


class EnginePool(ServerPool[Engine]):
    """The known engines; a request names the oldest version that may serve it."""

    noun = "engine"

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

    def _wanted(self, min_version: int) -> str:
        return f"an engine that serves version {min_version} or newer"
