"""SGLang's HTTP API over the built-in engine: paths, JSON and status codes, nothing else.

400 = the request is wrong (it says why), 409 = its learner epoch is stale, 500 = the engine failed, 503 = it does not serve now.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from actors.builtin.answer import answer
from actors.builtin.openai_server import OpenAiRoutes
from actors.builtin.progress import Progress
from actors.builtin.request import Generate, parse_generate
from actors.builtin.scheduler import ABORTED_BY_ID
from actors.builtin.updates import parse_specs
from actors.errors import BadRequest, EngineFailed, EngineUnavailable, UpdateRefused
from actors.http_api import Handler, body_of, done, error_of, need, of_update_in, translate, version_in
from weightstore.errors import WeightstoreError

if TYPE_CHECKING:
    from actors.builtin.engine import BuiltinEngine

PAUSE_MODES = ("abort", "retract", "in_place")
MAX_BODY_BYTES = 1 << 28
UPDATE_S = 60.0
"""Bound on joining a group and on receiving a bucket, unless the request says another."""
HEALTH_S = 20.0
SHUTDOWN_S = 5.0


class Server:
    """The routes of one engine."""

    def __init__(self, engine: "BuiltinEngine") -> None:
        self._engine, self._updates = engine, engine.updates
        self._app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[translate])
        for path, handler in {**self._routes(), **OpenAiRoutes(engine).routes()}.items():
            method, _, where = path.partition(" ")
            self._app.router.add_route(method, where, handler)
        self._runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)

    async def start(self, host: str, port: int) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=4096)
        await site.start()
        bound = self._runner.addresses[0][1]
        return f"http://{host}:{bound}"

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
            "GET /v1/loads": self._loads,
            "POST /abort_request": self._abort_request,
            "POST /pause_generation": self._pause,
            "POST /continue_generation": self._continue,
            "POST /flush_cache": self._flush_cache,
            "GET /flush_cache": self._flush_cache,
            "POST /init_weights_update_group": self._init_group,
            "POST /destroy_weights_update_group": self._destroy_group,
            "POST /begin_weight_update": self._begin_update,
            "POST /update_weights_from_distributed": self._update_from_distributed,
            "POST /end_weight_update": self._end_update,
            "POST /update_weights_from_disk": self._update_from_disk,
            "POST /weights_checker": self._weights_checker,
            "POST /weights_checksums": self._weights_checksums,
            "GET /snapshots/{name}/{file}": self._snapshot,
        }

    # -- generating -----------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        engine = self._engine
        self._engine.want_servable()
        generate = parse_generate(await body_of(request), engine.limits)
        await engine.serve_version(generate.min_version, generate.min_version_timeout_s)
        self._engine.want_servable()  # again: it may have begun to drain while this waited
        progress = engine.submit(generate)
        try:
            if generate.stream:
                return await self._stream(request, generate, progress)
            sequences = await progress.finished()
        finally:
            if not progress.done:
                engine.abandon(progress)
        failed = next((sequence.error for sequence in sequences if sequence.error is not None), None)
        if failed is not None:
            raise EngineFailed(engine.url, failed)
        answers = [answer(sequence, engine, logprobs=generate.return_logprob) for sequence in sequences]
        return web.json_response(answers if generate.many else answers[0])

    async def _stream(self, request: web.Request, generate: Generate, progress: Progress) -> web.StreamResponse:
        """Server-sent events, each with everything so far; a slow reader skips states, never tokens."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        async for place, num_tokens, ended in progress.changes():
            sequence = progress.sequences[place]
            if ended and sequence.error is not None:
                state = error_of(sequence.error, 500)
            else:
                state = answer(sequence, self._engine, logprobs=generate.return_logprob, partial=None if ended else num_tokens)
            if generate.many:
                state["index"] = place
            await response.write(b"data: " + json.dumps(state).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        everything, rid = body.get("abort_all", False), body.get("rid", "")
        if not everything and not (isinstance(rid, str) and rid):
            raise BadRequest(f'body: want {{"rid": "..."}} or {{"abort_all": true}}, got {body!r}')
        scheduler = self._engine.scheduler
        if everything:
            await asyncio.wrap_future(scheduler.abort(lambda each: True))
        else:
            await asyncio.wrap_future(scheduler.abort(lambda each: each.rid == rid or each.rid.rpartition("_")[0] == rid, ABORTED_BY_ID))
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        mode = body.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode: want one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        await asyncio.wrap_future(self._engine.scheduler.pause(mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._command(request)
        await asyncio.wrap_future(self._engine.scheduler.resume())
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        if await asyncio.wrap_future(self._engine.scheduler.flush()):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    # -- what it is -------------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        self._engine.want_servable()
        return web.Response()

    async def _health_generate(self, request: web.Request) -> web.Response:
        await self._health(request)
        try:
            await self._engine.probe(HEALTH_S)
        except EngineFailed as error:
            raise EngineUnavailable(error.engine, error.reason) from error
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        engine = self._engine
        return web.json_response(
            {
                "model_path": str(engine.model_dir),
                "tokenizer_path": str(engine.model_dir),
                "is_generation": True,
                "weight_version": str(engine.version),
                "model_type": engine.shape.family,
                "architectures": [engine.shape.architecture],
                "vocab_size": engine.shape.vocab_size,
                "eos_token_ids": sorted(engine.eos_ids),
                "has_tokenizer": engine.text is not None,
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        engine = self._engine
        config = engine.config
        return web.json_response(
            {
                "engine": "builtin",
                "model_path": str(engine.model_dir),
                "weight_version": str(engine.version),
                "tp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                "context_length": engine.limits.max_context,
                "max_running_requests": config.max_running,
                "max_queued_requests": config.max_waiting,
                "dtype": config.dtype,
                "device": str(engine.device),
                "phase": engine.phase,
                "epoch": engine.epoch,
                "paused": engine.scheduler.paused,
                "internal_states": [engine.stats()],
            }
        )

    async def _loads(self, request: web.Request) -> web.Response:
        stats, limit = self._engine.stats(), self._engine.config.max_running
        load = {
            "dp_rank": 0,
            "num_running_reqs": stats["running"],
            "num_waiting_reqs": stats["waiting"],
            "max_running_requests": limit,
            "utilization": stats["running"] / limit,
        }
        accelerator = "cpu" if self._engine.device.type == "cpu" else "gpu"
        return web.json_response({"timestamp": time.time(), "accelerator": accelerator, "num_accelerators": 1, "loads": [load]})

    # -- weights ------------------------------------------------------------------------------------------------------------

    async def _init_group(self, request: web.Request) -> web.Response:
        from weightstore.broadcast import BroadcastGroup

        body = await self._command(request)
        host, port = need(body, "master_address", str), need(body, "master_port", int)
        rank, world_size = need(body, "rank_offset", int), need(body, "world_size", int)
        name, timeout_s = body.get("group_name", "weight_update_group"), float(body.get("timeout_s", UPDATE_S))
        try:
            await self._updates.carry_out(
                self._updates.join(
                    name, lambda: BroadcastGroup.join(host, port, rank, world_size, name, body.get("backend", "nccl"), timeout_s)
                )
            )
        except (WeightstoreError, ValueError, RuntimeError) as error:
            raise UpdateRefused(f"joining group {name!r} as rank {rank} of {world_size}: {error}") from error
        return done("Succeeded to initialize custom process group.")

    async def _destroy_group(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        await self._updates.carry_out(self._updates.leave(body.get("group_name", "weight_update_group")))
        return done("Succeeded to destroy custom process group.")

    async def _begin_update(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        await self._updates.carry_out(self._updates.begin(version_in(body)))
        return done("Weight update begun.")

    async def _update_from_distributed(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        names, dtypes, shapes = (need(body, name, list) for name in ("names", "dtypes", "shapes"))
        if not len(names) == len(dtypes) == len(shapes):
            raise BadRequest(f"names, dtypes, shapes: want equal lengths, got {len(names)}, {len(dtypes)}, {len(shapes)}")
        load_format = body.get("load_format")
        if load_format not in (None, "flattened_bucket"):
            raise BadRequest(f"load_format: want null or flattened_bucket, got {load_format!r}")
        await self._updates.carry_out(
            self._updates.bucket(
                body.get("group_name", "weight_update_group"),
                parse_specs(names, dtypes, shapes),
                flat=load_format is not None,
                version=version_in(body),
                timeout_s=float(body.get("timeout_s", UPDATE_S)),
            )
        )
        return done("Succeeded to update parameter online.")

    async def _end_update(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        stall_s = await self._updates.carry_out(self._updates.end(version_in(body)))
        return done("Weight update ended.", stall_s=stall_s, weight_version=str(self._engine.version))

    async def _update_from_disk(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        stall_s = await self._updates.carry_out(self._updates.load_directory(Path(need(body, "model_path", str)), version_in(body)))
        return done("Succeeded to update model weights.", num_paused_requests=0, stall_s=stall_s)

    async def _weights_checker(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        if body.get("action") != "checksum":
            raise BadRequest(f"action: want checksum, got {body.get('action')!r}")
        found = await self._updates.carry_out(self._updates.checksums())
        return done("Success.", ranks=[{"checksums": found}], weight_version=str(self._engine.version))

    async def _weights_checksums(self, request: web.Request) -> web.Response:
        of_update = of_update_in(await self._command(request))
        version, told = await self._updates.carry_out(self._updates.told(of_update=of_update))
        return done("Success.", weight_version=None if version is None else str(version), **told.to_json())

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(await self._engine.lending.file(request.match_info["name"], request.match_info["file"]))

    async def _command(self, request: web.Request) -> Mapping[str, Any]:
        """The body of a command that a learner sends: its epoch is checked first."""
        body = await body_of(request)
        epoch = body.get("epoch")
        if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int)):
            raise BadRequest(f"epoch: want an integer, got {epoch!r}")
        self._updates.admit(epoch, request.path)
        return body
