"""Messages on their way into streams: each is sent until JetStream acknowledges that it is stored."""

import asyncio
import json
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
from nats.aio.msg import Msg

from tidemill.bus.client.connection import FOREIGN, Connection, unavailable
from tidemill.bus.errors import BusFull, BusUnavailable, Forbidden, Refused
from tidemill.bus.system.coroutines import heard
from tidemill.bus.wire.json_object import JsonObject

_log = logging.getLogger(__name__)

STREAM_FULL = 10077
# Error codes of a full disk, or full share of it. Treated like an outage: space may be freed.
_NO_ROOM = frozenset({10023, 10047})
# Error codes of a message with another expected last sequence than its stream or subject has
WRONG_LAST_SEQUENCE = (10071, 10164)
_ANSWER_S = 5.0
_FULL_S = 3.0  # Seconds to wait for the reason of a full bus; without one the server itself answers at once
_FULL_WAIT_S = (0.02, 0.2)
# Range of the random pause before a try, so that many publishers do not come back at the same moment
_RETRY_WAIT_S = (0.05, 0.3)


class PublishAck(NamedTuple):
    """Acknowledgement of a stored message."""

    seq: int
    duplicate: bool
    """True when the server knew the message id; ``seq`` is then the sequence of the first copy."""


class Outbox:
    """The publishing side of one connection; any number of messages may be in flight.

    The client library's ``publish_async`` leaves a refused message pending for ever, and its ``publish`` waits for an
    answer after the connection has broken.
    """

    def __init__(self, connection: Connection, full_subject: str) -> None:
        """``full_subject``: requests on it are answered with the reason while the bus stores nothing."""
        self._connection, self._full_subject = connection, full_subject
        # Answer, its deadline and the subject, by reply subject, oldest first
        self._waiting: dict[str, tuple[asyncio.Future[Msg | None], float, str]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._inbox = ""
        self._count = 0
        self._opening = asyncio.Lock()
        connection.on_lost(self._lost)
        connection.refusals.on_forbidden(self._forbidden)

    async def attempt(self, subject: str, payload: bytes, headers: dict[str, str]) -> PublishAck:
        """Send once, and return the acknowledgement.

        Raises Refused, Forbidden, BusFull; BusUnavailable, after which the message may be stored all the same.
        """
        answer = await self._answer(subject, payload, headers)
        try:
            return _read(subject, answer)
        except BusUnavailable as error:
            raise await self.explained(error) from None

    async def attempt_all(self, messages: Sequence[tuple[str, bytes, dict[str, str]]]) -> list[PublishAck | None]:
        """Send several messages (subject, payload, headers) once each, before any answer; None = not acknowledged."""
        acks, sent = list[PublishAck | None](), list[asyncio.Future[Msg | None]]()
        try:
            with suppress(BusUnavailable, Forbidden):
                await heard(self._send_all(messages, sent))
            for (subject, _, _), answer in zip(messages, sent, strict=False):
                ack = None
                with suppress(BusUnavailable, Forbidden, Refused):
                    ack = _read(subject, await answer)
                acks.append(ack)
        finally:
            for answer in sent:
                answer.cancel()
        return acks + [None] * (len(messages) - len(acks))

    async def request(self, subject: str, payload: bytes) -> None:
        """Send a request and wait for its empty answer. Raises as ``attempt``."""
        answer = await self._answer(subject, payload)
        if answer is None or answer.headers:
            raise BusUnavailable(subject, "no answer" if answer is None else "no responders")

    async def _send_all(
        self, messages: Sequence[tuple[str, bytes, dict[str, str]]], sent: "list[asyncio.Future[Msg | None]]"
    ) -> None:
        for message in messages:
            sent.append(await self._send(*message))

    async def _send(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> "asyncio.Future[Msg | None]":
        """Send a message, and return its future answer; None = none came, or the connection broke. In ``heard``."""
        self._connection.refusals.check_allowed(subject)
        if not self._inbox:
            await self._open()
        if not self._connection.connected:  # the client library would keep it and send it later
            raise BusUnavailable(subject, "not connected")
        self._count += 1
        token = f"{self._inbox}{self._count}"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Msg | None] = loop.create_future()
        self._waiting[token] = (future, loop.time() + _ANSWER_S, subject)
        if self._sweeping is None:
            self._sweeping = loop.call_later(_ANSWER_S, self._sweep, loop)
        try:
            await self._connection.nc.publish(subject, payload, reply=token, headers=headers)
        except BaseException as error:
            self._waiting.pop(token, None)
            if isinstance(error, FOREIGN):  # without the block of ``translated``: this is done for each sample
                raise unavailable(subject, error) from None
            raise
        return future

    async def _answer(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> Msg | None:
        """Send a message, and return its answer; None = none came, or the connection broke."""
        future = await heard(self._send(subject, payload, headers))
        try:
            return await future
        finally:
            future.cancel()

    async def explained(self, error: BusUnavailable) -> BusUnavailable:
        """Return the error of a request without success; in its place BusFull while that is the reason."""
        reason = await self.full() if self._connection.connected else ""
        return BusFull(error.where, reason) if reason else error

    async def full(self) -> str:
        """Return the reason for which the bus stores nothing; empty when none is known."""
        try:
            answer = await self._connection.request(self._full_subject, b"", _FULL_S)
        except (BusUnavailable, Forbidden):  # no process answers while messages are stored
            return ""
        return answer.data.decode(errors="replace")

    async def store(
        self,
        subject: str,
        payload: bytes,
        headers: dict[str, str],
        *,
        on_retry: Callable[[str, bool], None] | None = None,
    ) -> PublishAck:
        """Send under the same message id until it is stored, and return the acknowledgement. Cancellable.

        ``on_retry(reason, full)`` is called before each wait. Raises Refused, Forbidden (no retry cures them),
        BusUnavailable when closed.
        """
        assert "Nats-Msg-Id" in headers, "a message that is sent again needs an id"
        tries = 0
        while True:
            try:
                return await self.attempt(subject, payload, headers)
            except Refused as error:
                if error.code in _INCURABLE:
                    raise
                full, reason = error.code == STREAM_FULL, str(error)
            except BusUnavailable as error:
                if self._connection.closed:
                    raise
                full, reason = False, str(error)
            tries += 1
            if on_retry is not None:
                on_retry(reason, full)
            if tries % 100 == 1:
                level = logging.INFO if full else logging.WARNING
                _log.log(level, "bus: not stored yet subject=%s tries=%d reason=%s", subject, tries, reason)
            await self._pause(full)

    async def _pause(self, full: bool) -> None:
        await asyncio.sleep(random.uniform(*(_FULL_WAIT_S if full else _RETRY_WAIT_S)))
        while not self._connection.connected and not self._connection.closed:
            with suppress(BusUnavailable):
                await self._connection.wait_up(60.0)

    async def _open(self) -> None:
        async with self._opening:
            if self._inbox:
                return
            inbox = f"{self._connection.nc.new_inbox()}."
            await self._connection.subscribe(f"{inbox}*", self._answered, "outbox")
            self._inbox = inbox

    async def _answered(self, message: Msg) -> None:
        self._settle(message.subject, message)

    def _settle(self, token: str, answer: Msg | None) -> None:
        waiting = self._waiting.pop(token, None)
        if waiting is not None and not waiting[0].done():
            waiting[0].set_result(answer)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up on answers past their deadline: one timer for all messages."""
        self._sweeping = None
        now = loop.time()
        for token, (_, deadline, _) in list(self._waiting.items()):
            if deadline > now:
                self._sweeping = loop.call_later(deadline - now, self._sweep, loop)
                return
            self._settle(token, None)

    def _forbidden(self, error: Forbidden) -> bool:
        refused = [publish for publish in self._waiting.values() if publish[2].lower() == error.subject]
        for future, _, subject in refused:
            if not future.done():
                future.set_exception(Forbidden(subject, error.verb, error.user))
        return bool(refused)

    def _lost(self) -> None:
        for token in list(self._waiting):
            self._settle(token, None)


# Error codes that no retry cures: a message larger than the stream allows, or a taken expected place
_INCURABLE = frozenset({10054, *WRONG_LAST_SEQUENCE})


# Error codes of a cluster between two leaders, or still working on the same message
_NOT_NOW = frozenset({10008, 10158})
_UNAVAILABLE = 503


class _Error(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Reply(msgspec.Struct):
    """JetStream's answer to a publish."""

    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


_REPLY = msgspec.json.Decoder(_Reply)


def answered(where: str, data: bytes) -> JsonObject:
    """Return the map in an answer of JetStream's API. Raises BusUnavailable for a malformed answer."""
    with suppress(ValueError, RecursionError):
        fields = json.loads(data)
        if isinstance(fields, dict):
            return fields
    raise BusUnavailable(where, f"a malformed answer of {len(data)} bytes")


def _read(subject: str, answer: Msg | None) -> PublishAck:
    if answer is None:
        raise BusUnavailable(subject, "no answer: the message may be stored")
    if not answer.data:
        raise BusUnavailable(subject, "no stream for this subject (not created yet, or the server is starting)")
    try:
        stored = _REPLY.decode(answer.data)
    except (msgspec.DecodeError, RecursionError):
        raise BusUnavailable(subject, f"a malformed answer of {len(answer.data)} bytes") from None
    if stored.error is not None:
        code, reason = stored.error.err_code, stored.error.description
        if code in _NO_ROOM:
            raise BusFull(subject, f"no storage left on the server (disk full?): {reason} ({code})")
        if code in _NOT_NOW or (stored.error.code == _UNAVAILABLE and code != STREAM_FULL):
            raise BusUnavailable(subject, f"{reason} ({code})")
        raise Refused(subject, code, reason)
    if stored.seq < 1:
        raise BusUnavailable(subject, "an answer without a sequence")
    return PublishAck(stored.seq, stored.duplicate)
