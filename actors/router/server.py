"""The router's own paths, and the paths of requests, which are forwarded to an engine; and the body of a router
process.

                      /add_worker /remove_worker /list_workers /health /abort_request
client -> RouterServer --- |
                      a path of requests -> middleware ... -> Forwarder -> engine

A path that is not listed is refused: among those of an engine are commands, which go to one engine directly.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import aiohttp
from aiohttp import web

from tidemill.actors.config import RouterConfig, check_url
from tidemill.actors.engines.address_checks import AddressChecker
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.engines.membership import connected, default_id, first_row
from tidemill.actors.engines.server_discovery import WorkerDiscovery
from tidemill.actors.engines.server_pool import EnginePool
from tidemill.actors.errors import BadRequest, EngineError
from tidemill.actors.http_api import BODIES_BYTES, body_of, translate
from tidemill.actors.router.exchange import (
    SESSION_FIELD,
    SESSION_HEADERS,
    Answer,
    Middleware,
    Request,
    refusal,
    wrapped,
)
from tidemill.actors.router.forward import Asker, Forwarder
from tidemill.bus.client.addresses import reach, route_to
from tidemill.bus.config import BusConfig
from tidemill.bus.http.access import Route, RunAccess
from tidemill.bus.http.client import open_session
from tidemill.bus.http.listener import BodyLimits, Listener, body_in
from tidemill.bus.keys import RunKeys, admin_keys
from tidemill.bus.liveness import HeartbeatPublisher, LiveView
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.system.functions import find_function

log = logging.getLogger(__name__)

UPDATE_EVERY_S = 1.0
"""Seconds between two updates of the live row."""

_NAME = r"\w[\w.-]*"
FORWARDED = (
    *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/messages/count_tokens", "/v1/embeddings", "/encode", "/classify", "/v1/classify", "/v1/score", "/v1/rerank"),
    *("/retrieve_from_text", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/models"),
    *(f"/v1/models/{{model:{_NAME}(/{_NAME})?}}", "/v1/loads"),
    *("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/health_generate"),
)
"""Paths of requests of SGLang, OpenAI and Anthropic, and of ``TokenHistory``. ``RouterConfig.paths`` adds others."""
HOP_HEADERS = frozenset(("content-length", "transfer-encoding", "connection", "keep-alive"))
"""Headers of one connection, which the connection to the client sets itself."""


class RouterServer:
    """The server of a router. Call ``start``, and ``close`` at the end."""

    def __init__(self, config: RouterConfig, view: LiveView | None = None, keys: RunKeys | None = None) -> None:
        """``keys``: keys of the run, required of clients and sent to engines. Raises FunctionRefused."""
        self._config, self._view, self._keys = config, view, keys
        self._middleware = [load_middleware(path, config) for path in config.middleware]
        self._works: list[asyncio.Task[None]] = []
        routes = {
            "GET /health": Route.open(self._health),
            "POST /add_worker": Route.command(self._add),
            "POST /remove_worker": Route.command(self._remove),
            "GET /list_workers": Route.request(self._list),
            "POST /abort_request": Route.request(self._abort),
            **{f"* {path}": Route.request(self._forward) for path in (*FORWARDED, *config.paths)},
            "* /{path:.*}": Route.request(self._refuse),
        }
        self._access = RunAccess(keys, unguarded=config.insecure)
        limits = BodyLimits(one_bytes=config.max_body_bytes, all_bytes=BODIES_BYTES)
        self.listener = Listener(routes, self._access, middlewares=[translate], limits=limits)
        self.url, self._draining = "", False

    async def start(self) -> str:
        """Start discovery and listen. Raises OSError, ValueError for an address that others reach without a key."""
        config = self._config
        self._session = open_session(total_s=config.health_timeout_s)
        self.discovery = WorkerDiscovery(config, Asker(self._session, self._keys), self._view)
        self.engines = EnginePool(self.discovery, HttpEngine, in_turn=True)
        self.forwarder = Forwarder(config, self.engines, self._keys)
        self._handle = wrapped(self.forwarder.handle, self._middleware)
        self._works = [
            asyncio.create_task(self.engines.run(), name="router: look"),
            asyncio.create_task(self.discovery.check_for_ever(), name="router: health"),
        ]
        try:
            self.url = await self.listener.start(
                config.host, config.port, advertise=config.advertise, insecure=config.insecure, name="router.host"
            )
        except (OSError, ValueError):
            await self.close()
            raise
        return self.url

    async def failed(self) -> None:
        """Return or raise when discovery or the health checks end."""
        await first_of(*map(asyncio.shield, self._works))

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let those in flight end within ``drain_s``, break off the rest, stop listening."""
        self._draining = True
        try:
            async with asyncio.timeout(drain_s):
                while self.in_flight:  # noqa: ASYNC110 - bounded, and once
                    await asyncio.sleep(0.05)
        except TimeoutError:
            log.warning("requests broken off count=%d", self.in_flight)
        await self.listener.close()
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)
        await self.forwarder.close()
        await self._session.close()

    @property
    def in_flight(self) -> int:
        return sum(engine["in_flight"] for engine in self.engines.overview())

    # -- its own paths

    async def _health(self, request: web.Request) -> web.Response:
        serving = 0 if self._draining else sum(engine["serving"] for engine in self.engines.overview())
        status, code = ("ok", 200) if serving else ("no engine serves", 503)
        body = {"status": status, "serving": serving, "workers": len(self.discovery.urls())}
        return web.json_response(body, status=code)

    async def _add(self, request: web.Request) -> web.Response:
        await self.discovery.add(await _worker_in(request))
        await self._refresh()
        return web.json_response({"status": "success", "worker_urls": self._loads()})

    async def _remove(self, request: web.Request) -> web.Response:
        url = await _worker_in(request)
        if not self.discovery.remove(url):
            urls = ", ".join(self.discovery.urls()) or "no URL: there is no worker"
            raise BadRequest(f"url: want one of {urls}, got {url!r}")
        await self._refresh()
        return web.json_response({"status": "success", "worker_urls": self._loads()})

    async def _refresh(self) -> None:
        with suppress(TimeoutError):  # the change is made, and takes effect a little later
            await self.engines.refresh()

    async def _list(self, request: web.Request) -> web.Response:
        urls = self.discovery.urls()
        engines = {engine["url"]: engine for engine in self.engines.overview()}
        unseen = {"id": "", "serving": False, "version": -1, "in_flight": 0, "failures": 0, "remark": "not checked yet"}
        workers = [engines.get(url, {"url": url, **unseen}) for url in urls]
        return web.json_response({"urls": urls, "workers": workers, "sessions": len(self.forwarder.sessions)})

    def _loads(self) -> dict[str, int]:
        in_flight = {engine["url"]: engine["in_flight"] for engine in self.engines.overview()}
        return {url: in_flight.get(url, 0) for url in self.discovery.urls()}

    async def _abort(self, request: web.Request) -> web.Response:
        """Send the abort to all engines: the router does not know which of them has the request."""
        body = body_of(request)
        if everything := bool(body.get("abort_all")):
            await self._access.want(request, admin=True)
        urls, headers = self.discovery.urls(), {} if self._keys is None else await self._keys.headers(admin=everything)
        reached = await asyncio.gather(*(self._abort_at(url, body, headers) for url in urls))
        if urls and not any(reached):
            return web.json_response({"error": {"message": "no engine could be reached", "code": 502}}, status=502)
        return web.Response()

    async def _abort_at(self, url: str, body: object, headers: Mapping[str, str]) -> bool:
        try:
            async with self._session.post(url + "/abort_request", json=body, headers=headers) as response:
                return response.status == 200
        # ValueError: the address in a row is no URL.
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            log.info("abort did not reach url=%s error=%s", url, error)
            return False

    # -- forwarding

    async def _forward(self, incoming: web.Request) -> web.StreamResponse:
        if self._draining:
            return await self._send(incoming, refusal(503, "the router is draining", "no_available_workers"))
        request = _request(incoming, body_in(incoming))
        try:
            answer = await self._handle(request)
        except EngineError as error:
            if isinstance(error, BadRequest):
                raise
            answer = refusal(502, str(error), "bad_gateway")
        return await self._send(incoming, answer)

    async def _refuse(self, incoming: web.Request) -> web.StreamResponse:
        where = "a command goes to one engine directly; for a path of requests start the router with --path PATH"
        return await self._send(incoming, refusal(404, f"{incoming.path}: not forwarded; {where}", "not_found"))

    async def _send(self, incoming: web.Request, answer: Answer) -> web.StreamResponse:
        """Send the answer chunk by chunk. When the engine breaks off, so does this: half an answer is no answer."""
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS}
        response = web.StreamResponse(status=answer.status, headers=headers)
        try:
            async with answer:
                await response.prepare(incoming)
                async for chunk in answer.chunks:
                    async with asyncio.timeout(self._config.idle_s):
                        await response.write(chunk)
        except (EngineError, TimeoutError) as error:
            log.warning("answer broken off path=%s error=%s", incoming.path, error or "the client does not read")
            raise ConnectionResetError("answer broken off") from error  # the client sees that the answer is incomplete
        await response.write_eof()
        return response


