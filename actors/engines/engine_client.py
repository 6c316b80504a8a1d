"""The Engine port over SGLang's HTTP API: for the built-in engine and for SGLang itself. Knows no bus.

Fields that only the built-in engine supports (``min_version``, ``continued_tokens``) are sent only when they are used.
Requests for one prompt that start together are sent as one, in SGLang's batch form: for short responses an HTTP request
costs as much as its tokens do.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.engine_answers import decode_event, read_answer, read_version
from tidemill.actors.engines.port import GENERATE_S, GenerateOptions, Generation, Prompt
from tidemill.actors.errors import (
    BadRequest,
    EngineError,
    EngineFailed,
    EngineGone,
    EngineUnavailable,
    StaleEpoch,
    VersionUnavailable,
)
from tidemill.actors.http_api import END, data_in
from tidemill.bus.http.client import ApiClient, Body, CallFailed, Failure, no_headers
from tidemill.bus.liveness.keys import RunKeys
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Sampling
from tidemill.bus.wire.routed_experts import RoutedShape

Send = Callable[[bytes], Awaitable[Any]]
"""POST a body to /generate: one answer for one prompt, a list for a list."""
_BY_REQUEST = ("rid", "sampling_params")
"""Fields that are lists in the batch form, beside the prompts; the others must be the same for all."""


def _encoded(bodies: Sequence[JsonObject], prompt: NDArray[np.integer]) -> bytes:
    """Return the JSON of the requests ``bodies`` for one prompt, in the batch form if there are several."""
    # Encoded once: for prompts of thousands of tokens this was the largest part of the processor time of an actor.
    prompt_json = msgspec.Raw(msgspec.json.encode(prompt.tolist()))
    if len(bodies) == 1:
        return msgspec.json.encode(bodies[0] | {"input_ids": prompt_json})
    joined: JsonObject = {name: [body[name] for body in bodies] for name in _BY_REQUEST}
    return msgspec.json.encode(bodies[0] | joined | {"input_ids": [prompt_json] * len(bodies)})


@dataclass(slots=True, eq=False)
class _Batch:
    """Requests for one prompt, each with its future answer."""

    prompt: NDArray[np.integer]
    requests: list[tuple[JsonObject, asyncio.Future[Any]]] = field(default_factory=list)
    sending: asyncio.Task[None] | None = None


class RequestBatcher:
    """Collects requests for one engine and sends them in batches."""

    def __init__(self) -> None:
        self._waiting: dict[object, _Batch] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def request(self, prompt: NDArray[np.integer], body: JsonObject, send: Send) -> object:
        """Return the answer to ``body``, the other fields of a request for ``prompt``.

        The batch is sent by the ``send`` of its first caller; an exception of it is raised in all.
        """
        loop = asyncio.get_running_loop()
        key = (prompt.tobytes(), body.get("min_version"))
        answer: asyncio.Future[Any] = loop.create_future()
        batch = self._waiting.get(key)
        if batch is None:
            batch = self._waiting[key] = _Batch(prompt)
            # After this turn of the loop, so that its other requests are in the batch.
            loop.call_soon(self._start, key, send)
        batch.requests.append((body, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            # The engine ends the batch only once no caller waits for a part of it.
            if batch.sending is not None and all(other.cancelled() for _, other in batch.requests):
                batch.sending.cancel()
            raise

    async def close(self) -> None:
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _start(self, key: object, send: Send) -> None:
        batch = self._waiting.pop(key)
        batch.requests = [(body, answer) for body, answer in batch.requests if not answer.done()]
        if not batch.requests:
            return
        batch.sending = task = asyncio.get_running_loop().create_task(_send_batch(batch, send), name="request batch")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        # For a batch that was cancelled before it began.
        task.add_done_callback(lambda _: [answer.cancel() for _, answer in batch.requests])


async def _send_batch(batch: _Batch, send: Send) -> None:
    bodies = [body for body, _ in batch.requests]
    try:
        answers = await send(_encoded(bodies, batch.prompt))
        for (_, answer), part in zip(batch.requests, answers if len(bodies) > 1 else [answers], strict=True):
            if not answer.done():
                answer.set_result(part)
    except Exception as error:  # raised in every caller
        for _, answer in batch.requests:
            if not answer.done():
                answer.set_exception(error)


COMMAND_S = 30.0
"""Time limit in seconds of every call but generation."""


class HttpEngine:
    """A client of one engine. Connections are opened on first use, one per concurrent request.

    ``join``: requests for one prompt that start together are sent as one (``RequestBatcher``). ``keys``: keys of the
    run, for engines that require one. ``routed_experts``: every response has the experts of its tokens; EngineFailed
    for an engine that does not return them.
    """

    def __init__(
        self,
        url: str,
        *,
        command_timeout_s: float = COMMAND_S,
        join: bool = False,
        keys: RunKeys | None = None,
        routed_experts: bool = False,
    ) -> None:
        self.url, self._command_timeout_s = url.rstrip("/"), command_timeout_s
        self._batcher = RequestBatcher() if join else None
        self._wants_experts = routed_experts
        self._routed: RoutedShape | None = None
        """Sizes of the routing of the engine's model, from the first request on that needs them."""
        self._api = ApiClient(url, error_of_call, headers=no_headers if keys is None else keys.headers)

    async def generate(self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]) -> Generation:
        """Send /generate; with ``join`` as one request with others of this turn of the loop, unless continued."""
        routed = await self._routing()
        body, begun, timeout_s = self._body(sampling, options), options.get("begun"), _timeout_s(options)
        tokens = _tokens(prompt, begun)
        # A batch has one value of ``continued_tokens`` for all of its requests.
        batcher = None if begun is not None else self._batcher

        async def send(body: bytes) -> object:
            return await self._call("POST", "/generate", body, timeout_s=timeout_s)

        answer = await (send(_encoded([body], tokens)) if batcher is None else batcher.request(tokens, body, send))
        return read_answer(self.url, answer, sampling, begun, prompt_tokens=len(prompt), routed=routed)

    async def stream(
        self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[Generation]:
        """Send /generate and yield a response per event.

        Raises EngineFailed also for a stream that ends without [DONE].
        """
        routed = await self._routing()
        body, begun = self._body(sampling, options) | {"stream": True}, options.get("begun")
        encoded = _encoded([body], _tokens(prompt, begun))
        async with self._api.open("POST", "/generate", encoded, timeout_s=_timeout_s(options)) as response:
            async for data in data_in(response.content.iter_any()):
                if data == END:
                    return
                answer = decode_event(self.url, data)
                yield read_answer(self.url, answer, sampling, begun, prompt_tokens=len(prompt), routed=routed)
        raise EngineFailed(self.url, "the stream ended without [DONE]")

    async def abort(self, request_id: str | None = None) -> None:
        await self._call("POST", "/abort_request", {"abort_all": True} if request_id is None else {"rid": request_id})

    async def pause(self, mode: str = "in_place") -> None:
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def healthy(self) -> bool:
        try:
            await self._call("GET", "/health")
        except (EngineUnavailable, EngineFailed, BadRequest):
            return False
        return True

    async def version(self) -> int:
        """Return the version in /model_info. Raises EngineFailed for one that is no number."""
        return read_version(self.url, (await self._call("GET", "/model_info")).get("weight_version"))

    async def close(self) -> None:
        """Cancel the batches in flight, then close the connections."""
        if self._batcher is not None:
            await self._batcher.close()
        await self._api.close()

    async def _routing(self) -> RoutedShape | None:
        """Return the sizes of the engine's routing; None = experts are not wanted.

        Raises EngineFailed for an engine that returns none.
        """
        if not self._wants_experts or self._routed is not None:
            return self._routed
        described = (await self._call("GET", "/server_info")).get("routed_experts")
        if described is None:
            cure = "a model with experts, and a SGLang server with --enable-return-routed-experts"
            raise EngineFailed(
                self.url, f"it returns no experts of tokens, which learner.routing_replay: rollout needs: want {cure}"
            )
        try:
            self._routed = RoutedShape.read(described)
        except ValueError as error:
            raise EngineFailed(self.url, f"/server_info, routed_experts: {error}") from None
        return self._routed

    def _body(self, sampling: Sampling, options: GenerateOptions) -> JsonObject:
        """Return the fields of a request besides its tokens."""
        begun, min_version = options.get("begun"), options.get("min_version", 0)
        params: JsonObject = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        body: JsonObject = {
            "rid": options.get("request_id") or secrets.token_hex(16),
            "sampling_params": params,
            "return_logprob": True,
        }
        if self._routed is not None:
            body["return_routed_experts"] = True
        if begun is not None and len(begun.tokens):
            body["continued_tokens"] = len(begun.tokens)
            params["max_new_tokens"] -= len(begun.tokens)
        if min_version > 0:
            # A little earlier than our own time limit, so that the engine's reason arrives.
            body |= {"min_version": min_version, "min_version_timeout_s": 0.9 * _timeout_s(options)}
        return body

    async def _call(self, method: str, path: str, body: Body = None, *, timeout_s: float | None = None) -> Any:
        return await self._api.call(method, path, body, timeout_s=timeout_s or self._command_timeout_s)


def _tokens(prompt: Prompt, begun: Generation | None) -> NDArray[np.integer]:
    """Return the tokens of a prompt and of the response that is continued."""
    tokens = np.asarray(prompt)
    return tokens if begun is None else np.concatenate([tokens, begun.tokens])


def _timeout_s(options: GenerateOptions) -> float:
    return options.get("timeout_s", GENERATE_S)


def error_of_call(failed: CallFailed) -> EngineError:
    """Return the error of ``tidemill.actors.errors`` for a failed call."""
    url, reason = failed.url, failed.reason
    match failed.failure:
        case (
            Failure.NOT_CONNECTED | Failure.NO_ANSWER | Failure.UNAUTHORIZED
        ):  # 401: another key is required; the request may be right
            return EngineUnavailable(url, reason)
        case Failure.UNAVAILABLE:
            lacks_version = failed.answer.get("unavailable") == VersionUnavailable.__name__
            return (VersionUnavailable if lacks_version else EngineUnavailable)(url, reason)
        case Failure.BROKEN:
            return EngineGone(url, reason)
        case Failure.STALE:
            epoch = failed.answer.get("epoch")
            return StaleEpoch(f"{url}: {reason}", -1, epoch if isinstance(epoch, int) else -1)
        case Failure.REFUSED | Failure.ABORTED:
            return BadRequest(f"{url}: {reason}")
        case Failure.UNREADABLE:
            return EngineFailed(url, f"{failed.path}: {reason}")
        case Failure.FAILED:
            return EngineFailed(url, f"HTTP {failed.status}: {reason}")
