"""/generate in front of an SGLang server: validates requests, holds them during an update, and answers in one response across updates."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from actors.errors import BadRequest, EngineError, EngineFailed, EngineUnavailable
from actors.events import DATA, END, data_in
from actors.http_api import body_of, error_of
from actors.serving.sglang.aborts import Aborts, Watch
from actors.serving.sglang.api import Aborted
from actors.serving.sglang.checks import responses_in
from actors.serving.sglang.names import Names

if TYPE_CHECKING:
    from actors.serving.sglang.engine import SglangEngine

HOLD_S = 30.0
"""Seconds that a request waits for the end of an update; one that takes longer is in trouble, and other engines may serve."""
LEAVE_S = 2.0
ATTEMPTS = 8
"""Attempts at an answer with one version's keys and values; a push would have to overtake each of them."""
OURS = ("continued_tokens", "min_version", "min_version_timeout_s", "epoch", "timeout_s")
"""Fields of requests that SGLang does not know."""


class Generating:
    """The requests of one engine, those of ``actors.openai.openai_server`` included."""

    def __init__(self, engine: "SglangEngine", aborts: Aborts) -> None:
        self._engine, self._aborts = engine, aborts

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate."""
        async with self._taken(await body_of(request)) as (asked, watch):
            if asked.get("stream"):
                return await self._relay(request, asked, watch)
            return web.Response(body=await self._answer(asked, watch), content_type="application/json")

    async def states(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the states of all responses, as ``actors.openai.openai_server.Generating`` requires."""
        async with self._taken(body) as (asked, watch):
            if asked.get("stream"):
                async with aclosing(self._streamed(asked, watch)) as states:
                    async for state in states:
                        yield state
            else:
                answer = json.loads(await self._answer(asked, watch))
                for one in answer if isinstance(answer, list) else [answer]:
                    yield one

    @asynccontextmanager
    async def _taken(self, body: Mapping[str, Any]) -> AsyncIterator[tuple[dict[str, Any], Watch]]:
        """Validate a body of /generate and yield it in SGLang's form. Until this context is left the request and its aborts are counted."""
        engine = self._engine
        self._want_serving()
        try:
            count = responses_in(body, engine.limits, most=engine.config.max_waiting)
        except BadRequest:
            engine.counters["refused"] += 1
            raise
        wanted, timeout_s = _number(body, "min_version", 0), _number(body, "min_version_timeout_s", 60.0)
        with self._aborts.watching(Names(body, count)) as watch:
            if wanted > 0:
                await engine.serve_version(int(wanted), timeout_s)
            _want_wanted(watch)
            watch.since = engine.updates.completed
            engine.began(count)
            try:
                yield {name: value for name, value in body.items() if name not in OURS} | {"rid": watch.names.given}, watch
            finally:
                engine.ended(count)

    async def _keyed(self, asked: Mapping[str, Any], watch: Watch, *, again: bool) -> dict[str, Any]:
        """Wait while an update is under way. Returns the request with a cache key that finds only results of the served weights."""
        await self._engine.between_updates(HOLD_S)
        _want_wanted(watch)
        if not again or not self._engine.whole:  # a draining engine still answers accepted requests
            self._engine.want_servable()
        watch.asked()
        return {**keyed(asked, self._engine.cache_key()), "rid": watch.names.ask()}

    async def _answer(self, asked: Mapping[str, Any], watch: Watch) -> bytes:
        async with self._asked(asked, watch, aiohttp.StreamReader.read) as chunks:
            raw = b"".join([chunk async for chunk in chunks])
        watch.see(raw)
        return raw

    @asynccontextmanager
    async def _asked(
        self, asked: Mapping[str, Any], watch: Watch, read: Callable[[aiohttp.StreamReader], Awaitable[bytes]]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send the request and ``read`` the answer, or its part up to the first state. Yields all of the answer, in chunks.

        The request is sent again if weights changed before the response began and its prompt was in the cache of the previous weights: no
        span would show that its keys and values are of both. (Not a stream of several responses: the others may have been seen.)
        """
        engine, can_again = self._engine, not asked.get("stream") or (len(watch.names.responses) == 1 and watch.names.ours)
        for attempt in range(1, ATTEMPTS + 1):
            body, updates = await self._keyed(asked, watch, again=attempt > 1), engine.updates.completed
            version = str(engine.version)
            async with translated(self._engine), engine.api.open("POST", "/generate", body) as answer:
                raw = await read(answer.content)
                changed = (engine.updates.completed != updates or engine.updates.under_way) and engine.updates.keeps_cache
                if not (can_again and changed and attempt < ATTEMPTS and not watch.called_off and _cached_before(raw, version)):
                    yield _chunks(raw, answer.content, watch.names)
                    return
                engine.counters["asked_again"] += 1
                for name in watch.names.at_server if asked.get("stream") else ():
                    with suppress(EngineError):  # the connection is closed, which has the same effect
                        await engine.api.call("POST", "/abort_request", {"rid": name}, timeout_s=LEAVE_S)

    async def _streamed(self, asked: Mapping[str, Any], watch: Watch) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a stream's states, each with all tokens so far."""
        unended: set[int] = set()
        async with self._asked(asked, watch, _first_state) as chunks:
            async for data in data_in(chunks):
                if data == END:
                    break
                state = json.loads(data)
                finish = state.get("meta_info", {}).get("finish_reason") or {}
                (unended.discard if finish or "error" in state else unended.add)(state.get("index", 0))
                if code := finish.get("status_code"):  # a refusal that came late
                    yield error_of(str(finish.get("message")), code)
                    continue
                watch.aborted += finish.get("type") == "abort"
                yield state
        if unended:
            raise EngineFailed(self._engine.url, "/generate: the stream ended within a response")

    async def _relay(self, request: web.Request, asked: Mapping[str, Any], watch: Watch) -> web.StreamResponse:
        """Pass a stream on as it is received."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            async with self._asked(asked, watch, _first_state) as chunks:
                await response.prepare(request)
                async for chunk in chunks:
                    watch.see(chunk)
                    await response.write(chunk)
                return response
        except EngineError as error:
            if response.prepared:  # the only way left to show that this is not the end
                raise ConnectionResetError(str(error)) from error
            raise

    def _want_serving(self) -> None:
        """Raise EngineUnavailable unless the engine serves, or will at the end of an update."""
        if not self._engine.updates.under_way or not self._engine.servable:
            self._engine.want_servable()


@asynccontextmanager
async def translated(engine: "SglangEngine") -> AsyncIterator[None]:
    """Raise EngineFailed (500) for a server that breaks off while the engine serves; any other EngineUnavailable stays a 503."""
    try:
        yield
    except EngineUnavailable as error:
        if engine.servable:
            raise EngineFailed(engine.url, error.reason) from error
        raise


async def _first_state(content: aiohttp.StreamReader) -> bytes:
    """Return a stream up to its first event, with all bytes received along with it."""
    begin = b""
    while b"\n" not in begin.lstrip() and (chunk := await content.readany()):
        begin += chunk
    return begin


async def _chunks(begin: bytes, rest: aiohttp.StreamReader, names: Names) -> AsyncIterator[bytes]:
    """Yield an answer with its client's ids."""
    chunk, line = begin, b""
    while chunk:
        whole, end, line = (line + chunk).rpartition(b"\n")
        yield names.told(whole + end)
        chunk = await rest.readany()
    yield names.told(line)


def keyed(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the request with ``key`` before its own keys in SGLang's cache."""
    own = body.get("extra_key")
    return {**body, "extra_key": [f"{key} {one or ''}" for one in own] if isinstance(own, list) else f"{key} {own or ''}"}


def _want_wanted(watch: Watch) -> None:
    if watch.called_off:
        raise Aborted("/generate: aborted before it began")


def _cached_before(raw: bytes, version: str) -> bool:
    """Return whether a response took part of its prompt from the cache of ``version`` and was begun by another one. In a stream the first
    state decides.
    """
    state = raw.lstrip()
    if state.startswith(DATA):
        state = state.removeprefix(DATA).partition(b"\n")[0]
    if not state.startswith((b"{", b"[{")):  # the end of a stream without a state
        return False
    answer = json.loads(state)
    for one in answer if isinstance(answer, list) else [answer]:
        told = one.get("meta_info") or {}
        begun = told["weight_versions"][0]["version"] if told.get("weight_versions") else told.get("weight_version", version)
        if begun != version and told.get("cached_tokens") and (told.get("finish_reason") or {}).get("type") != "abort":
            return True
    return False


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 << 53:
        raise BadRequest(f"{name}: want a number >= 0, got {value!r}")
    return float(value)
