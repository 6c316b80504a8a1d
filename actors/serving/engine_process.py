"""The body of an engine process: load, listen, catch up with the head, serve, drain. Names no backend: the factory is
passed in.

    joining -> catching up -> (probe) serving -> stale (missed pushes) -> catching up -> ...

Pushes arrive over HTTP at the engine itself; this module watches the registry and brings the engine to the head when no
push does. A colocated engine takes memory by itself only while the engines own the accelerator: when it starts, and
when it catches up. Its live row states that meanwhile, and the learner waits until it is done.
"""

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.address_checks import OwnAddress
from tidemill.actors.engines.membership import connected, default_id, first_row
from tidemill.actors.errors import EngineFailed
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.port import Factory, ServedEngine
from tidemill.bus.client.addresses import reach, route_to
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError
from tidemill.bus.keys import admin_keys
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import first_of, to_the_end
from tidemill.bus.system.files import Scratch
from tidemill.bus.wire.rows import Capabilities
from tidemill.weightstore.catch_up import GRACE_S, Joiner, catch_up, keep_up
from tidemill.weightstore.errors import CatchUpTimeout
from tidemill.weightstore.push.accelerator_lease import AcceleratorLease
from tidemill.weightstore.store.registry import VersionRegistry
from tidemill.weightstore.transport.handles import shared_memory_domain

log = logging.getLogger(__name__)

ROW_EVERY_S = 1.0
"""Seconds between two updates of the live row."""
ROW_AFTER_S = 0.005
"""Seconds from a new version to the row with it."""
CATCH_UP_S = 600.0
PROBE_AGAIN_S = 0.5
"""Seconds after a probe without weights, before the engine catches up again."""
STORED_S = 5.0
"""Time limit in seconds for the live row to be stored, before memory is taken."""
MEMORY = "the learner to release the accelerator's memory"
WHOLE = "a complete weight update"
"""Reasons for waiting in the live row, while there are no weights to serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlaces:
    """Addresses and directories of an engine process, and its name."""

    run: str
    bus_url: str
    bus: BusConfig = field(default_factory=BusConfig)
    model_dir: Path
    id: str = ""
    """Unique name of the engine; empty = one is made."""
    devices: Capabilities = field(default_factory=Capabilities)
    """Accelerators of the engine, for its live row: ``devices`` and the fields behind it; the default is for a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Deadlines of an engine process, in seconds."""

    drain_s: float = 30.0
    """Time in which accepted requests are answered at the end of the process."""
    grace_s: float = GRACE_S
    """Time for a push to bring the head, before the engine catches up by itself."""
    catch_up_s: float = CATCH_UP_S
    """Time to obtain weights. After it the engine logs a warning and tries again."""


async def run_engine(
    places: EnginePlaces,
    engine_config: EngineConfig,
    draining: asyncio.Event,
    *,
    factory: Factory,
    limits: EngineLimits,
) -> None:
    """Serve a model directory and every newer version of the run until ``draining`` is set and the requests are
    answered. Raises BusUnavailable without a bus for five minutes, and the engine's error for a model that it cannot
    load.
    """
    engine_id = places.id or default_id()
    async with AsyncExitStack() as stack:
        bus = await connected(
            stack, places.bus_url, places.run, places.bus, name=f"engine {engine_id}", draining=draining
        )
        if bus is None:
            return
        heartbeat = await stack.enter_async_context(HeartbeatPublisher(bus, first_row("engine", engine_id)))
        turns = AcceleratorLease(bus) if engine_config.colocated else None
        served = _Served(bus, engine_id, heartbeat, turns, places.devices)
        route = await asyncio.to_thread(route_to, places.bus_url)
        at = reach(engine_config.host, engine_config.advertise, route, name="engine.host")
        engine = factory(
            places.model_dir,
            replace(engine_config, host=at.bind, advertise=at.advertised),
            version=-1,
            on_update=lambda version, epoch: served.update_row_soon(),
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
        served.update_row()
        if not await engine.drain(limits.drain_s):
            log.warning("requests left unanswered after %.0f s", limits.drain_s)


class _Served:
    """The engine's live row, and its use of a shared accelerator."""

    def __init__(
        self,
        bus: Bus,
        engine_id: str,
        heartbeat: HeartbeatPublisher,
        turns: AcceleratorLease | None,
        devices: Capabilities,
    ) -> None:
        self.bus, self.engine_id, self.turns = bus, engine_id, turns
        self._heartbeat, self._devices = heartbeat, devices
        self._waits_for, self._place = "", shared_memory_domain()
        self.authority = Authority(admin_keys(bus), VersionRegistry(bus).newest_epoch, devices.visible_devices)
        self.engine: ServedEngine | None = None
        """None until it has started."""
        self.own_address: OwnAddress | None = None

    @asynccontextmanager
    async def taking_memory(self, draining: asyncio.Event | None = None) -> AsyncIterator[None]:
        """Wait until the engines own the accelerator, or ``draining`` is set. The learner does not get it meanwhile."""
        if self.turns is not None:
            while not await self._begin_taking(self.turns, draining):
                self._report_taking(False)
        try:
            yield
        finally:
            self._report_taking(False)

    async def _begin_taking(self, turns: AcceleratorLease, draining: asyncio.Event | None) -> bool:
        if self.engine is None:
            self._heartbeat.update(waits_for=MEMORY)
        await turns.wait_until_available(draining)
        if draining is not None and draining.is_set():
            return True
        self._report_taking(True)
        try:
            # Either this sees then that the learner owns it, or the learner sees this row.
            async with asyncio.timeout(STORED_S):
                await self._heartbeat.stored()
            return await turns.available()
        except (BusError, TimeoutError) as error:
            log.warning("memory is not taken before the live row is stored error=%r", error)
            return False

    def _report_taking(self, taking: bool) -> None:
        if self.turns is not None:
            self._heartbeat.update(taking_memory=taking)
        self.update_row()

    async def serve(self, engine: ServedEngine, draining: asyncio.Event, limits: EngineLimits) -> None:
        """Serve until ``draining`` is set. Raises the engine's error when it fails."""
        with contextlib.closing(await asyncio.to_thread(Scratch, "engine")) as scratch:
            follower = _Follower(self, engine, scratch.path, limits)
            own_address = self.own_address = OwnAddress(self.bus, engine.nonce)
            rows = self._update_row_periodically(), own_address.run(self.update_row)
            await first_of(follower.run(), *rows, draining.wait(), engine.failed())

    def set_waits_for(self, text: str) -> None:
        """Set the engine's reason for waiting, empty when there is none, and update the live row."""
        self._waits_for = text
        self.update_row()

    def update_row_soon(self) -> None:
        """Update the live row a moment later: the learner, which waits for the answer to its push, comes first."""
        asyncio.get_running_loop().call_later(ROW_AFTER_S, self.update_row)

    def update_row(self) -> None:
        engine, devices = self.engine, self._devices
        if engine is not None:
            capabilities = replace(
                engine.capabilities,
                devices=devices.devices,
                visible_devices=devices.visible_devices,
                nccl=devices.nccl,
                device_memory_bytes=devices.device_memory_bytes,
            )
            self._heartbeat.update(
                phase=engine.phase,
                waits_for=self._waiting(engine),
                version=engine.version,
                epoch=engine.epoch,
                address=engine.url,
                nonce=engine.nonce,
                trouble="" if self.own_address is None else self.own_address.trouble,
                handles=engine.handles,
                place=self._place,
                load=engine.stats(),
                capabilities=capabilities,
            )

    def _waiting(self, engine: ServedEngine) -> str:
        """Return the live row's reason for waiting, with the refusal of the newest command, if it was refused."""
        waits_for = self._waits_for or ("" if engine.whole else WHOLE if self.turns is None else MEMORY)
        refused = self.authority.refused
        return f"{waits_for} (refused: {refused})" if waits_for and refused else waits_for

    async def _update_row_periodically(self) -> None:
        while True:
            self.update_row()
            await asyncio.sleep(ROW_EVERY_S)


