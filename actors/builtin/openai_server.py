"""OpenAI's paths of the built-in engine: /v1/models, /v1/completions, /v1/chat/completions."""

import secrets
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from actors import openai_api
from actors.builtin.answer import answer
from actors.builtin.progress import Progress
from actors.builtin.request import parse_generate
from actors.chat_template import ChatTemplate
from actors.errors import BadRequest, EngineError, EngineFailed, EngineUnavailable
from actors.http_api import Handler, body_of

if TYPE_CHECKING:
    from actors.builtin.engine import BuiltinEngine


class OpenAiRoutes:
    """The paths of one engine."""

    def __init__(self, engine: "BuiltinEngine") -> None:
        """Raises ValueError for a chat template that is none."""
        self._engine = engine
        self._model = engine.model_dir.resolve().name
        self._template = ChatTemplate.read(engine.model_dir)

    def routes(self) -> dict[str, Handler]:
        return {
            "GET /v1/models": self._models,
            "POST /v1/completions": self._completions,
            "POST /v1/chat/completions": self._chat,
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
        return await self._answered(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, chat=True)

    async def _answered(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            return await self._answer(request, chat)
        except BadRequest as error:
            return _refused(str(error), 400)
        except EngineUnavailable as error:
            return _refused(error.reason, 503, unavailable=type(error).__name__)
        except EngineError as error:
            return _refused(str(error), 500)

    async def _answer(self, request: web.Request, chat: bool) -> web.StreamResponse:
        engine = self._engine
        engine.want_servable()
        asked = openai_api.parse(await body_of(request), chat=chat)
        prompts = openai_api.prompt_ids(asked, engine.text, self._template)
        generate = parse_generate(asked.generate(prompts, max_context=engine.limits.max_context), engine.limits)
        await engine.serve_version(generate.min_version, generate.min_version_timeout_s)
        engine.want_servable()  # again: it may have begun to drain while this waited
        text = engine.text
        piece = None if text is None else lambda token: text.decode([token], skip_special=False)
        told = openai_api.Told(asked, id=secrets.token_hex(12), model=self._model, created=int(time.time()), piece=piece)
        progress = engine.submit(generate)
        try:
            if asked.stream:
                return await self._stream(request, progress, told)
            return await self._whole(progress, told)
        finally:
            if not progress.done:
                engine.abandon(progress)

    async def _whole(self, progress: Progress, told: openai_api.Told) -> web.Response:
        sequences = await progress.finished()
        failed = next((sequence.error for sequence in sequences if sequence.error is not None), None)
        if failed is not None:
            raise EngineFailed(self._engine.url, failed)
        return web.json_response(told.whole([answer(sequence, self._engine, logprobs=True) for sequence in sequences]))

    async def _stream(self, request: web.Request, progress: Progress, told: openai_api.Told) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        async for place, num_tokens, ended in progress.changes():
            sequence = progress.sequences[place]
            if ended and sequence.error is not None:
                await response.write(openai_api.event(openai_api.error(sequence.error, 500)))
                continue
            state = answer(sequence, self._engine, logprobs=True, partial=None if ended else num_tokens)
            for part in told.parts({**state, "index": place}):
                await response.write(openai_api.event(part))
        for part in told.last():
            await response.write(openai_api.event(part))
        await response.write(openai_api.DONE)
        return response


def _refused(message: str, status: int, **more: Any) -> web.Response:
    return web.json_response({**openai_api.error(message, status), **more}, status=status)
