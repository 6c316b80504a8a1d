"""Engines, scorers and actors of one machine, in the desired numbers, kept by the supervisor.

Consumes rows of ``wanted`` and the live rows of hosts; produces processes, and a live row with their numbers; waits for
a change, and reads every second besides; unblocked by the bus or the next second. Without the bus it leaves everything
as it is.

A child ends with its host, however that ends (by the kernel), so a host that starts finds no process to adopt or to
duplicate.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tidemill.actors.engines.membership import connected
from tidemill.bus.client.addresses import bare
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, Forbidden
from tidemill.bus.liveness import HeartbeatPublisher, LiveView
from tidemill.bus.server.auth import CREDENTIALS_VARIABLE, credentials_file
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.devices.shapes import DeviceError
from tidemill.launch.run import desired
from tidemill.launch.run.access import LEARNER, address_line
from tidemill.launch.run.desired import ROLES, LiveHost
from tidemill.launch.run.directory import HostExists
from tidemill.launch.run.engine_devices import EngineDevices
from tidemill.launch.run.supervisor import Supervisor
from tidemill.launch.run.workers import found_run
from tidemill.launch.settings.run_config import RunConfig

log = logging.getLogger(__name__)

ROLE = "host"
LOOK_EVERY_S = 1.0
LATE_S = 2.5  # Longest read that is no outage of the bus; after one, rows of living hosts may be as old as dead ones'
SETTLE_S = 5.0  # Seconds without changes after an outage of the bus, in which every live host writes its row again
HOST_RESTART_WINDOW_S = 300.0  # Seconds over which `tidemill host` counts the failures of a process (--restarts)


class Host:
    """Keeps the engines, scorers and actors of one machine in the desired numbers."""

    def __init__(
        self,
        bus: Bus,
        supervisor: Supervisor,
        host: LiveHost,
        *,
        prefix: str = "",
        arguments: Callable[[str, str], Sequence[str]],
        drain_s: float,
        users: Mapping[str, Sequence[Path]] | None = None,
        devices: EngineDevices | None = None,
        own: Mapping[str, int] | None = None,
    ) -> None:
        """``arguments(role, id)`` follow ``python -m tidemill``; processes are named ``<role>-<prefix><number>``.

        ``own``: its desired numbers where the bus has no row for this host.
        ``devices``: the accelerators of its engines; None = all of this machine, which has no ranks.
        ``users``: on a bus with users, files with the credentials of this host's processes, by role: each process is
        named after its user then, and there are no more of them than users.
        """
        self._bus, self._supervisor, self._live_host = bus, supervisor, host
        self._prefix, self._arguments, self._drain_s = prefix, arguments, drain_s
        self._users, self._own = users, own or {}
        self._devices = devices or EngineDevices(bus)
        self._unplaced: dict[str, str] = {}
        """Desired engines that are not started, and the reason: there is no device for them."""
        self._view = LiveView(bus)
        self._draining: dict[str, asyncio.Task[object]] = {}
        self._logged: set[str] = set()  # Processes that are given up, and logged as such
        self._credentials: dict[str, str] = {}  # Digest of the credentials with which each process was started
        self._revision = -1
        self.counts: dict[str, int] = {}  # Desired number of processes of this host by role, as last read

    async def run(self, draining: asyncio.Event, *, drain: bool = True) -> None:
        """Keep the processes until ``draining`` is set; then drain them, unless ``drain`` is False."""
        waiter, trusted_from, own = Waiter(), 0.0, self._live_host
        host, pid = socket.gethostname(), os.getpid()
        row = LiveRow(role=ROLE, id=own.name, host=host, pid=pid, phase="working", pool=own.pool)
        async with HeartbeatPublisher(self._bus, row) as heartbeat, self._waking(waiter.wake, draining):
            while not draining.is_set():
                began_s = time.monotonic()
                try:
                    rows, hosts = await desired.read(self._bus), await self._hosts()
                    if time.monotonic() - began_s > LATE_S:
                        trusted_from = time.monotonic() + SETTLE_S
                    counts = rows.of(self._live_host, hosts, own=self._own)
                    if counts["engine"]:
                        await self._devices.refresh()
                    if time.monotonic() >= trusted_from:
                        self.reconcile(counts, rows.revision)
                except BusError as error:
                    log.info("desired numbers not read, nothing is changed error=%s", error)
                    trusted_from = time.monotonic() + SETTLE_S
                self._update(heartbeat)
                await waiter.wait(LOOK_EVERY_S)
            if drain:
                heartbeat.update(phase="draining")
                for roles in (("actor", "learner"), ("engine", "scorer")):  # engines last: actors need them to finish
                    await self.settled()
                    names = [name for role in roles for name in self._supervisor.names(role)]
                    await self._supervisor.end(names, within_s=self._drain_s)

    @contextlib.asynccontextmanager
    async def _waking(self, wake: Callable[[], None], draining: asyncio.Event) -> AsyncIterator[None]:
        """While entered, call ``wake`` at changes of the desired numbers, and when ``draining`` is set."""
        rows, drained = self._bus.rows("wanted"), asyncio.create_task(draining.wait(), name="draining")
        drained.add_done_callback(lambda _: wake())
        try:
            async with rows.on_change("*", wake), rows.on_change("*.*", wake):
                yield
        finally:
            drained.cancel()

    async def _hosts(self) -> list[LiveHost]:
        hosts = {row.id: LiveHost(row.id, row.pool) for row in await self._view.alive(ROLE)}
        return list({**hosts, self._live_host.name: self._live_host}.values())

    def reconcile(self, counts: dict[str, int], revision: int) -> None:
        """Start missing processes and drain surplus ones; a process given up is tried again when rows, or its
        credentials, change.
        """
        if counts != self.counts:
            log.info("wanted %s", ", ".join(f"{role}s={counts[role]}" for role in ROLES))
        self.counts = counts
        slots = {role: self._slots(role) for role in ROLES}
        kept = [name for role in ROLES for name in self._supervisor.names(role)]
        given_up = self._supervisor.given_up
        for name in kept:
            tried_again = name in given_up and (revision != self._revision or self._has_new_credentials(name))
            if tried_again or not any(name in names for names in slots.values()):
                self._drain(name)
        self._devices.keep_only(kept, desired=slots["engine"])
        self._unplaced = {name: reason for name, reason in self._unplaced.items() if name in slots["engine"]}
        for role in ROLES:
            for name in slots[role]:
                if name not in kept:  # a process that drains is kept until it has ended
                    self._start(role, name)
        for name in given_up.keys() - self._logged:
            log.error("%s", given_up[name])
        self._logged = set(given_up)
        self._revision = revision

    def _slots(self, role: str) -> list[str]:
        count = self.counts[role]
        if self._users is None:
            return [f"{role}-{self._prefix}{number}" for number in range(count)]
        return [file.stem for file in self._users[role][:count]]

    def _start(self, role: str, name: str) -> None:
        try:
            environment = self._environment(role, name)
        except DeviceError as error:
            if self._unplaced.get(name) != str(error):
                log.warning("not started process=%s reason=%s", name, error)
            self._unplaced[name] = str(error)
            return
        self._unplaced.pop(name, None)
        self._credentials[name] = self._credentials_digest(name)
        self._supervisor.keep(name, self._arguments(role, name), environment=environment)

    def _environment(self, role: str, name: str) -> dict[str, str]:
        """Return the variables of a process: its credentials and its devices. Raises DeviceError."""
        variables = self._devices.give(name) if role == "engine" else {}
        if self._users is None:
            return variables
        return {**variables, CREDENTIALS_VARIABLE: str(self._user_file(name))}

    def _user_file(self, name: str) -> Path | None:
        """Return the file with the credentials of a process; None on a bus without users."""
        files = itertools.chain(*(self._users or {}).values())
        return next((file for file in files if file.stem == name), None)

    def _credentials_digest(self, name: str) -> str:
        """Return the digest of the file with a process's credentials; empty without one."""
        file = self._user_file(name)
        with contextlib.suppress(OSError):  # it is being replaced
            return hashlib.sha256(file.read_bytes()).hexdigest() if file else ""
        return ""

    def _has_new_credentials(self, name: str) -> bool:
        """Return whether a process would be started with other credentials than before."""
        return self._credentials_digest(name) not in ("", self._credentials.get(name))

    def _drain(self, name: str) -> None:
        """Drain a process; if it is desired again, it is started after the end: never two of one name."""
        if name in self._draining:
            return
        ending = self._supervisor.end([name], within_s=self._drain_s)
        self._draining[name] = asyncio.create_task(ending, name=f"drain {name}")
        self._draining[name].add_done_callback(lambda _: self._draining.pop(name))

    async def settled(self) -> None:
        """Wait for the processes that are draining."""
        await asyncio.gather(*self._draining.values(), return_exceptions=True)

    def _update(self, heartbeat: HeartbeatPublisher) -> None:
        running, given_up = self._supervisor.running, self._supervisor.given_up
        load = {f"{role}s_wanted": float(self.counts.get(role, 0)) for role in ROLES}
        load |= {f"{role}s": float(sum(name in running for name in self._supervisor.names(role))) for role in ROLES}
        load |= {"draining": float(len(self._draining)), "restarted": float(sum(self._supervisor.restarted.values()))}
        lost = [f"{name} given up: {error.cause}" for name, error in sorted(given_up.items())]
        lost += [f"{name} not started: {reason}" for name, reason in sorted(self._unplaced.items())]
        lost += [
            f"{self.counts[role]} {role}s wanted, credentials for {len(files)} of them here"
            for role, files in (self._users or {}).items()
            if self.counts.get(role, 0) > len(files)
        ]
        heartbeat.update(load=load, waits_for="; ".join(lost))


