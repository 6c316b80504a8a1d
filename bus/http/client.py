"""The HTTP client of all processes: sessions, deadlines, bounded answers, and statuses and errors as a ``Failure``.

    status, or error of aiohttp --(here)--> CallFailed(failure) --(``translate`` of each room)--> its own error

Knows requests, deadlines and how an error is worded; no path, and nothing of weights, of generating or of rewards.
Traffic inside a run never goes through a proxy of the environment: a session does not read it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

import aiohttp
import msgspec

from tidemill.bus.errors import BusError, DetailedError

CONNECT_S = 5.0
KEEP_S = 2.0  # An idle connection is kept so long: less than SGLang keeps it (5 s), or a request might meet its end
# Size of the largest answer that is read: a batch of long responses with the experts of their tokens
MAX_ANSWER_BYTES = 1 << 30
MAX_REFUSAL_BYTES = 1 << 20
MAX_REASON_BYTES = 2000  # Maximum number of bytes of an answer that is no JSON in an error: it may be a page of HTML
# Buffer of a connection for large answers; aiohttp's default of 64 KB costs a wake-up for each piece
READ_BUFFER_BYTES = 1 << 20


class Failure(Enum):
    """Why a call has no answer with status 200."""

    NOT_CONNECTED = "refused, or not made in time: the engine has not seen the request"
    NO_ANSWER = "none within the deadline"
    BROKEN = "the connection broke"
    UNREADABLE = "status 200, and no JSON"
    UNAUTHORIZED = "401: it wants another key"
    STALE = "409: it has seen a newer learner"
    ABORTED = "499: a client aborted the request before it began"
    UNAVAILABLE = "408, 429, 502, 503, 504: not now"
    REFUSED = "any other 4xx: the request is wrong"
    FAILED = "any other status"


STATUSES = {
    401: Failure.UNAUTHORIZED,
    409: Failure.STALE,
    499: Failure.ABORTED,
    **dict.fromkeys((408, 429, 502, 503, 504), Failure.UNAVAILABLE),
}


EMPTY: Mapping[str, object] = {}


class CallFailed(DetailedError, BusError):
    """A call without an answer of status 200."""

    url: str
    path: str
    failure: Failure
    reason: str
    status: int = 0
    """Status of the answer; 0 = none came."""
    answer: Mapping[str, object] = EMPTY
    """The JSON map in the answer's body; empty when that is something else."""
    template = "{url}{path}: {reason}"


Translate = Callable[[CallFailed], Exception]  # Returns the error of the caller's own room for a failed call
Headers = Callable[[], Awaitable[Mapping[str, str]]]
Body = Mapping[str, object] | bytes | None  # JSON: a map, or the bytes that a caller has encoded


async def no_headers() -> Mapping[str, str]:
    """Return no headers: for an engine that wants no key."""
    return {}


def open_session(
    *,
    total_s: float | None = None,
    connect_s: float | None = None,
    read_s: float | None = None,
    headers: Mapping[str, str] | None = None,
    max_connections: int = 0,
    keep_s: float | None = None,
    unpack: bool = True,
    read_buffer_bytes: int = 1 << 16,
    proxied: bool = False,
) -> aiohttp.ClientSession:
    """Return a session; the caller closes it. A deadline of None is none: requests may take minutes.

    ``max_connections``: 0 = no limit, because a request must not wait for the end of another. ``keep_s``: time for
    which an idle connection is kept; 0 = each request has its own, None = as aiohttp has it. ``unpack`` compressed
    answers. ``proxied``: by the proxy that the environment names, for addresses outside of the run.
    """
    timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s, sock_read=read_s)
    keep: dict[str, Any] = {"keepalive_timeout": keep_s} if keep_s else {"force_close": keep_s == 0}
    connector = aiohttp.TCPConnector(limit=max_connections, **keep)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        headers=headers,
        auto_decompress=unpack,
        read_bufsize=read_buffer_bytes,
        trust_env=proxied,
    )


async def content_of(content: aiohttp.StreamReader, max_bytes: int) -> bytes:
    """Return the body of an answer (``response.content``). Raises ValueError for more than ``max_bytes``, unpacked."""
    body = bytearray()
    async for piece in content.iter_any():
        body += piece
        if len(body) > max_bytes:
            raise ValueError(f"an answer of more than {max_bytes} bytes")
    return bytes(body)


