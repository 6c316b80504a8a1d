"""Requests as the built-in engine answers them: /generate, aborts, its state, pushes in one request, and snapshots for its peers."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from tidemill.actors.errors import BadRequest, EngineFailed, EngineUnavailable
from tidemill.actors.events import DONE, event
from tidemill.actors.http_api import body_of, done, error_of, group_in, need, seconds_in, version_in
from tidemill.actors.request import Generate, parse_generate, seeds
from tidemill.actors.score_request import asks_for_scores, parse_scores
from tidemill.actors.serving.builtin.captured_experts import CapturedExperts
from tidemill.actors.serving.builtin.counters import ABORTED_BY_ID, CLIENT_GONE
from tidemill.actors.serving.builtin.input_scores import Scoring, scores_json
from tidemill.actors.serving.builtin.peer_snapshots import PeerSnapshotServer
from tidemill.actors.serving.builtin.progress import Progress
from tidemill.actors.serving.builtin.response import response_json
from tidemill.actors.serving.builtin.scheduler import Scheduler
from tidemill.actors.serving.builtin.sequence import Model, ResponseRequest, Sequence
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.actors.serving.builtin.update_checks import specs_in
from tidemill.actors.serving.builtin.weight_updates import WeightUpdates
from tidemill.actors.serving.host import PROBE, EngineHost
from tidemill.actors.serving.port import COMMAND_S, Body, Result
from tidemill.actors.text.text import beside_loop, size_of
from tidemill.bus.http.access import Route
from tidemill.bus.wire.json_object import JsonObject

SNAPSHOT_S = 3600.0
"""Time-out of sending a file of a snapshot: its reader may be frozen."""


class BuiltinBackend:
    """The responses of one engine."""

    def __init__(
        self,
        host: EngineHost[WeightUpdates],
        scheduler: Scheduler,
        shape: ModelShape,
        model: Model,
        peer_snapshots: Callable[[], PeerSnapshotServer],
    ) -> None:
        self._host, self._scheduler, self._shape, self._model, self._peer_snapshots = host, scheduler, shape, model, peer_snapshots

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /generate, as a stream if requested. Raises EngineFailed when a response of a request without a stream fails."""
        body = body_of(request)
        if asks_for_scores(body):
            return web.json_response(await self._scores(body))
        async with self._submitted(body) as (generate, progress):
            if generate.stream:
                return await self._stream(request, generate, progress)
            states = [state async for state in self._states(generate, progress)]
        failed = next((state["error"]["message"] for state in states if "error" in state), None)
        if failed is not None:
            raise EngineFailed(self._host.url, failed)
        return web.json_response(states if generate.many else states[0])

    async def _scores(self, body: Body) -> JsonObject | list[JsonObject]:
        """Return the log-probs of given tokens. Raises BadRequest, EngineUnavailable, EngineFailed."""
        host = self._host
        host.require_servable()
        wanted = parse_scores(body, host.limits)
        host.accept(len(wanted.sequences))
        try:
            scorings = [
                Scoring(tokens=tokens, start=start, temperature=wanted.temperature, top_k=wanted.top_k)
                for tokens, start in zip(wanted.sequences, wanted.starts, strict=True)
            ]
            self._scheduler.submit_scorings(scorings)
            try:
                found = await asyncio.gather(*(asyncio.wrap_future(one.done) for one in scorings))
            except asyncio.CancelledError:
                if self._scheduler.alive:
                    raise
                raise EngineUnavailable(host.url, "it has ended") from None
        finally:
            host.ended(len(wanted.sequences))
        rid = str(body.get("rid") or "scores")
        answers = [scores_json(one, rid, each) for one, each in zip(scorings, found, strict=True)]
        return answers if wanted.many else answers[0]

    async def _stream(self, request: web.Request, generate: Generate, progress: Progress) -> web.StreamResponse:
        """Send server-sent events, each with all tokens so far; a slow reader skips states, never tokens."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        async for state in self._states(generate, progress):
            await response.write(event(state))
        await response.write(DONE)
        return response

    async def states(self, body: Body) -> AsyncGenerator[JsonObject, None]:
        """Yield the states of all responses, as ``tidemill.actors.openai.openai_server.GenerateBackend`` requires."""
        async with self._submitted(body) as (generate, progress):
            async for state in self._states(generate, progress):
                yield state

    @asynccontextmanager
    async def _submitted(self, body: Body) -> AsyncIterator[tuple[Generate, Progress]]:
        """Check a body of /generate and submit its responses; those that have not ended when this context is left are aborted."""
        host = self._host
        host.require_servable()
        generate = await beside_loop(size_of(body.get("text")), lambda: parse_generate(body, host.limits))
        await host.serve_version(generate.min_version, generate.min_version_timeout_s)
        host.require_servable()  # again: it may have begun to drain while this waited
        progress = self.submit(generate)
        try:
            yield generate, progress
        finally:
            if not progress.done:
                self._abandon(progress)

    def submit(self, generate: Generate) -> Progress:
        """Queue the requested responses, in any phase, and return their progress. Raises EngineUnavailable when the queue is full."""
        self._host.accept(len(generate.prompts))
        progress, routed = Progress(), self._shape.routed if generate.return_routed_experts else None
        for prompt, params, rid, seed in zip(generate.prompts, generate.params, generate.rids, seeds(generate), strict=True):
            request = ResponseRequest(rid=rid, prompt=prompt, params=params, seed=seed, continued_tokens=generate.continued_tokens)
            experts = None if routed is None else CapturedExperts(routed)
            progress.add(Sequence(request, model=self._model, sink=progress.update, stream=generate.stream, experts=experts))
        self._scheduler.submit(list(progress.sequences))
        return progress

    def _abandon(self, progress: Progress) -> None:
        """Abort the responses that have not ended: their client has hung up."""
        self._scheduler.abort(set(progress.sequences).__contains__, CLIENT_GONE)

    async def _states(self, generate: Generate, progress: Progress) -> AsyncIterator[JsonObject]:
        """Yield every response in order, once all have ended; or, streamed, each whenever it has grown."""
        if not generate.stream:
            await progress.finished()
            for place in range(len(progress.sequences)):
                yield self._state(generate, progress, place)
            return
        async for place, num_tokens, ended in progress.changes():
            yield self._state(generate, progress, place, partial=None if ended else num_tokens)

    def _state(self, generate: Generate, progress: Progress, place: int, *, partial: int | None = None) -> JsonObject:
        sequence, host = progress.sequences[place], self._host
        if partial is None and sequence.error is not None:
            state = error_of(sequence.error, 500)
        else:
            state = response_json(sequence, host.text, host.version, logprobs=generate.return_logprob, partial=partial)
        return {**state, "index": place} if generate.many and generate.stream else state

    async def probe(self, timeout_s: float) -> None:
        """Generate one token. Raises EngineFailed."""
        progress = self.submit(parse_generate({**PROBE, "rid": "probe"}, self._host.limits))
        try:
            async with asyncio.timeout(timeout_s):
                (sequence,) = await progress.finished()
        except TimeoutError:
            self._abandon(progress)
            raise EngineFailed(self._host.url, f"no token within {timeout_s:g} s") from None
        if sequence.error is not None:
            raise EngineFailed(self._host.url, sequence.error)

    async def abort(self, rid: str | None, body: Body) -> web.Response:
        """End the request or response ``rid`` with its tokens so far, or all (None). Responses have the ids ``<request>_<place>``."""
        if rid is None:
            await _shielded(self._scheduler.abort(lambda each: True))
        else:
            await _shielded(self._scheduler.abort(lambda each: each.rid == rid or each.rid.rpartition("_")[0] == rid, ABORTED_BY_ID))
        return web.Response()

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Drop cached keys and values; HTTP 400 while sequences run, which need them."""
        if await _shielded(self._scheduler.flush()):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def model_info(self) -> JsonObject:
        """Return the model's directory, architecture, vocabulary and version."""
        host, shape = self._host, self._shape
        return {
            "model_path": str(host.model_dir),
            "tokenizer_path": str(host.model_dir),
            "is_generation": True,
            "weight_version": str(host.version),
            "model_type": shape.family,
            "architectures": [shape.architecture],
            "vocab_size": shape.vocab_size,
            "eos_token_ids": sorted(self._model.eos_ids),
            "has_tokenizer": host.text is not None,
        }

    async def server_info(self) -> JsonObject:
        """Return the engine's limits, state and counters, under SGLang's names where it has one."""
        host, config, scheduler = self._host, self._host.config, self._scheduler
        return {
            "engine": "builtin",
            "model_path": str(host.model_dir),
            "weight_version": str(host.version),
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "context_length": host.limits.max_context,
            "max_running_requests": config.max_running,
            "max_queued_requests": config.max_waiting,
            "dtype": str(scheduler.dtype).removeprefix("torch."),
            "device": str(scheduler.device),
            "phase": host.phase,
            "epoch": host.epoch,
            "paused": scheduler.paused,
            "released": sorted(scheduler.released),
            "internal_states": [host.stats()],
            "routed_experts": None if self._shape.routed is None else self._shape.routed.described(),
        }

    async def loads(self, request: web.Request) -> web.Response:
        """Answer GET /v1/loads with the requests of this one engine, as data-parallel rank 0."""
        stats, limit = self._host.stats(), self._host.config.max_running
        load = {
            "dp_rank": 0,
            "num_running_reqs": stats["running"],
            "num_waiting_reqs": stats["waiting"],
            "max_running_requests": limit,
            "utilization": stats["running"] / limit,
        }
        accelerator = "cpu" if self._scheduler.device.type == "cpu" else "gpu"
        return web.json_response({"timestamp": time.time(), "accelerator": accelerator, "num_accelerators": 1, "loads": [load]})

    def own_routes(self, command: Callable[[web.Request], Awaitable[Body]]) -> Mapping[str, Route]:
        """Return the routes of pushes in one request, and of snapshots for peers."""

        async def receive_push(request: web.Request) -> web.Response:
            """Check the epoch of a push in one request, and receive it."""
            return await self._receive_push(await command(request))

        return {"POST /receive_push": Route.command(receive_push), "GET /snapshots/{name}/{file}": Route.request(self._snapshot)}

    async def _receive_push(self, body: Body) -> web.Response:
        buckets, serve = need(body, "buckets", list), body.get("serve", False)
        if not isinstance(serve, bool) or not all(isinstance(bucket, dict) for bucket in buckets):
            raise BadRequest(f"buckets, serve: want a list of maps, and true or false, got {buckets!r:.200}, {serve!r:.200}")
        updates, group = self._host.updates, group_in(body)
        receiving = updates.receive(
            [(group_in({"group_name": group, **bucket}), specs_in(bucket)) for bucket in buckets],
            version=version_in(body),
            timeout_s=seconds_in(body, "timeout_s", COMMAND_S),
            serve=serve,
        )
        return done("Push received.", stall_s=await updates.run_shielded(receiving))

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        name, server = request.match_info["name"], self._peer_snapshots()
        return _SnapshotFile(await server.file(name, request.match_info["file"]), lambda: server.reading(name))


class _SnapshotFile(web.FileResponse):
    """A file of a snapshot, which is in use until ``prepare`` has sent it."""

    def __init__(self, path: Path, reading: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(path)
        self._reading = reading

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send the file, in at most ``SNAPSHOT_S`` seconds; the snapshot is kept until then."""
        with self._reading():
            async with asyncio.timeout(SNAPSHOT_S):
                return await super().prepare(request)


async def _shielded(call: "Future[Result]") -> Result:
    """Wait for a call of the decoding thread, which is run even if the client hangs up."""
    return await asyncio.shield(asyncio.wrap_future(call))
