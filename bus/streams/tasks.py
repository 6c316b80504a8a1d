"""The work queue of prompts: issued by one fenced learner, leased by any number of actors."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from nats.aio.msg import Msg

from tidemill.bus.client.connection import retry
from tidemill.bus.client.jetstream import JetStream, Message
from tidemill.bus.client.pull import remove_tasks
from tidemill.bus.client.rows import Rows, Value
from tidemill.bus.client.work_queue import ACK, NAK, PROGRESS, FetchSlots
from tidemill.bus.errors import BusUnavailable, NotFound, UnknownSchema, WireError
from tidemill.bus.streams.dead import DeadLetters
from tidemill.bus.streams.fenced import FencedStream, FencedWriter, Fences, epoch_of, valid
from tidemill.bus.system.coroutines import ended
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.codec import decode_partial, decode_record, decode_task, encode_partial, encode_task
from tidemill.bus.wire.invariants import check_partial
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Dead, Fence, Kind, Partial, Task
from tidemill.bus.wire.subjects import nonce

_log = logging.getLogger(__name__)

# Deliveries after which a task is dead even without a report: it ends its actors before they can report
MAX_DELIVERIES = 50
_REFRESH_EVERY_S = 2.0
_CONFIRM_S = 2.0
_NEWER_SCHEMA_S = 1.0  # Delay in seconds after which a task of a newer schema is delivered again, to any actor
_OVER = (ACK, b"+NXT", b"+TERM")
_NS = 1_000_000_000


def _nak(delay_s: float) -> bytes:
    return NAK if delay_s <= 0 else NAK + b' {"delay": %d}' % int(delay_s * _NS)


class Lease:
    """The right to work on a task, until ``ack``, ``nak`` or ``fail``, or ``lease_s`` without renewal.

    No method raises because the bus is away: a lost acknowledgement leads to another, harmless delivery.
    """

    def __init__(self, queue: "TaskQueue", task: Task, message: Msg, deliveries: int) -> None:
        self.task = task
        self.attempt = nonce()  # ``Sample.attempt`` of every sample made under this lease
        self.deliveries = deliveries  # Number of this delivery, from 1
        self._queue, self._reply = queue, message.reply
        self._lease_s = queue.lease_s

    async def renew(self) -> bool:
        """Extend the lease by ``lease_s``. Returns False when the bus was away."""
        return await self._answer(PROGRESS)

    async def ack(self) -> bool:
        """Acknowledge the task, whose samples are stored; retried for ``lease_s``. Returns whether it is confirmed."""
        connection, deadline = self._queue.jet.connection, time.monotonic() + self._lease_s

        async def ack() -> None:
            left_s = deadline - time.monotonic()
            await connection.wait_up(left_s)
            await self._queue.jet.outbox.request(self._reply, ACK)

        try:
            await retry(connection, ack, deadline=deadline, report=self._not_acknowledged)
        except BusUnavailable as error:
            self._not_acknowledged(error)
            return False
        return True

    def _not_acknowledged(self, error: BusUnavailable) -> None:
        _log.info("task not acknowledged yet task=%d reason=%s", self.task.id, error)

    async def nak(self, delay_s: float = 0) -> bool:
        """Have it delivered again, at once or after ``delay_s``. Returns False when the bus was away."""
        return await self._answer(_nak(delay_s))

    async def fail(self, reason: str, *, actor: str) -> bool:
        """Report a failure and nak; the ``max_attempts``-th report makes the task dead. Returns whether it is dead now.

        Waits until the report is stored.
        """
        reports = await self._queue.dead.report(self.task.id, reason=reason, actor=actor, attempt=self.attempt)
        if reports < self._queue.jet.config.max_attempts:
            await self.nak()
            return False
        # Stored before the task is acknowledged: a kill in between leads to another delivery, not to a task that is
        # lost.
        await self._queue.dead.store(_dead(self.task, reason, reports, actor))
        await self.ack()
        return True

    @asynccontextmanager
    async def kept(self) -> AsyncIterator["Lease"]:
        """Renew every ``lease_s / 3`` while the block runs."""
        # A timer: a task that sleeps, and its end, are three tasks for each lease, most of which are never renewed.
        loop, renewing = asyncio.get_running_loop(), set[asyncio.Task[bool]]()
        timer: asyncio.TimerHandle

        def renew() -> None:
            nonlocal timer
            if not renewing:
                task = loop.create_task(self.renew(), name=f"lease {self.task.id}")
                renewing.add(task)
                task.add_done_callback(renewing.discard)
            timer = loop.call_later(self._lease_s / 3, renew)

        timer = loop.call_later(self._lease_s / 3, renew)
        try:
            yield self
        finally:
            timer.cancel()
            await ended(*renewing)

    async def _answer(self, payload: bytes) -> bool:
        return await self._queue.jet.connection.try_send(self._reply, payload)


class TaskQueue:
    """Stream TASKS and its consumers: one for tasks of each kind, and one for training tasks of each rollout."""

    def __init__(self, jet: JetStream, dead: DeadLetters) -> None:
        self.jet, self.dead = jet, dead
        self._log = FencedStream(jet, subjects.TASKS, subjects.task(jet.run, "fence"), _decode)
        self._stream = self._log.name
        self._writer = FencedWriter(self._log)
        self._queues = subjects.queues(jet.config.rollouts)
        self._slots = {queue: FetchSlots(jet, self._stream, consumer) for queue, consumer in self._queues.items()}
        self._rows = Rows(jet, "run")
        self._fences = Fences(self._log)
        self._floor = 0
        self._refreshed_s = float("-inf")
        self._refreshing = asyncio.Lock()

    @property
    def lease_s(self) -> float:
        """Seconds after which a task is delivered again if its lease is not renewed."""
        return self.jet.config.lease_s

    # --- the learner's side

    async def fence(self, epoch: int) -> None:
        """Take over as the only writer. Raises Fenced."""
        await self._writer.fence(epoch)

    async def issue(self, task: Task) -> int:
        """Store a task of the fenced epoch and return its id. Retries until stored. Needs ``fence`` first.

        Raises Fenced, and WireError for a task that is larger than a message.
        """
        return (await self.issue_all([task]))[0]

    async def issue_all(self, tasks: Sequence[Task]) -> list[int]:
        """Store tasks in order, and return their ids; as ``issue``. None is stored if one is too large."""
        for task in tasks:
            if task.epoch != self._writer.epoch:
                raise WireError("epoch", f"the fenced epoch {self._writer.epoch}", task.epoch)
        run = self.jet.run
        return await self._writer.append_all(
            [(subjects.task(run, task.kind, task.rollout), encode_task(task)) for task in tasks]
        )

    async def scan(self, start: int = 1) -> AsyncIterator[Task]:
        """Yield every valid task from id ``start`` to the present end, in order."""
        async for _, record in valid(self._log, start, follow=False):
            if isinstance(record, Task):
                yield record

    async def fetch(self, task_id: int) -> Task:
        """Return one task. Raises NotFound."""
        return decode_task((await self.jet.message(self._stream, task_id)).data, task_id)

    async def backlog(self, rollout: str | None = None) -> tuple[int, int]:
        """Return (waiting, leased) training tasks, of one rollout or all. A nak'ed task that waits counts as leased."""
        rollouts = {rollout or ""}
        if rollout is None:
            # From the subjects, too: the settings of an onlooker's process name no rollouts.
            counts = await self.jet.subjects(self._stream, subjects.task(self.jet.run, "*"))
            rollouts.update(self.jet.config.rollouts, map(subjects.rollout_of, filter(subjects.trains, counts)))
        infos = [await self._info(Kind.TRAIN, name) for name in sorted(rollouts)]
        return sum(int(info["num_pending"]) for info in infos), sum(int(info["num_ack_pending"]) for info in infos)

    async def _info(self, kind: Kind, rollout: str) -> JsonObject:
        return await self.jet.call(f"CONSUMER.INFO.{self._stream}.{subjects.consumer(kind, rollout)}")

    async def waiting(self) -> dict[str, int]:
        """Return the number of tasks that wait for an actor by rollout; the empty name counts single turns."""
        counts: Counter[str] = Counter()
        for subject in await self.jet.subjects(self._stream, subjects.task(self.jet.run, "*")):
            kind, rollout = subject.split(".")[3].partition("-")[0], subjects.rollout_of(subject)
            if kind in list(Kind):
                with suppress(NotFound):  # an old run has no such queue
                    counts[rollout] += int((await self._info(Kind(kind), rollout))["num_pending"])
        return +counts

    async def acked_to(self, rollout: str = "") -> int:
        """Return the id up to which every training task of a rollout is acknowledged; a long lease holds it back."""
        return int((await self._info(Kind.TRAIN, rollout))["ack_floor"]["stream_seq"])

    @asynccontextmanager
    async def acks(self, on_ack: Callable[[int], None]) -> AsyncIterator[None]:
        """While entered, ``on_ack`` gets the ids of acknowledged training tasks. Some may be missed (``acked_to``)."""

        async def on_message(message: Msg) -> None:
            numbers = subjects.delivery(message.subject)
            if numbers is not None and (message.data.startswith(_OVER) or not message.data):
                on_ack(numbers.seq)

        async with AsyncExitStack() as stack:
            for subject in subjects.acks(self.jet.run, self.jet.config.rollouts):
                await stack.enter_async_context(self.jet.connection.subscribed(subject, on_message))
            yield

    async def last_id(self) -> int:
        """Return the id of the newest message of TASKS (a task or a fence); 0 when there has been none."""
        return (await self.jet.state(self._stream)).last_seq

    async def raise_floor(self, floor: int) -> None:
        """Record that all tasks with ids up to ``floor`` are settled: actors ack them unworked. It never falls."""

        def raised(row: Value | None) -> Value | None:
            return None if row is not None and row["floor"] >= floor else {"floor": floor}

        await self._rows.change(subjects.FLOOR_KEY, raised, replace_unreadable=True)

    async def trim(self, below: int) -> None:
        """Remove tasks with ids < ``below``; fences stay."""
        for kind, rollout in self._queues:
            await self.jet.purge(self._stream, below, subject=subjects.task(self.jet.run, kind, rollout))

    # --- the actors' side

    async def lease(self, timeout_s: float, *, kind: Kind = Kind.TRAIN, rollout: str = "") -> Lease | None:
        """Return the next task of a queue, None after ``timeout_s``. Any number of callers may wait; cancellable.

        Acks and passes over tasks that are settled (below the floor), void (after a fence), unreadable or delivered too
        often (DEAD). A task of a newer schema is nak'ed, for an actor of a newer release.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            message = await self._slots[kind, rollout].take(left_s)
            if message is None:
                return None
            try:
                lease = await self._admit(message)
            except BaseException:
                await self.jet.connection.try_send(message.reply, NAK)
                raise
            if lease is not None:
                return lease
        return None

    async def _admit(self, message: Msg) -> Lease | None:
        numbers = subjects.delivery(message.reply)
        if numbers is None:
            return None
        deliveries, seq, headers = numbers.deliveries, numbers.seq, message.headers or {}
        try:
            async with asyncio.timeout(_CONFIRM_S):
                # An earlier delivery may have settled it a moment ago.
                await self._refresh(0.0 if deliveries > 1 else _REFRESH_EVERY_S)
        except (BusUnavailable, TimeoutError) as error:  # continue with the floor and fences read before
            _log.info("task floor not read reason=%s", error)
        if seq <= self._floor or self._fences.voids(seq, epoch_of(headers)):
            await self.jet.connection.try_send(message.reply, ACK)
            return None
        stored = Message(seq=seq, subject=message.subject, headers=headers, data=message.data, stored_s=0.0)
        try:
            task = self._log.checked(stored)
        except WireError as error:
            self.jet.refusals.refuse(subjects.TASKS, seq, error)
            if isinstance(error, UnknownSchema) and deliveries <= MAX_DELIVERIES:
                # The learner is of a newer release, and so may another actor be.
                await self.jet.connection.try_send(message.reply, _nak(_NEWER_SCHEMA_S))
            else:
                dead = Dead(task=seq, reason=str(error), attempts=deliveries, actor="", prompt="")
                await self._store_dead(message, dead)
            return None
        assert isinstance(task, Task), "the consumer's subject is a subject of tasks"
        if deliveries > MAX_DELIVERIES:
            reason = f"delivered {deliveries} times, never acknowledged"
            await self._store_dead(message, _dead(task, reason, deliveries, ""))
            return None
        return Lease(self, task, message, deliveries)

    async def _store_dead(self, message: Msg, dead: Dead) -> None:
        await self.dead.store(dead)
        await self.jet.connection.try_send(message.reply, ACK)

    async def _refresh(self, within_s: float) -> None:
        """Refresh the floor and the fences, unless they have been read within so many seconds."""
        asked_s = time.monotonic()
        async with self._refreshing:  # or a second caller would use the old values
            if self._refreshed_s >= asked_s - within_s:
                return
            began_s = time.monotonic()
            row, _ = await self._rows.read(subjects.FLOOR_KEY)
            if row is not None:
                self._floor = row["floor"]
            await self._fences.refresh()
            self._refreshed_s = began_s


def _decode(message: Message) -> Task | Fence:
    """Return the record in a message. Raises WireError, also for a task on the subject of another kind or rollout."""
    if not message.subject.endswith(".fence"):
        task = decode_task(message.data, message.seq)
        place = f"{task.kind}-{task.rollout}" if task.rollout else task.kind.value
        if not message.subject.endswith(f".{place}"):
            fields = "kind, rollout" if task.rollout else "kind"
            raise WireError(fields, f"that of the subject {message.subject}", place)
        return task
    record = decode_record(message.data)
    if not isinstance(record, Fence):
        raise WireError("type", "fence", type(record).__name__)
    return record


def _dead(task: Task, reason: str, attempts: int, actor: str) -> Dead:
    return Dead(
        task=task.id,
        reason=reason,
        attempts=attempts,
        actor=actor,
        prompt=task.prompt,
        root=task.id if task.reissue_of is None else task.reissue_of,
        reissues=task.reissues,
        prompt_epoch=task.prompt_epoch,
        offset=task.offset,
    )


class Partials:
    """Stream PARTIALS. No process depends on it: a partial that is missing is generated again."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self._stream = subjects.stream(jet.run, subjects.PARTIALS)
        self._found = False

    async def store(self, partial: Partial) -> bool:
        """Store a partial, tried for ever under its message id. Cancellable.

        Returns False when it is larger than a message may be, or the run is older than the stream. Raises WireError
        when it breaks an invariant.
        """
        check_partial(partial)
        data = encode_partial(partial)
        if not codec.fits(data, self._jet.connection.max_payload):
            _log.warning("partial too large task=%d index=%d bytes=%d", partial.task, partial.index, len(data))
            return False
        if not await self._exists():
            _log.warning("partial not stored, there is no stream for it stream=%s", self._stream)
            return False
        subject = subjects.partial(self._jet.run, partial.task, partial.index)
        await self._jet.outbox.store(subject, data, {subjects.MESSAGE_ID: partial.message_id})
        return True

    async def of(self, task: int) -> dict[int, Partial]:
        """Return the newest partial of each index of a task; none without such a stream. Raises BusUnavailable."""
        by_index: dict[int, Partial] = {}
        try:
            for subject in await self._jet.subjects(self._stream, subjects.partial(self._jet.run, task)):
                message = await self._jet.last(self._stream, subject)
                if message is None:  # trimmed meanwhile
                    continue
                try:
                    partial = decode_partial(message.data)
                    check_partial(partial)
                except WireError as error:
                    _log.warning("partial not usable subject=%s error=%s", subject, error)
                    continue
                if (partial.run, partial.task) == (self._jet.run, task):
                    by_index[partial.index] = partial
        except NotFound:  # the run is older than the stream
            pass
        return by_index

    async def trim(self, below: int) -> None:
        """Remove the partials of tasks with ids < ``below``. Raises BusUnavailable."""
        await remove_tasks(self._jet, self._stream, lambda task: subjects.partial(self._jet.run, task), below)

    async def _exists(self) -> bool:
        if not self._found:
            try:
                await self._jet.retry_for_ever(lambda: self._jet.state(self._stream))
            except NotFound:
                return False
            self._found = True
        return True
