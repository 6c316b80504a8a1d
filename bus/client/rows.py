"""Rows of a key-value bucket: maps with a revision, changed by compare-and-set where it matters.

A row is a JSON object, so that any NATS tool can show it. A deleted row leaves nothing behind. A row that does not have
the shape of its key (``bus/wire/row_reader.py``) is passed over and counted; only ``get`` and ``change`` raise for it.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Generic, NamedTuple, TypeVar

from tidemill.bus.client.connection import RETRY_S, retry
from tidemill.bus.client.jetstream import RETRY_FOR_S, JetStream, Message
from tidemill.bus.client.outbox import WRONG_LAST_SEQUENCE
from tidemill.bus.client.pull import present
from tidemill.bus.errors import (
    BusFull,
    BusUnavailable,
    Forbidden,
    Refused,
    RowConflict,
    UnreadableRow,
    WireError,
)
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire import subjects
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.row_reader import read_row
from tidemill.bus.wire.subjects import nonce

_log = logging.getLogger(__name__)

_KEY = re.compile(r"[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=-]+)*")  # Keys that every NATS tool accepts in a bucket
_OPERATION = "KV-Operation"  # Header of a message that replaces a deleted row
_LOG_EVERY_S = 15.0
_AT_ONCE = 16

Value = JsonObject
Row = tuple[Value, int]  # (value, revision)
After = TypeVar("After", Value, Value | None)


class Changed(NamedTuple, Generic[After]):
    """A row before and after ``Rows.change``; None = there is none."""

    before: Value | None
    after: After


class Rows:
    """One bucket. Every method retries over a server restart of some seconds, then raises BusUnavailable."""

    def __init__(self, jet: JetStream, bucket: str) -> None:
        if bucket not in subjects.BUCKETS:
            raise ValueError(f"bucket: want one of {', '.join(subjects.BUCKETS)}, got {bucket!r}")
        self._jet, self.bucket = jet, bucket
        self._stream = subjects.bucket_stream(jet.run, bucket)

    async def get(self, key: str) -> Row | None:
        """Return (value, revision), or None when there is no such row. Raises UnreadableRow."""
        value, revision, error = await self._read_row(key)
        if error is not None:
            raise self._unreadable(key, revision, error)
        return None if value is None else (value, revision)

    async def read(self, key: str) -> tuple[Value | None, int]:
        """Return (value, revision), or (None, 0) when there is no row.

        Returns (None, revision) for a row that cannot be read; ``update`` at this revision replaces it.
        """
        value, revision, error = await self._read_row(key)
        return value, 0 if value is None and error is None else revision

    async def all(self, under: str = "") -> dict[str, Row]:
        """Return key -> (value, revision) of every readable row, or of those with keys that begin with ``under.``."""
        limit = asyncio.Semaphore(_AT_ONCE)

        async def read_one(key: str) -> tuple[str, Value | None, int]:
            async with limit:
                return key, *await self.read(key)

        rows = await asyncio.gather(*[read_one(key) for key in await self.keys(under)])
        return {key: (value, revision) for key, value, revision in rows if value is not None}

    async def keys(self, under: str = "") -> list[str]:
        """Return all keys, or the keys that begin with ``under.``, sorted. A row may be deleted or unreadable."""
        prefix = subjects.row(self._jet.run, self.bucket, "")
        counts = await self._jet.subjects(self._stream, f"{self._subject(under)}.>" if under else f"{prefix}>")
        return sorted(key for subject in counts if _KEY.fullmatch(key := subject.removeprefix(prefix)))

    async def put(self, key: str, value: Value) -> int:
        """Write a row. Returns the new revision."""
        return await self._write(key, value, None)

    async def update(self, key: str, value: Value, revision: int) -> int:
        """Write a row that must have this revision, 0 = not exist. Returns the new one. Raises RowConflict."""
        return await self._write(key, value, revision)

    async def change(
        self,
        key: str,
        fn: Callable[[Value | None], After],
        *,
        replace_unreadable: bool = False,
        if_none: Callable[[], Awaitable[None]] | None = None,
    ) -> Changed[After]:
        """Write the value that ``fn`` makes of the present one, by compare-and-set, until no other writer is faster.

        ``fn`` gets None when there is no row (with ``replace_unreadable`` also for an unreadable one, which else raises
        UnreadableRow), and returns None to leave the row as it is. ``if_none`` is awaited before ``fn`` gets None.
        Errors of both are passed on.
        """
        while True:
            before, revision, error = await self._read_row(key)
            if error is not None and not replace_unreadable:
                raise self._unreadable(key, revision, error)
            if before is None and if_none is not None:
                await if_none()
            after = fn(before)
            if after is None:
                return Changed(before, before)
            with suppress(RowConflict):
                await self.update(key, after, revision)
                return Changed(before, after)

    async def delete(self, key: str) -> None:
        """Remove a row, if there is one.

        A user that may write this row but not purge the bucket leaves a marker in its place, which is read as no row.
        """
        try:
            await self._jet.purge_subject(self._stream, self._subject(key))
        except Forbidden:
            headers = {subjects.MESSAGE_ID: f"row.{nonce()}", _OPERATION: "DEL"}
            await self._jet.outbox.store(self._subject(key), b"", headers)

    async def trim(self, keys: str, below: int) -> None:
        """Remove the rows with these keys (``v.*``) and revisions < ``below``."""
        await self._jet.purge(self._stream, below, subject=subjects.row(self._jet.run, self.bucket, keys))

    async def keep(self, key: str, value: Value, *, every_s: float = 5.0) -> None:
        """Write ``value`` again whenever the row is missing or unreadable, until cancelled: for its one writer."""
        while True:
            try:
                async for row in self.watch(key, every_s, unreadable=True):
                    if row is None:  # another write of ours may be faster
                        await self.change(key, lambda row: value if row is None else None, replace_unreadable=True)
            except BusUnavailable as error:
                if self._jet.connection.closed:
                    raise
                _log.warning("row not kept bucket=%s key=%s error=%s", self.bucket, key, error)
            await asyncio.sleep(RETRY_S)

    async def watch(self, key: str, every_s: float = 1.0, *, unreadable: bool = False) -> AsyncIterator[Row | None]:
        """Yield the row now and after each readable change (None = there is none), for ever.

        Writes wake it (as core messages), and it also reads every ``every_s``: a wake-up may be lost, a change may not.
        Quick changes may show as one. ``unreadable``: also yield None for a row that cannot be read.
        """
        waiter = Waiter()
        last_revision = -1
        async with self.on_change(key, waiter.wake):
            while True:
                try:
                    value, revision = await self.read(key)
                except BusUnavailable:
                    if self._jet.connection.closed:
                        raise
                else:
                    if revision != last_revision and (value is not None or unreadable or not revision):
                        yield None if value is None else (value, revision)
                    last_revision = revision
                await waiter.wait(every_s)

    async def written(self, keys: str, start: int) -> AsyncIterator[tuple[Value, Message]]:
        """Yield (value, message) of the present rows with these keys (``v.*``) and a revision >= ``start``."""
        prefix = subjects.row(self._jet.run, self.bucket, "")
        async for delivered in present(self._jet, self._stream, start, filters=[f"{prefix}{keys}"]):
            value, _, _ = self._decoded(delivered.subject.removeprefix(prefix), delivered)
            if value is not None:
                yield value, delivered

    @asynccontextmanager
    async def on_change(self, keys: str, wake: Callable[[], None]) -> AsyncIterator[None]:
        """While entered, call ``wake`` at writes of these keys (``*`` = any one part), also a moment too early.

        Some may be missed, so callers also poll.
        """
        subject = subjects.row(self._jet.run, self.bucket, keys)

        async def notice(message: object) -> None:
            wake()

        async with self._jet.connection.subscribed(subject, notice):
            yield

    async def _write(self, key: str, value: Value, expected: int | None) -> int:
        """Write with the same message id at every try, so that a write with a lost answer is recognised."""
        subject, payload = self._subject(key), self._bytes(key, value)
        headers = {subjects.MESSAGE_ID: f"row.{nonce()}"}
        if expected is not None:
            headers[subjects.EXPECTED_LAST_ON_SUBJECT] = str(expected)
        deadline, log_failure = time.monotonic() + RETRY_FOR_S, FailureLog(_log, every_s=_LOG_EVERY_S)

        async def attempt() -> int:
            await self._jet.connection.wait_up(deadline - time.monotonic(), subject)
            return (await self._jet.outbox.attempt(subject, payload, headers)).seq

        def report_full(error: BusUnavailable) -> None:
            if isinstance(error, BusFull):  # the only wait that may be long
                log_failure("bus: not stored yet", str(error))

        try:
            return await retry(self._jet.connection, attempt, deadline=deadline, report=report_full)
        except Refused as error:
            if error.code not in WRONG_LAST_SEQUENCE or expected is None:
                raise
            return await self._mine(key, headers[subjects.MESSAGE_ID], expected)

    async def _mine(self, key: str, message_id: str, expected: int) -> int:
        """Return the revision of our own write, whose first answer was lost; raise RowConflict for another's."""
        message = await self._jet.last(self._stream, self._subject(key))
        if message is not None and message.headers.get(subjects.MESSAGE_ID) == message_id:
            return message.seq
        raise RowConflict(f"{self.bucket}.{key}", expected)

    def _subject(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{self.bucket}: want a key of A-Z a-z 0-9 _ = - in parts joined by dots, got {key!r}")
        return subjects.row(self._jet.run, self.bucket, key)

    def _bytes(self, key: str, value: Value) -> bytes:
        try:
            return json.dumps(value, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise WireError(f"{self.bucket}.{key}", "a value that JSON can hold", str(error)) from None

    def _unreadable(self, key: str, revision: int, error: WireError) -> UnreadableRow:
        want = f"{error.field}: {error.want}".removeprefix(": ")
        return UnreadableRow(f"{self.bucket}.{key}", want, error.got, revision)

    async def _read_row(self, key: str) -> tuple[Value | None, int, WireError | None]:
        """Return (value, revision, None), or (None, revision, the reason why it is unreadable).

        Without a row, (None, revision of the marker of a deleted row, or 0, None).
        """
        message = await self._jet.last(self._stream, self._subject(key))
        return (None, 0, None) if message is None else self._decoded(key, message)

    def _decoded(self, key: str, message: Message) -> tuple[Value | None, int, WireError | None]:
        if _OPERATION in message.headers:
            return None, message.seq, None
        try:
            return read_row(self.bucket, key, message.data), message.seq, None
        except WireError as error:
            self._jet.refusals.refuse(self.bucket, f"{key} (revision {message.seq})", error)
            return None, message.seq, error
