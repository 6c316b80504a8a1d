"""OpenAI's paths of any engine (models, completions, chat completions), built on its implementation of /generate."""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tidemill.actors.errors import BadRequest, EngineError, EngineFailed, EngineUnavailable
from tidemill.actors.events import DONE, event
from tidemill.actors.http_api import body_of
from tidemill.actors.openai import openai_api
from tidemill.actors.openai.openai_answers import ResponseBuilder
from tidemill.actors.serving.port import Backend
from tidemill.actors.text.text import beside_loop, size_of
from tidemill.actors.text.tool_calls import ChatTemplate
from tidemill.bus.http.access import Route
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

if TYPE_CHECKING:
    from tidemill.actors.serving.host import EngineHost


class OpenAiRoutes:
    """OpenAI's paths of one engine."""

    def __init__(self, engine: "EngineHost[Any]", backend: Backend) -> None:
        """Read the chat template of the model directory. Raises ValueError for an invalid one."""
        self._engine, self._backend = engine, backend
        self._model = engine.model_dir.resolve().name
        self._template = ChatTemplate.read(engine.model_dir)

    def routes(self) -> dict[str, Route]:
        """Return the routes by method and path."""
        return {
            "GET /v1/models": Route.request(self._models),
            "POST /v1/completions": Route.request(partial(self._respond, chat=False)),
            "POST /v1/chat/completions": Route.request(partial(self._respond, chat=True)),
        }

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "tidemill",
            "max_model_len": self._engine.limits.max_context,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _respond(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            return await self._answer(request, chat)
        except (BadRequest, EngineError) as error:
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
        except (BadRequest, EngineError) as error:
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
