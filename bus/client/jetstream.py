"""The requests of JetStream's API in use: maps in and out, foreign errors translated, reads repeated over restarts."""

import base64
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeVar

from tidemill.bus.client.connection import Connection, retry
from tidemill.bus.client.outbox import Outbox, answered
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusUnavailable, NotFound, Refused, WireError
from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire import subjects
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.subjects import Shards

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Number of places remembered, so that a message read again, or a row read every second, is counted once
_MAX_KNOWN = 4096
_MAX_TEXT = 160


class Refusals:
    """Messages and rows of one connection that could not be read. Memory is bounded, whatever arrives.

    Each message is counted once (until thousands of others): by its sequence, a row by key and revision.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # Refusals by stream (``DEAD``) or bucket (``live``)
        self.newest = ""
        self._known: dict[tuple[str, str], None] = {}
        self._repeated = FailureLog(_log)

    def read(self, place: str, at: object, decode: Callable[[], T]) -> T | None:
        """Return the result of ``decode``; where it raises WireError, count a refusal and return None.

        ``place`` is the stream or bucket, ``at`` the sequence, or key and revision.
        """
        try:
            return decode()
        except WireError as error:
            self.refuse(place, at, error)
            return None

    def refuse(self, place: str, at: object, reason: object) -> None:
        """Count one refusal, and log it unless another one of this place was logged within a minute."""
        message = (place, str(at))
        if message in self._known:
            return
        self._known[message] = None
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self.counts[place] += 1
        self.newest = _short(f"{place} {at}: {reason}")
        self._repeated(f"unreadable in {place}, passed over", self.newest)

    def __str__(self) -> str:
        """Return ``3 unreadable messages (DEAD 2, live 1), newest: DEAD 17: ...``; empty for none."""
        if not self.counts:
            return ""
        total = self.counts.total()
        places = ", ".join(f"{place} {count}" for place, count in sorted(self.counts.items()))
        return f"{total} unreadable message{'s' if total > 1 else ''} ({places}), newest: {self.newest}"


def _short(text: str) -> str:
    plain = "".join(letter if letter.isprintable() else "?" for letter in text[:_MAX_TEXT])
    return plain if len(text) <= _MAX_TEXT else f"{plain}..."


_STORED_BYTES = 34  # What nats-server adds to subject, headers and data in a file
_ANSWER_S = 2.0  # Deadline of one attempt
RETRY_FOR_S = 15.0  # Seconds for which a request is repeated: a killed server is back within a second or so
_NOT_FOUND = {10014: "consumer", 10037: "message", 10059: "stream"}
_STARTING = (10008, 10074)


class Message(NamedTuple):
    """A stored message."""

    seq: int
    subject: str
    headers: dict[str, str]
    data: bytes
    """Empty where a consumer delivers headers only."""
    stored_s: float
    """Unix time by the server's clock."""
    pending: int = 0
    """Number of messages after this one when a consumer delivered it."""

    @property
    def size_bytes(self) -> int:
        """Size of the data, which the server puts into a header where it delivers headers only."""
        return len(self.data) or subjects.natural(self.headers.get("Nats-Msg-Size", "")) or 0

    @property
    def stored_bytes(self) -> int:
        """Size by which it counts in its stream, to some ten bytes."""
        headers = sum(len(name) + len(value) + 4 for name, value in self.headers.items())
        return _STORED_BYTES + len(self.subject) + headers + self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Identity and extent of a stream."""

    created: str
    """Creation time by the server: the identity of the stream."""
    first_seq: int
    last_seq: int
    messages: int
    bytes: int


class JetStream:
    """JetStream, used for one run."""

    def __init__(self, connection: Connection, run: str, config: BusConfig) -> None:
        self.connection, self.run, self.config = connection, run, config
        self.outbox = Outbox(connection, subjects.full(run))
        self.refusals = Refusals()
        self._shards: Shards | None = None

    async def shards(self) -> Shards:
        """Return the shards of SAMPLES as the bus has them, or while it has none, as configured.

        They are read once, waiting for the bus as long as necessary. Raises BusUnavailable once closed.
        """
        if self._shards is None:
            self._shards = await self.retry_for_ever(self.stored_shards)
        return self._shards or Shards(self.config.sample_shards)

    async def stored_shards(self) -> Shards | None:
        """Return the shards of SAMPLES that the bus has; None = it has none yet. Raises BusUnavailable."""
        filter = subjects.everything(self.run)
        names: list[str] = []
        while True:
            answer = await self.call("STREAM.NAMES", {"subject": filter, "offset": len(names)})
            page = answer.get("streams") or []
            names += page
            if not page or len(names) >= int(answer.get("total", 0)):
                return Shards.named(names)

    async def store_use(self) -> tuple[int, int]:
        """Return the bytes of this user's streams on the disks of the bus, and their bound; 0 = it has none."""
        account = await self.call("INFO")
        return int(account.get("storage", 0)), max(0, int((account.get("limits") or {}).get("max_storage", 0)))

    async def call(
        self, verb: str, request: Mapping[str, object] | None = None, *, retry_for_s: float = RETRY_FOR_S
    ) -> JsonObject:
        """Return the answer to ``$JS.API.<verb>``, a request that may be repeated: it is, while the server is away.

        Raises NotFound, Refused, and BusUnavailable after ``retry_for_s``.
        """
        payload = json.dumps(request).encode() if request else b""
        deadline = time.monotonic() + retry_for_s

        async def ask() -> JsonObject:
            await self.connection.wait_up(deadline - time.monotonic(), verb)
            answer_s = min(_ANSWER_S, max(0.01, deadline - time.monotonic()))
            try:
                return _fields(verb, (await self.connection.request(f"$JS.API.{verb}", payload, answer_s)).data)
            except BusUnavailable as error:  # servers of a cluster that cannot write give no answer to reads either
                raise await self.outbox.explained(error) from None

        return await retry(self.connection, ask, deadline=deadline)

    async def retry_for_ever(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``ask``, called again while the bus is away. Raises BusUnavailable once closed."""
        return await retry(self.connection, ask, report=lambda error: _log.warning("bus: waiting reason=%s", error))

    async def state(self, stream: str) -> StreamState:
        """Return identity and extent of a stream. Raises NotFound."""
        fields = await self.call(f"STREAM.INFO.{stream}")
        return StreamState(
            created=fields["created"],
            **{name: fields["state"][name] for name in ("first_seq", "last_seq", "messages", "bytes")},
        )

    async def subjects(self, stream: str, filter: str) -> dict[str, int]:
        """Return the number of messages of each subject that matches."""
        counts: dict[str, int] = {}
        while True:
            fields = await self.call(f"STREAM.INFO.{stream}", {"subjects_filter": filter, "offset": len(counts)})
            page = fields["state"].get("subjects") or {}
            counts.update(page)
            if not page or len(counts) >= fields.get("total", 0):
                return counts

    async def message(self, stream: str, seq: int) -> Message:
        """Return a message by sequence, from the leader. Raises NotFound."""
        return await self._get(stream, {"seq": seq})

    async def last(self, stream: str, subject: str) -> Message | None:
        """Return the newest message on a subject, from the leader. Raises NotFound without the stream."""
        return await self._get_any(stream, {"last_by_subj": subject})

    async def next(self, stream: str, seq: int, subject: str = ">") -> Message | None:
        """Return the first message from ``seq`` on a subject, from the leader. Raises NotFound without the stream."""
        return await self._get_any(stream, {"seq": seq, "next_by_subj": subject})

    async def purge(self, stream: str, below: int, *, subject: str = "") -> None:
        """Remove messages with sequences < ``below`` (and of this subject).

        Nothing happens for ``below`` < 2: before 2.15, ``purge(seq=1)`` of a file stream wiped everything.
        """
        if below < 2:
            return
        await self.call(f"STREAM.PURGE.{stream}", {"seq": below, **({"filter": subject} if subject else {})})

    async def purge_subject(self, stream: str, subject: str) -> None:
        await self.call(f"STREAM.PURGE.{stream}", {"filter": subject})

    async def delete(self, stream: str, seq: int) -> None:
        """Remove a message, if it is there."""
        try:
            await self.call(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
        except (NotFound, Refused) as error:  # removed meanwhile, or by a request whose answer was lost
            _log.info("bus: message not removed stream=%s seq=%d reason=%s", stream, seq, error)

    async def _get_any(self, stream: str, request: Mapping[str, object]) -> Message | None:
        try:
            return await self._get(stream, request)
        except NotFound as error:
            if error.what == "stream":
                raise
            return None

    async def _get(self, stream: str, request: Mapping[str, object]) -> Message:
        fields = (await self.call(f"STREAM.MSG.GET.{stream}", request))["message"]
        return Message(
            seq=fields["seq"],
            subject=fields["subject"],
            headers=parse_headers(base64.b64decode(fields.get("hdrs", ""))),
            data=base64.b64decode(fields.get("data", "")),
            stored_s=unix_time(fields["time"]),
        )


def parse_headers(raw: bytes) -> dict[str, str]:
    """Return the headers of a raw header block; its first line is ``NATS/1.0``."""
    headers: dict[str, str] = {}
    for line in raw.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.decode(errors="replace")] = value.strip().decode(errors="replace")
    return headers


def unix_time(stamp: str) -> float:
    """Return the Unix time of a time stamp of the server (RFC 3339 with up to nanoseconds)."""
    return datetime.fromisoformat(stamp).timestamp()  # digits after the microseconds are cut off


def _fields(verb: str, data: bytes) -> JsonObject:
    if not data:
        raise BusUnavailable(verb, "no responders: JetStream is not enabled, or the server is starting")
    fields = answered(verb, data)
    if "error" in fields:
        error = fields["error"]
        code, reason = int(error.get("err_code", 0)), str(error.get("description", ""))
        if code in _NOT_FOUND:
            raise NotFound(verb, _NOT_FOUND[code])
        if error.get("code") == 503 or code in _STARTING:
            raise BusUnavailable(verb, reason)
        raise Refused(verb, code, reason)
    return fields
