"""Requests as an SGLang engine answers them: /generate validated, held during updates, and answered in one response
across updates. Aborts are repeated until they take effect; all other answers are the server's own.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import aiohttp
from aiohttp import web

from tidemill.actors.errors import BadRequest, EngineError, EngineFailed, EngineUnavailable
from tidemill.actors.http_api import DATA, END, body_of, data_in, error_of
from tidemill.actors.serving.host import EngineHost
from tidemill.actors.serving.port import COMMAND_S, Body
from tidemill.actors.serving.sglang.aborts import AGAIN_S, Aborts, RequestIds, Watch
from tidemill.actors.serving.sglang.server_process import RETURNS_EXPERTS, Aborted, Api
from tidemill.actors.serving.sglang.validation import responses_in
from tidemill.actors.serving.sglang.weight_updates import SglangUpdates
from tidemill.actors.text.text import beside_loop, size_of
from tidemill.bus.http.access import Route
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.routed_experts import RoutedShape

HOLD_S = 30.0
"""Seconds that a request waits for an update to end; a longer one is in trouble, and other engines may serve."""
LEAVE_S = 2.0
"""Time limit in seconds of the abort of a response that is requested again."""
ATTEMPTS = 8
"""Attempts at an answer with one version's keys and values; a push would have to overtake each of them."""
SERVER_KEYS = ("api_key", "admin_api_key")
"""Fields of the server's settings that hold its keys."""
OURS = ("continued_tokens", "min_version", "min_version_timeout_s", "epoch", "timeout_s")
"""Fields of requests that SGLang does not know."""


