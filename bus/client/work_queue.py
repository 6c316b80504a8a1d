"""Messages of a work queue, one by one, for any number of callers of this process (``FetchSlots``)."""

import asyncio
import time

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tidemill.bus.client.connection import RETRY_S, before_retry
from tidemill.bus.client.jetstream import JetStream
from tidemill.bus.errors import BusUnavailable

# Acknowledgements (JetStream's protocol): deliver again, done, and still at work, which renews the lease
NAK, ACK, PROGRESS = b"-NAK", b"+ACK", b"+WPI"
# Seconds for which a request lives at the server, and the most that a request lost with the server costs
_REQUEST_S = 2.0
_GRACE_S = 0.5  # Time that the answer to an expired request has to arrive
_NS = 1_000_000_000


class FetchSlots:
    """Work of one durable consumer, one message at a time, for any number of concurrent callers of this process.

    A message that arrives after its caller has left is nak'ed at once.
    """

    def __init__(self, jet: JetStream, stream: str, consumer: str) -> None:
        self._jet = jet
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._idle: list[_Slot] = []

    async def take(self, timeout_s: float) -> Msg | None:
        """Return the next message; None when none arrived in time (or the bus was away)."""
        deadline = time.monotonic() + timeout_s
        slot = self._idle.pop() if self._idle else _Slot(self._jet, self._subject)
        try:
            return await slot.take(deadline)
        finally:
            self._idle.append(slot)


class _Slot:
    # A subscription with at most one request at the server: sharing one, or requesting more, makes the client library's
    # ``fetch`` stall.
    def __init__(self, jet: JetStream, subject: str) -> None:
        self._jet, self._subject = jet, subject
        self._sub: Subscription | None = None
        self._requested_until_s = 0.0
        self._answer: asyncio.Future[Msg | None] | None = None
        jet.connection.on_lost(self._lost)

    async def take(self, deadline: float) -> Msg | None:
        """Return the next message; None at ``deadline`` (monotonic clock)."""
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                await self._jet.connection.wait_up(left_s)
                message = await self._request(left_s)
            except BusUnavailable as error:
                await before_retry(self._jet.connection, error, pause_s=min(RETRY_S, left_s))
                continue
            if message is not None:
                return message
        return None

    async def _request(self, left_s: float) -> Msg | None:
        """Wait for the answer to one request, or to a request that an earlier caller left."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Msg | None] = loop.create_future()
        self._answer = answer
        now = time.monotonic()
        timer = None
        try:
            if now >= self._requested_until_s:
                await self._send(min(left_s, _REQUEST_S))
            timer = loop.call_later(max(0.0, self._requested_until_s - now), self._resolve, None)
            message = await answer
        except BaseException:
            # The caller has left (cancelled) in the moment in which its message arrived: another actor gets it at once.
            if answer.done() and not answer.cancelled() and (late := answer.result()) is not None:
                await self._jet.connection.try_send(late.reply, NAK)
            raise
        finally:
            self._answer = None
            if timer is not None:
                timer.cancel()
        return message

    async def _send(self, expires_s: float) -> None:
        if self._sub is None:
            inbox = self._jet.connection.nc.new_inbox()
            self._sub = await self._jet.connection.subscribe(inbox, self._on_message, self._subject)
        self._requested_until_s = time.monotonic() + expires_s + _GRACE_S
        request = b'{"batch": 1, "expires": %d}' % int(expires_s * _NS)
        await self._jet.connection.send(self._subject, request, reply=self._sub.subject)

    async def _on_message(self, message: Msg) -> None:
        """Handle a message, or a status that ends the request (expired, limits, consumer gone)."""
        is_status = not message.reply.startswith("$JS.ACK.")
        if is_status and (message.headers or {}).get("Status") == "100":
            return
        self._requested_until_s = 0.0
        if not self._resolve(None if is_status else message) and not is_status:
            await self._jet.connection.try_send(message.reply, NAK)

    def _resolve(self, message: Msg | None) -> bool:
        if self._answer is None or self._answer.done():
            return False
        self._answer.set_result(message)
        return True

    def _lost(self) -> None:
        self._requested_until_s = 0.0
        self._resolve(None)
