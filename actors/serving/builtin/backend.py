"""Requests as the built-in engine answers them: /generate, aborts, its state, pushes in one request, and snapshots for
its peers.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from tidemill.actors.errors import BadRequest, EngineFailed, EngineUnavailable, UpdateRefused
from tidemill.actors.generate_body import Generate, asks_for_scores, parse_generate, parse_scores, seeds
from tidemill.actors.http_api import DONE, body_of, decode, done, error_of, event
from tidemill.actors.serving.builtin.input_scores import Scoring, scores_json
from tidemill.actors.serving.builtin.peer_snapshots import PeerSnapshotServer
from tidemill.actors.serving.builtin.responses import Progress, response_json
from tidemill.actors.serving.builtin.scheduler import Scheduler
from tidemill.actors.serving.builtin.sequence import (
    ABORTED_BY_ID,
    CLIENT_GONE,
    CapturedExperts,
    Model,
    ResponseRequest,
    Sequence,
)
from tidemill.actors.serving.builtin.shape import ModelFacts
from tidemill.actors.serving.builtin.weight_updates import BuiltinUpdates
from tidemill.actors.serving.command_bodies import AdapterBody, PushBody
from tidemill.actors.serving.host import PROBE, EngineHost
from tidemill.actors.serving.port import Body, Result
from tidemill.actors.text.text import beside_loop, size_of
from tidemill.bus.http.access import Route
from tidemill.bus.wire.json_object import JsonObject

SNAPSHOT_S = 3600.0
"""Time-out of sending a file of a snapshot: its reader may be frozen."""


class BuiltinBackend:
    """The responses of one engine."""

    def __init__(
        self,
        host: EngineHost[BuiltinUpdates],
        scheduler: Scheduler,
        facts: ModelFacts,
        model: Model,
        peer_snapshots: Callable[[], PeerSnapshotServer],
    ) -> None:
        self._host, self._scheduler, self._facts, self._model = host, scheduler, facts, model
        self._peer_snapshots = peer_snapshots

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /generate, as a stream if requested. Raises EngineFailed when a response fails."""
        body = body_of(request)
        if asks_for_scores(body):
            return web.json_response(await self._scores(body))
        async with self._submitted(body) as (generate, progress):
            if generate.body.stream:
                return await self._stream(request, generate, progress)
            states = [state async for state in self._states(generate, progress)]
        failed = next((state["error"]["message"] for state in states if "error" in state), None)
        if failed is not None:
            raise EngineFailed(self._host.url, failed)
        # A seventh of the time of ``web.json_response`` for short responses.
        answer = msgspec.json.encode(states if generate.many else states[0])
        return web.Response(body=answer, content_type="application/json")

    async def _scores(self, body: Body) -> JsonObject | list[JsonObject]:
        host = self._host
        host.require_servable()
        scores = parse_scores(body, host.limits)
        self._require_adapter(scores.adapter)
        host.accept(len(scores.sequences))
        try:
            scorings = [
                Scoring(
                    tokens=tokens,
                    start=start,
                    temperature=scores.temperature,
                    top_k=scores.top_k,
                    adapter=scores.adapter,
                )
                for tokens, start in zip(scores.sequences, scores.starts, strict=True)
            ]
            self._scheduler.submit_scorings(scorings)
            try:
                results = await asyncio.gather(*(asyncio.wrap_future(scoring.done) for scoring in scorings))
            except asyncio.CancelledError:
                if self._scheduler.alive:
                    raise
                raise EngineUnavailable(host.url, "it has ended") from None
        finally:
            host.ended(len(scores.sequences))
        rid = str(body.get("rid") or "scores")
        answers = [scores_json(scoring, rid, result) for scoring, result in zip(scorings, results, strict=True)]
        return answers if scores.many else answers[0]

    async def _stream(self, request: web.Request, generate: Generate, progress: Progress) -> web.StreamResponse:
        """Send server-sent events, each with all tokens so far; a slow reader skips states, never tokens."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        async for state in self._states(generate, progress):
            await response.write(event(state))
        await response.write(DONE)
        return response

    async def states(self, body: Body) -> AsyncGenerator[JsonObject, None]:
        async with self._submitted(body) as (generate, progress):
            async for state in self._states(generate, progress):
                yield state

    @asynccontextmanager
    async def _submitted(self, body: Body) -> AsyncIterator[tuple[Generate, Progress]]:
        """Check a body of /generate and submit its responses. When this context is left unfinished ones are aborted."""
        host = self._host
        host.require_servable()
        generate = await beside_loop(size_of(body.get("text")), lambda: parse_generate(body, host.limits))
        await host.serve_version(generate.body.min_version, generate.body.min_version_timeout_s)
        host.require_servable()  # again: it may have begun to drain while this waited
        self._require_adapter(generate.body.lora_path or "")
        progress = self.submit(generate)
        try:
            yield generate, progress
        finally:
            if not progress.done:
                self._abandon(progress)

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters, sorted."""
        return sorted(filter(None, self._scheduler.adapters))

    def _require_adapter(self, name: str) -> None:
        """Raise BadRequest for an adapter that is not loaded."""
        if name not in ("", *self.adapters):
            raise BadRequest(f"lora_path: want a loaded adapter ({', '.join(self.adapters) or 'none'}), got {name!r}")

    def submit(self, generate: Generate) -> Progress:
        """Queue the requested responses, in any phase. Raises EngineUnavailable when the queue is full."""
        self._host.accept(len(generate.prompts))
        progress, routed = Progress(), self._facts.routed if generate.body.return_routed_experts else None
        for prompt, params, rid, seed in zip(
            generate.prompts, generate.params, generate.rids, seeds(generate), strict=True
        ):
            request = ResponseRequest(
                rid=rid,
                prompt=prompt,
                params=params,
                seed=seed,
                continued_tokens=generate.body.continued_tokens,
                adapter=generate.body.lora_path or "",
            )
            experts = None if routed is None else CapturedExperts(routed)
            progress.add(
                Sequence(request, model=self._model, sink=progress.update, stream=generate.body.stream, experts=experts)
            )
        self._scheduler.submit(list(progress.sequences))
        return progress

    def _abandon(self, progress: Progress) -> None:
        """Abort the responses that have not ended: their client has hung up."""
        self._scheduler.abort(set(progress.sequences).__contains__, CLIENT_GONE)

    async def _states(self, generate: Generate, progress: Progress) -> AsyncIterator[JsonObject]:
        """Yield every response in order, once all have ended; or, streamed, each whenever it has grown."""
        if not generate.body.stream:
            await progress.finished()
            for place in range(len(progress.sequences)):
                yield self._state(generate, progress, place)
            return
        async for place, num_tokens, has_ended in progress.changes():
            yield self._state(generate, progress, place, partial=None if has_ended else num_tokens)

    def _state(self, generate: Generate, progress: Progress, place: int, *, partial: int | None = None) -> JsonObject:
        sequence, host = progress.sequences[place], self._host
        if partial is None and sequence.error is not None:
            state = error_of(sequence.error, 500)
        else:
            state = response_json(
                sequence, host.text, host.version, logprobs=generate.body.return_logprob, partial=partial
            )
        return {**state, "index": place} if generate.many and generate.body.stream else state

    async def probe(self, timeout_s: float) -> None:
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
        """End the request ``rid``, its response ``<rid>_<place>``, or all (None), with the tokens so far."""
        if rid is None:
            ending = self._scheduler.abort(lambda sequence: True)
        else:
            ending = self._scheduler.abort(
                lambda sequence: rid in (sequence.rid, sequence.rid.rpartition("_")[0]), ABORTED_BY_ID
            )
        await _shielded(ending)
        return web.Response()

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Drop cached keys and values; HTTP 400 while sequences run, which need them."""
        if await _shielded(self._scheduler.flush()):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def model_info(self) -> JsonObject:
        host, facts = self._host, self._facts
        return {
            "model_path": str(host.model_dir),
            "tokenizer_path": str(host.model_dir),
            "is_generation": True,
            "weight_version": str(host.version),
            "model_type": facts.family,
            "architectures": [facts.architecture],
            "vocab_size": facts.vocab_size,
            "eos_token_ids": sorted(self._model.eos_ids),
            "has_tokenizer": host.text is not None,
        }

    async def server_info(self) -> JsonObject:
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
            "routed_experts": None if self._facts.routed is None else self._facts.routed.described(),
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
        return web.json_response(
            {"timestamp": time.time(), "accelerator": accelerator, "num_accelerators": 1, "loads": [load]}
        )

    def own_routes(self, command: Callable[[web.Request], Awaitable[Body]]) -> Mapping[str, Route]:

        async def receive_push(request: web.Request) -> web.Response:
            return await self._receive_push(await command(request))

        async def load_adapter(request: web.Request) -> web.Response:
            body = decode(await command(request), AdapterBody)
            updates = self._host.updates
            if body.lora_name == self._host.model_dir.resolve().name:  # OpenAI's API finds both by this name
                raise UpdateRefused(f"lora_name: want another name than the model's, got {body.lora_name!r}")
            await updates.run_shielded(updates.load_adapter(body.lora_name, Path(body.lora_path), body.version or 0))
            return done("Adapter loaded.", loaded_adapters=self.adapters)

        async def unload_adapter(request: web.Request) -> web.Response:
            body = decode(await command(request), AdapterBody)
            await _shielded(self._scheduler.drop_adapter(body.lora_name))
            return done("Adapter unloaded.", loaded_adapters=self.adapters)

        return {
            "POST /load_lora_adapter": Route.command(load_adapter),
            "POST /unload_lora_adapter": Route.command(unload_adapter),
            "POST /receive_push": Route.command(receive_push),
            "GET /snapshots/{name}/{file}": Route.request(self._snapshot),
        }

    async def _receive_push(self, body: Body) -> web.Response:
        updates, push = self._host.updates, decode(body, PushBody)
        receiving = updates.receive(
            [(bucket.group_name, bucket.specs()) for bucket in push.each_bucket()],
            version=push.version,
            timeout_s=push.timeout_s,
            serve=push.serve,
            adapter=push.adapter,
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
