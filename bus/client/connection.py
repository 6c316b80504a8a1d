"""The NATS connection, and retries while it is down, all by one rule. Knows nothing of streams.

It tracks connected, disconnected, closed and forbidden, and calls listeners.
"""

import asyncio
import logging
import math
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tidemill.bus.client.addresses import Address, parse
from tidemill.bus.client.refusals import Refusals
from tidemill.bus.config import LEAF_CURE, OLDEST_SERVER
from tidemill.bus.errors import BusError, BusFull, BusUnavailable, Denied, Forbidden, PasswordReplaced
from tidemill.bus.system.coroutines import CANCEL_AGAIN_S, Waiter, ended, heard, to_the_end
from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire.subjects import inbox_prefix

_log = logging.getLogger(__name__)

RETRY_S = 0.1
AFTER_FULL_S = 15.0  # Seconds left for a request after the bus was full: its server is started again when it has room
T = TypeVar("T")
_RECONNECT_S = 0.2
_PING_S = 5.0  # Seconds between two pings; a silently cut network is detected after three
_LOG_EVERY_S = 5.0
_FLUSH_S, _CLOSE_S = 1.0, 1.0  # Deadlines at a close: for messages that are not sent yet, and for the close itself
_NEVER_S = 1e6
# Parts of the server's errors for a wrong user or password, in lower case
_LOGIN_ERRORS = ("authorization violation", "authentication", "user credentials")
_LOGIN_LATE = "authentication timeout"  # of a server that many clients reach at once: no word about the password

_JETSTREAM = "$JS.API."
_STARTING_S = 3.0  # Seconds without JetStream after which a log names the cures
NO_JETSTREAM = f"it starts, or was started without -js, or is a leaf node with plain defaults ({LEAF_CURE})"

# Errors that the client library raises for causes outside of this process
FOREIGN = (nats.errors.Error, OSError, asyncio.TimeoutError)


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Raise BusUnavailable for errors of the client library in the block."""
    try:
        yield
    except FOREIGN as error:
        raise unavailable(where, error) from None


def unavailable(where: str, error: BaseException) -> BusUnavailable:
    """Return the error of this project for one of the client library."""
    return BusUnavailable(where, str(error) or type(error).__name__)


class _Client(Client):
    """The client library, patched: headers that it cannot parse would end its reading of a connection for ever.

    There is no public hook: ``docs/decisions/017-headers-that-the-client-cannot-parse.md``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unparsed = FailureLog(_log)
        self.refusal = ""  # The server's last error; ``last_error`` forgets it when the socket is closed behind it

    async def _process_err(self, err_msg: str) -> None:
        self.refusal = err_msg
        await super()._process_err(err_msg)

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except Exception as error:  # whatever the parser raises, the message is delivered, without headers
            self._unparsed("bus: headers that cannot be parsed", f"{headers[:40]!r} ({error!r})")
            return None


