"""SGLang's HTTP API over the built-in engine: paths, JSON and status codes, nothing else.

400 = the request is wrong (the message states why), 409 = its learner epoch is stale, 500 = the engine failed, 503 = it does not serve now.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from actors.errors import BadRequest, EngineFailed, EngineUnavailable, UpdateRefused
from actors.events import DONE, event
from actors.http_api import (
    COMMANDS,
    body_of,
    done,
    error_of,
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
from actors.request import Generate, parse_generate
from actors.serving.builtin.answer import answer
from actors.serving.builtin.progress import Progress
from actors.serving.builtin.scheduler import ABORTED_BY_ID
from weightstore.errors import WeightstoreError
from weightstore.format.manifest import TensorSpec
from weightstore.listener import Access, Handler, Listener

if TYPE_CHECKING:
    from actors.serving.builtin.engine import BuiltinEngine

Result = TypeVar("Result")
PAUSE_MODES = ("abort", "retract", "in_place")
UPDATE_S = 60.0
"""Time-out of joining a group and of receiving a bucket, unless the request has another."""
HEALTH_S = 20.0
LENT_S = 3600.0
"""Time-out of sending a file of a snapshot: its reader may be frozen."""


class Server:
    """The routes of one engine."""

    def __init__(self, engine: "BuiltinEngine") -> None:
        self._engine, self._updates = engine, engine.updates
        self._access = Access(engine.authority.keys, COMMANDS, engine.authority.note)
        self.listener = Listener({**self._routes(), **OpenAiRoutes(engine, self).routes()}, self._access, middlewares=[translate])

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
            "POST /receive_push": self._receive_push,
            "POST /update_weights_from_disk": self._update_from_disk,
            "POST /weights_checker": self._weights_checker,
            "POST /weights_checksums": self._weights_checksums,
            "POST /release_memory_occupation": self._release_memory,
            "POST /resume_memory_occupation": self._resume_memory,
            "GET /snapshots/{name}/{file}": self._snapshot,
        }

    # -- generating -----------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        async with self._submitted(await body_of(request)) as (generate, progress):
            if generate.stream:
                return await self._stream(request, generate, progress)
            states = [state async for state in self._states(generate, progress)]
        failed = next((state["error"]["message"] for state in states if "error" in state), None)
        if failed is not None:
            raise EngineFailed(self._engine.url, failed)
        return web.json_response(states if generate.many else states[0])

    async def _stream(self, request: web.Request, generate: Generate, progress: Progress) -> web.StreamResponse:
        """Send server-sent events, each with all tokens so far; a slow reader skips states, never tokens."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        async for state in self._states(generate, progress):
            await response.write(event(state))
        await response.write(DONE)
        return response

    async def states(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        async with self._submitted(body) as (generate, progress):
            async for state in self._states(generate, progress):
                yield state

    @asynccontextmanager
    async def _submitted(self, body: Mapping[str, Any]) -> AsyncIterator[tuple[Generate, Progress]]:
        """Check a body of /generate and submit its responses; those that have not ended when this context is left are aborted."""
        engine = self._engine
        engine.want_servable()
        generate = parse_generate(body, engine.limits)
        await engine.serve_version(generate.min_version, generate.min_version_timeout_s)
        engine.want_servable()  # again: it may have begun to drain while this waited
        progress = engine.submit(generate)
        try:
            yield generate, progress
        finally:
            if not progress.done:
                engine.abandon(progress)

    async def _states(self, generate: Generate, progress: Progress) -> AsyncIterator[dict[str, Any]]:
        """Yield every response in order, once all have ended; or, streamed, each whenever it has grown."""
        if not generate.stream:
            await progress.finished()
            for place in range(len(progress.sequences)):
                yield self._state(generate, progress, place)
            return
        async for place, num_tokens, ended in progress.changes():
            yield self._state(generate, progress, place, partial=None if ended else num_tokens)

    def _state(self, generate: Generate, progress: Progress, place: int, *, partial: int | None = None) -> dict[str, Any]:
        sequence = progress.sequences[place]
        if partial is None and sequence.error is not None:
            state = error_of(sequence.error, 500)
        else:
            state = answer(sequence, self._engine, logprobs=generate.return_logprob, partial=partial)
        return {**state, "index": place} if generate.many and generate.stream else state

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        everything, rid = body.get("abort_all", False), body.get("rid", "")
        if not everything and not (isinstance(rid, str) and rid):
            raise BadRequest(f'body: want {{"rid": "..."}} or {{"abort_all": true}}, got {body!r}')
        scheduler = self._engine.scheduler
        if everything:
            await self._access.want(request, admin=True)
            await _to_its_end(scheduler.abort(lambda each: True))
        else:
            await _to_its_end(scheduler.abort(lambda each: each.rid == rid or each.rid.rpartition("_")[0] == rid, ABORTED_BY_ID))
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        mode = body.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode: want one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        await _to_its_end(self._engine.scheduler.pause(mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._command(request)
        await _to_its_end(self._engine.scheduler.resume())
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        if await _to_its_end(self._engine.scheduler.flush()):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    # -- state ------------------------------------------------------------------------------------------------------------

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
                "released": sorted(engine.scheduler.released),
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
        from weightstore.transport.broadcast import BroadcastGroup

        body = await self._command(request)
        host, port = need(body, "master_address", str), port_in(body, "master_port")
        rank, world_size = need(body, "rank_offset", int), need(body, "world_size", int)
        name, timeout_s = group_in(body), seconds_in(body, "timeout_s", UPDATE_S)
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
        await self._updates.carry_out(self._updates.leave(group_in(body)))
        return done("Succeeded to destroy custom process group.")

    async def _begin_update(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        await self._updates.carry_out(self._updates.begin(version_in(body)))
        return done("Weight update begun.")

    async def _update_from_distributed(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        load_format = body.get("load_format")
        if load_format not in (None, "flattened_bucket"):
            raise BadRequest(f"load_format: want null or flattened_bucket, got {load_format!r}")
        await self._updates.carry_out(
            self._updates.bucket(
                group_in(body),
                _specs(body),
                flat=load_format is not None,
                version=version_in(body),
                timeout_s=seconds_in(body, "timeout_s", UPDATE_S),
            )
        )
        return done("Succeeded to update parameter online.")

    async def _receive_push(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        buckets, serve = need(body, "buckets", list), body.get("serve", False)
        if not isinstance(serve, bool) or not all(isinstance(told, dict) for told in buckets):
            raise BadRequest(f"buckets, serve: want a list of maps, and true or false, got {buckets!r:.200}, {serve!r:.200}")
        receiving = self._updates.receive(
            group_in(body),
            [_specs(told) for told in buckets],
            version=version_in(body),
            timeout_s=seconds_in(body, "timeout_s", UPDATE_S),
            serve=serve,
        )
        return done("Push received.", stall_s=await self._updates.carry_out(receiving))

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

    async def _release_memory(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        await self._updates.carry_out(self._updates.release(memory_tags_in(body)))
        return web.json_response(None)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        body = await self._command(request)
        await self._updates.carry_out(self._updates.resume(memory_tags_in(body)))
        return web.json_response(None)

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        name, lending = request.match_info["name"], self._engine.lending
        return _Lent(await lending.file(name, request.match_info["file"]), lambda: lending.reading(name))

    async def _command(self, request: web.Request) -> Mapping[str, Any]:
        """Return the body of a learner's command; its epoch is checked first."""
        body = await body_of(request)
        await self._engine.authority.admit(self._updates, body, self._engine.url, request.path)
        return body


class _Lent(web.FileResponse):
    """A file of a snapshot, which is in use until ``prepare`` has sent it."""

    def __init__(self, path: Path, reading: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(path)
        self._reading = reading

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        with self._reading():
            async with asyncio.timeout(LENT_S):
                return await super().prepare(request)


async def _to_its_end(called: "Future[Result]") -> Result:
    """Wait for a call of the decoding thread, which is run even if the client hangs up."""
    return await asyncio.shield(asyncio.wrap_future(called))


def _specs(body: Mapping[str, Any]) -> list[TensorSpec]:
    """Return the tensors announced in SGLang's JSON. Raises BadRequest, and UpdateRefused for values that no tensor can have."""
    names, dtypes, shapes = (need(body, name, list) for name in ("names", "dtypes", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequest(f"names, dtypes, shapes: want equal lengths, got {len(names)}, {len(dtypes)}, {len(shapes)}")
    try:
        return [
            TensorSpec(name=str(name), shape=tuple(map(int, shape)), dtype=str(dtype).removeprefix("torch."))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
    except (WeightstoreError, TypeError, ValueError) as error:
        raise UpdateRefused(str(error)) from error
