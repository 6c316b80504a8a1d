"""The body of an engine process: load, listen, catch up with the head, serve, drain. Names no backend: the factory is passed in.

    joining -> catching up -> (probe) serving -> stale (passed by) -> catching up -> ...

Pushes arrive over HTTP at the engine itself; this watches the registry and brings the engine to the head when no push does.
"""

import asyncio
import logging
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from actors.config import EngineConfig
from actors.membership import connected, default_id, first_row
from bus.config import BusConfig
from bus.connection import Bus
from bus.live import Heartbeat
from weightstore.joining import GRACE_S, catch_up, keep_up

log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
CATCH_UP_S = 600.0


class ServedEngine(Protocol):
    """An engine of this process, as this file needs it."""

    phase: str
    url: str
    takes_deltas: bool
    """``load_snapshot`` can be given what has changed since the version that is served."""

    @property
    def version(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    def load(self) -> None:
        """Read the model directory (blocking)."""

    async def start(self) -> str:
        """Listen; gives the URL. Nothing is generated before the phase is ``serving``."""
        raise NotImplementedError

    async def load_snapshot(self, directory: Path, version: int, epoch: int) -> None:
        """Serve the weights of a directory, whole or not at all."""

    async def probe(self) -> None:
        """Generate a token; raises when that does not work."""

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing more, finish what is there; False when not in time."""
        raise NotImplementedError

    async def close(self) -> None: ...
    async def failed(self) -> None:
        """Return or raise when it can generate no more, whatever is done."""

    def stats(self) -> dict[str, float]:
        """Counters and gauges for the live row."""
        raise NotImplementedError


Factory = Callable[..., ServedEngine]
"""``(model_dir, config, *, version, on_update)``; ``version`` -1 = not known to be any yet."""


async def run_engine(
    bus_url: str,
    run: str,
    model_dir: Path,
    engine_config: EngineConfig,
    bus_config: BusConfig,
    draining: asyncio.Event,
    engine_id: str | None = None,
    *,
    factory: Factory,
    drain_s: float = 30.0,
    grace_s: float = GRACE_S,
) -> None:
    """Serve ``model_dir`` and every newer version of the run until ``draining`` is set and the requests are answered.

    Raises BusUnavailable when there is no bus within five minutes, and whatever the engine raises for a model it cannot load.
    """
    id = engine_id or default_id()
    async with AsyncExitStack() as stack:
        bus = await connected(stack, bus_url, run, bus_config, name=f"engine {id}", draining=draining)
        if bus is None:
            return
        heartbeat = await stack.enter_async_context(Heartbeat(bus, first_row("engine", id)))
        served = _Served(bus, id, heartbeat)
        engine = factory(model_dir, engine_config, version=-1, on_update=lambda version, epoch: served.tell())
        await asyncio.to_thread(engine.load)
        await engine.start()
        try:
            await served.serve(engine, draining, grace_s)
            served.tell()
            if not await engine.drain(drain_s):
                log.warning("requests left unanswered after %.0f s", drain_s)
        finally:
            await engine.close()


class _Served:
    """The engine's life on the bus."""

    def __init__(self, bus: Bus, id: str, heartbeat: Heartbeat) -> None:
        self._bus, self._id, self._heartbeat = bus, id, heartbeat
        self._waits_for = ""
        self._engine: ServedEngine | None = None

    async def serve(self, engine: ServedEngine, draining: asyncio.Event, grace_s: float) -> None:
        """Until draining."""
        self._engine = engine
        with tempfile.TemporaryDirectory(prefix="tidemill-engine-") as directory:
            works = [
                asyncio.create_task(self._follow(engine, Path(directory), grace_s), name="follow the head"),
                asyncio.create_task(self._tell_for_ever(), name="live row"),
                asyncio.create_task(draining.wait(), name="draining"),
                asyncio.create_task(engine.failed(), name="engine"),
            ]
            try:
                done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
                for work in done:
                    work.result()
            finally:
                for work in works:
                    work.cancel()
                await asyncio.gather(*works, return_exceptions=True)

    async def _follow(self, engine: ServedEngine, directory: Path, grace_s: float) -> None:
        """Catch up with the head, serve, and keep up with it."""

        def stale(is_stale: bool) -> None:
            engine.phase = "stale" if is_stale else "serving"
            self.tell()

        engine.phase = "catching up"
        while engine.version < 0:  # nothing published yet, or not reached
            await catch_up(
                self._bus,
                engine=self._id,
                version=lambda: engine.version,
                load=engine.load_snapshot,
                directory=directory,
                deadline_s=CATCH_UP_S,
                say=self._say,
                deltas=engine.takes_deltas,
            )
            if engine.version < 0:
                self._say("the learner to publish version 0")
                await asyncio.sleep(0.2)
        self._say("")
        await engine.probe()
        engine.phase = "serving"
        self.tell()
        log.info("serving version=%d url=%s", engine.version, engine.url)
        await keep_up(
            self._bus,
            engine=self._id,
            version=lambda: engine.version,
            load=engine.load_snapshot,
            directory=directory,
            deadline_s=CATCH_UP_S,
            stale=stale,
            say=self._say,
            grace_s=grace_s,
            deltas=engine.takes_deltas,
        )

    def _say(self, text: str) -> None:
        self._waits_for = text
        self.tell()

    def tell(self) -> None:
        """Bring the live row up to date."""
        engine = self._engine
        if engine is not None:
            self._heartbeat.update(
                phase=engine.phase,
                waits_for=self._waits_for,
                version=engine.version,
                epoch=engine.epoch,
                address=engine.url,
                load=engine.stats(),
            )

    async def _tell_for_ever(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(TELL_EVERY_S)
