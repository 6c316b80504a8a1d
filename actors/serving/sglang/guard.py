"""The HTTP side of an SGLang engine: the built-in engine's paths and status codes in front of a real server.

Requests, OpenAI's included, go through ``generating``; weight updates are put into order and fenced by the learner's epoch; all other
answers are SGLang's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from actors.errors import BadRequest, EngineFailed, EngineUnavailable
from actors.http_api import (
    COMMANDS,
    body_of,
    done,
    group_in,
    memory_tags_in,
    need,
    of_update_in,
    port_in,
    seconds_in,
    translate,
    version_in,
)
from actors.openai.openai_server import OpenAiRoutes
from actors.serving.sglang.aborts import AGAIN_S, Aborts
from actors.serving.sglang.generating import Generating, translated
from weightstore.listener import Access, Handler, Listener

if TYPE_CHECKING:
    from actors.serving.sglang.engine import SglangEngine

COMMAND_S = 60.0
SERVER_KEYS = ("api_key", "admin_api_key")
PAUSE_MODES = ("abort", "retract", "in_place")


class Guard:
    """The routes of one engine."""

    def __init__(self, engine: "SglangEngine") -> None:
        self._engine, self._updates = engine, engine.updates
        self._aborts = Aborts(engine.updates, engine.counters)
        self._generating = Generating(engine, self._aborts)
        self._access = Access(engine.authority.keys, COMMANDS, engine.authority.note)
        routes = {**self._routes(), **OpenAiRoutes(engine, self._generating).routes()}
        self.listener = Listener(routes, self._access, middlewares=[translate])

    def _routes(self) -> dict[str, Handler]:
        return {
            "POST /generate": self._generating.generate,
            "GET /health": self._health,
            "GET /health_generate": self._health_generate,
            "GET /model_info": self._model_info,
            "GET /get_model_info": self._model_info,
            "GET /server_info": self._server_info,
            "GET /get_server_info": self._server_info,
            "POST /abort_request": self._abort,
            "POST /pause_generation": self._pause,
            "POST /continue_generation": self._continue,
            "GET /flush_cache": self._as_it_is,
            "POST /flush_cache": self._as_it_is,
            "POST /init_weights_update_group": self._init_group,
            "POST /destroy_weights_update_group": self._destroy_group,
            "POST /begin_weight_update": self._begin_update,
            "POST /update_weights_from_distributed": self._update_from_distributed,
            "POST /end_weight_update": self._end_update,
            "POST /update_weights_from_disk": self._update_from_disk,
            "POST /weights_checker": self._weights_checker,
            "POST /weights_checksums": self._weights_checksums,
            "POST /release_memory_occupation": self._release_memory,
            "POST /resume_memory_occupation": self._resume_memory,
            "GET /v1/loads": self._as_it_is,
        }

    # -- generating -----------------------------------------------------------------------------------------------------

    async def _pass_on(self, request: web.Request, path: str, body: Mapping[str, Any] | None) -> web.Response:
        async with translated(self._engine), self._engine.api.open(request.method, path, body) as answer:
            return web.Response(body=await answer.read(), content_type=answer.content_type)

    async def _as_it_is(self, request: web.Request) -> web.StreamResponse:
        return await self._pass_on(request, request.path_qs, None)

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        body = await self._admitted(request)
        rid = None if body.get("abort_all") else need(body, "rid", str)
        if rid is None:
            await self._access.want(request, admin=True)
        if rid == "":
            raise BadRequest("rid: want the name of a request, or abort_all, got ''")
        meant = self._aborts.call_off(rid)
        for watch in meant:
            watch.insist(self._engine.api, AGAIN_S if rid is None else 0.0)
        return await self._pass_on(request, request.path, body) if rid is None or not meant else web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        mode = body.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode: want one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        await self._updates.carry_out(self._updates.pause(mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        await self._updates.carry_out(self._updates.go_on(body))
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _release_memory(self, request: web.Request) -> web.Response:
        tags = memory_tags_in(await self._admitted(request))
        await self._updates.carry_out(self._updates.release(tags, unfinished=self._engine.unfinished))
        return web.json_response(None)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        tags = memory_tags_in(await self._admitted(request))
        await self._updates.carry_out(self._updates.resume(tags))
        return web.json_response(None)

    # -- state ------------------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        self._engine.want_servable()
        return web.Response()

    async def _health_generate(self, request: web.Request) -> web.Response:
        self._engine.want_servable()
        try:
            await self._engine.probe()
        except EngineFailed as error:
            raise EngineUnavailable(error.engine, error.reason) from error
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        engine = self._engine
        said = await engine.api.call("GET", "/model_info", timeout_s=COMMAND_S)
        ours = {
            "weight_version": str(engine.version),
            "vocab_size": engine.limits.vocab_size,
            "has_tokenizer": engine.limits.encode is not None,
        }
        return web.json_response({**said, **ours})

    async def _server_info(self, request: web.Request) -> web.Response:
        engine = self._engine
        said = await engine.api.call("GET", "/server_info", timeout_s=COMMAND_S)
        ours = {
            "engine": "sglang",
            "weight_version": str(engine.version),
            "context_length": engine.limits.max_context,
            "phase": engine.phase,
            "epoch": engine.epoch,
        }
        return web.json_response({**_without_keys(said), **ours})

    # -- weights ------------------------------------------------------------------------------------------------------------

    async def _init_group(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        need(body, "master_address", str), port_in(body, "master_port"), need(body, "world_size", int)
        seconds_in(body, "timeout_s", COMMAND_S), group_in(body)
        await self._updates.carry_out(self._updates.join(body))
        return done("Succeeded to initialize custom process group.")

    async def _destroy_group(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        await self._updates.carry_out(self._updates.leave(group_in(body)))
        return done("Succeeded to destroy custom process group.")

    async def _begin_update(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        timeout_s = seconds_in(body, "timeout_s", COMMAND_S)
        await self._updates.carry_out(self._updates.begin(version_in(body), timeout_s))
        return done("Weight update begun.")

    async def _update_from_distributed(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        for name in ("names", "dtypes", "shapes"):
            need(body, name, list)
        seconds_in(body, "timeout_s", COMMAND_S)
        await self._updates.carry_out(self._updates.bucket(body, version_in(body)))
        return done("Succeeded to update parameter online.")

    async def _end_update(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        stall_s = await self._updates.carry_out(self._updates.end(version_in(body)))
        return done("Weight update ended.", stall_s=stall_s, weight_version=str(self._engine.version))

    async def _update_from_disk(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        stall_s = await self._updates.carry_out(self._updates.load_directory(Path(need(body, "model_path", str)), version_in(body)))
        return done("Succeeded to update model weights.", num_paused_requests=0, stall_s=stall_s)

    async def _weights_checker(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        if body.get("action") != "checksum":
            raise BadRequest(f"action: want checksum, got {body.get('action')!r}")
        return done("Success.", ranks=[{"checksums": await self._updates.checksums()}], weight_version=str(self._engine.version))

    async def _weights_checksums(self, request: web.Request) -> web.Response:
        of_update = of_update_in(await self._admitted(request))
        version, told = await self._updates.carry_out(self._updates.told(of_update=of_update))
        return done("Success.", weight_version=str(version), **told.to_json())

    async def _admitted(self, request: web.Request) -> dict[str, Any]:
        """Return the body of a learner's command without its epoch, which is checked first."""
        body = dict(await body_of(request))
        await self._engine.authority.admit(self._updates, body, self._engine.url, request.path)
        body.pop("epoch", None)
        return body


def _without_keys(said: Any) -> Any:
    """Return a server's state, settings included, without the keys that it requires."""
    if isinstance(said, dict):
        return {name: _without_keys(value) for name, value in said.items() if name not in SERVER_KEYS}
    return [_without_keys(each) for each in said] if isinstance(said, list) else said
