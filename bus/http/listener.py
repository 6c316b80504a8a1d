"""The HTTP server of all processes of a run: its routes with their rules (``access``), bodies, and deadlines.

    headers -> key of the route's rule -> encoding and size -> body -> handler

The key comes first: a client without it cannot make this process keep a body. Bodies are bounded one by one
and together, and within deadlines. Compressed ones are refused: aiohttp compares its limit with the unpacked bytes only
after it has unpacked them, and one megabyte of gzip makes a gigabyte. Engines, the proxy of SGLang, the router,
scorers, the gateways of actors, and the learner's snapshots, parts and checkpoints use it. Knows the keys, but not the
meaning of the paths.
"""

import asyncio
import errno
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from tidemill.bus.client.addresses import bare, in_url
from tidemill.bus.config import is_loopback
from tidemill.bus.http.access import Access, Handler, Route, Rule, refusal

_log = logging.getLogger(f"{__name__}.http")

MAX_BODY_BYTES = 64 << 20  # Largest body of a request; a larger one is refused with 413
# Maximum number of bytes of bodies that one listener holds until the ends of their requests; then 503
MAX_BODIES_BYTES = 256 << 20
SMALL_BYTES = 64 << 10  # Bodies up to this size are not counted, so that an abort passes where large requests do not
BODY_S = 120.0
STALL_S = 15.0
RETRY_AFTER_S = 1
MAX_DEPTH = 100  # Maximum depth of nested lists and maps in JSON: not every encoder can write deeper ones
# Maximum number of lists and maps in JSON: an empty one has 2 bytes in a body and 56 or more in memory
MAX_NESTED = 1 << 20
_BODY: web.RequestKey[bytes] = web.RequestKey("body", bytes)
HEADERS_S = 60.0  # Seconds without a whole request to the close of a connection; clients close idle ones sooner
SHUTDOWN_S = 5.0
_BACKLOG = 4096  # Connections that may wait to be accepted. Linux lowers it to net.core.somaxconn.
_FILES = "GET /{file}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Bounds of the bodies that a listener reads."""

    one_bytes: int = MAX_BODY_BYTES
    all_bytes: int = MAX_BODIES_BYTES
    whole_s: float = BODY_S
    stall_s: float = STALL_S


class Bodies:
    """The bodies that one listener holds."""

    def __init__(self, limits: BodyLimits) -> None:
        # The largest body can be read when there is no other one.
        self.limits = replace(limits, all_bytes=max(limits.all_bytes, limits.one_bytes))
        self.held_bytes = 0

    @asynccontextmanager
    async def received(self, request: web.Request) -> AsyncIterator[None]:
        """Read the body for ``body_in``, and hold it while entered.

        Raises HTTPUnsupportedMediaType, HTTPRequestEntityTooLarge, HTTPRequestTimeout, HTTPBadRequest,
        HTTPServiceUnavailable.
        """
        self._refuse_by_headers(request)
        body, num_bytes = bytearray(), 0
        try:
            if request.can_read_body:
                await self._read(request, body)
            request[_BODY], num_bytes = bytes(body), len(body)
            body.clear()
            yield
        finally:
            self.held_bytes -= _counted(num_bytes or len(body))

    def _refuse_by_headers(self, request: web.Request) -> None:
        encodings = ",".join(request.headers.getall("Content-Encoding", [])).replace(" ", "").lower()
        if not set(encodings.split(",")) <= {"", "identity"}:
            reason = f"Content-Encoding: want a body that is not compressed (identity), got {encodings[:80]}"
            raise refusal(web.HTTPUnsupportedMediaType, reason, {"Accept-Encoding": "identity"})
        self._refuse_size(request.content_length or 0)

    def _refuse_size(self, num_bytes: int) -> None:
        if num_bytes > (limit := self.limits.one_bytes):
            # web.HTTPRequestEntityTooLarge takes other arguments than ``refusal`` gives.
            raise refusal(_TooLarge, f"body: want at most {limit} bytes, got {num_bytes} or more")

    async def _read(self, request: web.Request, body: bytearray) -> None:
        limits = self.limits
        deadline = asyncio.get_running_loop().time() + limits.whole_s
        try:
            while piece := await _within(request, min(deadline, asyncio.get_running_loop().time() + limits.stall_s)):
                self._refuse_size(len(body) + len(piece))
                num_bytes = _counted(len(body) + len(piece)) - _counted(len(body))
                if self.held_bytes + num_bytes > limits.all_bytes:
                    got = f"bodies of {self.held_bytes} bytes are being processed"
                    reason = f"{got}, want at most {limits.all_bytes}: repeat the request"
                    raise refusal(web.HTTPServiceUnavailable, reason, {"Retry-After": str(RETRY_AFTER_S)})
                body += piece
                self.held_bytes += num_bytes
        except TimeoutError:
            reason = f"body: want all of it within {limits.whole_s:g} s, and a piece of it every {limits.stall_s:g} s"
            raise refusal(web.HTTPRequestTimeout, f"{reason}, got {len(body)} bytes") from None
        except web.RequestPayloadError as error:
            reason = f"body: want valid chunks or as many bytes as Content-Length says: {error}"
            raise refusal(web.HTTPBadRequest, reason) from None


