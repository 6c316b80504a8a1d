"""The body of ``tidemill bus``: the run's nats-server, or three, started again when they end or stop storing.

    room on the disk? -> servers start -> streams -> the address in a file -> heartbeats
    every 0.2 s: the servers that have ended or stopped storing are started again, as soon as their disk has room
(bus/server/embedded_bus.py)

Waits for room, and for the signal to drain. ``started``: the bus of a run that is over, read-only, for one command.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from tidemill.bus.client.addresses import parse
from tidemill.bus.config import BusConfig, needed_bytes
from tidemill.bus.errors import ServerFailed
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.server.auth import LEARNER, VIEWER, credentials_file
from tidemill.bus.server.embedded_bus import EmbeddedBus, StoreKeeper
from tidemill.bus.server.nats_server import in_use
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.system.files import lacking, write_whole
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.run import backup
from tidemill.launch.run.access import AUTH_DIR, BUS_URL_FILE, auth_dir, own_address, viewer_line
from tidemill.launch.run.directory import BusRequest, RequestRefused
from tidemill.launch.run.supervisor import GaveUp, Supervisor
from tidemill.launch.run.watch import SERVER_RESTARTS
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import from_map
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig

log = logging.getLogger(__name__)

BUS_START_S = 60.0  # Seconds for the bus of a run to answer
CHECK_SERVER_S = 0.2  # Interval in seconds at which the nats-server is checked
CHECK_ROOM_S = 1.0  # Interval in seconds at which a disk without room is checked before the start
Requests = dict[BusRequest, Callable[[str], None]]


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
    keeper, requests = StoreKeeper(servers.servers, need_bytes), _requests(config, servers)
    try:
        url = await asyncio.to_thread(servers.start)
        async with connect(own_address(config, url), config.run, config.bus, name="bus") as bus:
            created = bus.jet.retry_for_ever(bus.create_layout)
            await first_of(_keep(requests, keeper, bus, lambda: None), created, draining.wait())
            if not draining.is_set():
                await _serve(config, url, requests, keeper, bus, draining)
    finally:
        (config.root / BUS_URL_FILE).unlink(missing_ok=True)
        await asyncio.to_thread(servers.stop)


async def _serve(
    config: RunConfig, url: str, requests: Requests, keeper: StoreKeeper, bus: Bus, draining: asyncio.Event
) -> None:
    write_whole(config.root / BUS_URL_FILE, url)  # not before the streams exist: `tidemill up` waits for this file
    log.info("listening url=%s pids=%s", url, " ".join(str(server.pid) for server in keeper.servers))
    bus_id = config.bus.server_name or "bus"
    row = LiveRow(
        role="bus", id=bus_id, host=socket.gethostname(), pid=keeper.servers[0].pid, phase="serving", address=url
    )
    async with HeartbeatPublisher(bus, row) as heartbeat:

        def update() -> None:
            restarts = {SERVER_RESTARTS: float(keeper.restarts)}
            if (heartbeat.row.pid, heartbeat.row.load) != (keeper.servers[0].pid, restarts):
                heartbeat.update(pid=keeper.servers[0].pid, load=restarts, trouble=keeper.last_restart)

        await first_of(_keep(requests, keeper, bus, update), draining.wait())


def _requests(config: RunConfig, servers: EmbeddedBus) -> Requests:
    """Return the requests of commands that this bus answers."""
    source = backup.Source.of(config)
    return {
        backup.request_of(config.root): lambda target: backup.take(source, servers.servers, Path(target)),
        users_request(config.root): lambda names: renew_users(config, servers, names.split()),
    }


async def _keep(requests: Requests, keeper: StoreKeeper, bus: Bus, on_look: Callable[[], None]) -> None:
    """Loop: keep the servers up and storing; while they store nothing, every process gets the reason.

    Between two looks it answers the requests of commands.
    """

    async def look() -> None:
        await asyncio.sleep(CHECK_SERVER_S)
        await asyncio.to_thread(keeper.look)
        on_look()
        for request, work in requests.items():
            if request.pending:
                began_s, error = time.monotonic(), await asyncio.to_thread(request.answer, work)
                log.info("request %s seconds=%.1f error=%s", request.verb, time.monotonic() - began_s, error or "none")

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


# ---- the bus of a run that is over


class RunResumed(ValueError):
    """SIGTERM was received: the run was started again, and needs its store."""

    def __init__(self) -> None:
        super().__init__("ended by SIGTERM: the run was started again; repeat the command")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedBus:
    """Settings and directories with which the bus is started."""

    directory: Path
    auth_dir: Path
    run: str
    config: BusConfig

    @classmethod
    def of(cls, root: Path) -> "EndedBus | None":
        """Return the bus of the run in ``root``; None if it is external or running. Raises ValueError."""
        file = root / CONFIG_FILE
        config = from_map(yaml_file.read(file)[0], str(file))
        bus, directory = config.bus, root / "bus"
        if bus.url or ((root / BUS_URL_FILE).exists() and _running(directory)):
            return None
        if bus.server_name:
            cure = f"start it with `tidemill bus --config {file}` on them"
            raise ValueError(f"{root}: its bus is a cluster of several machines; {cure}")
        if not (directory / ("n0/store" if bus.cluster > 1 else "store")).is_dir():
            raise ValueError(f"{root}: no bus is running here, and {directory} does not hold the streams of a run")
        users_dir = Path(bus.auth_dir) if bus.auth_dir else root / AUTH_DIR
        plain = replace(bus, host="127.0.0.1", port=-1, tls_cert="", tls_key="", tls_verify=False)
        return cls(directory=directory, auth_dir=users_dir, run=config.run, config=plain)


def _running(directory: Path) -> bool:
    """Return whether a server has the store open. The address file alone does not prove it: it remains after a kill."""
    return any(in_use(server_dir) for server_dir in (directory, *directory.glob("n[0-9]")))


@contextmanager
def started(bus: EndedBus) -> Iterator[str]:
    """Run the bus while entered; yield its address, not to be shown. Raises ValueError, RunResumed on SIGTERM.

        store not in use -> nats-server on a free port of 127.0.0.1 -> the viewer reads -> stopped (also after kill -9)

    The viewer may create nothing but consumers in memory, so the streams do not change. The run has priority: when
    it is started again, its bus sends SIGTERM to this process, which stops the server at once.
    """
    password = "" if bus.config.auth else secrets.token_urlsafe(24)
    try:
        servers = EmbeddedBus(bus.directory, bus.run, bus.config, bus.auth_dir, read_only=True, viewer=password)
    except OSError as error:
        raise ValueError(f"{bus.auth_dir}: the users of the bus cannot be read: {error.strerror}") from None
    is_resumed = False

    def give_way(number: int, frame: FrameType | None) -> None:
        # Stop the server, and raise KeyboardInterrupt in the main thread.
        nonlocal is_resumed
        is_resumed = True
        servers.stop()  # here, in the handler: this process may be blocked by a pager that reads no further
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs with SIGINT ignored
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, give_way)
    try:
        url = _start(servers)
        if password:
            yield replace(parse(url), user=VIEWER, password=password).line()
        else:
            users = {"auth": True, "auth_dir": str(bus.auth_dir)}
            yield viewer_line(url, os.environ, bus.directory, users)
    except BaseException:
        if is_resumed:
            raise RunResumed from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        servers.stop()


def _start(servers: EmbeddedBus) -> str:
    try:
        return servers.start()
    except ServerFailed as error:
        raise ValueError(str(error)) from None
    except OSError as error:
        raise ValueError(f"{error.filename}: the store of the run cannot be opened: {error.strerror}") from None


def users_request(root: Path) -> BusRequest:
    """Return the request for new passwords to the bus of a run."""
    return BusRequest(root / "bus", "users")


def renew_users(config: RunConfig, servers: EmbeddedBus, names: Sequence[str]) -> None:
    """Give these users new passwords, and have the servers read users and certificates again.

    The connections of these users are closed, and no others. Raises RequestRefused, ServerFailed.
    """
    directory = auth_dir(config)
    for name in names:
        file = credentials_file(directory, name)
        if name == LEARNER:
            cure = f"end both, remove {file}, and start them again"
            raise RequestRefused(f"{name}: learner and bus read its password at their start; {cure}")
        if not config.bus.auth or not file.is_file():
            raise RequestRefused(f"{name}: want a user of this bus, with a file {file}; there is none")
    for name in names:
        credentials_file(directory, name).unlink()
    servers.reload()