def _by_number(file: Path) -> tuple[int, str]:
    return len(file.stem), file.stem  # actor-2 before actor-10


def users_in(directory: Path) -> dict[str, list[Path]]:
    """Return the files with credentials by role, made by ``tidemill bus --auth``. Raises ValueError for none."""
    files = {role: sorted(directory.glob(f"{role}-*.env"), key=_by_number) for role in ROLES}
    if not any(files.values()):
        raise ValueError(f"--users: want files engine-N.env and actor-N.env in {directory}, got none")
    return files


async def refuse_another(bus: Bus, name: str) -> None:
    """Raise HostExists if a host of this name is alive elsewhere; takes ``SETTLE_S`` if it is not."""
    rows, key = bus.rows("live"), f"{ROLE}.{desired.token(name)}"
    _, first_revision = await rows.read(key)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while True:  # a user of the role host gets no changes of its own row
                row, revision = await rows.read(key)
                if row is None:
                    return
                if revision != first_revision:
                    place = f"{row.get('host')} (process {row.get('pid')})"
                    raise HostExists(f"--name: host {name} of run {bus.run} is running on {place}; choose another name")
                await asyncio.sleep(LOOK_EVERY_S / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLearner:
    """One node of a learner, as the command line of its host gives it."""

    config: RunConfig
    rank: int
    arguments: Sequence[str]  # Those behind `python -m tidemill`
    # Directory with the credentials of the learner's user; None = no users, or the run's own files.
    users: Path | None = None

    def __post_init__(self) -> None:
        if self.users is not None and not credentials_file(self.users, LEARNER).exists():
            want = f"{LEARNER}.env in {self.users} with --learner-node"
            raise ValueError(f"--users: want {want}, got none; cure: copy it from the bus's machine")

    @asynccontextmanager
    async def kept(self, supervisor: Supervisor, *, drain_s: float) -> AsyncIterator[None]:
        """Keep the agent while entered: it is started again after a bad end."""
        environment = {} if self.users is None else {CREDENTIALS_VARIABLE: str(credentials_file(self.users, LEARNER))}
        supervisor.keep(f"{LEARNER}-node-{self.rank}", self.arguments, finishes=True, environment=environment)
        try:
            yield
        finally:
            # None are left where the host has drained all.
            await supervisor.end(supervisor.names(LEARNER), within_s=drain_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine as a host of a run, from the command line."""

    name: str
    pool: str
    own: Mapping[str, int]  # Desired numbers of this machine itself, by role; empty = its share of the total
    directory: Path
    drain_s: float
    restarts: int
    users: Mapping[str, Sequence[Path]] | None
    allowed: Sequence[str]
    server_words: Sequence[str]  # Arguments passed on to its engines and scorers
    learner: "HostLearner | None" = None  # The learner's node of this machine

    def command(self, role: str, id: str, *, bus_url: str, run: str) -> list[str]:
        """Return the arguments behind ``python -m tidemill`` of one of its processes."""
        passed_on = [word for pattern in self.allowed for word in ("--allow", pattern)]
        words = () if role == "actor" else self.server_words
        if role == "scorer":  # the port belongs to an engine
            words = [bare(word) for word in words]
        return [role, "--bus", bus_url, "--run", run, "--id", id, *passed_on, *words]


async def run_host(run: str, bus_url: str, draining: asyncio.Event, machine: Machine) -> None:
    """Run this machine's engines, scorers and actors in the desired numbers, and its node of the learner."""
    name, directory, learner = machine.name, machine.directory, machine.learner
    address = address_line(bus_url, None, name, os.environ)
    run = run or (learner.config.run if learner else await found_run(address, "host", draining))
    if not run:
        return
    supervisor = Supervisor(directory / "logs", restarts=machine.restarts, window_s=HOST_RESTART_WINDOW_S)
    async with AsyncExitStack() as stack:
        if learner is not None:  # before the wait for the run: its leader begins it
            await stack.enter_async_context(learner.kept(supervisor, drain_s=machine.drain_s))
        bus = await connected(stack, address, run, BusConfig(), name=f"host {name}", draining=draining)
        if bus is None:
            return
        await refuse_another(bus, name)
        if machine.own:
            try:
                await desired.change(bus, desired.host_key(name), machine.own)
            except Forbidden as error:  # a user of the role host: the numbers are known here alone
                log.info("%s; its numbers are kept here, unless an operator sets others", error)
        host = Host(
            bus,
            supervisor,
            desired.LiveHost(name, machine.pool),
            prefix=f"{name}-",
            arguments=partial(machine.command, bus_url=bus_url, run=run),
            drain_s=machine.drain_s,
            users=machine.users,
            devices=EngineDevices(bus, learner.config) if learner else None,
            own=machine.own,
        )
        log.info("host running run=%s name=%s pool=%s logs=%s", run, name, machine.pool or "-", directory / "logs")
        await host.run(draining)
