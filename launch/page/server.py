"""The HTTP server of a page: routes of viewers, which change nothing, and its files.

    request -> access (host, token) -> answers of the reader | one payload of the bus -> JSON
    GET /events -> feed -> server-sent events

With an operator (``launch.page.commands``) there are routes of commands, too; without one they do not exist.
"""

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web

from tidemill.bus.errors import BusError, NotFound
from tidemill.bus.http.access import Handler, Route
from tidemill.bus.http.listener import BodyLimits, Listener
from tidemill.bus.system.coroutines import beside
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.page.access import HEADERS, PageAccess, error_answer, is_own_user, secured
from tidemill.launch.page.answers import RunAnswers
from tidemill.launch.page.batch import batch_of
from tidemill.launch.page.columns import BUCKETS, shown_first
from tidemill.launch.page.commands import dead_tasks
from tidemill.launch.page.compared import ComparedRuns
from tidemill.launch.page.configuration import configuration_of
from tidemill.launch.page.feed import Feed
from tidemill.launch.page.logs import RunLogs
from tidemill.launch.page.reader import RunReader
from tidemill.launch.page.sample_view import MAX_TOKENS
from tidemill.launch.page.samples import MAX_PAGE, PAGE, SampleAnswers
from tidemill.launch.page.static_files import StaticFile, read_files
from tidemill.launch.page.texts import safe, to_json

log = logging.getLogger(__name__)

RENDERER = "renderer-"  # Beginning of the names of users' modules; no module of the page has it
MAX_NAMES = 64  # Metrics in one request
MAX_BODY_BYTES = 4 << 20
LOADING_S = 1.0  # Longest wait of the first answers for the records that are read at the start
COMPRESSED_BYTES = 1 << 16  # Size from which on an answer is compressed
Answer = Callable[[web.Request], Awaitable[JsonObject]]


