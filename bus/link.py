"""The connection itself: up, down, gone; who wants to know is told. Knows nothing of streams."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from bus.errors import BusError, BusUnavailable

_log = logging.getLogger(__name__)

OLDEST_SERVER = (2, 10)
"""Older ones silently ignore settings we need (several filter subjects, stream metadata)."""
_RECONNECT_S = 0.2
_PING_S = 5.0
"""A silently cut network is noticed after three of these."""
_SAY_EVERY_S = 5.0

FOREIGN = (nats.errors.Error, OSError, asyncio.TimeoutError)
"""What the client library raises when something is wrong outside of this process."""


class Link:
    """A connection that is kept for ever."""

    def __init__(self) -> None:
        self.nc: Client = Client()
        self._up = asyncio.Event()
        self._turn = asyncio.Event()
        """Set when it is up, or closed: what waiting for it can end with."""
        self._listeners: set[Callable[[], None]] = set()
        self.last_error = ""
        self._said_s = 0.0
        self._closing = False
        self._what = "bus"

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    @property
    def closed(self) -> bool:
        return self.nc.is_closed

    @property
    def max_payload(self) -> int:
        return self.nc.max_payload

    async def wait_up(self, timeout_s: float, where: str = "bus") -> None:
        """Raises BusUnavailable when it is not up in time, or closed."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                while not self._up.is_set():
                    if self.closed:
                        raise BusUnavailable(where, "the connection was closed")
                    await self._turn.wait()
        except TimeoutError:
            raise BusUnavailable(where, f"not connected for {timeout_s:.1f} s ({self.last_error or 'no error seen'})") from None

    def on_lost(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` whenever the connection breaks; returns what ends that."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Msg:
        """One answer. Raises BusUnavailable, at once when the connection breaks that should bring it."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s) as scope:
                forget = self.on_lost(lambda: scope.reschedule(loop.time()))
                try:
                    answer = await self.nc.request(subject, payload, timeout=2 * timeout_s)
                finally:
                    forget()
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # wait_for of Python 3.11 forgets one that comes together with the answer
                    raise asyncio.CancelledError
                return answer
        except FOREIGN as error:
            raise self.unavailable(subject, error) from None

    async def send(self, subject: str, payload: bytes = b"", *, reply: str = "") -> None:
        """Fire and forget. Raises BusUnavailable, also when not connected: the client library would send it some day, too late."""
        if not self.connected:
            raise BusUnavailable(subject, "not connected")
        try:
            await self.nc.publish(subject, payload, reply=reply)
        except FOREIGN as error:
            raise self.unavailable(subject, error) from None

    async def tell(self, subject: str, payload: bytes) -> bool:
        """Send what may be lost. False when the bus is away."""
        try:
            await self.send(subject, payload)
        except BusUnavailable as error:
            _log.info("bus: unsent subject=%s reason=%s", subject, error)
            return False
        return True

    def unavailable(self, where: str, error: BaseException) -> BusUnavailable:
        return BusUnavailable(where, str(error) or type(error).__name__)

    async def open(self, url: str, name: str, wait_s: float) -> None:
        """Connect within ``wait_s``. Raises BusUnavailable."""
        since = time.monotonic()
        self._what = f"{name} at {url}"
        try:
            async with asyncio.timeout(wait_s):
                await self.nc.connect(
                    url,
                    name=name,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_S,  # type: ignore[arg-type]
                    ping_interval=_PING_S,  # type: ignore[arg-type]
                    max_outstanding_pings=2,
                )
        except FOREIGN as error:
            reason = self.last_error or str(error) or type(error).__name__
            raise BusUnavailable(f"connecting {name} to {url}", f"waited {time.monotonic() - since:.1f} s: {reason}") from None
        version = self.nc.connected_server_version
        if (version.major, version.minor) < OLDEST_SERVER:
            want = ".".join(map(str, OLDEST_SERVER))
            raise BusError(f"connecting {name} to {url}: want nats-server >= {want}, got {version.major}.{version.minor}.{version.patch}")
        self._rise()

    async def close(self) -> None:
        """Send what is pending (for at most a second) and close."""
        self._closing = True
        if self.connected and not self.nc.is_closed:
            try:
                await self.nc.flush(timeout=1)
            except FOREIGN as error:
                _log.warning("bus: closing with messages unsent error=%r", error)
        try:
            await self.nc.close()
        except FOREIGN as error:  # the library tries to send what is pending over a connection that is gone
            _log.info("bus: closed while it was away error=%r", error)

    async def _on_error(self, error: Exception) -> None:
        self.last_error = str(error) or type(error).__name__
        now = time.monotonic()
        if now - self._said_s > _SAY_EVERY_S:
            self._said_s = now
            _log.warning("bus: %s what=%s error=%s", "trouble" if self.connected else "waiting", self._what, self.last_error)

    async def _on_disconnected(self) -> None:
        if self._closing or not self._up.is_set():
            return
        _log.warning("bus: disconnected, reconnecting for ever")
        self._fall()

    async def _on_reconnected(self) -> None:
        _log.info("bus: connected again")
        self._rise()

    async def _on_closed(self) -> None:
        self._fall()
        self._turn.set()

    def _rise(self) -> None:
        self._up.set()
        self._turn.set()

    def _fall(self) -> None:
        self._up.clear()
        self._turn.clear()
        for listener in list(self._listeners):
            listener()


@asynccontextmanager
async def linked(url: str, name: str, wait_s: float) -> AsyncIterator[Link]:
    """A link for the length of the block."""
    link = Link()
    try:
        await link.open(url, name, wait_s)
        yield link
    finally:
        await link.close()


class Waiter:
    """One place to wait for one thing: ``wake`` ends the present wait, or the next one."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Until woken, at most ``timeout_s``."""
        if not self._woken:
            loop = asyncio.get_running_loop()
            self._future = loop.create_future()
            timer = loop.call_later(timeout_s, self._expire, self._future)
            try:
                await self._future
            finally:
                timer.cancel()
                self._future = None
        self._woken = False

    @staticmethod
    def _expire(future: "asyncio.Future[Any]") -> None:
        if not future.done():
            future.set_result(None)
