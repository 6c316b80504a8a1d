"""The HTTP server of all processes of a run: which key a request needs, and how long it may take to arrive.

    open     /health                    no key
    request  every other path           the run's api key, where the listener can be reached from other machines: it is bound beyond
                                        loopback, or advertises another host than loopback (a forwarded port)
    command  paths named as commands    the run's admin key, everywhere

Engines, the proxy of SGLang, the router and the learner's snapshots use it. Knows the keys, but not the meaning of the paths.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from bus.client.reach import bare, in_url
from bus.config import is_loopback
from bus.errors import BusError
from bus.liveness.keys import Keys, RunKeys

HEADERS_S = 60.0
"""A connection that has brought no whole request for this time is closed; clients close idle ones sooner (aiohttp 15 s, httpx 5 s)."""
BODY_S = 120.0
"""Deadline from the headers of a request to the end of its body."""
MAX_BODY_BYTES = 1 << 28
"""Largest body of a request; a larger one is refused with 413."""
SHUTDOWN_S = 5.0
"""Time that requests under way have to end in ``close``."""
OPEN = frozenset({"/health"})
"""Paths without a key: monitors and load balancers have none."""
_BACKLOG = 4096
"""Connections that may wait to be accepted, as when many clients connect at one moment. Linux lowers it to net.core.somaxconn."""
_SCHEME = "bearer"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access:
    """The key that a request needs. Without ``keys`` (a test, a router without a bus) none is needed."""

    def __init__(self, keys: RunKeys | None, commands: Collection[str] = (), on_refused: Callable[[str], None] | None = None) -> None:
        """``on_refused`` is called with the reason when a command is refused."""
        self.keys, self.commands, self._on_refused = keys, frozenset(commands), on_refused
        self.is_public = False
        """Other machines can reach the listener."""

    async def check(self, request: web.Request) -> None:
        """Check the key of a request. Raises HTTPUnauthorized, or HTTPServiceUnavailable while the keys cannot be read."""
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        if path in self.commands:
            await self.want(request, admin=True)
        elif self.is_public and path not in OPEN:
            await self.want(request, admin=False)

    async def want(self, request: web.Request, *, admin: bool) -> None:
        """Check for the given key; for a handler that reads from the body which key it needs. Raises as ``check`` does."""
        if self.keys is None:
            return
        scheme, _, presented = request.headers.get("Authorization", "").partition(" ")
        # The scheme of an Authorization header may be in any case (RFC 9110).
        presented = presented.strip() if scheme.lower() == _SCHEME else ""
        try:
            # The keys may have been made, or replaced, since they were read: a key that does not fit is compared once more with the newest
            # ones. A request without a key does not make this process read the bus.
            known = (await self.keys.known()).admits(presented, admin=admin)
            if known or (presented and (await self.keys.newest()).admits(presented, admin=admin)):
                return
            has = (await self.keys.known()) != Keys()
        except BusError as error:
            raise _refusal(web.HTTPServiceUnavailable, f"{request.path}: the keys of the run are not known: {error}") from error
        name = "admin key" if admin else "api key"
        reason = f"{request.path}: want the run's {name}"
        if not has:
            raise _refusal(web.HTTPServiceUnavailable, f"{reason}, and the run has none yet")
        reason += f" (Authorization: Bearer KEY), got {'another one' if presented else 'none'}"
        if admin and self._on_refused is not None:
            self._on_refused(reason)
        raise _refusal(web.HTTPUnauthorized, reason)


class Listener:
    """Routes served at one address. ``start``, and ``close`` at the end."""

    def __init__(
        self,
        routes: Mapping[str, Handler],
        access: Access,
        *,
        files: Path | None = None,
        middlewares: Sequence[Middleware] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
        shutdown_s: float = SHUTDOWN_S,
        headers_s: float = HEADERS_S,
        body_s: float = BODY_S,
    ) -> None:
        """``routes``: "METHOD /path" -> handler. ``files``: a directory that is served unchanged. ``middlewares`` also see refusals."""
        self._access = access
        app = web.Application(client_max_size=max_body_bytes, middlewares=[*middlewares, _admission(access, body_s)])
        for path, handler in routes.items():
            method, _, where = path.partition(" ")
            app.router.add_route(method, where, handler)
        if files is not None:
            app.router.add_static("/", files)
        # handler_cancellation: a client that hangs up cancels its request, so nothing is generated for it any longer.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s, keepalive_timeout=headers_s
        )

    async def start(self, host: str, port: int, *, advertise: str = "", insecure: bool = False, name: str = "host") -> str:
        """Listen. Returns the URL at which other processes reach it, with ``advertise`` as the host if that is given.

        Raises ValueError for a public address without keys unless ``insecure``, and OSError.
        """
        # A loopback address with the name of another host is behind a forwarded port, or a proxy.
        public = not (is_loopback(host) and is_loopback(bare(advertise or host)))
        if public and self._access.keys is None and not insecure:
            raise ValueError(
                f"{name}: {advertise or host} can be reached by others, who could ask for everything there; want insecure: true to allow it"
            )
        self._access.is_public = public and not insecure
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=_BACKLOG).start()
        return url_of(advertise or host, self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening. Requests under way have ``shutdown_s`` to end."""
        await self._runner.cleanup()


def _admission(access: Access, body_s: float) -> Middleware:
    """Return a middleware that checks the key and then reads the whole body within its deadline."""

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, read the body, and pass the request to its handler."""
        # The key is checked before the body is read: a client without it cannot make this process keep a large body.
        await access.check(request)
        if request.can_read_body:
            try:
                async with asyncio.timeout(body_s):
                    await request.read()
            except TimeoutError:
                raise _refusal(web.HTTPRequestTimeout, f"body: want all of it within {body_s:g} s") from None
        return await handler(request)

    return admit


def url_of(host: str, port: int) -> str:
    """Return the URL; ``host`` is a name or an address, with or without brackets, and may have its own port (a forwarded one)."""
    host = in_url(host)
    has_port = ":" in host.rpartition("]")[2]
    return f"http://{host}" if has_port else f"http://{host}:{port}"


def _refusal(kind: type[web.HTTPError], message: str) -> web.HTTPError:
    answer: dict[str, object] = {"success": False, "message": message, "error": {"message": message, "code": kind.status_code}}
    headers = {"WWW-Authenticate": "Bearer"} if kind is web.HTTPUnauthorized else None
    return kind(text=json.dumps(answer), content_type="application/json", headers=headers)
