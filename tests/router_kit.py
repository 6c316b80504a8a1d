"""A router over real engines, a client of it, engines that fail on request, and an engine process that can be
killed.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.waits import LIMIT_S, until
from tidemill.actors.config import RouterConfig
from tidemill.actors.router.server import RouterServer
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.keys import RunKeys
from tidemill.bus.liveness import LiveView


class Door:
    """A client of a router."""

    def __init__(self, router: RouterServer, session: aiohttp.ClientSession) -> None:
        self.router, self.session, self.url = router, session, router.url

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **options) as response:
            return response.status, await _content(response)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await _content(response)

    async def generate(self, *, session: str = "", rid: str = "", text: str = "", **params: Any) -> tuple[int, Any]:
        body: dict[str, Any] = {"text": text} if text else {"input_ids": [5, 6, 7]}
        body |= {"sampling_params": {"max_new_tokens": 4, "ignore_eos": True, **params}}
        return await self.post(
            "/generate", body | ({"rid": rid} if rid else {}), headers={"X-Session-Id": session} if session else {}
        )

    async def until(self, reached: Callable[[dict[str, Any]], bool]) -> dict[str, dict[str, Any]]:
        """Return the workers by URL, as soon as ``reached`` is true of them."""

        async def reached_workers() -> dict[str, dict[str, Any]] | None:
            _, listed = await self.get("/list_workers")
            workers = {worker["url"]: worker for worker in listed["workers"]}
            return workers if reached(workers) else None

        workers: dict[str, dict[str, Any]] = await until(lambda: reached_workers())
        return workers

    async def serving(self, *urls: str) -> None:
        """Wait until these engines, and no others, serve."""
        await self.until(lambda workers: {url for url, worker in workers.items() if worker["serving"]} == set(urls))


@asynccontextmanager
async def routing(
    *urls: str, view: LiveView | None = None, keys: RunKeys | None = None, wait: bool = True, **config: Any
) -> AsyncIterator[Door]:
    """Run a router that knows these engines; they serve from the beginning if ``wait``."""
    settings = {
        "health_every_s": 0.1,
        "health_timeout_s": 20.0,
        "wait_s": 30.0,
        "connect_s": 60.0,
        "insecure": keys is None,
        **config,
    }
    router = RouterServer(RouterConfig(workers=urls, **settings), view, keys)
    await router.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
            door = Door(router, session)
            if wait and urls:
                while {each["url"] for each in router.engines.overview() if each["serving"]} != set(urls):
                    with suppress(TimeoutError):
                        await router.engines.refresh()  # otherwise it reads the health checks every second
                await door.serving(*urls)
            yield door
    finally:
        await router.close()


class Faulty:
    """An engine that reports that it is healthy, and answers requests as set.

    One of: break (the connection), 503, version, 500, no json, hang, flood, half (then breaks), generate (a token,
    whatever the request), events (those in ``events``, as a stream that ends), ok.
    """

    def __init__(self) -> None:
        self.does, self.asked = "ok", list[str]()
        self.healthy, self.silent = True, False
        """Answer of the engine to a health check; with ``silent`` it gives none."""
        self.paths, self.queries = list[str](), list[str]()
        self.checks = 0
        """Number of health checks."""
        self.gone = asyncio.Event()
        """Set when the client of a hanging request has disconnected."""
        self.version: str | None = None
        """Release of the engine in /server_info; None = the field is missing."""
        self.events = b""
        self.url, self.leave = "", _nothing
        """``leave``: function that stops listening at its address."""

    async def meet(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.checks += request.path == "/health"
        if request.path == "/health" and self.silent:
            request.transport.abort()
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if request.path == "/model_info":
            return web.json_response({"weight_version": "0"})
        self.asked.append(self.does)
        self.paths.append(request.path)
        self.queries.append(request.rel_url.raw_query_string)
        body = await request.read()
        if request.path == "/server_info" and self.version is not None:
            return web.json_response({"version": self.version})
        match self.does:
            case "break":
                request.transport.abort()
            case "503":
                return web.json_response({"error": {"message": "full", "code": 503}}, status=503)
            case "version":
                refused = {
                    "error": {"message": "version 9 is not served", "code": 503},
                    "unavailable": "VersionUnavailable",
                }
                return web.json_response(refused, status=503)
            case "500":
                return web.json_response({"error": {"message": "broken", "code": 500}}, status=500)
            case "no json":
                return web.Response(text="{", content_type="application/json")
            case "hang":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.gone.set()
                    raise
            case "flood":
                response = web.StreamResponse()
                await response.prepare(request)
                try:
                    while True:
                        await response.write(bytes(1 << 20))
                except (ConnectionError, asyncio.CancelledError):
                    self.gone.set()
                    raise
            case "half":
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await response.write(b'data: {"text": "a"}\n\n')
                await self.gone.wait()
                request.transport.abort()
                return response
            case "events":
                return web.Response(body=self.events, content_type="text/event-stream")
            case "generate":
                meta = {
                    "id": "x",
                    "finish_reason": {"type": "length", "length": 1},
                    "prompt_tokens": 1,
                    "completion_tokens": 1,
                }
                meta |= {"weight_version": "0", "output_token_logprobs": [[-1.0, 5, None]]}
                return web.json_response({"text": "a", "output_ids": [5], "meta_info": meta})
        return web.json_response({"echo": json.loads(body) if body else None, "headers": dict(request.headers)})


@asynccontextmanager
async def faulty() -> AsyncIterator[Faulty]:
    engine = Faulty()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.meet)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.leave = runner.cleanup
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


class EngineProcess:
    """A built-in engine in a process of its own, which can be killed, and started again at the same address."""

    def __init__(self, model_dir: Path, port: int) -> None:
        self._model_dir, self._port, self.url = model_dir, port, ""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, *, held_after: int | None = None) -> None:
        """Start it; ``held_after``: it does so many decoding steps, and no more."""
        held = [] if held_after is None else [str(held_after)]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.engine_child", str(self._model_dir), str(self._port), *held),
            cwd=Path(__file__).parents[1],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            self.url = (await self._process.stdout.readline()).decode().strip()
        assert self.url.startswith("http://"), "the engine process has ended"

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def engine_process(model_dir: Path, *, held_after: int | None = None) -> AsyncIterator[EngineProcess]:
    with KeptPort() as port:
        process = EngineProcess(model_dir, port.number)
        try:
            await process.start(held_after=held_after)
            yield process
        finally:
            await process.kill()


async def _nothing() -> None: ...


async def _content(response: aiohttp.ClientResponse) -> Any:
    return await response.json() if response.content_type == "application/json" else await response.text()
