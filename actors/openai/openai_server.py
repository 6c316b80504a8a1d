"""OpenAI's paths of any engine (/v1/models, /v1/completions, /v1/chat/completions), built on its implementation of
/generate.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from aiohttp import web

from tidemill.actors.errors import BadRequest, EngineError, EngineFailed, EngineUnavailable
from tidemill.actors.events import DONE, event
from tidemill.actors.generate_body import RequestLimits
from tidemill.actors.http_api import body_of
from tidemill.actors.openai import openai_api
from tidemill.actors.text.text import Text, beside_loop, size_of
from tidemill.actors.text.tool_calls import ChatTemplate
from tidemill.bus.http.access import Route
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

State = JsonMapping


class EngineProperties(Protocol):
    """Properties of an engine that the routes need."""

    @property
    def url(self) -> str:
        """URL of the engine, for errors."""
        ...

    @property
    def model_dir(self) -> Path:
        """Directory of the model; its name is the model's name."""
        ...

    @property
    def text(self) -> Text | None:
        """Tokenizer; None = the model directory has none."""
        ...

    @property
    def limits(self) -> RequestLimits:
        """Bounds of a request."""
        ...


class GenerateBackend(Protocol):
    """An engine's implementation of /generate."""

    def states(self, body: Mapping[str, object]) -> AsyncGenerator[State, None]:
        """Yield SGLang's JSON of all responses to a body of /generate, in order; or, streamed, of each as it grows,
        with its ``index``.

        A response that fails among others is ``{"error": {"message": ..., "code": ...}}``. Closing it early drops the
        unfinished responses. Raises BadRequest, EngineUnavailable, EngineFailed; BadRequest before the first state.
        """
        ...


class OpenAiRoutes:
    """OpenAI's paths of one engine."""

    def __init__(self, engine: EngineProperties, backend: GenerateBackend) -> None:
        """Read the chat template of the model directory. Raises ValueError for an invalid one."""
        self._engine, self._backend = engine, backend
        self._model = engine.model_dir.resolve().name
        self._template = ChatTemplate.read(engine.model_dir)

    def routes(self) -> dict[str, Route]:
        """Return the routes by method and path."""
        return {
            "GET /v1/models": Route.request(self._models),
            "POST /v1/completions": Route.request(self._completions),
            "POST /v1/chat/completions": Route.request(self._chat),
        }

    async def _models(self, request: web.Request) -> web.Response:
        known = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "tidemill",
            "max_model_len": self._engine.limits.max_context,
        }
        return web.json_response({"object": "list", "data": [known]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, chat=True)

    async def _respond(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            return await self._answer(request, chat)
        except (BadRequest, EngineError) as error:
            return _error_response(error)

    async def _answer(self, request: web.Request, chat: bool) -> web.StreamResponse:
        engine = self._engine
        parsed = openai_api.parse(body_of(request), chat=chat)
        size = size_of(parsed.messages if parsed.chat else parsed.prompts)
        prompts = await beside_loop(size, lambda: openai_api.prompt_ids(parsed, engine.text, self._template))
        text = engine.text
        builder = openai_api.ResponseBuilder(
            parsed,
            id=secrets.token_hex(12),
            model=self._model,
            created=int(time.time()),
            piece=None if text is None else lambda token: text.decode([token], skip_special=False),
            read=openai_api.reader(parsed, self._template),
        )
        body = parsed.generate(prompts, max_context=engine.limits.max_context)
        body["return_logprob"] = parsed.logprobs or parsed.token_ids
        async with aclosing(self._backend.states(body)) as states:
            if parsed.stream:
                return await self._stream(request, states, builder)
            answers = [self._checked(state) async for state in states]
        return web.json_response(builder.whole(answers))

    async def _stream(
        self, request: web.Request, states: AsyncGenerator[State, None], builder: openai_api.ResponseBuilder
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
        except (BadRequest, EngineError) as error:
            await response.write(event(_error_of(error)))
            return response
        for part in builder.last():
            await response.write(event(part))
        await response.write(DONE)
        return response

    def _checked(self, state: State) -> State:
        """Return the state. Raises BadRequest, EngineUnavailable or EngineFailed if it is an error."""
        if (error := state.get("error")) is None:
            return state
        message, code = str(error.get("message")), int(error.get("code") or 500)
        if 400 <= code < 500:
            raise BadRequest(message)
        raise (EngineUnavailable if code == 503 else EngineFailed)(self._engine.url, message)


async def _write_state(response: web.StreamResponse, state: State, builder: openai_api.ResponseBuilder) -> None:
    if (error := state.get("error")) is not None:
        await response.write(event(openai_api.error(str(error.get("message")), int(error.get("code") or 500))))
        return
    for part in builder.parts(state):
        await response.write(event(part))


def _error_of(error: Exception) -> JsonObject:
    if isinstance(error, EngineUnavailable):
        return {**openai_api.error(error.reason, 503), "unavailable": type(error).__name__}
    return openai_api.error(str(error), 400 if isinstance(error, BadRequest) else 500)


def _error_response(error: Exception) -> web.Response:
    body = _error_of(error)
    return web.json_response(body, status=body["error"]["code"])
