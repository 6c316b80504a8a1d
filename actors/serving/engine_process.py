"""The body of an engine process: load, listen, catch up with the head, serve, drain. Names no backend: the factory is passed in.

    joining -> catching up -> (probe) serving -> stale (passed by) -> catching up -> ...

Pushes arrive over HTTP at the engine itself; this watches the registry and brings the engine to the head when no push does. A colocated
engine takes memory by itself only in the engines' turn: when it starts, and when it catches up. Its row says so meanwhile, and the learner
waits for that.
"""

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from actors.config import EngineConfig
from actors.engines.membership import connected, default_id, first_row
from actors.errors import EngineFailed
from actors.scratch import Scratch
from actors.serving.authority import Authority
from bus.client.reach import reach, route_to
from bus.config import BusConfig
from bus.errors import BusError
from bus.liveness.keys import admin_keys
from bus.liveness.live import Heartbeat
from bus.streams.connection import Bus
from bus.system.coroutines import first_of
from bus.wire.messages import Capabilities
from weightstore.catchup.joining import GRACE_S, Joiner, catch_up, keep_up
from weightstore.errors import CatchUpTimeout
from weightstore.push.turns import AcceleratorLease
from weightstore.store.registry import VersionRegistry
from weightstore.transport.handles import shared_memory_domain

log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
CATCH_UP_S = 600.0
PROBE_AGAIN_S = 0.5
STORED_S = 5.0
MEMORY = "the learner to give the turn, and with it memory"
WHOLE = "all of the weights of an update"