class Proxy:
    """The requests of one engine."""

    def __init__(
        self,
        host: EngineHost[SglangUpdates],
        api: Api,
        counters: dict[str, float],
        cache_prefix: str,
        routed: RoutedShape | None = None,
    ) -> None:
        """``cache_prefix``: beginning of the cache keys, before the version. ``routed``: None = no routing."""
        self._routed = routed
        self._host, self._api, self._counters, self._cache_prefix = host, api, counters, cache_prefix
        self._aborts = Aborts(host.updates, counters)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /generate: validated, held during an update, and with the client's own request ids."""
        async with self._accepted(body_of(request)) as (accepted, watch):
            if accepted.get("stream"):
                return await self._relay(request, accepted, watch)
            return web.Response(body=await self._answer(accepted, watch), content_type="application/json")

    async def states(self, body: JsonMapping) -> AsyncGenerator[JsonObject, None]:
        async with self._accepted(body) as (accepted, watch):
            if accepted.get("stream"):
                async with aclosing(self._streamed(accepted, watch)) as states:
                    async for state in states:
                        yield state
            else:
                answer = json.loads(await self._answer(accepted, watch))
                for state in answer if isinstance(answer, list) else [answer]:
                    yield state

    @asynccontextmanager
    async def _accepted(self, body: JsonMapping) -> AsyncIterator[tuple[JsonObject, Watch]]:
        """Validate a body of /generate, yield it in SGLang's form, and count the request and its aborts."""
        host = self._host
        if not host.updates.under_way or not host.servable:  # otherwise it serves at the end of the update
            host.require_servable()
        try:
            size, limit = size_of(body.get("text")), host.config.max_waiting
            count, fields = await beside_loop(size, lambda: responses_in(body, host.limits, max_responses=limit))
        except BadRequest:
            self._counters["refused"] += 1
            raise
        with self._aborts.watching(RequestIds(body, count)) as watch:
            if fields.min_version:
                await host.serve_version(fields.min_version, fields.min_version_timeout_s)
            _require_not_aborted(watch)
            watch.since = host.updates.completed
            host.accept(count)
            self._counters["requests"] += count
            try:
                accepted = {name: value for name, value in body.items() if name not in OURS}
                yield accepted | {"rid": watch.ids.given}, watch
            finally:
                host.ended(count)

    async def _keyed(self, body: Body, watch: Watch, *, again: bool) -> JsonObject:
        """Wait for the end of an update, and return the request with a cache key of the served weights."""
        await self._host.updates.between_updates(HOLD_S)
        _require_not_aborted(watch)
        if not again or not self._host.whole:  # a draining engine still answers accepted requests
            self._host.require_servable()
        watch.sent()
        return {**keyed(body, f"{self._cache_prefix} {self._host.version}"), "rid": watch.ids.for_sending()}

    async def _answer(self, body: Body, watch: Watch) -> bytes:
        async with self._sent(body, watch, aiohttp.StreamReader.read) as chunks:
            raw = b"".join([chunk async for chunk in chunks])
        watch.scan(raw)
        return raw

    @asynccontextmanager
    async def _sent(
        self, body: Body, watch: Watch, read: Callable[[aiohttp.StreamReader], Awaitable[bytes]]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send the request and ``read`` the answer, or its part up to the first state. Yields all of the answer, in
        chunks. The request is sent again if weights changed before the response began with a prompt in the cache of the
        previous weights, which no span would show. (Not a stream of several responses: the others may have been seen.)
        """
        weights = self._host.updates
        can_again = not body.get("stream") or (len(watch.ids.responses) == 1 and watch.ids.replaced)
        for attempt in range(1, ATTEMPTS + 1):
            keyed_body, completed = await self._keyed(body, watch, again=attempt > 1), weights.completed
            version = str(self._host.version)
            async with self._translated(), self._api.open("POST", "/generate", keyed_body) as answer:
                raw = await read(answer.content)
                changed = (weights.completed != completed or weights.under_way) and weights.keeps_cache
                can_repeat = can_again and changed and attempt < ATTEMPTS and not watch.is_aborted
                if not (can_repeat and _cached_before(raw, version)):
                    yield _chunks(raw, answer.content, watch.ids)
                    return
                self._counters["asked_again"] += 1
                for name in watch.ids.at_server if body.get("stream") else ():
                    with suppress(EngineError):  # the connection is closed, which has the same effect
                        await self._api.call("POST", "/abort_request", {"rid": name}, timeout_s=LEAVE_S)

    async def _streamed(self, body: Body, watch: Watch) -> AsyncGenerator[JsonObject, None]:
        """Yield a stream's states, each with all tokens so far."""
        unended: set[int] = set()
        async with self._sent(body, watch, _first_state) as chunks:
            async for data in data_in(chunks):
                if data == END:
                    break
                state = json.loads(data)
                finish = state.get("meta_info", {}).get("finish_reason") or {}
                (unended.discard if finish or "error" in state else unended.add)(state.get("index", 0))
                if code := finish.get("status_code"):  # a refusal after the stream began
                    yield error_of(str(finish.get("message")), code)
                    continue
                watch.aborted += finish.get("type") == "abort"
                yield state
        if unended:
            raise EngineFailed(self._host.url, "/generate: the stream ended within a response")

    async def _relay(self, request: web.Request, body: Body, watch: Watch) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            async with self._sent(body, watch, _first_state) as chunks:
                await response.prepare(request)
                async for chunk in chunks:
                    watch.scan(chunk)
                    await response.write(chunk)
                return response
        except EngineError as error:
            if response.prepared:  # the only way left to show that this is not the end
                raise ConnectionResetError(str(error)) from error
            raise

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """Raise EngineFailed (500) for a server that breaks off while the engine serves; else it stays a 503."""
        try:
            yield
        except EngineUnavailable as error:
            if self._host.servable:
                raise EngineFailed(self._host.url, error.reason) from error
            raise

    async def abort(self, rid: str | None, body: Body) -> web.Response:
        """Record an abort and send it until it takes effect. One of all, or of an unknown id, is passed on too."""
        aborted = self._aborts.abort(rid)
        for watch in aborted:
            watch.send_aborts(self._api, AGAIN_S if rid is None else 0.0)
        return await self._pass_on("POST", "/abort_request", body) if rid is None or not aborted else web.Response()

    async def loads(self, request: web.Request) -> web.Response:
        """Return the server's own answer to the same method and path."""
        return await self._pass_on(request.method, request.path_qs, None)

    flush_cache = loads

    async def _pass_on(self, method: str, path: str, body: Body | None) -> web.Response:
        async with self._translated(), self._api.open(method, path, body) as answer:
            return web.Response(body=await answer.read(), content_type=answer.content_type)

    @property
    def adapters(self) -> tuple[str, ...]:
        return ()  # its arguments for adapters are refused

    async def model_info(self) -> JsonObject:
        host = self._host
        info = await self._api.call("GET", "/model_info", timeout_s=COMMAND_S)
        ours = {
            "weight_version": str(host.version),
            "vocab_size": host.limits.vocab_size,
            "has_tokenizer": host.limits.encode is not None,
        }
        return {**info, **ours}

    async def server_info(self) -> JsonObject:
        host = self._host
        info = await self._api.call("GET", "/server_info", timeout_s=COMMAND_S)
        routed = self._routed if info.get(RETURNS_EXPERTS) else None
        ours = {
            "engine": "sglang",
            "weight_version": str(host.version),
            "context_length": host.limits.max_context,
            "phase": host.phase,
            "epoch": host.epoch,
            "routed_experts": None if routed is None else routed.described(),
        }
        return {**_without_keys(info), **ours}

    def own_routes(self, command: Callable[[web.Request], Awaitable[Body]]) -> Mapping[str, Route]:
        return {}


async def _first_state(content: aiohttp.StreamReader) -> bytes:
    """Return a stream up to its first event, with all bytes received along with it."""
    begin = b""
    while b"\n" not in begin.lstrip() and (chunk := await content.readany()):
        begin += chunk
    return begin


async def _chunks(begin: bytes, content: aiohttp.StreamReader, ids: RequestIds) -> AsyncIterator[bytes]:
    chunk, line = begin, b""
    while chunk:
        lines, end, line = (line + chunk).rpartition(b"\n")
        yield ids.with_client_ids(lines + end)
        chunk = await content.readany()
    yield ids.with_client_ids(line)


def keyed(body: JsonMapping, key: str) -> JsonObject:
    """Return the request with ``key`` before its own keys in SGLang's cache."""
    keys = body.get("extra_key")
    keyed_keys = [f"{key} {own_key or ''}" for own_key in keys] if isinstance(keys, list) else f"{key} {keys or ''}"
    return {**body, "extra_key": keyed_keys}


def _require_not_aborted(watch: Watch) -> None:
    if watch.is_aborted:
        raise Aborted("/generate: aborted before it began")


def _cached_before(raw: bytes, version: str) -> bool:
    """Return whether a response's first state has some of its prompt from ``version``'s cache but is of another."""
    state = raw.lstrip()
    if state.startswith(DATA):
        state = state.removeprefix(DATA).partition(b"\n")[0]
    if not state.startswith((b"{", b"[{")):  # the end of a stream without a state
        return False
    answer = json.loads(state)
    for response in answer if isinstance(answer, list) else [answer]:
        meta = response.get("meta_info") or {}
        spans = meta.get("weight_versions")
        begun = spans[0]["version"] if spans else meta.get("weight_version", version)
        if begun != version and meta.get("cached_tokens") and (meta.get("finish_reason") or {}).get("type") != "abort":
            return True
    return False


def _without_keys(info: Any) -> Any:
    """Return a server's state, settings included, without the keys that it requires."""
    if isinstance(info, dict):
        return {name: _without_keys(value) for name, value in info.items() if name not in SERVER_KEYS}
    return [_without_keys(entry) for entry in info] if isinstance(info, list) else info
