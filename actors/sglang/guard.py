"""The HTTP side of an SGLang engine: the built-in engine's paths and status codes in front of a real server.

/generate is checked and passed on; weight updates are put into order and fenced by the learner's epoch; the rest is SGLang's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from actors.builtin.request import token_ids
from actors.errors import BadRequest, EngineFailed, EngineUnavailable
from actors.http_api import Handler, body_of, done, need, of_update_in, translate, version_in

if TYPE_CHECKING:
    from actors.sglang.engine import SglangEngine

MAX_BODY_BYTES = 1 << 28
COMMAND_S = 60.0
SHUTDOWN_S = 5.0
OURS = ("continued_tokens", "min_version", "min_version_timeout_s", "epoch", "timeout_s")
"""Fields of requests that SGLang does not know."""
PASSED_ON = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "GET /v1/models",
    "GET /v1/loads",
    "POST /release_memory_occupation",
    "POST /resume_memory_occupation",
)


class Guard:
    """The routes of one engine."""

    def __init__(self, engine: "SglangEngine") -> None:
        self._engine, self._updates = engine, engine.updates
        self._app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[translate])
        for path, handler in self._routes().items():
            method, _, where = path.partition(" ")
            self._app.router.add_route(method, where, handler)
        self._runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)

    async def start(self, host: str, port: int) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=4096).start()
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()

    def _routes(self) -> dict[str, Handler]:
        return {
            "POST /generate": self._generate,
            "GET /health": self._health,
            "GET /health_generate": self._health_generate,
            "GET /model_info": self._model_info,
            "GET /get_model_info": self._model_info,
            "GET /server_info": self._server_info,
            "GET /get_server_info": self._server_info,
            "POST /abort_request": self._command,
            "POST /pause_generation": self._command,
            "POST /continue_generation": self._continue,
            "GET /flush_cache": self._flush_cache,
            "POST /flush_cache": self._flush_cache,
            "POST /init_weights_update_group": self._init_group,
            "POST /destroy_weights_update_group": self._destroy_group,
            "POST /begin_weight_update": self._begin_update,
            "POST /update_weights_from_distributed": self._update_from_distributed,
            "POST /end_weight_update": self._end_update,
            "POST /update_weights_from_disk": self._update_from_disk,
            "POST /weights_checker": self._weights_checker,
            "POST /weights_checksums": self._weights_checksums,
            **dict.fromkeys(PASSED_ON, self._pass_on),
        }

    # -- generating -----------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        engine = self._engine
        self._want_servable()
        body = await body_of(request)
        try:
            count = self._check(body)
        except BadRequest:
            engine.counters["refused"] += 1
            raise
        wanted, timeout_s = _number(body, "min_version", 0), _number(body, "min_version_timeout_s", 60.0)
        if wanted > 0:
            await engine.serve_version(int(wanted), timeout_s)
            self._want_servable()
        asked = {name: value for name, value in body.items() if name not in OURS}
        asked.setdefault("extra_key", f"version {engine.version}")  # what is cached of older weights is not used again
        engine.began(count)
        try:
            return await self._relay(request, "/generate", asked, stream=bool(asked.get("stream")))
        finally:
            engine.ended(count)

    def _check(self, body: Mapping[str, Any]) -> int:
        """Raises BadRequest for ids that are none of the model's (they end an SGLang server); gives the number of responses."""
        limits = self._engine.limits
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise BadRequest("body: want exactly one of input_ids and text, got " + ("none" if text is None else "both"))
        if ids is not None:
            prompts = ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]
            for place, prompt in enumerate(prompts):
                token_ids(prompt, f"input_ids[{place}]" if prompts is ids else "input_ids", limits)
        else:
            prompts = text if isinstance(text, list) else [text]
        params = body.get("sampling_params") or {}
        each = params if isinstance(params, list) else [params] * len(prompts)
        if len(each) != len(prompts) or not all(isinstance(one, Mapping) for one in each):
            raise BadRequest(f"sampling_params: want a map, or one for each of {len(prompts)} prompts, got {str(params)[:200]}")
        for one in each:
            named = [*(one.get("stop_token_ids") or ()), *(int(id) for id in (one.get("logit_bias") or {}) if str(id).isdigit())]
            if any(not isinstance(id, int) or not 0 <= id < limits.vocab_size for id in named):
                raise BadRequest(f"sampling_params: want token ids in 0 .. {limits.vocab_size - 1}, got {named}")
        return sum(int(one.get("n") or 1) for one in each)

    async def _relay(self, request: web.Request, path: str, body: Mapping[str, Any] | None, *, stream: bool) -> web.StreamResponse:
        """Pass on as it is; a server that breaks off is a 500, one that is away a 503."""
        engine = self._engine
        try:
            async with engine.api.open(request.method, path, body) as answer:
                if not stream:
                    return web.Response(body=await answer.read(), content_type=answer.content_type)
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                return response
        except EngineUnavailable as error:
            if engine.servable:
                raise EngineFailed(engine.url, error.reason) from error
            raise

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request) if request.method == "POST" else None
        if request.path.startswith("/v1/") and request.method == "POST":
            self._want_servable()
        return await self._relay(request, request.path_qs, body, stream=bool(body and body.get("stream")))

    async def _command(self, request: web.Request) -> web.StreamResponse:
        """SGLang's own, once the epoch is known to be good."""
        body = await self._admitted(request)
        return await self._relay(request, request.path, body, stream=False)

    async def _continue(self, request: web.Request) -> web.StreamResponse:
        if self._engine.version < 0:
            raise BadRequest("continue_generation: the weights are not whole; want an update first")
        return await self._command(request)

    async def _flush_cache(self, request: web.Request) -> web.StreamResponse:
        if self._engine.unfinished and self._updates.flush_needs_idle:
            raise BadRequest(f"flush_cache: {self._engine.unfinished} requests are unfinished, and this SGLang would end")
        return await self._relay(request, request.path_qs, None, stream=False)

    # -- what it is -------------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        self._want_servable()
        return web.Response()

    async def _health_generate(self, request: web.Request) -> web.Response:
        self._want_servable()
        try:
            await self._engine.probe()
        except EngineFailed as error:
            raise EngineUnavailable(error.engine, error.reason) from error
        return web.Response()

    def _want_servable(self) -> None:
        engine = self._engine
        if not engine.servable or engine.version < 0:
            raise EngineUnavailable(engine.url, f"it does not serve now: phase {engine.phase}, version {engine.version}")

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
        return web.json_response({**said, **ours})

    # -- weights ------------------------------------------------------------------------------------------------------------

    async def _init_group(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        need(body, "master_address", str), need(body, "master_port", int), need(body, "world_size", int)
        await self._updates.carry_out(self._updates.join(body))
        return done("Succeeded to initialize custom process group.")

    async def _destroy_group(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        await self._updates.carry_out(self._updates.leave(body.get("group_name", "weight_update_group")))
        return done("Succeeded to destroy custom process group.")

    async def _begin_update(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        await self._updates.carry_out(self._updates.begin(version_in(body)))
        return done("Weight update begun.")

    async def _update_from_distributed(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        for name in ("names", "dtypes", "shapes"):
            need(body, name, list)
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
        """The body of a command that a learner sends: its epoch is checked first, and taken out."""
        body = dict(await body_of(request))
        epoch = body.get("epoch")
        if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int)):
            raise BadRequest(f"epoch: want an integer, got {epoch!r}")
        self._updates.admit(epoch, request.path)
        body.pop("epoch", None)
        return body


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise BadRequest(f"{name}: want a number >= 0, got {value!r}")
    return float(value)