class ApiClient:
    """One server at ``url``. Every call raises the exception that ``translate`` makes of its CallFailed."""

    def __init__(
        self,
        url: str,
        translate: Translate,
        *,
        headers: Headers = no_headers,
        session: aiohttp.ClientSession | None = None,
        connect_s: float = CONNECT_S,
    ) -> None:
        """``headers`` are read before each request. ``session``: the caller's; None = opened on first use."""
        self.url, self._translate, self._headers, self._connect_s = url.rstrip("/"), translate, headers, connect_s
        self._shared, self._opened = session, session

    async def call(self, method: str, path: str, body: Body = None, *, timeout_s: float | None = None) -> Any:
        """Return the JSON of the answer; None for an answer of another kind."""
        async with self.open(method, path, body, timeout_s=timeout_s) as response:
            raw = await self._content(path, response)
        try:
            return _value(raw) if response.content_type == "application/json" else None
        except (ValueError, RecursionError) as error:
            failed = CallFailed(self.url, path, Failure.UNREADABLE, f"want JSON: {error}", status=200)
            raise self._translate(failed) from error

    async def read(self, method: str, path: str, body: Body = None, *, timeout_s: float | None = None) -> bytes:
        async with self.open(method, path, body, timeout_s=timeout_s) as response:
            return await self._content(path, response)

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: Body = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its answer, of status 200, to be read while entered, all within ``timeout_s``."""
        timeout = aiohttp.ClientTimeout(total=None, connect=self._connect_s)
        try:
            async with asyncio.timeout(timeout_s):
                headers = {**await self._headers(), "Accept-Encoding": "identity"}
                content: dict[str, Any] = {"json": body}
                if isinstance(body, bytes):
                    content, headers["Content-Type"] = {"data": body}, "application/json"
                sent = self._session.request(method, self.url + path, **content, headers=headers, timeout=timeout)
                async with sent as response:
                    if response.status != 200:
                        raise await self._refused(path, response)
                    if encoding := response.headers.get("Content-Encoding", "").replace("identity", ""):
                        # Unpacked, a small answer may be larger than the memory of this process.
                        reason = f"Content-Encoding: want an answer that is not compressed, got {encoding:.80}"
                        raise CallFailed(self.url, path, Failure.UNREADABLE, reason, status=200)
                    yield response
        except CallFailed as failed:
            raise self._translate(failed) from None
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise self._translate(self._broken(path, error, timeout_s)) from error

    async def close(self) -> None:
        """Close the session, unless it is the caller's."""
        if self._shared is None and self._opened is not None:
            opened, self._opened = self._opened, None
            await opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = open_session(keep_s=KEEP_S, read_buffer_bytes=READ_BUFFER_BYTES)
        return self._opened

    async def _content(self, path: str, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await content_of(response.content, MAX_ANSWER_BYTES)
        except ValueError as error:
            raise CallFailed(self.url, path, Failure.UNREADABLE, str(error), status=response.status) from None

    async def _refused(self, path: str, response: aiohttp.ClientResponse) -> CallFailed:
        try:
            raw = await content_of(response.content, MAX_REFUSAL_BYTES)
        except ValueError:  # no engine gives so long a reason
            raw = b""
        if response.status >= 500:
            response.close()  # uvicorn is about to close it, too: the next request is not to travel on it
        return refusal(self.url, path, response.status, raw)

    def _broken(self, path: str, error: Exception, timeout_s: float | None) -> CallFailed:
        if isinstance(error, aiohttp.ServerTimeoutError):
            return CallFailed(self.url, path, Failure.NOT_CONNECTED, f"not connected within {self._connect_s:g} s")
        if isinstance(error, TimeoutError):
            return CallFailed(self.url, path, Failure.NO_ANSWER, f"no answer within {timeout_s or 0.0:g} s")
        failure = Failure.NOT_CONNECTED if isinstance(error, aiohttp.ClientConnectorError) else Failure.BROKEN
        return CallFailed(self.url, path, failure, f"{type(error).__name__}: {error}")


def _value(raw: bytes) -> Any:
    """Return the value of an answer's JSON. Raises ValueError, RecursionError."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:  # NaN, halves of surrogate pairs and other encodings are left to Python's reader
        return json.loads(raw)


def refusal(url: str, path: str, status: int, raw: bytes) -> CallFailed:
    """Return the error for an answer with this body and another status than 200."""
    reason, answer = _reason_in(raw)
    failure = STATUSES.get(status, Failure.REFUSED if 400 <= status < 500 else Failure.FAILED)
    return CallFailed(url, path, failure, reason or f"HTTP {status}", status=status, answer=answer)


def _reason_in(raw: bytes) -> tuple[str, Mapping[str, object]]:
    """Return the reason of a refusal (SGLang's ``error.message`` or ``message``, else the text), and its JSON map."""
    text = raw[:MAX_REASON_BYTES].decode(errors="replace")
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        return text, EMPTY
    if not isinstance(answer, dict):
        return text, EMPTY
    error = answer.get("error")
    return str((error.get("message") if isinstance(error, dict) else error) or answer.get("message") or text), answer
