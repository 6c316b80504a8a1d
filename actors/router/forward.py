"""Forwards a request to one engine, and to another where repeating is safe. Knows HTTP on both sides, not the content
of requests.

As long as nothing was answered, these requests are repeated:
- a request that was never sent (connection refused, or not made in time): always;
- one answered 503, when it is GET, HEAD, a generation, or carries a request id: the engine has not begun it;
- one with a broken connection: only when it is GET or HEAD, or carries a request id.
(The HTTP client itself sends a second request to the same engine for idempotent methods: GET, HEAD, OPTIONS, PUT,
DELETE.) A request that timed out is not repeated: the engine may still work on it. After the first byte nothing is
repeated.
"""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus
from urllib.parse import quote

import aiohttp
from yarl import URL

from tidemill.actors.config import RouterConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.engines.server_discovery import NotServing
from tidemill.actors.engines.server_pool import EnginePool, NoServer
from tidemill.actors.errors import EngineError, EngineGone, EngineUnavailable, VersionUnavailable
from tidemill.actors.http_api import NONCE_HEADER
from tidemill.actors.router.exchange import REQUEST_HEADER, SESSION_HEADERS, Answer, Request, once, refusal
from tidemill.bus.http.client import content_of, open_session
from tidemill.bus.keys import RunKeys

GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions")
"""Paths of generations."""
NOT_FORWARDED = frozenset(
    [
        *("host", "content-length", "connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer"),
        *("expect", "proxy-authenticate", "proxy-authorization", "accept-encoding"),
        *(name.lower() for name in SESSION_HEADERS),
    ]
)
"""Headers of one connection, and the headers that this module sets itself."""
NO_CONNECTION = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)
"""Errors of a request that was never sent."""
UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
MAX_INFO_BYTES = 1 << 20
"""Size of the largest /model_info that is read."""
MAX_REFUSAL_BYTES = 1 << 16
"""Maximum number of bytes of a refusal that are read: it is kept until all attempts have failed."""


class NotSent(EngineUnavailable):
    """There was no connection, so the engine has not received the request."""


class EngineRefused(EngineUnavailable):
    """The engine answered 503; the client gets this answer."""

    headers: Mapping[str, str]
    body: bytes


class EngineRefusedVersion(EngineRefused, VersionUnavailable):
    """The engine answered 503 because it does not serve the requested version: no reason for a quarantine."""


class RequestTimeout(EngineError):
    """A time limit of a request has passed. Only the health checks decide whether the engine is healthy."""