class _Follower:
    """Brings the engine to the head, lets it serve, and keeps it at the head."""

    def __init__(self, served: _Served, engine: ServedEngine, directory: Path, limits: EngineLimits) -> None:
        self._served, self._engine, self._limits = served, engine, limits
        self._joiner = Joiner(
            engine=served.engine_id,
            version=self._version,
            load=self._load,
            directory=directory,
            on_wait=served.set_waits_for,
            adapters=engine.capabilities.adapters,
        )

    async def run(self) -> None:
        """Catch up with the head, serve, and keep up with it. Raises EngineFailed when the engine cannot generate."""
        engine = self._engine
        engine.phase = "catching up"
        await self._catch_up()
        while not await self._probed():
            await asyncio.sleep(PROBE_AGAIN_S)
            await self._catch_up()
        gc.collect()
        # The loaded objects stay: a full collection would walk them all, and hold up decoding for a tenth of a second.
        gc.freeze()
        # Before any process has verified its address: an engine that starts while the learner is away would wait for it
        # (decision 021).
        engine.phase = "serving"
        self._served.update_row()
        log.info("serving version=%d url=%s", engine.version, engine.url)
        await keep_up(
            self._served.bus,
            self._joiner,
            deadline_s=self._limits.catch_up_s,
            stale=self._stale,
            allowed=None if self._served.turns is None else self._served.turns.available,
            grace_s=self._limits.grace_s,
        )

    async def _catch_up(self) -> None:
        while self._version() < 0:  # no version is published yet, or none could be loaded
            try:
                await catch_up(self._served.bus, self._joiner, deadline_s=self._limits.catch_up_s)
            except (CatchUpTimeout, BusError) as error:
                log.warning("no weights yet, catching up is repeated engine=%s error=%s", self._joiner.engine, error)
                self._served.set_waits_for(str(error))
                await asyncio.sleep(0.2)
                continue
            if self._version() < 0:
                self._served.set_waits_for("the learner to publish version 0")
                await asyncio.sleep(0.2)
        self._served.set_waits_for("")

    async def _probed(self) -> bool:
        """Generate one token. Returns False when a push broke off, or memory was released, meanwhile."""
        try:
            await self._engine.probe()
        except EngineFailed as error:
            if self._version() >= 0 and not self._engine.stats().get("released"):
                raise
            log.warning("a push broke off, or memory was released, during the probe: %s", error)
            return False
        return True

    def _stale(self, is_stale: bool) -> None:
        self._engine.phase = "stale" if is_stale else "serving"
        self._served.update_row()

    async def _load(self, directory: Path, version: int, epoch: int) -> None:
        async with self._served.taking_memory():
            loading = self._engine.load_snapshot(directory, version, epoch)
            # A load goes on when catching up takes too long. Of a shared accelerator it has memory until it ends.
            await (loading if self._served.turns is None else to_the_end(loading))

    def _version(self) -> int:
        return self._engine.version if self._engine.whole else -1
