"""Messages of a stream in order without a gap (``OrderedPull``), and the removal of messages of settled tasks and of
tasks that there are not.
"""

import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Self, overload

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tidemill.bus.client.connection import FOREIGN
from tidemill.bus.client.jetstream import JetStream, Message, StreamState
from tidemill.bus.errors import BusUnavailable, Forbidden, NotFound
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire import subjects
from tidemill.bus.wire.subjects import delivery, natural

_log = logging.getLogger(__name__)

_CREDIT = 64  # Messages requested at once; more are requested when half of them have arrived
# Bytes requested at once, however few messages they are: it limits the memory of messages that have arrived
_CREDIT_BYTES = 32_000_000
_HEARTBEAT_S = 0.5
_MISSED_S = 2.5 * _HEARTBEAT_S  # Silence after which the consumer is replaced: two heartbeats may be late
_EXPIRES_S = 30.0
_INACTIVE_S = 60.0  # Seconds without requests after which the server removes a consumer
_NS = 1_000_000_000
MAX_REMOVALS = 10_000  # Requests of one ``remove_tasks``, 0.3 ms each on two shared cores


class OrderedPull:
    """Endless async iterator over the messages from ``start`` on, over lost connections and server restarts.

    A pull consumer without acknowledgements: the position is kept here. A missing consumer sequence, missing heartbeats
    and a lost connection all lead to a new consumer at the next sequence.

    ``on_open`` gets the state of the stream and the position, before the first message and after every re-opening.
    """

    def __init__(
        self,
        jet: JetStream,
        stream: str,
        start: int,
        *,
        filters: Sequence[str] = (),
        headers_only: bool = False,
        on_open: Callable[[StreamState, int], None] | None = None,
    ) -> None:
        self.position = start  # Smallest sequence that the next message can have
        self.reopened = 0
        self._jet, self._stream, self._filters, self._headers_only = jet, stream, list(filters), headers_only
        self._on_open = on_open
        self._arrived: deque[Msg] = deque()
        self._waiter = Waiter()
        self._sub: Subscription | None = None
        self._consumer = ""
        self._consumer_seq = 0
        self._requested = 0
        self._last_message_s = 0.0
        self._lost = False
        self._stop_listening = jet.connection.on_lost(self._on_lost)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[Message]:
        return self.next()

    @overload
    async def next(self) -> Message: ...
    @overload
    async def next(self, timeout_s: float) -> Message | None: ...
    async def next(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, or None after ``timeout_s`` without one; waits for the bus as long as necessary.

        Raises the errors of ``on_open``, NotFound when the stream is gone, BusUnavailable when the connection was
        closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._arrived and not self._lost:
                delivered = self._take(self._arrived.popleft())
                # Requested before the last ones have arrived, so that the server never waits for a request.
                if self._requested <= _CREDIT // 2 and self._sub is not None:
                    await self._request_more()
                if delivered is not None:
                    return delivered
            left_s = _MISSED_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                return None
            if self._sub is None or self._lost:
                await self._reopen(left_s)
            elif time.monotonic() - self._last_message_s > _MISSED_S:
                self._mark_lost("heartbeats missing")
            else:
                await self._waiter.wait(min(left_s, _MISSED_S))

    async def close(self) -> None:
        """End the reading, and remove its consumer from the server."""
        self._stop_listening()
        await self._drop()

    def _take(self, message: Msg) -> Message | None:
        headers, numbers = message.headers or {}, delivery(message.reply)
        if numbers is None:
            self._status(headers)
            return None
        # A message was lost on its way here, or the consumer is an older one: the server would not send it again.
        if numbers.consumer_seq != self._consumer_seq + 1 or numbers.seq < self.position:
            self._mark_lost(f"consumer sequence {numbers.consumer_seq} behind {self._consumer_seq}")
            return None
        self._consumer_seq = numbers.consumer_seq
        self._requested -= 1
        self.position = numbers.seq + 1
        return Message(numbers.seq, message.subject, headers, message.data, numbers.stored_ns / _NS, numbers.pending)

    def _status(self, headers: dict[str, str]) -> None:
        """Handle a status: 100 heartbeat, 408 expired, 409 limit reached or consumer deleted, 503 no responders."""
        status, what = headers.get("Status", ""), headers.get("Description", "")
        if status == "100":
            return
        self._requested = max(0, self._requested - _unsent(headers, self._requested))
        if status == "503" or (status == "409" and ("Deleted" in what or "Shutdown" in what or "Leadership" in what)):
            self._mark_lost(f"status {status} {what}")

    def _mark_lost(self, reason: str) -> None:
        _log.info("bus: reopening stream=%s at=%d reason=%s", self._stream, self.position, reason)
        self._lost = True

    def _on_lost(self) -> None:
        self._lost = True
        self._waiter.wake()

    async def _on_message(self, message: Msg) -> None:
        self._last_message_s = time.monotonic()
        self._arrived.append(message)
        self._waiter.wake()

    async def _reopen(self, timeout_s: float) -> None:
        try:
            await self._jet.connection.wait_up(timeout_s, self._stream)
            await self._drop()
            state = await self._jet.state(self._stream)
            if self._on_open is not None:
                self._on_open(state, self.position)
            await self._open()
        except BusUnavailable as error:
            if self._jet.connection.closed:
                raise
            self._lost = True
            _log.info("bus: waiting stream=%s reason=%s", self._stream, error)

    async def _open(self) -> None:
        """Subscribe, then create the consumer, then request: no message can arrive before the subscription."""
        self._lost = False
        inbox = self._jet.connection.nc.new_inbox()
        self._sub = await self._jet.connection.subscribe(inbox, self._on_message, self._stream)
        name = f"read-{inbox.rsplit('.', 1)[1]}"
        # In the memory of one server, because nothing is lost with it: the position is here, and a new consumer
        # continues from it.
        config = {
            "name": name,
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.position,
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_INACTIVE_S * _NS),
            "headers_only": self._headers_only,
            **({"filter_subjects": self._filters} if self._filters else {}),
        }
        # Before the call: a server whose answer comes too late has made it, too, and ``_drop`` removes it.
        self._consumer, self._consumer_seq, self._requested = name, 0, 0
        request = {"stream_name": self._stream, "config": config}
        await self._jet.call(f"CONSUMER.CREATE.{self._stream}.{name}", request, retry_for_s=2.5)
        self._last_message_s = time.monotonic()
        await self._request_more()
        self.reopened += 1

    async def _request_more(self) -> None:
        assert self._sub is not None
        request = {
            "batch": _CREDIT - self._requested,
            # More than one message of any size: a request with less room than the next message needs would end without
            # it.
            "max_bytes": max(_CREDIT_BYTES, 2 * self._jet.connection.max_payload),
            "expires": int(_EXPIRES_S * _NS),
            "idle_heartbeat": int(_HEARTBEAT_S * _NS),
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        self._requested = _CREDIT
        try:
            await self._jet.connection.send(subject, json.dumps(request).encode(), reply=self._sub.subject)
        except BusUnavailable:
            self._lost = True

    async def _drop(self) -> None:
        """Drop the present consumer; the server removes by itself one that cannot be deleted now."""
        sub, consumer = self._sub, self._consumer
        self._sub, self._consumer = None, ""
        self._arrived.clear()
        if sub is None:
            return
        try:
            await sub.unsubscribe()
            if consumer and self._jet.connection.connected:
                await self._jet.connection.send(f"$JS.API.CONSUMER.DELETE.{self._stream}.{consumer}")
        except (*FOREIGN, BusUnavailable, NotFound) as error:
            _log.debug("bus: consumer not deleted stream=%s error=%s", self._stream, error)


def _unsent(headers: dict[str, str], otherwise: int) -> int:
    unsent = natural(headers.get("Nats-Pending-Messages", ""))
    return otherwise if unsent is None else unsent


async def present(
    jet: JetStream, stream: str, start: int, *, filters: Sequence[str] = (), headers_only: bool = False
) -> AsyncIterator[Message]:
    """Yield the messages from ``start`` to the present end of the stream. Raises NotFound without such a stream."""
    last = (await jet.state(stream)).last_seq
    async with OrderedPull(jet, stream, max(1, start), filters=filters, headers_only=headers_only) as pull:
        while pull.position <= last:
            if pull.reopened == 0 and not await _any(jet, stream, pull.position, last, filters):
                return
            delivered = await pull.next(2 * _MISSED_S)
            if delivered is None:  # slow, or the rest was removed meanwhile
                if not await _any(jet, stream, pull.position, last, filters):
                    return
                continue
            if delivered.seq > last:
                return
            yield delivered
            if delivered.pending == 0 and (
                pull.position > last or not await _any(jet, stream, pull.position, last, filters)
            ):
                return  # the leader decides: in a cluster the consumer counts only messages that its own server has


async def follow(
    jet: JetStream, stream: str, start: int, *, filters: Sequence[str] = (), headers_only: bool = False
) -> AsyncIterator[Message]:
    """Yield the messages from ``start`` on, for ever."""
    async with OrderedPull(jet, stream, max(1, start), filters=filters, headers_only=headers_only) as pull:
        async for delivered in pull:
            yield delivered


async def _any(jet: JetStream, stream: str, first: int, last: int, filters: Sequence[str]) -> bool:
    """Return whether the stream's leader has a message in this range."""
    messages = [await jet.next(stream, first, subject) for subject in filters or (">",)]
    return any(message is not None and message.seq <= last for message in messages)


async def remove_tasks(jet: JetStream, stream: str, subject_of: Callable[[int | str], str], below: int) -> bool:
    """Remove messages of tasks with ids < ``below``, of tasks that are not issued yet, and of subjects that name no
    task (``task.007``, ``task.*``): no process of the run publishes the last two.

    ``subject_of``: filter of a task's subjects, ``*`` = any. Returns False after ``MAX_REMOVALS`` requests, when
    messages are left for the next call.
    """
    try:
        end = (await jet.state(stream)).last_seq + 1
        counts = await jet.subjects(stream, subject_of("*"))
        # Read last: of a task with a larger id, no message before ``end`` can come from a process of the run.
        last_id = (await jet.state(subjects.stream(jet.run, subjects.TASKS))).last_seq
    except NotFound:
        return True
    tasks = {subject: subjects.task_named(subject) for subject in counts}
    numbers = {task for task in tasks.values() if task is not None}
    # The newest ones first: thousands of forged messages of older tasks do not keep them in the stream.
    filters = [subject_of(task) for task in sorted(numbers, reverse=True) if task < below]
    filters += [subject_of(task) for task in numbers if task > last_id and task >= below]
    filters += [subject for subject, task in tasks.items() if task is None and subjects.is_literal(subject)]
    for subject in filters[:MAX_REMOVALS]:
        await jet.purge(stream, end, subject=subject)
    left = MAX_REMOVALS - len(filters)
    wildcards = {subject for subject, task in tasks.items() if task is None and not subjects.is_literal(subject)}
    return left >= 0 and await _remove_each(jet, stream, wildcards, left)


async def _remove_each(jet: JetStream, stream: str, wildcards: Collection[str], most: int) -> bool:
    """Remove messages of subjects such as ``task.*`` and ``task.>``, one by one: a purge would take ``*`` for any task.

    nats-server stores a message on such a subject. Returns False after ``most`` messages, when others are left.
    """
    # Without a filter: none matches ``>``. Only where there are such messages, and without the data
    if not wildcards:
        return True
    async with aclosing(present(jet, stream, 1, headers_only=True)) as messages:  # type: ignore[type-var]
        async for message in messages:
            if message.subject not in wildcards:
                continue
            if not most:
                return False
            most -= 1
            try:
                await jet.delete(stream, message.seq)
            except Forbidden as error:  # the users of this server were made by an older release
                _log.warning("bus: messages on subjects with a wildcard stay: %s", error)
                return True
    return True