class Sessions:
    """Engine id of each session; the sessions unused for longest are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._engines: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def engine(self, session: str) -> str:
        """Return the engine id of a session; empty when the session is new."""
        return self._engines.get(session, "") if session else ""

    def note(self, session: str, engine: str) -> None:
        """Record the engine that a session used last; a request without a session is ignored."""
        if not session:
            return
        self._engines[session] = engine
        self._engines.move_to_end(session)
        if len(self._engines) > self._limit:
            self._engines.popitem(last=False)


class Forwarder:
    """The innermost handler. Call ``close`` at the end."""

    def __init__(self, config: RouterConfig, engines: EnginePool, keys: RunKeys | None = None) -> None:
        self._config, self._engines, self._keys = config, engines, keys
        self.sessions = Sessions(config.max_sessions)
        # One connection per request: a kept one may be dead, which looks the same as an engine that broke off its work.
        self._session = open_session(connect_s=config.connect_s, keep_s=0, unpack=False)

    async def close(self) -> None:
        """Close the connections to engines; requests in flight break off."""
        await self._session.close()

    async def handle(self, request: Request) -> Answer:
        """Return the engine's answer, or an error with the reason why there is none."""
        deadline, avoid = time.monotonic() + self._config.timeout_s, ""
        for attempts_left in range(self._config.retries, -1, -1):
            try:
                return await self._attempt(request, deadline, avoid)
            except NoServer as error:
                return refusal(503, str(error), "no_available_workers")
            except RequestTimeout as error:
                return refusal(504, str(error), "timeout")
            except EngineUnavailable as error:
                if attempts_left == 0 or not _repeatable(request, error):
                    if isinstance(error, EngineRefused):
                        return Answer(UNAVAILABLE, error.headers, once(error.body))
                    return refusal(502, str(error), "bad_gateway")
                avoid = error.engine
        raise AssertionError("the last attempt returns")

    async def _attempt(self, request: Request, deadline: float, avoid: str) -> Answer:
        """Forward the request once. Raises EngineUnavailable with the engine's id, NoServer, RequestTimeout."""
        config = self._config
        wait_s = min(config.wait_s, deadline - time.monotonic())
        min_version = request.field("min_version")
        async with AsyncExitStack() as stack:
            engine_id, engine = await stack.enter_async_context(
                self._engines.acquire(
                    min_version=min_version if isinstance(min_version, int) else 0,
                    timeout_s=wait_s,
                    avoid=avoid,
                    prefer=self.sessions.engine(request.session),
                )
            )
            assert isinstance(engine, HttpEngine)
            response = await self._open(stack, request, engine_id, engine.url, deadline)
            self.sessions.note(request.session, engine_id)
            chunks = self._chunks(response, engine_id, deadline)
            return Answer(response.status, _passed_on(response.headers), chunks, stack.pop_all())

    async def _open(
        self, stack: AsyncExitStack, request: Request, engine_id: str, url: str, deadline: float
    ) -> aiohttp.ClientResponse:
        """Send the request. Raises NotSent, EngineRefused, EngineGone, RequestTimeout."""
        # Encoded here, so that the engine sees exactly this path: nothing in it is read as a query or as a step to a
        # parent path.
        where = URL(url + quote(request.path) + (f"?{request.query}" if request.query else ""), encoded=True)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in NOT_FORWARDED}
        if self._keys is not None:
            # The client's key was checked here. Without keys of a run, engines added by hand may require it.
            headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            headers |= await self._keys.headers(admin=False)
        headers["Accept-Encoding"] = "identity"  # chunks are passed on unchanged, each at once
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                response = await stack.enter_async_context(
                    self._session.request(
                        request.method, where, data=request.content or None, headers=headers, allow_redirects=False
                    )
                )
                if response.status == UNAVAILABLE:
                    raise _refused(engine_id, response, await response.content.read(MAX_REFUSAL_BYTES))
                return response
        except (*NO_CONNECTION, UnicodeError) as error:
            raise NotSent(engine_id, f"{type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise RequestTimeout(f"engine {engine_id}: no answer within {self._config.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineGone(engine_id, f"{type(error).__name__}: {error}") from error

    async def _chunks(self, response: aiohttp.ClientResponse, engine_id: str, deadline: float) -> AsyncIterator[bytes]:
        """Yield the chunks as they arrive. Raises EngineGone when the connection breaks, RequestTimeout."""
        while True:
            try:
                async with asyncio.timeout(min(self._config.idle_s, deadline - time.monotonic())):
                    chunk = await response.content.readany()
            except TimeoutError as error:
                raise RequestTimeout(f"engine {engine_id}: no further data within the time limit") from error
            except (aiohttp.ClientError, OSError) as error:
                raise EngineGone(engine_id, f"{type(error).__name__}: {error}") from error
            if not chunk:
                return
            yield chunk


class Asker:
    """Health check of an engine: whether it serves, and which version."""

    def __init__(self, session: aiohttp.ClientSession, keys: RunKeys | None = None) -> None:
        self._session, self._keys = session, keys

    async def __call__(self, url: str, nonce: str = "") -> int:
        """Return the served version; 0 if it is not reported as a number. ``nonce``: from the engine's live row, which
        the answer must have; empty = unknown. Raises NotServing, EngineUnavailable.
        """
        try:
            async with self._session.get(url + "/health") as response:
                if nonce and response.headers.get(NONCE_HEADER) != nonce:
                    raise NotServing(url, "another process answers there than the one of the live row")
                if response.status != HTTPStatus.OK:
                    raise NotServing(url, f"/health: HTTP {response.status}")
            headers = {} if self._keys is None else await self._keys.headers(admin=False)
            async with self._session.get(url + "/model_info", headers=headers) as response:
                is_ok = response.status == HTTPStatus.OK
                info = json.loads(await content_of(response.content, MAX_INFO_BYTES)) if is_ok else {}
                version = info.get("weight_version")
        except (aiohttp.ClientError, OSError, ValueError, AttributeError, RecursionError) as error:
            raise EngineUnavailable(url, f"{type(error).__name__}: {error}") from error
        return int(version) if isinstance(version, str) and version.isdecimal() else 0


def _repeatable(request: Request, error: EngineUnavailable) -> bool:
    if isinstance(error, NotSent):
        return True
    named = request.method in ("GET", "HEAD") or REQUEST_HEADER in request.headers or bool(request.field("rid"))
    return named or (isinstance(error, EngineRefused) and request.path in GENERATING)


def _refused(engine_id: str, response: aiohttp.ClientResponse, body: bytes) -> EngineRefused:
    kind = EngineRefusedVersion if b'"VersionUnavailable"' in body else EngineRefused
    return kind(engine_id, body[:500].decode(errors="replace"), _passed_on(response.headers), body)


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in {*NOT_FORWARDED, "date", "server"}}
