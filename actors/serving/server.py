"""SGLang's HTTP API of an engine: paths, JSON and status codes (``tidemill.actors.http_api``), for all engines."""

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tidemill.actors.errors import BadRequest, EngineError, EngineFailed, EngineUnavailable
from tidemill.actors.http_api import BODIES_BYTES, DONE, NONCE_HEADER, body_of, decode, done, event, translate
from tidemill.actors.openai import openai_api
from tidemill.actors.openai.openai_answers import ResponseBuilder
from tidemill.actors.serving.command_bodies import (
    AbortBody,
    BucketBody,
    CheckerBody,
    ChecksumBody,
    DirectoryBody,
    JoinBody,
    MemoryBody,
    PauseBody,
    UpdateBody,
)
from tidemill.actors.serving.port import Backend, Body, Result
from tidemill.actors.text.text import beside_loop, size_of
from tidemill.actors.text.tool_calls import ChatTemplate
from tidemill.bus.http.access import Handler, Route, Rule, RunAccess
from tidemill.bus.http.listener import BodyLimits, Listener
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.weightstore.format.checksums import ChecksumReport

if TYPE_CHECKING:
    from tidemill.actors.serving.host import EngineHost


class EngineServer:
    """The routes of one engine."""

    def __init__(self, engine: "EngineHost[Any]", backend: Backend) -> None:
        self._engine, self._backend, self._updates = engine, backend, engine.updates
        authority = engine.authority
        self._access = RunAccess(authority.keys, authority.note, unguarded=authority.unguarded)
        routes = {
            **self._routes(),
            **self._update_routes(),
            **backend.own_routes(self._command),
            **OpenAiRoutes(engine, backend).routes(),
        }
        if not authority.accepts_commands:
            routes = {path: route for path, route in routes.items() if route.rule is not Rule.COMMAND}
        self.listener = Listener(
            routes, self._access, middlewares=[self._with_nonce, translate], limits=BodyLimits(all_bytes=BODIES_BYTES)
        )

    def _routes(self) -> dict[str, Route]:
        model_info = Route.request(_json(self._backend.model_info))
        server_info = Route.request(_json(self._backend.server_info))
        flush_cache = Route.command(self._backend.flush_cache)
        return {
            "POST /generate": Route.request(self._backend.generate),
            "GET /health": Route.open(self._health),
            "GET /health_generate": Route.request(self._health_generate),
            "GET /model_info": model_info,
            "GET /get_model_info": model_info,
            "GET /server_info": server_info,
            "GET /get_server_info": server_info,
            "GET /v1/loads": Route.request(self._backend.loads),
            "POST /abort_request": Route.request(self._abort_request),
            "POST /flush_cache": flush_cache,
            "GET /flush_cache": flush_cache,
            "POST /weights_checker": Route.request(self._weights_checker),
            "POST /weights_checksums": Route.request(
                self._operation(
                    lambda body: self._updates.checksum_report(of=decode(body, ChecksumBody).of),
                    _report,
                )
            ),
        }

    def _update_routes(self) -> dict[str, Route]:
        updates, operation = self._updates, self._operation

        def begin(body: Body) -> Coroutine[object, None, None]:
            update = decode(body, UpdateBody)
            return updates.begin(update.version, update.timeout_s, update.adapter)

        def join(body: Body) -> Coroutine[object, None, None]:
            decode(body, JoinBody)  # here, because the SGLang adapter passes the body on as it is
            return updates.join(body)

        def load(body: Body) -> Coroutine[object, None, float]:
            directory = decode(body, DirectoryBody)
            return updates.load_directory(Path(directory.model_path), directory.version)

        handlers = {
            "POST /pause_generation": operation(
                lambda body: updates.pause(decode(body, PauseBody).mode), _status("Generation paused successfully.")
            ),
            "POST /continue_generation": operation(
                updates.continue_generation, _status("Generation continued successfully.")
            ),
            "POST /init_weights_update_group": operation(join, _done("Succeeded to initialize custom process group.")),
            "POST /destroy_weights_update_group": operation(
                lambda body: updates.leave(decode(body, UpdateBody).group_name),
                _done("Succeeded to destroy custom process group."),
            ),
            "POST /begin_weight_update": operation(begin, _done("Weight update begun.")),
            "POST /update_weights_from_distributed": operation(
                lambda body: updates.receive_bucket(body, decode(body, BucketBody).version),
                _done("Succeeded to update parameter online."),
            ),
            "POST /end_weight_update": operation(
                lambda body: updates.end(decode(body, UpdateBody).version),
                lambda stall_s: done("Weight update ended.", stall_s=stall_s, weight_version=str(self._engine.version)),
            ),
            "POST /update_weights_from_disk": operation(
                load,
                lambda stall_s: done("Succeeded to update model weights.", num_paused_requests=0, stall_s=stall_s),
            ),
            "POST /release_memory_occupation": operation(
                lambda body: updates.release(decode(body, MemoryBody).kinds), web.json_response
            ),
            "POST /resume_memory_occupation": operation(
                lambda body: updates.resume(decode(body, MemoryBody).kinds), web.json_response
            ),
        }
        return {path: Route.command(handler) for path, handler in handlers.items()}

    def _operation(
        self, operation: Callable[[Body], Coroutine[object, None, Result]], response: Callable[[Result], web.Response]
    ) -> Handler:
        """Return a handler that checks a command's epoch, runs its operation to the end, and returns the response."""

        async def handle(request: web.Request) -> web.Response:
            return response(await self._updates.run_shielded(operation(await self._command(request))))

        return handle

    async def _command(self, request: web.Request) -> JsonObject:
        """Return the body of a command without its epoch, which is checked first. Some requests have the form of a
        command: one that names an epoch, which would fence older learners, needs the admin key.
        """
        body = dict(body_of(request))
        if "epoch" in body:
            await self._access.want(request, admin=True)
        await self._engine.authority.require_current_epoch(
            self._updates.require_current_epoch, body, self._engine.url, request.path
        )
        body.pop("epoch", None)
        return body

    async def _abort_request(self, request: web.Request) -> web.StreamResponse:
        body = await self._command(request)
        abort = decode(body, AbortBody)
        if abort.abort_all:
            await self._access.want(request, admin=True)
        return await self._backend.abort(None if abort.abort_all else abort.rid, body)

    @web.middleware
    async def _with_nonce(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Add the nonce to the answers of /health in any phase: callers verify the address by it."""
        response = await handler(request)
        if request.path == "/health":
            response.headers[NONCE_HEADER] = self._engine.nonce
        return response

    async def _health(self, request: web.Request) -> web.Response:
        self._engine.require_servable()
        return web.Response()

    async def _health_generate(self, request: web.Request) -> web.Response:
        self._engine.require_servable()
        try:
            await self._engine.probe()
        except EngineFailed as error:
            raise EngineUnavailable(error.engine, error.reason) from error
        return web.Response()

    async def _weights_checker(self, request: web.Request) -> web.Response:
        decode(body_of(request), CheckerBody)
        checksums = await self._updates.run_shielded(self._updates.checksums())
        return done("Success.", ranks=[{"checksums": checksums}], weight_version=str(self._engine.version))


def _done(message: str) -> Callable[[None], web.Response]:
    return lambda _: done(message)


def _status(message: str) -> Callable[[None], web.Response]:
    return lambda _: web.json_response({"message": message, "status": "ok"})


def _report(result: tuple[int | None, ChecksumReport]) -> web.Response:
    version, report = result
    return done("Success.", weight_version=None if version is None else str(version), **report.to_json())


def _json(info: Callable[[], Awaitable[Body]]) -> Handler:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response(await info())

    return respond


class OpenAiRoutes:
    """OpenAI's paths of one engine."""

    def __init__(self, engine: "EngineHost[Any]", backend: Backend) -> None:
        """Read the chat template of the model directory. Raises ValueError for an invalid one."""
        self._engine, self._backend = engine, backend
        self._model = engine.model_dir.resolve().name
        self._template = ChatTemplate.read(engine.model_dir)

    def routes(self) -> dict[str, Route]:
        return {
            "GET /v1/models": Route.request(self._models),
            "POST /v1/completions": Route.request(partial(self._respond, chat=False)),
            "POST /v1/chat/completions": Route.request(partial(self._respond, chat=True)),
        }

    async def _models(self, request: web.Request) -> web.Response:
        names = (self._model, *self._backend.adapters)
        return web.json_response(openai_api.models(names, self._engine.limits.max_context))

    async def _respond(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            return await self._answer(request, chat)
        except EngineError as error:
            body = _error_of(error)
            return web.json_response(body, status=body["error"]["code"])

    async def _answer(self, request: web.Request, chat: bool) -> web.StreamResponse:
        engine, text = self._engine, self._engine.text
        parsed = openai_api.parse(body_of(request), chat=chat)
        size = size_of(parsed.messages if parsed.chat else parsed.prompts)
        prompts = await beside_loop(size, lambda: openai_api.prompt_ids(parsed, text, self._template))
        builder = ResponseBuilder(
            parsed,
            chat_id=secrets.token_hex(12),
            model=self._model,
            created=int(time.time()),
            piece=None if text is None else lambda token: text.decode([token], skip_special=False),
            read=openai_api.reader(parsed, self._template),
        )
        body = parsed.generate(prompts, max_context=engine.limits.max_context)
        body["return_logprob"] = parsed.logprobs or parsed.token_ids
        if parsed.model in self._backend.adapters:
            body["lora_path"] = parsed.model
        async with aclosing(self._backend.states(body)) as states:
            if parsed.stream:
                return await self._stream(request, states, builder)
            answers = [self._checked(state) async for state in states]
        return web.json_response(builder.whole(answers))

    async def _stream(
        self, request: web.Request, states: AsyncGenerator[JsonMapping, None], builder: ResponseBuilder
    ) -> web.StreamResponse:
        """Stream the answer. It begins with the first state, so that an earlier refusal still has an HTTP status."""
        first = await anext(states, None)
        if first is None:
            raise EngineFailed(self._engine.url, "the stream ended before it began")
        self._checked(first)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await _write_state(response, first, builder)
            async for state in states:
                await _write_state(response, state, builder)
        except EngineError as error:
            await response.write(event(_error_of(error)))
            return response
        for part in builder.last():
            await response.write(event(part))
        await response.write(DONE)
        return response

    def _checked(self, state: JsonMapping) -> JsonMapping:
        """Return the state. Raises BadRequest, EngineUnavailable or EngineFailed if it is an error."""
        if (error := state.get("error")) is None:
            return state
        message, code = str(error.get("message")), int(error.get("code") or 500)
        if 400 <= code < 500:
            raise BadRequest(message)
        raise (EngineUnavailable if code == 503 else EngineFailed)(self._engine.url, message)


async def _write_state(response: web.StreamResponse, state: JsonMapping, builder: ResponseBuilder) -> None:
    if (error := state.get("error")) is not None:
        await response.write(event(openai_api.error(str(error.get("message")), int(error.get("code") or 500))))
        return
    for part in builder.parts(state):
        await response.write(event(part))


def _error_of(error: Exception) -> JsonObject:
    if isinstance(error, EngineUnavailable):
        return {**openai_api.error(error.reason, 503), "unavailable": type(error).__name__}
    return openai_api.error(str(error), 400 if isinstance(error, BadRequest) else 500)