class Connection:
    """One connection, which reconnects for ever."""

    def __init__(self) -> None:
        self.nc = _Client()
        self.connected = False  # True while the connection is up
        self._changed = Waiter()
        self._listeners: set[Callable[[], None]] = set()
        self.refusals = Refusals()
        self.user = ""
        self._address, self._opening = Address(servers=()), False
        self.last_error = ""
        self._logged_s = 0.0
        self._repeated, self._unanswered_s = FailureLog(_log), math.inf
        self._closing = False
        self._what = "bus"

    @property
    def closed(self) -> bool:
        """True once the connection is closed for good; a broken one is connected again."""
        return self.nc.is_closed

    @property
    def denied(self) -> Denied | None:
        """Refusal with which the server has closed the connection for good: the user's password was replaced."""
        if self._closing or not self.closed:
            return None
        try:
            _raise_if_denied(self._what, self._address, BusError(self.nc.refusal))
        except Denied as denied:
            return PasswordReplaced(denied.where, denied.reason, denied.cure)
        return None

    @property
    def connected_url(self) -> str:
        """URL of the present server; empty while there is none."""
        url = self.nc.connected_url
        return "" if url is None else url.geturl()

    @property
    def max_payload(self) -> int:
        """Largest message that the server accepts, in bytes, headers included."""
        return self.nc.max_payload

    async def wait_up(self, timeout_s: float, where: str = "bus") -> None:
        """Return when the connection is up. Raises BusUnavailable when it is not up in time, or closed; Denied."""
        if self.connected:
            return
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                while not self.connected:
                    if self.closed:
                        raise self.denied or BusUnavailable(where, "the connection was closed")
                    await self._changed.wait()
        except TimeoutError:
            reason = f"not connected for {timeout_s:.1f} s ({self.last_error or 'no error seen'})"
            raise BusUnavailable(where, reason) from None

    def on_lost(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` whenever the connection breaks. Returns a function that removes it."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Msg:
        """Return the answer to a request. Raises Forbidden; BusUnavailable, at once when the connection breaks."""
        loop = asyncio.get_running_loop()
        self.refusals.check_allowed(subject)

        def end() -> None:
            if not scope.expired():
                scope.reschedule(loop.time())

        def end_if_refused(error: Forbidden) -> bool:
            if is_ours := error.subject == subject.lower():
                end()
            return is_ours

        try:
            async with asyncio.timeout(timeout_s) as scope:
                removals = (self.on_lost(end), self.refusals.on_forbidden(end_if_refused))
                try:
                    # Twice the time, so that always the scope above ends the request, and never the library.
                    # Its wait_for (Python 3.11) loses a cancellation that comes together with the answer.
                    return await heard(self.nc.request(subject, payload, timeout=2 * timeout_s))
                finally:
                    for remove in removals:
                        remove()
        except nats.errors.NoRespondersError as error:
            if not subject.startswith(_JETSTREAM):
                raise unavailable(subject, error) from None
            raise BusUnavailable(subject, self._no_jetstream()) from None
        except FOREIGN as error:
            self.refusals.check_allowed(subject)
            raise unavailable(subject, error) from None

    def _no_jetstream(self) -> str:
        """Return the reason for which no JetStream answers, with the cure; log it, unless a server may just start."""
        reason, now = f"no JetStream answers at {self.connected_url}: {NO_JETSTREAM}", time.monotonic()
        self._unanswered_s = min(self._unanswered_s, now)
        if now - self._unanswered_s > _STARTING_S:
            self._repeated("bus: no JetStream", reason)
        return reason

    async def send(self, subject: str, payload: bytes = b"", *, reply: str = "") -> None:
        """Publish without an answer. Raises Forbidden; BusUnavailable when not connected."""
        self.refusals.check_allowed(subject)
        if not self.connected:  # the client library would send it later, too late
            raise BusUnavailable(subject, "not connected")
        with translated(subject):
            # With more than 2 MiB unsent it waits for them, and swallows a cancellation.
            await heard(self.nc.publish(subject, payload, reply=reply))

    async def try_send(self, subject: str, payload: bytes) -> bool:
        """Publish a message that may be lost. Returns False when the bus is away."""
        try:
            await self.send(subject, payload)
        except BusUnavailable as error:
            _log.info("bus: unsent subject=%s reason=%s", subject, error)
            return False
        return True

    @asynccontextmanager
    async def subscribed(self, subject: str, on_message: Callable[[Msg], Awaitable[None]]) -> AsyncIterator[None]:
        """While entered, call ``on_message`` with every message on a subject that arrives while connected."""
        with translated(subject):
            sub = await self.nc.subscribe(subject, cb=on_message)
        try:
            yield
        finally:
            if not self.closed:
                await sub.unsubscribe()

    async def subscribe(self, subject: str, on_message: Callable[[Msg], Awaitable[None]], where: str) -> Subscription:
        """Subscribe to a reply subject, without the limits beyond which the library drops messages.

        An answer that is dropped is a message sent twice.
        """
        with translated(where):
            return await self.nc.subscribe(subject, cb=on_message, pending_msgs_limit=-1, pending_bytes_limit=-1)

    async def open(self, url: str, name: str, wait_s: float) -> None:
        """Connect to ``url`` within ``wait_s``. Raises BusUnavailable, ValueError; Denied at once."""
        since = time.monotonic()
        address = parse(url)
        self._what, self._address, self.user = f"{name} at {address}", address, address.user
        self._opening = True
        connecting = asyncio.get_running_loop().create_task(
            self.nc.connect(
                list(address.servers),
                name=name,
                **_login(address),
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RECONNECT_S,  # type: ignore[arg-type]
                ping_interval=_PING_S,  # type: ignore[arg-type]
                max_outstanding_pings=2,
            )
        )
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(connecting)
        except FOREIGN as error:
            reason = f"waited {time.monotonic() - since:.1f} s: {self.last_error or error or type(error).__name__}"
            raise BusUnavailable(f"connecting {name} to {address}", reason) from None
        finally:
            # The client library may swallow one cancellation, and would then connect for ever.
            await ended(connecting, again_s=CANCEL_AGAIN_S)
            self._opening = False
        version = self.nc.connected_server_version
        if (version.major, version.minor) < OLDEST_SERVER:
            want, got = ".".join(map(str, OLDEST_SERVER)), f"{version.major}.{version.minor}.{version.patch}"
            raise BusError(f"connecting {name} to {address}: want nats-server >= {want}, got {got}")
        self._set_connected()

    async def close(self) -> None:
        """Flush for at most a second and close within another; a cancellation is raised afterwards.

        After a failed TLS handshake the library would wait for ever, and a close that is cut short leaves its tasks and
        its socket behind.
        """
        await to_the_end(self._close())

    async def _close(self) -> None:
        self._closing = True
        flushing: asyncio.Task[None] | None = None
        if self.connected and not self.nc.is_closed:
            # Cancelled only after the close: the library fails at the answer to a flush that has been given up, and
            # stops reading.
            flushing = asyncio.create_task(self.nc.flush(timeout=_NEVER_S), name="flush")
        try:
            if flushing is not None:
                await asyncio.wait({flushing}, timeout=_FLUSH_S)
                reason = f"no answer for {_FLUSH_S:g} s" if not flushing.done() else flushing.exception()
                if reason is not None:
                    _log.warning("bus: closing with messages unsent error=%s", reason)
            async with asyncio.timeout(_CLOSE_S):
                await self.nc.close()
        except FOREIGN as error:  # the library tries to send pending messages over a connection that is gone
            _log.info("bus: closed while disconnected error=%r", error)
        finally:
            if flushing is not None:
                await ended(flushing, again_s=CANCEL_AGAIN_S)

    async def _on_error(self, error: Exception) -> None:
        """Handle a refused publish, which the library reports only here: its caller would wait for the answer."""
        self.last_error = str(error) or type(error).__name__
        if self._opening:
            _raise_if_denied(self._what, self._address, error)
        if self.refusals.record(self.last_error, self.user):
            return
        if time.monotonic() - self._logged_s > _LOG_EVERY_S:
            self._logged_s = time.monotonic()
            state = "trouble" if self.connected else "waiting"
            _log.warning("bus: %s what=%s error=%s", state, self._what, self.last_error)

    async def _on_disconnected(self) -> None:
        if self._closing or not self.connected:
            return
        _log.warning("bus: disconnected, reconnecting for ever")
        self._set_disconnected()

    async def _on_reconnected(self) -> None:
        _log.info("bus: connected again")
        self._set_connected()

    async def _on_closed(self) -> None:
        self._set_disconnected()
        self._changed.wake()

    def _set_connected(self) -> None:
        self.refusals.clear()
        self.connected, self._unanswered_s = True, math.inf
        self._changed.wake()

    def _set_disconnected(self) -> None:
        self.connected = False
        for listener in list(self._listeners):
            listener()


def _login(address: Address) -> dict[str, object]:
    """Return the client library's options for user and certificates. Raises ValueError."""
    options: dict[str, object] = {}
    if address.user and address.password:
        prefix = inbox_prefix(address.user).encode()
        options |= {"user": address.user, "password": address.password, "inbox_prefix": prefix}
    elif address.user:
        options["token"] = address.user
    if address.tls or address.ca:
        try:
            context = ssl.create_default_context(cafile=address.ca or None)
            if address.cert:
                context.load_cert_chain(address.cert, address.key or None)
        except OSError as error:
            files = f"{address.ca} {address.cert}"
            raise ValueError(f"address of the bus: ca, cert, key: want PEM files, {files}: {error}") from None
        options["tls"] = context
    return options


def _raise_if_denied(what: str, address: Address, error: Exception) -> None:
    if isinstance(error, ssl.SSLCertVerificationError):
        reason, cure = f"the certificate of the bus: {error.verify_message}", "give the file that signed it"
        raise Denied(what, reason, f"{cure} (bus.tls_ca, or ?ca=FILE)")
    text = str(error).lower()
    if any(part in text for part in _LOGIN_ERRORS) and _LOGIN_LATE not in text:
        reason = "wrong name or password" if address.user else "no user given"
        cure = "TIDEMILL_BUS_CREDENTIALS=FILE, or TIDEMILL_BUS_USER and TIDEMILL_BUS_PASSWORD (docs/security.md)"
        raise Denied(what, reason, cure)


@asynccontextmanager
async def open_connection(url: str, name: str, wait_s: float) -> AsyncIterator[Connection]:
    """Yield an open connection, and close it at the end of the block. Raises as ``Connection.open``."""
    connection = Connection()
    try:
        await connection.open(url, name, wait_s)
        yield connection
    finally:
        await connection.close()


async def retry(
    connection: Connection,
    ask: Callable[[], Awaitable[T]],
    *,
    pause_s: float = RETRY_S,
    deadline: float = math.inf,
    outage_s: float | None = None,
    report: Callable[[BusUnavailable], None] | None = None,
) -> T:
    """Return the result of ``ask``, called again while it raises BusUnavailable and ``before_retry`` does not.

    A full bus is waited for without end. ``report`` gets each error that another try follows; with ``outage_s`` that
    try waits for the connection, at most so long.
    """
    while True:
        try:
            return await ask()
        except BusUnavailable as error:
            if isinstance(error, BusFull):
                deadline = max(deadline, time.monotonic() + AFTER_FULL_S)
            await before_retry(connection, error, pause_s=pause_s, deadline=deadline)
            if report is not None:
                report(error)
        if outage_s is not None:
            await connection.wait_up(outage_s)


async def before_retry(
    connection: Connection, error: BusUnavailable, *, pause_s: float = RETRY_S, deadline: float = math.inf
) -> None:
    """Wait before the next try. Raises ``error`` when closed, or when that is past ``deadline`` (monotonic clock);
    Denied when the password of this process was replaced.
    """
    if connection.closed or time.monotonic() + pause_s >= deadline:
        raise connection.denied or error
    await asyncio.sleep(pause_s)