class PageServer:
    """Answers the requests of a page."""

    def __init__(
        self,
        reader: RunReader,
        answers: RunAnswers,
        samples: SampleAnswers,
        access: PageAccess,
        compared: ComparedRuns,
        commands: Mapping[str, Route] | None = None,
        renderers: Path | None = None,
        logs: Path | None = None,
    ) -> None:
        """``commands``: routes of an operator. ``renderers``: directory of modules that draw samples. ``logs``: of the
        run's processes, if they are on this machine.
        """
        self._renderers, self._logs = renderers, RunLogs(logs)
        self._reader, self._answers, self._samples, self._compared = reader, answers, samples, compared
        self._access, self.feed, self._files = access, Feed(reader, answers), read_files()
        self.listener = Listener(
            {**self._routes(), **(commands or {})},
            access,
            middlewares=[secured, _translated],
            limits=BodyLimits(one_bytes=MAX_BODY_BYTES),
            shutdown_s=0.5,
        )

    def _routes(self) -> dict[str, Route]:
        answers: dict[str, Answer] = {
            "run": self._run,
            "overview": self._overview,
            "metrics": self._of(lambda query: self._answers.metrics()),
            "series": self._series,
            "lags": self._of(lambda query: self._answers.lags(*_steps(query), _number(query, "buckets", 200, 1, 1000))),
            "flow": self._of(self._flow),
            "fleet": self._of(
                lambda query: self._answers.fleet(_seconds(query, "from", 0.0), _seconds(query, "to", float("inf")))
            ),
            "histogram": lambda request: self._samples.histogram(request.query.get("filter", "")),
            "samples": self._list,
            "sample": self._sample,
            "text": self._text,
            "tokens": self._tokens,
            "group": lambda request: self._samples.group(_number(request.query, "task", None)),
            "prompts": lambda request: self._samples.prompts(),
            "find": lambda request: self._samples.find(dict(request.query)),
            "batch": lambda request: batch_of(
                self._reader, self._samples, _number(request.query, "step", self._reader.metrics.last)
            ),
            "dead": lambda request: dead_tasks(self._reader.bus),
            "config": lambda request: asyncio.to_thread(configuration_of, self._reader.settings.row),
            "logs": self._log,
            "runs": lambda request: self._compared.as_map(self._reader.metrics.last),
        }
        routes = {f"GET /api/{name}": Route.request(self._answered(answer)) for name, answer in answers.items()}
        return {
            "GET /": Route.request(self._file_answer("index.html")),
            "GET /favicon.ico": Route.request(self._file_answer("icon.svg")),
            "GET /static/{name}": Route.request(self._static),
            "GET /events": Route.request(self._events),
            **routes,
        }

    def _of(self, answer: Callable[[Mapping[str, str]], JsonObject]) -> Answer:
        async def answered(request: web.Request) -> JsonObject:
            return answer(request.query)

        return answered

    def _answered(self, answer: Answer) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            await self._loaded()
            # The state may change while the bus is read: the position is of the time before.
            position = self.feed.position()
            body = to_json({**await answer(request), **position})
            headers = {"Vary": "Accept-Encoding"}
            if len(body) > COMPRESSED_BYTES and _takes_deflate(request):
                # Level 1: all curves of a run are two megabytes, which level 6 takes seven times as long for.
                body, headers["Content-Encoding"] = await asyncio.to_thread(zlib.compress, body, 1), "deflate"
            return web.Response(body=body, content_type="application/json", headers=headers)

        return handler

    async def _run(self, request: web.Request) -> JsonObject:
        # Events go to all viewers: the rights of one are in its own answers alone.
        return self._answers.run() | {"rights": self._access.rights(request)}

    async def _overview(self, request: web.Request) -> JsonObject:
        return self._answers.overview() | {"rights": self._access.rights(request)}

    async def _log(self, request: web.Request) -> JsonObject:
        rows = [lane.row for lane in self._reader.lanes.lanes.values()]

        def may_read() -> bool:
            return self._access.guarded or is_own_user(request)

        return await asyncio.to_thread(self._logs.as_map, request.query.get("name", ""), rows, may_read=may_read)

    async def _loaded(self) -> None:
        if not self._reader.loaded.is_set():
            try:
                async with asyncio.timeout(LOADING_S):
                    await self._reader.loaded.wait()
            except TimeoutError:
                log.info("answered while records are still read")

    async def _series(self, request: web.Request) -> JsonObject:
        query = request.query
        names = [name for name in query.get("names", "").split(",") if name]
        if query.get("first"):
            names = [name for _, shown in shown_first(self._reader.metrics) for name in shown][:MAX_NAMES]
        if len(names) > MAX_NAMES:
            raise ValueError(f"names: want at most {MAX_NAMES}, got {len(names)}")
        columns = await self._compared.columns(query["run"]) if query.get("run") else None
        buckets = _number(query, "buckets", BUCKETS, 10, 2000)
        return self._answers.series(names, *_steps(query), buckets, columns)

    def _flow(self, query: Mapping[str, str]) -> JsonObject:
        if query.get("check"):
            self._reader.begin_audit()
        last = query.get("last", "all")
        return self._answers.flow(0.0 if last == "all" else _seconds(query, "last", 0.0))

    async def _list(self, request: web.Request) -> JsonObject:
        query = request.query
        before = _number(query, "before", 0) or None
        count = _number(query, "n", PAGE, 1, MAX_PAGE)
        return await self._samples.page(query.get("filter", ""), before, count, texts=bool(query.get("texts")))

    async def _sample(self, request: web.Request) -> JsonObject:
        sample = await self._samples.sample(dict(request.query))
        name = sample.get("environment")
        return sample | {"renderer": name if self._renderer(f"{RENDERER}{name}.js") else None}

    def _renderer(self, name: str) -> Path | None:
        """Return the module with this name; only names that are in the directory exist."""
        files = () if self._renderers is None else self._renderers.glob("*.js")
        return next((file for file in files if f"{RENDERER}{file.name}" == name), None)

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        renderer = self._renderer(name)
        file = self._files.get(name) if renderer is None else StaticFile.of(renderer.read_bytes(), ".js")
        if file is None:
            raise web.HTTPNotFound(text=f"no such file: {safe(name)[:80]}")
        return _file(request, file)

    def _file_answer(self, name: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return _file(request, self._files[name])

        return handler

    async def _text(self, request: web.Request) -> JsonObject:
        view = await self._samples.view(_number(request.query, "seq", None))
        return view.text(request.query.get("field", ""), _number(request.query, "from", 0))

    async def _tokens(self, request: web.Request) -> JsonObject:
        query = request.query
        start, count = _number(query, "from", 0), _number(query, "n", MAX_TOKENS, 1, MAX_TOKENS)
        return await self._samples.tokens(_number(query, "seq", None), start, count)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        with self.feed.viewer() as queue, suppress(ConnectionResetError):  # a viewer that leaves
            headers = {**HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            await response.write(b"retry: 1000\n\n")
            while (message := await queue.get()) is not None:
                await response.write(message)
        return response

    @asynccontextmanager
    async def serving(self, host: str, port: int, *, advertise: str = "") -> AsyncIterator[str]:
        """Serve while entered, and yield the address. Raises OSError; ValueError for a public one without a token."""
        url = await self.listener.start(host, port, advertise=advertise, name="--host")
        try:
            async with beside(self.feed.run()):
                yield url
        finally:
            self.feed.close()
            await self.listener.close()


@web.middleware
async def _translated(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors of the query with 400, missing messages with 404, and an absent bus with 503."""
    try:
        return await handler(request)
    except ValueError as error:
        return error_answer(400, safe(str(error)))
    except NotFound as error:
        return error_answer(404, safe(str(error)))
    except BusError as error:
        return error_answer(503, safe(f"the bus does not answer: {error}"))
    except TimeoutError:
        return error_answer(503, "the bus has not answered in time; try again")


def _file(request: web.Request, file: StaticFile) -> web.Response:
    """Return a file, or that the browser's copy is still the newest one."""
    headers = {"Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if any(tag.value == file.tag for tag in request.if_none_match or ()):
        response = web.Response(status=304, headers=headers)
    else:
        deflated = len(file.deflated) < len(file.body) and _takes_deflate(request)
        headers |= {"Content-Encoding": "deflate"} if deflated else {}
        body = file.deflated if deflated else file.body
        response = web.Response(body=body, content_type=file.content_type, charset="utf-8", headers=headers)
    response.etag = file.tag
    return response


def _takes_deflate(request: web.Request) -> bool:
    return "deflate" in request.headers.get("Accept-Encoding", "")


def _number(query: Mapping[str, str], name: str, default: int | None, low: int = 0, high: int = 1 << 62) -> int:
    """Return a number of the query. Raises ValueError without one, if there is no default."""
    text = query.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and low <= int(text) <= high):
        raise ValueError(f"{name}: want a number from {low} to {high}, got {text[:40]!r}")
    return int(text)


def _steps(query: Mapping[str, str]) -> tuple[int, int]:
    return _number(query, "from", 0), _number(query, "to", 0)


def _seconds(query: Mapping[str, str], name: str, default: float) -> float:
    text = query.get(name, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 <= seconds < 1e12:
        raise ValueError(f"{name}: want seconds, got {text[:40]!r}")
    return seconds
