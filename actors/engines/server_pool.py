"""Choice of the server for a request, of engines or of scorers: one that serves, and has the fewest requests in flight.

Knows the addresses of the servers (live rows on the bus, or given URLs) and their failures, not the content of
requests. ``EnginePool`` is the pool of engines, whose versions count.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypedDict, TypeVar

from tidemill.actors.engines.port import Engine
from tidemill.actors.engines.sample_limit import EngineLoad
from tidemill.actors.engines.server_discovery import ANSWER_S, Discovery, ServerStatus
from tidemill.actors.errors import EngineError, ServerFault, VersionUnavailable
from tidemill.bus.errors import BusError, DetailedError
from tidemill.bus.system.coroutines import Waiter

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two reads of the servers' states."""
POLL_WAITING_S = 0.1
"""Seconds between two reads while a request waits (at max_lag 0 every step waits for the new version) and no change is
notified."""
QUARANTINE_S = (0.5, 10.0)
"""Seconds without requests after the first failure in a row, doubled with each further one; and their bound."""
GONE = "gone"
"""Remark of a server that is known no longer."""
GONE_S = 5.0
"""Seconds for which a server must be known no longer: after an outage of the bus all rows look old until they are
written again."""


class NoServer(DetailedError, EngineError):
    """No suitable engine was found in time; the request was not made."""

    server: str
    """The server, in words."""
    waited_s: float
    template = "waited {waited_s:.1f} s for {server}"


class Closing(Protocol):
    """A client of a server."""

    async def close(self) -> None: ...


Client = TypeVar("Client", bound=Closing)


@dataclass(slots=True, kw_only=True)
class Pooled(Generic[Client]):
    """State of one server in a pool."""

    client: Client
    status: ServerStatus
    in_flight: int = 0
    failures: int = 0
    """Number of failures in a row."""
    error: str = ""
    """The last of them."""
    quarantined_until: float = 0.0
    chosen: int = 0
    """Number of the pool's choice that last selected it."""
    missing_since_s: float | None = None
    """Monotonic time since which it is known no longer."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its process is no more: known no longer for ``GONE_S``, or another one is at its address."""

    @property
    def usable(self) -> bool:
        """True if it serves, and is not in quarantine."""
        return self.status.serving and self.quarantined_until <= time.monotonic()

    def remark(self, min_version: int) -> str:
        """Return why the server is not chosen for a request of ``min_version``, given that it is not."""
        if not self.status.serving:
            return self.status.remark or "not serving"
        if self.status.version < min_version:
            return f"version {self.status.version}"
        return f"quarantined after {self.failures} failures"


