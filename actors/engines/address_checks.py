"""Verification of engines' advertised addresses: another process calls each and expects the nonce of its live row back.

    engine   row: address, nonce      GET /health -> header with the nonce, in every phase
    witness  row: reached             nonce -> the error; empty = the nonce came back; the learner and every router
    actors   row: reached             only the engines that have failed them several times in a row

An address is believed once a witness has got the nonce there: a name that resolves to another machine, a port that
another process has and a container's inner address all look right to the engine itself. Knows the bus and HTTP, but not
the engines' work.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import aiohttp

from tidemill.actors.engines.server_pool import EnginePool
from tidemill.actors.http_api import NONCE_HEADER
from tidemill.bus.errors import BusError
from tidemill.bus.http.client import open_session
from tidemill.bus.liveness import HeartbeatPublisher, LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import LiveRow

logger = logging.getLogger(__name__)

ROLES = ("learner", "router")
"""Roles of the processes that call every engine."""
CURE = "cure: engine: --advertise ADDRESS"
LOOK_EVERY_S = 1.0
"""Seconds between two looks at the engines' rows; an engine that was not reached is called again at each."""
CHECK_EVERY_S = 5.0
"""Seconds between two calls to an engine that was reached."""
CONNECT_S = 1.5
"""Deadline of a connection; after 1 s Linux repeats a lost first packet. It gives up after 3 s where no machine has the
address, and after 130 s where a firewall drops packets.
"""
ANSWER_S = 5.0
"""Deadline of a call: one that has a connection may wait for a busy engine."""
MAX_MISSES = 3
"""Calls in a row without an answer after which an engine that was reached before is reported; a busy one may miss
one."""
MAX_CALLS = 32
"""Calls at a time."""
MAX_NAMED = 64
"""Errors in a row of the bus; the errors of further engines are the same by experience."""
MAX_CHARACTERS = 200
"""Length at which an error is cut off."""


@dataclass(slots=True)
class _Called:
    """Calls to one process of an engine."""

    error: str = ""
    was_reached: bool = False
    misses: int = 0
    due_s: float = 0.0
    """Time of the loop from which on it is called again."""

    def note(self, error: str, now: float) -> None:
        self.misses = self.misses + 1 if error else 0
        if not error or not self.was_reached or self.misses >= MAX_MISSES:
            self.error = error
        self.was_reached = self.was_reached or not error
        self.due_s = now + (LOOK_EVERY_S if error else CHECK_EVERY_S)


@dataclass(slots=True)
class AddressChecker:
    """Calls the engines of a run and writes the results into its own live row. ``run`` is a background loop."""

    bus: Bus
    heartbeat: HeartbeatPublisher
    _called: dict[str, _Called] = field(default_factory=dict)

    async def run(self) -> None:
        """Call each engine once it has an address, and again from time to time, until cancelled."""
        view, slots = LiveView(self.bus), asyncio.Semaphore(MAX_CALLS)
        async with open_session(total_s=ANSWER_S, connect_s=CONNECT_S, keep_s=0) as session:
            while True:
                try:
                    rows = {row.nonce: row for row in await view.alive("engine") if row.nonce and row.address}
                except BusError as error:  # the engines known so far stay
                    logger.debug("engines not read error=%s", error)
                else:
                    self._called = {nonce: self._called.get(nonce) or _Called() for nonce in rows}
                    now = asyncio.get_running_loop().time()
                    due = [row for row in rows.values() if self._called[row.nonce].due_s <= now]
                    await asyncio.gather(*(self._call(session, slots, row) for row in due))
                    self._report()
                await asyncio.sleep(LOOK_EVERY_S)

    async def _call(self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, row: LiveRow) -> None:
        async with slots:
            error = await call(session, row.address, row.nonce)
        called = self._called[row.nonce]
        before = called.error
        called.note(error, asyncio.get_running_loop().time())
        if bool(called.error) != bool(before):
            text = "engine unreachable" if called.error else "engine reachable again"
            logger.warning("%s id=%s address=%s error=%s", text, row.id, row.address, called.error or before)

    def _report(self) -> None:
        errors = {nonce: called.error for nonce, called in self._called.items() if called.error}
        reached = {nonce: "" for nonce, called in self._called.items() if called.was_reached and not called.error}
        reached |= dict(list(errors.items())[:MAX_NAMED])
        if reached != self.heartbeat.row.reached:
            self.heartbeat.update(reached=reached)


async def call(session: aiohttp.ClientSession, address: str, nonce: str) -> str:
    """Return why the process at an address has not answered with the nonce; empty if it has."""
    try:
        async with session.get(f"{address}/health", allow_redirects=False) as response:
            got = response.headers.get(NONCE_HEADER, "")
    except TimeoutError:
        return f"no connection in {CONNECT_S:g} s, or no answer in {ANSWER_S:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a text that is no URL
        return (str(error) or type(error).__name__)[:MAX_CHARACTERS]
    if got == nonce:
        return ""
    return f"another process answers there (HTTP {response.status}, {'another nonce' if got else 'no nonce'})"


def unreachable(nonce: str, rows: Iterable[LiveRow]) -> list[str]:
    """Return an error for each process that has not reached an engine, by its row.

    ``rows`` are of processes that live.
    """
    if not nonce:
        return []
    return [f"unreachable from {row.role} {row.id}: {row.reached[nonce]}" for row in rows if row.reached.get(nonce)]


def verified(nonce: str, rows: Iterable[LiveRow]) -> bool:
    """Return whether a process has reached an engine at its advertised address."""
    return any(row.reached.get(nonce) == "" for row in rows)


def failing(pool: EnginePool) -> dict[str, str]:
    """Return ``reached`` of a process that makes no calls of its own: nonce -> the last of several errors in a row."""
    named = [entry for entry in pool.overview() if entry["nonce"] and entry["failures"] >= MAX_MISSES]
    return {entry["nonce"]: entry["error"][:MAX_CHARACTERS] for entry in named[:MAX_NAMED]}


class OwnAddress:
    """An engine's view of its own address: the results that the witnesses have written."""

    def __init__(self, bus: Bus, nonce: str) -> None:
        self._view, self._nonce = LiveView(bus), nonce
        self.trouble = ""
        """Errors with the cure; empty while there are none."""

    async def run(self, changed: Callable[[], None]) -> None:
        """Background loop: read the rows of the witnesses. ``changed`` is called when ``trouble`` is another one."""
        while True:
            is_verified = False
            try:
                rows = [row for role in ROLES for row in await self._view.alive(role)]
            except BusError as error:
                logger.debug("witnesses not read error=%s", error)
            else:
                is_verified = verified(self._nonce, rows)
                errors = unreachable(self._nonce, rows)
                trouble = "; ".join([*errors, CURE]) if errors else ""
                if bool(trouble) != bool(self.trouble):  # the texts of connections that fail in turn are no events
                    logger.warning("%s", trouble or "reachable again")
                if trouble != self.trouble:
                    self.trouble = trouble
                    changed()
            await asyncio.sleep(CHECK_EVERY_S if is_verified else LOOK_EVERY_S)
