"""The body of ``tidemill bus``: the run's nats-server, or three, each started again when it ends or has stopped
storing.

    room on the disk? -> servers start -> streams -> the address in a file -> heartbeats
    every 0.2 s: the servers that have ended or stopped storing are started again, as soon as their disk has room
(bus/server/store_disk.py)

Waits for room, and for the signal to drain.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tidemill.bus.liveness.heartbeats import HeartbeatPublisher
from tidemill.bus.server.cluster import EmbeddedBus
from tidemill.bus.server.store_disk import StoreKeeper, lacking, needed_bytes
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.run.access import BUS_URL_FILE, auth_dir, own_address
from tidemill.launch.run.supervisor import GaveUp, Supervisor
from tidemill.launch.run.watch import SERVER_RESTARTS
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig

log = logging.getLogger(__name__)

BUS_START_S = 60.0
"""Seconds for the bus of a run to answer."""
CHECK_SERVER_S = 0.2
"""Interval in seconds at which the nats-server is checked."""
CHECK_ROOM_S = 1.0
"""Interval in seconds at which a disk without room is checked before the start."""


async def start_bus(config: RunConfig, supervisor: Supervisor) -> str:
    """Start the bus of a run as a process, and return its address. Raises GaveUp."""
    address = config.root / BUS_URL_FILE
    address.unlink(missing_ok=True)  # of an earlier start that was killed
    keeper = supervisor.keep("bus", ["bus", "--config", str(config.root / CONFIG_FILE)])
    deadline = time.monotonic() + BUS_START_S
    while not address.exists():
        if keeper.done():
            keeper.result()
        if time.monotonic() > deadline:
            silence = f"no address in {address} after {BUS_START_S:.0f} s; see {config.root}/logs/bus.log"
            raise GaveUp("bus", -1, 1, BUS_START_S, silence)
        await asyncio.sleep(0.02)
    return address.read_text().strip()


async def run_bus(config: RunConfig, draining: asyncio.Event) -> None:
    """Run the embedded nats-server, or three, until ``draining`` is set; always on the same ports."""
    directory, need_bytes = config.root / "bus", needed_bytes(config.bus)
    await first_of(_room(directory, need_bytes), draining.wait())
    if draining.is_set():
        return
    servers = EmbeddedBus(directory, config.run, config.bus, auth_dir(config))
    keeper = StoreKeeper(servers.servers, need_bytes)
    try:
        url = await asyncio.to_thread(servers.start)
        async with connect(own_address(config, url), config.run, config.bus, name="bus") as bus:
            created = bus.jet.retry_for_ever(bus.create_layout)
            await first_of(_keep(keeper, bus, lambda: None), created, draining.wait())
            if not draining.is_set():
                await _serve(config, url, servers, keeper, bus, draining)
    finally:
        (config.root / BUS_URL_FILE).unlink(missing_ok=True)
        await asyncio.to_thread(servers.stop)


async def _serve(
    config: RunConfig, url: str, servers: EmbeddedBus, keeper: StoreKeeper, bus: Bus, draining: asyncio.Event
) -> None:
    write_whole(config.root / BUS_URL_FILE, url)  # not before the streams exist: `tidemill up` waits for this file
    log.info("listening url=%s pids=%s", url, " ".join(str(server.pid) for server in servers.servers))
    bus_id = config.bus.server_name or "bus"
    row = LiveRow(role="bus", id=bus_id, host=socket.gethostname(), pid=servers.pid, phase="serving", address=url)
    async with HeartbeatPublisher(bus, row) as heartbeat:

        def update() -> None:
            """Write the first server's process and the restarts into the live row, where they have changed."""
            restarts = {SERVER_RESTARTS: float(keeper.restarts)}
            if (heartbeat.row.pid, heartbeat.row.load) != (servers.pid, restarts):
                heartbeat.update(pid=servers.pid, load=restarts, trouble=keeper.last_restart)

        await first_of(_keep(keeper, bus, update), draining.wait())


async def _keep(keeper: StoreKeeper, bus: Bus, on_look: Callable[[], None]) -> None:
    """Loop: keep the servers up and storing; while they store nothing, every process gets the reason."""

    async def look() -> None:
        await asyncio.sleep(CHECK_SERVER_S)
        await asyncio.to_thread(keeper.look)
        on_look()

    while True:
        await look()
        if keeper.reason:
            async with bus.reporting_full(lambda: keeper.reason):
                while keeper.reason:
                    await look()


async def _room(directory: Path, need_bytes: int) -> None:
    """Wait until the disk has room for the servers."""
    logged = False
    while reason := await asyncio.to_thread(lacking, directory, need_bytes):
        if not logged:
            log.warning("the bus is not started: %s", reason)
        logged = True
        await asyncio.sleep(CHECK_ROOM_S)