def load_middleware(path: str, config: RouterConfig) -> Middleware:
    """Return the result of ``package.module:factory``, called with the settings. Raises FunctionRefused."""
    factory: Callable[[RouterConfig], Middleware] = find_function(path, "middleware", want="package.module:factory")
    return factory(config)


def _request(incoming: web.Request, body: bytes) -> Request:
    """Return the request with its session, taken out of header or body: engines do not receive it."""
    method, path, query = incoming.method, incoming.path, incoming.rel_url.raw_query_string
    request = Request(method=method, path=path, query=query, headers=incoming.headers, body=body)
    session = next((incoming.headers[name] for name in SESSION_HEADERS if incoming.headers.get(name)), "")
    if f'"{SESSION_FIELD}"'.encode() in body and SESSION_FIELD in (fields := request.map):
        named = fields.pop(SESSION_FIELD)
        request, session = request.with_body(fields), session or str(named or "")
    return replace(request, session=session)


async def _worker_in(request: web.Request) -> str:
    url = request.query.get("url") or request.query.get("worker_url") or body_of(request).get("url")
    try:
        return check_url(url)
    except ValueError as error:
        raise BadRequest(str(error)) from error


async def run_router(
    config: RouterConfig, bus_url: str, run: str, router_id: str, draining: asyncio.Event, *, drain_s: float
) -> None:
    """Serve until ``draining`` is set. Without ``bus_url`` the router knows only the engines added by hand, and no
    keys. Raises BusUnavailable without a bus for five minutes, FunctionRefused for a middleware.
    """
    async with AsyncExitStack() as stack:
        bus, view, heartbeat, keys = None, None, None, None
        if bus_url:
            bus = await connected(
                stack, bus_url, run, BusConfig(), name=f"router {router_id}".strip(), draining=draining
            )
            if bus is None:
                return
            view, keys = LiveView(bus), admin_keys(bus)
            row = first_row("router", router_id or default_id())
            heartbeat = await stack.enter_async_context(HeartbeatPublisher(bus, row))
            route = await asyncio.to_thread(route_to, bus_url)
            route = replace(route, is_here=True)  # it may serve this machine alone
            at = reach(config.host, config.advertise, route, name="router.host")
            config = replace(config, host=at.bind, advertise=at.advertised)
        router = RouterServer(config, view, keys)
        url = await router.start()
        log.info("listening url=%s", url)
        try:
            checks = [] if bus is None or heartbeat is None else [AddressChecker(bus, heartbeat).run()]
            await first_of(_update_heartbeat(router, heartbeat), router.failed(), *checks, draining.wait())
        finally:
            await router.close(drain_s)


async def _update_heartbeat(router: RouterServer, heartbeat: HeartbeatPublisher | None) -> None:
    while True:
        if heartbeat is not None:
            engines = router.engines.overview()
            serving = sum(engine["serving"] for engine in engines)
            load = {"workers": len(engines), "serving": serving}
            load |= {"in_flight": router.in_flight, "sessions": len(router.forwarder.sessions)}
            phase, waits_for = ("serving", "") if serving else ("waiting", "an engine that serves")
            heartbeat.update(phase=phase, waits_for=waits_for, address=router.url, load=load)
        await asyncio.sleep(UPDATE_EVERY_S)