class ServedEngine(Protocol):
    """An engine of this process, as this file needs it."""

    phase: str
    url: str
    handles: str
    """URL of the socket at which it takes handles of weights; "" = it takes none."""

    @property
    def version(self) -> int: ...
    @property
    def whole(self) -> bool:
        """There are weights to serve: not from their release until an update."""
        raise NotImplementedError

    @property
    def epoch(self) -> int: ...
    @property
    def capabilities(self) -> Capabilities:
        """How it can be pushed to now, and whether it has weights to give."""
        raise NotImplementedError

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
"""``(model_dir, config, *, version, on_update, authority)``; ``version`` -1 = not known to be any yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlaces:
    """Addresses and directories of an engine process, and its name."""

    run: str
    bus_url: str
    bus: BusConfig = field(default_factory=BusConfig)
    model_dir: Path
    id: str = ""
    """Empty = one that no other engine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Deadlines of an engine process, in seconds."""

    drain_s: float = 30.0
    """For requests to be answered at its end."""
    grace_s: float = GRACE_S
    """For a push, when the head is ahead."""
    catch_up_s: float = CATCH_UP_S
    """For weights. It logs a warning then, and tries on."""


async def run_engine(
    places: EnginePlaces, engine_config: EngineConfig, draining: asyncio.Event, *, factory: Factory, limits: EngineLimits
) -> None:
    """Serve a model directory and every newer version of the run until ``draining`` is set and the requests are answered.

    Raises BusUnavailable when there is no bus within five minutes, and whatever the engine raises for a model it cannot load.
    """
    id = places.id or default_id()
    async with AsyncExitStack() as stack:
        bus = await connected(stack, places.bus_url, places.run, places.bus, name=f"engine {id}", draining=draining)
        if bus is None:
            return
        heartbeat = await stack.enter_async_context(Heartbeat(bus, first_row("engine", id)))
        served = _Served(bus, id, heartbeat, AcceleratorLease(bus) if engine_config.colocated else None)
        at = reach(engine_config.host, engine_config.advertise, await asyncio.to_thread(route_to, places.bus_url), name="engine.host")
        engine = factory(
            places.model_dir,
            replace(engine_config, host=at.bind, advertise=at.advertised),
            version=-1,
            on_update=lambda version, epoch: served.tell(),
            authority=served.authority,
        )
        async with served.taking_memory(draining):
            if draining.is_set():
                return
            await asyncio.to_thread(engine.load)
            stack.push_async_callback(engine.close)
            await engine.start()
            served.engine = engine
        await served.serve(engine, draining, limits)
        served.tell()
        if not await engine.drain(limits.drain_s):
            log.warning("requests left unanswered after %.0f s", limits.drain_s)


class _Served:
    """The engine's life on the bus."""

    def __init__(self, bus: Bus, id: str, heartbeat: Heartbeat, turns: AcceleratorLease | None) -> None:
        self._bus, self._id, self._heartbeat, self._turns = bus, id, heartbeat, turns
        self._waits_for, self._place = "", shared_memory_domain()
        self.authority = Authority(admin_keys(bus), VersionRegistry(bus).newest_epoch)
        self.engine: ServedEngine | None = None
        """None until it has started."""

    @asynccontextmanager
    async def taking_memory(self, ended: asyncio.Event | None = None) -> AsyncIterator[None]:
        """Entered in the engines' turn, or when ``ended`` is set; while entered, a learner that takes the turn waits."""
        if self._turns is not None:
            while not await self._begins_taking(self._turns, ended):
                self._take(False)
        try:
            yield
        finally:
            self._take(False)

    async def _begins_taking(self, turns: AcceleratorLease, ended: asyncio.Event | None) -> bool:
        if self.engine is None:
            self._heartbeat.update(waits_for=MEMORY)
        await turns.wait_until_available(ended)
        if ended is not None and ended.is_set():
            return True
        self._take(True)
        try:
            async with asyncio.timeout(STORED_S):
                await self._heartbeat.stored()  # before it looks again: so this sees the learner's turn, or the learner this row
            return await turns.available()
        except (BusError, TimeoutError) as error:
            log.warning("memory is not taken before the row says so error=%r", error)
            return False

    def _take(self, taking: bool) -> None:
        if self._turns is not None:
            self._heartbeat.update(taking_memory=taking)
        self.tell()

    async def serve(self, engine: ServedEngine, draining: asyncio.Event, limits: EngineLimits) -> None:
        """Until draining."""
        with contextlib.closing(await asyncio.to_thread(Scratch, "engine")) as scratch:
            follower = _Follower(self, engine, scratch.path, limits, bus=self._bus, id=self._id, turns=self._turns)
            await first_of(follower.run(), self._tell_for_ever(), draining.wait(), engine.failed())

    def say(self, text: str) -> None:
        self._waits_for = text
        self.tell()

    def tell(self) -> None:
        """Bring the live row up to date."""
        engine = self.engine
        if engine is not None:
            self._heartbeat.update(
                phase=engine.phase,
                waits_for=self._waiting(engine),
                version=engine.version,
                epoch=engine.epoch,
                address=engine.url,
                handles=engine.handles,
                place=self._place,
                load=engine.stats(),
                capabilities=engine.capabilities,
            )

    def _waiting(self, engine: ServedEngine) -> str:
        """What it waits for, and why commands do not bring it, as far as that is known."""
        waits_for = self._waits_for or ("" if engine.whole else WHOLE if self._turns is None else MEMORY)
        refused = self.authority.refused
        return f"{waits_for} (refused: {refused})" if waits_for and refused else waits_for

    async def _tell_for_ever(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(TELL_EVERY_S)


class _Follower:
    """Brings the engine to the head, lets it serve, and keeps it at the head."""

    def __init__(
        self,
        served: _Served,
        engine: ServedEngine,
        directory: Path,
        limits: EngineLimits,
        *,
        bus: Bus,
        id: str,
        turns: AcceleratorLease | None,
    ) -> None:
        self._served, self._engine, self._limits, self._bus, self._turns = served, engine, limits, bus, turns
        self._joiner = Joiner(id=id, version=self._version, load=self._load, directory=directory, on_wait=served.say)

    async def run(self) -> None:
        """Catch up with the head, serve, and keep up with it; for ever. Raises EngineFailed when the engine cannot generate."""
        engine = self._engine
        engine.phase = "catching up"
        await self._catch_up()
        while not await self._probed():
            await asyncio.sleep(PROBE_AGAIN_S)
            await self._catch_up()
        gc.collect()
        gc.freeze()  # what has been loaded stays: a full collection walks all of it, and nothing is decoded for a tenth of a second
        engine.phase = "serving"
        self._served.tell()
        log.info("serving version=%d url=%s", engine.version, engine.url)
        await keep_up(
            self._bus,
            self._joiner,
            deadline_s=self._limits.catch_up_s,
            stale=self._stale,
            allowed=None if self._turns is None else self._turns.available,
            grace_s=self._limits.grace_s,
        )

    async def _catch_up(self) -> None:
        while self._version() < 0:  # nothing published yet, or not reached
            try:
                await catch_up(self._bus, self._joiner, deadline_s=self._limits.catch_up_s)
            except (CatchUpTimeout, BusError) as error:
                log.warning("no weights yet, trying on engine=%s error=%s", self._joiner.id, error)
                self._served.say(str(error))
                await asyncio.sleep(0.2)
                continue
            if self._version() < 0:
                self._served.say("the learner to publish version 0")
                await asyncio.sleep(0.2)
        self._served.say("")

    async def _probed(self) -> bool:
        """Generate a token; False when the weights went away meanwhile."""
        try:
            await self._engine.probe()
        except EngineFailed as error:
            if self._version() >= 0 and not self._engine.stats().get("released"):
                raise
            log.warning("a push broke off, or memory was released, in the middle of the probe: %s", error)
            return False
        return True

    def _stale(self, is_stale: bool) -> None:
        self._engine.phase = "stale" if is_stale else "serving"
        self._served.tell()

    async def _load(self, directory: Path, version: int, epoch: int) -> None:
        async with self._served.taking_memory():
            await self._engine.load_snapshot(directory, version, epoch)

    def _version(self) -> int:
        return self._engine.version if self._engine.whole else -1