class ServerPool(Generic[Client]):
    """The known servers. The one with the fewest requests in flight is chosen; one that fails is quarantined, twice as
    long each time.

    ``run`` reads the servers' states; it must be running while requests are made.
    """

    noun = "server"
    """Kind of server in messages."""

    def __init__(
        self,
        discovery: Discovery,
        client: Callable[[str], Client],
        *,
        quarantine_s: tuple[float, float] = QUARANTINE_S,
        in_turn: bool = False,
    ) -> None:
        """``client(url)`` returns a client; it is closed when its server is gone, and by ``run`` at the end.

        ``in_turn``: of equally busy servers choose the one chosen longest ago, else the first by id.
        """
        self._discovery, self._client, self._quarantine_s, self._in_turn = discovery, client, quarantine_s, in_turn
        self.entries: dict[str, Pooled[Client]] = {}
        """The known servers by address."""
        self._changed = Waiter()
        self._tickets, self._choices = itertools.count(), itertools.count(1)
        self._waiting: dict[int, tuple[int, float]] = {}
        """Ticket -> (requested version, monotonic time of the request)."""
        self._refresh_now = Waiter()
        self._reads = 0
        self._closing = False

    async def run(self) -> None:
        """Background loop: read the servers' states, more often while a request waits."""
        try:
            async with AsyncExitStack() as stack:
                await self._watch(stack)
                while True:
                    try:
                        await self._update(await self._discovery.discover())
                    except BusError as error:  # the last known states are still the best guess
                        logger.debug("%s discovery failed error=%s", self.noun, error)
                    self._reads += 1
                    self._changed.wake()
                    await self._refresh_now.wait(POLL_WAITING_S if self._waiting else POLL_S)
        finally:
            await self._discovery.close()
            for entry in self.entries.values():
                await entry.client.close()

    async def _watch(self, stack: AsyncExitStack) -> None:
        """Read the states at once when a server changes while a request waits for one."""

        try:
            await stack.enter_async_context(self._discovery.watch(self._refresh_waiting))
        except BusError as error:
            logger.warning("cannot subscribe to changes of %ss, polling only error=%s", self.noun, error)

    def _refresh_waiting(self) -> None:
        if self._waiting:
            self._refresh_now.wake()

    @asynccontextmanager
    async def acquire(
        self, *, min_version: int = 0, timeout_s: float, avoid: str = "", prefer: str = ""
    ) -> AsyncIterator[tuple[str, Client]]:
        """Yield (id, client) of a server that serves ``min_version`` or newer, with the fewest requests: ``prefer`` if
        possible, ``avoid`` only if there is no other (ids).

        A ServerFault that leaves the block puts the server into quarantine (not when only its version is too old).
        Raises NoServer when there is none within ``timeout_s``, or none at once after ``give_up``.
        """
        entry = await self.wait(min_version, timeout_s, avoid, prefer)
        with self.using(entry) as acquired:
            yield acquired

    @contextmanager
    def using(self, entry: Pooled[Client], requests: int = 1) -> Iterator[tuple[str, Client]]:
        """Yield (id, client) of a server that ``wait`` has just returned, and count the requests; as ``acquire``."""
        entry.in_flight += requests
        entry.chosen = next(self._choices)
        try:
            yield entry.status.id, entry.client
        except ServerFault as error:
            if not isinstance(error, VersionUnavailable):
                self._quarantine(entry, error)
            raise
        else:
            entry.failures = 0
        finally:
            entry.in_flight -= requests
            self._changed.wake()

    async def gone(self, client: Client) -> None:
        """Return when the process of an acquired client is no more, as far as the bus knows."""
        for entry in [entry for entry in self.entries.values() if entry.client is client]:
            await entry.gone.wait()

    def process_of(self, server_id: str) -> str:
        """Return the identity of a server's process, as last observed; empty = not known."""
        return next((entry.status.process for entry in self.entries.values() if entry.status.id == server_id), "")

    async def refresh(self) -> None:
        """Read the servers' states at once and return when they are known. Raises TimeoutError after ``ANSWER_S``."""
        async with asyncio.timeout(ANSWER_S):
            for _ in range(2):  # the first may have begun before this call
                reads = self._reads
                self._refresh_now.wake()
                while self._reads == reads:
                    await self._changed.wait()

    def give_up(self) -> None:
        """From now on ``acquire`` raises NoServer instead of waiting."""
        self._closing = True
        self._changed.wake()

    def waits_for(self) -> str:
        """Return a description of the wait for a server and its duration; empty when no request waits."""
        if not self._waiting:
            return ""
        min_version, since = min(self._waiting.values(), key=lambda waiting: waiting[1])
        waited_s = time.monotonic() - since
        return f"{self._describe(min_version)}, for {waited_s:.0f} s ({len(self._waiting)} samples wait)"

    async def wait(self, min_version: int, timeout_s: float, avoid: str, prefer: str) -> Pooled[Client]:
        """Return a server as ``acquire`` does. Use it at once: until then it may be chosen again, or be closed."""
        begin = time.monotonic()
        ticket = next(self._tickets)
        try:
            while (entry := self._best(min_version, avoid, prefer)) is None:
                left_s = begin + timeout_s - time.monotonic()
                if self._closing or left_s <= 0:
                    raise NoServer(self._describe(min_version), time.monotonic() - begin)
                if ticket not in self._waiting:
                    self._waiting[ticket] = (min_version, begin)
                    self._refresh_now.wake()
                await self._changed.wait(min(left_s, self._next_return_s()))
            return entry
        finally:
            self._waiting.pop(ticket, None)

    def _best(self, min_version: int, avoid: str, prefer: str) -> Pooled[Client] | None:
        able = [entry for entry in self.entries.values() if entry.usable and entry.status.version >= min_version]
        if len(able) < 2:
            return able[0] if able else None

        def rank(entry: Pooled[Client]) -> tuple[bool, bool, int, int, str]:
            name = entry.status.id
            return name == avoid, name != prefer, entry.in_flight, entry.chosen if self._in_turn else 0, name

        return min(able, key=rank)

    def _next_return_s(self) -> float:
        """Return the seconds until the next server leaves quarantine; about ``POLL_S`` when none is in it."""
        now = time.monotonic()
        ends = [entry.quarantined_until - now for entry in self.entries.values() if entry.quarantined_until > now]
        # A little later, so that the quarantine is over when the waiter looks again.
        return min(ends, default=POLL_S) + 0.001

    def _describe(self, min_version: int) -> str:
        remarks = ", ".join(f"{entry.status.id}: {entry.remark(min_version)}" for entry in self.entries.values())
        return f"{self._describe_server(min_version)} ({remarks or 'none known'})"

    def _describe_server(self, min_version: int) -> str:
        """Return the server that a request waits for, in words."""
        return f"a {self.noun}"

    def _quarantine(self, entry: Pooled[Client], error: ServerFault) -> None:
        now = time.monotonic()
        if entry.quarantined_until > now:  # one death fails many requests, and counts once
            return
        first_s, longest_s = self._quarantine_s
        pause_s = min(first_s * 2**entry.failures, longest_s)
        entry.failures += 1
        entry.error = str(error)
        entry.quarantined_until = now + pause_s
        text = "%s quarantined id=%s pause_s=%.1f failures=%d error=%s"
        logger.warning(text, self.noun, entry.status.id, pause_s, entry.failures, error)

    async def _update(self, statuses: Sequence[ServerStatus]) -> None:
        """Apply the observed states. A server that serves again after it did not leaves quarantine."""
        status_of = {status.url: status for status in statuses}
        # A server with requests in flight stays, as they use its client.
        gone = [url for url, entry in self.entries.items() if url not in status_of and not entry.in_flight]
        # Popped all at once, or one might be chosen while another is closed.
        for entry in [self.entries.pop(url) for url in gone]:
            await entry.client.close()
        for url, entry in self.entries.items():
            status = status_of.get(url) or replace(entry.status, serving=False, remark=GONE)
            if status.serving and not entry.status.serving:
                entry.failures, entry.quarantined_until = 0, 0.0
            if status.process != entry.status.process and status.process and entry.status.process:
                entry.gone.set()  # ends the calls of the former process
                entry.gone = asyncio.Event()
            entry.status = status
            entry.missing_since_s = (entry.missing_since_s or time.monotonic()) if status.remark == GONE else None
            if entry.missing_since_s is None and entry.gone.is_set():  # it is back before its last call was over
                entry.gone = asyncio.Event()
            elif entry.missing_since_s is not None and time.monotonic() - entry.missing_since_s >= GONE_S:
                entry.gone.set()
        for url, status in status_of.items():
            if url not in self.entries:
                self.entries[url] = Pooled(client=self._client(url), status=status)
        self._changed.wake()


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
        return [
            {
                "url": entry.status.url,
                "id": entry.status.id,
                "serving": entry.usable,
                "version": entry.status.version,
                "in_flight": entry.in_flight,
                "failures": entry.failures,
                "remark": "" if entry.usable else entry.remark(0),
                "nonce": entry.status.nonce,
                "error": entry.error if entry.failures else "",
            }
            for entry in self.entries.values()
        ]

    def loads(self) -> list[EngineLoad]:
        return [
            EngineLoad(
                **{name: float(entry.status.load.get(name, 0.0)) for name in ("running", "waiting", "rows")},
                requests=entry.in_flight,
            )
            for entry in self.entries.values()
            if entry.usable
        ]

    def _describe_server(self, min_version: int) -> str:
        return f"an engine that serves version {min_version} or newer"
