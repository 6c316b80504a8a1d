"""The HTTP server of all processes of a run: its routes with their rules (``access``), bodies (``bodies``), and
deadlines.

    headers -> key of the route's rule -> encoding and size -> body -> handler

The key comes first: a client without it cannot make this process keep a body. Engines, the proxy of SGLang, the router,
scorers, the gateways of actors, and the learner's snapshots, parts and checkpoints use it. Knows the keys, but not the
meaning of the paths.
"""

import errno
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from tidemill.bus.client.addresses import bare, in_url
from tidemill.bus.config import is_loopback
from tidemill.bus.http.access import Access, Handler, Route, Rule
from tidemill.bus.http.bodies import Bodies, BodyLimits

HEADERS_S = 60.0  # Seconds without a whole request to the close of a connection; clients close idle ones sooner
SHUTDOWN_S = 5.0
_BACKLOG = 4096  # Connections that may wait to be accepted. Linux lowers it to net.core.somaxconn.
_FILES = "GET /{file}"
_log = logging.getLogger(f"{__name__}.http")


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