class _TooLarge(web.HTTPClientError):
    status_code = 413


async def _within(request: web.Request, deadline: float) -> bytes:
    async with asyncio.timeout_at(deadline):
        return await request.content.readany()


def _counted(num_bytes: int) -> int:
    return num_bytes if num_bytes > SMALL_BYTES else 0


def body_in(request: web.Request) -> bytes:
    """Return the body of a request, which the listener has read; empty for one without."""
    return request[_BODY]


def json_in(raw: bytes) -> object:
    """Return a body as a JSON value. Raises ValueError unless it is JSON in UTF-8, at most ``MAX_DEPTH`` deep."""
    # Counted first, as that is cheap: a body with fewer brackets cannot be deeper, and the memory of the value is
    # bounded.
    nested = raw.count(b"[") + raw.count(b"{")
    if nested > MAX_NESTED:
        raise ValueError(f"body: want at most {MAX_NESTED} lists and maps (brackets), got {nested}")
    try:
        value = json.loads(raw.decode())
        deep = nested > MAX_DEPTH and _deeper(value, MAX_DEPTH)
    except RecursionError:
        deep = True
    except ValueError as error:
        raise ValueError(f"body: want JSON: {error}") from error
    if deep:
        raise ValueError(f"body: want lists and maps at most {MAX_DEPTH} deep, got more")
    return value


def _deeper(value: object, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
    return bool(level)


class Listener:
    """Routes served at one address. ``start``, and ``close`` at the end."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        access: Access,
        *,
        files: Path | None = None,
        middlewares: Sequence[Middleware] = (),
        limits: BodyLimits | None = None,
        shutdown_s: float = SHUTDOWN_S,
        headers_s: float = HEADERS_S,
    ) -> None:
        """``routes``: by "METHOD /path". ``files``: a served directory. ``middlewares`` also see refusals."""
        self._access, self.bodies = access, Bodies(limits or BodyLimits())
        self.rules = {path: route.rule for path, route in routes.items()}  # Rule of every route, by "METHOD /path"
        self._rules: dict[web.AbstractRoute, Rule] = {}
        app = web.Application(middlewares=[*middlewares, self._admit])
        for path, route in routes.items():
            method, _, where = path.partition(" ")
            self._rules[app.router.add_route(method, where, route.handler)] = route.rule
        if files is not None:
            self.rules[_FILES] = Rule.REQUEST
            app.router.add_static("/", files)
        # handler_cancellation: a client that hangs up cancels its request, so nothing is generated for it any longer.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            logger=_log,
            access_log=None,
            shutdown_timeout=shutdown_s,
            keepalive_timeout=headers_s,
        )

    async def start(
        self, host: str, port: int, *, advertise: str = "", insecure: bool = False, name: str = "host"
    ) -> str:
        """Listen. Returns the URL for other processes, with ``advertise`` as the host if that is given.

        Raises ValueError for a public address without keys unless ``insecure``, and OSError.
        """
        # A loopback address with the name of another host is behind a forwarded port, or a proxy.
        public = not (is_loopback(host) and is_loopback(bare(advertise or host)))
        if public and not self._access.guarded and not insecure:
            reason = f"{advertise or host} can be reached by others, and no request needs a key there"
            raise ValueError(f"{name}: {reason}; want insecure: true to allow it")
        self._access.is_public = public and not insecure
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=_BACKLOG).start()
        return url_of(advertise or host, self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening. Requests under way have ``shutdown_s`` to end."""
        await self._runner.cleanup()

    @property
    def keys(self) -> dict[str, str]:
        """The key that every route needs, in words, by "METHOD /path"."""
        return {path: self._access.key(rule) for path, rule in self.rules.items()}

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, read the body, and pass the request to its handler."""
        # Files, and paths that do not exist, are requests.
        await self._access.check(request, self._rules.get(request.match_info.route, Rule.REQUEST))
        async with self.bodies.received(request):
            try:
                return await handler(request)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                raise web.HTTPNotFound from None  # aiohttp looks for the file of such a name, which there cannot be


def url_of(host: str, port: int) -> str:
    """Return the URL; ``host`` may have brackets, and its own port (a forwarded one)."""
    host = in_url(host)
    has_port = ":" in host.rpartition("]")[2]
    return f"http://{host}" if has_port else f"http://{host}:{port}"


def _without_traceback(record: logging.LogRecord) -> bool:
    """Log a malformed request, which any client can send, as one line for debugging; aiohttp answers with 400."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname, record.exc_info = logging.DEBUG, "DEBUG", None
        record.msg, record.args = "malformed request: %s", (f"{error.message:.200}",)
    return record.levelno >= _log.getEffectiveLevel()


_log.addFilter(_without_traceback)
