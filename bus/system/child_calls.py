"""Calls of one child process, from the process that started it: each request has one result or a reason. Starts and
kills no process.

    to the child      {"id": N, "request": {...}}     {"id": N, "cancel": true}
    from the child    {"up": true} once               {"id": N, "result": ...} or {"id": N, "failed": TEXT}
                      {"note": KIND, "text": TEXT}    something for the log

A result with "last": TEXT says that the process takes no more calls, and TEXT is the reason of the others.

A frame is four bytes of length (big-endian) and one JSON map. Code of users can write to the child's end, so a frame
has a bounded size, and any other message ends the child.
"""

import asyncio
import itertools
import json
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from tidemill.bus.errors import DetailedError

START_S = 120.0  # Seconds for the import of a user's module, with the packages that it needs
LAST_WORDS_S = 1.0  # Seconds for reading the output of an ended process: one below it may keep its connection open
MAX_TEXT = 2000


class ChildCallFailed(DetailedError):
    """A call has no result."""

    reason: str
    ended: bool = False
    """Its process has ended, or takes no more calls."""
    outside: bool = False
    """The cause lies outside of the call, so that others fail, too."""
    template = "{reason}"


class ChildConnection:
    """Connection to one child process."""

    def __init__(
        self,
        number: int,
        kill: "Callable[[ChildConnection, str], None]",
        *,
        closed: "Callable[[ChildConnection], None]" = lambda connection: None,
        note: Callable[[str, str], None] = lambda kind, text: None,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        """``kill`` gets the reason for the calls. ``closed``: the child closed its end. ``note`` gets kind and text.
        ``freed``: a call has ended.
        """
        self.number, self._kill, self._closed, self._note, self._freed = number, kill, closed, note, freed
        self.ended = ""  # Why it takes no more calls; empty while it does
        self._calls: dict[int, asyncio.Future[object]] = {}
        self._ids = itertools.count(1)
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return the number of running calls; a cancelled call runs until it has ended."""
        return len(self._calls)

    async def open(self, connection: socket.socket) -> None:
        """Begin to read, and wait until the process is up. Raises ChildCallFailed when it ends before, TimeoutError."""
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        self._reading = asyncio.create_task(self._read(reader), name=f"child process {self.number}")
        async with asyncio.timeout(START_S):
            await self._up

    async def call(
        self, request: bytes, timeout_s: float | None = None, *, cancel_s: float = 0.0, blocked: str = ""
    ) -> object:
        """Return the result of one call. Raises ChildCallFailed with the child's reason, TimeoutError.

        ``cancel_s``: a call that is cancelled or past its limit is cancelled in the child, which confirms that within
        this time if it is alive; else it is ended, and ``blocked`` is the reason of its other calls. 0 = the caller
        ends the process.
        """
        if self.ended or self._writer is None:
            raise ChildCallFailed(self.ended or "not started", ended=True)
        number = next(self._ids)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(encode_call(number, request))
                return await asyncio.shield(future)
        finally:
            if cancel_s and not future.done():
                self._writer.write(encode_frame({"id": number, "cancel": True}))
                asyncio.get_running_loop().call_later(cancel_s, self._give_up, number, blocked)
            else:
                self._calls.pop(number, None)
                future.cancel()

    def process_ended(self, reason: str) -> None:
        """End, once all that the process wrote is read: its end may be reported before its last reply comes."""
        if self._reading is None or self._reading.done():
            self.end(reason)
            return
        timer = asyncio.get_running_loop().call_later(LAST_WORDS_S, self.end, reason)

        def read(_: object) -> None:
            timer.cancel()
            self.end(reason)

        self._reading.add_done_callback(read)

    def end(self, reason: str) -> None:
        """Take no more calls, and fail the running ones."""
        if self.ended:
            return
        self.ended = reason
        futures: list[asyncio.Future[Any]] = [self._up, *self._calls.values()]
        for future in futures:
            if not future.done():
                future.set_exception(ChildCallFailed(reason, ended=True))
                future.exception()  # a call that was cancelled does not retrieve it
        self._calls.clear()
        if self._writer is not None:
            self._writer.transport.abort()
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()

    def _give_up(self, number: int, blocked: str) -> None:
        if self._calls.pop(number, None) is not None:
            self._kill(self, blocked)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (message := await read_frame(reader)) is not None:
                self._take_message(message)
        except BadFrame as error:
            self._kill(self, f"its process wrote {error}")
        except OSError as error:
            self._kill(self, f"connection to its process: {error}")
        else:
            self._closed(self)

    def _take_message(self, message: Mapping[str, Any]) -> None:
        number = message.get("id")
        if "up" in message:
            if not self._up.done():
                self._up.set_result(None)
        elif "note" in message:
            self._note(str(message["note"]), str(message.get("text"))[:MAX_TEXT])
        elif type(number) is int:
            self._settle(self._calls.pop(number, None), message)
        else:
            raise BadFrame(f"a message of {', '.join(message) or 'nothing'}, want a result"[:200])

    def _settle(self, future: "asyncio.Future[object] | None", message: Mapping[str, Any]) -> None:
        if future is not None and not future.done():
            if "result" in message:
                future.set_result(message["result"])
            else:
                reason = str(message.get("failed", "a reply without a result"))[:MAX_TEXT]
                future.set_exception(ChildCallFailed(reason, outside=message.get("outside") is True))
                future.exception()
        self._freed()
        if "last" in message:
            self._kill(self, str(message["last"])[:MAX_TEXT])


MAX_RESULT_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")


class BadFrame(Exception):
    """The bytes read are no frame."""


def encode_frame(message: Mapping[str, object]) -> bytes:
    """Return the frame of a message. Raises TypeError, ValueError or RecursionError for values that JSON lacks."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def encode_call(number: int, request: bytes) -> bytes:
    """Return the frame of a call, with the JSON of its request."""
    body = b'{"id": %d, "request": %s}' % (number, request)
    return _LENGTH.pack(len(body)) + body


def decode_frame(body: bytes) -> dict[str, Any]:
    """Return the map in the body of a frame. Raises BadFrame."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"no JSON: {error}") from None
    if not isinstance(message, dict):
        raise BadFrame(f"want a map, got {type(message).__name__}")
    return message


async def read_frame(reader: asyncio.StreamReader, max_bytes: int = MAX_RESULT_BYTES) -> dict[str, Any] | None:
    """Return the next message, None at the end. Raises BadFrame."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > max_bytes:
            raise BadFrame(f"a result of {size} bytes, want at most {max_bytes}")
        return decode_frame(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_frame(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message of a blocking socket, None at the end."""
    head = _exactly(connection, _LENGTH.size)
    body = _exactly(connection, _LENGTH.unpack(head)[0]) if head else b""
    return decode_frame(body) if body else None


def _exactly(connection: socket.socket, size: int) -> bytes:
    body = bytearray()
    while len(body) < size:
        piece = connection.recv(min(size - len(body), 1 << 20))
        if not piece:
            return b""
        body += piece
    return bytes(body)
