"""The Engine port over SGLang's HTTP API: for the built-in engine and for SGLang itself. Knows no bus.

Fields that only the built-in engine supports (``min_version``, ``continued_tokens``) are sent only when they are used.
Requests for one prompt that start together are sent as one, in SGLang's batch form: for short responses an HTTP request
costs as much as its tokens do.

The experts of a response's tokens are in ``meta_info.routed_experts``: base64 of int32 [rows, all layers, top_k], a row
for each token but the last, of prompt and response. Shape letters: P = tokens of the prompt, R = tokens of the
response, E = layers with experts, K = experts of a token.
"""

import asyncio
import base64
import binascii
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.port import EngineInfo, Generation
from tidemill.actors.errors import (
    BadRequest,
    EngineError,
    EngineFailed,
    EngineGone,
    EngineUnavailable,
    StaleEpoch,
    VersionUnavailable,
)
from tidemill.actors.events import END, data_in
from tidemill.bus.errors import WireError
from tidemill.bus.http.client import ApiClient, CallFailed, Failure, no_headers
from tidemill.bus.liveness.keys import RunKeys
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Sampling, Span
from tidemill.bus.wire.routed_experts import RoutedExperts, RoutedShape, check_routed_experts

Send = Callable[[JsonObject], Awaitable[Any]]
"""POST a body to /generate: one answer for one prompt, a list for a list."""
Pending = list[tuple[JsonObject, "asyncio.Future[object]"]]
"""The body and the future answer of each request of a batch."""
_BY_REQUEST = ("rid", "input_ids", "sampling_params")
"""Fields that are lists in the batch form; the others must be the same for all."""


class RequestBatcher:
    """Collects requests for one engine and sends them in batches."""

    def __init__(self) -> None:
        self._waiting: dict[object, Pending] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def request(self, body: JsonObject, send: Send) -> object:
        """Return the answer to ``body``.

        The batch is sent by the ``send`` of its first caller; an exception of it is raised in all.
        """
        loop = asyncio.get_running_loop()
        key = (tuple(body["input_ids"]), body.get("min_version"))
        answer: asyncio.Future[object] = loop.create_future()
        if key not in self._waiting:
            self._waiting[key] = []
            loop.call_soon(
                self._start, key, send
            )  # after this turn of the loop, so that its other requests are in the batch
        self._waiting[key].append((body, answer))
        return await answer

    async def close(self) -> None:
        """Cancel the batches in flight."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _start(self, key: object, send: Send) -> None:
        waiting = [(body, answer) for body, answer in self._waiting.pop(key) if not answer.done()]
        if not waiting:
            return
        task = asyncio.get_running_loop().create_task(_send_batch(waiting, send), name="request batch")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        task.add_done_callback(
            lambda _: [answer.cancel() for _, answer in waiting]
        )  # for a batch that was cancelled before it began
        for _, answer in waiting:
            answer.add_done_callback(
                lambda _: task.cancel() if all(other.cancelled() for _, other in waiting) else None
            )


async def _send_batch(waiting: Pending, send: Send) -> None:
    """Send a batch and give each caller its part of the answer."""
    first = waiting[0][0]
    body = first if len(waiting) == 1 else first | {name: [one[name] for one, _ in waiting] for name in _BY_REQUEST}
    try:
        answers = await send(body)
        for (_, answer), part in zip(waiting, [answers] if len(waiting) == 1 else answers, strict=True):
            if not answer.done():
                answer.set_result(part)
    except Exception as error:  # raised in every caller
        for _, answer in waiting:
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

    async def generate(
        self,
        prompt: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        id: str = "",
        min_version: int = 0,
        timeout_s: float = 300.0,
        begun: Generation | None = None,
    ) -> Generation:
        """Send /generate; with ``join``, as one request with others of the same turn of the loop, unless it continues a
        response.
        """
        routed = await self._routing()
        rid = id or secrets.token_hex(16)
        body = _request(prompt, sampling, rid=rid, min_version=min_version, timeout_s=timeout_s, begun=begun)
        body |= {} if routed is None else {"return_routed_experts": True}
        # A batch has one value of ``continued_tokens`` for all of its requests.
        batcher = None if begun is not None else self._batcher

        async def send(wanted: Mapping[str, object]) -> object:
            """Return the decoded answer of /generate."""
            return await self._call("POST", "/generate", wanted, timeout_s=timeout_s)

        answer = await (send(body) if batcher is None else batcher.request(body, send))
        return _whole(self.url, answer, sampling, begun, prompt_tokens=len(prompt), routed=routed)

    async def stream(
        self,
        prompt: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        id: str = "",
        min_version: int = 0,
        timeout_s: float = 300.0,
        begun: Generation | None = None,
    ) -> AsyncIterator[Generation]:
        """Send /generate and yield a response per event.

        Raises EngineFailed also for a stream that ends without [DONE].
        """
        routed = await self._routing()
        rid = id or secrets.token_hex(16)
        body = _request(prompt, sampling, rid=rid, min_version=min_version, timeout_s=timeout_s, begun=begun) | {
            "stream": True
        }
        body |= {} if routed is None else {"return_routed_experts": True}
        async with self._api.open("POST", "/generate", body, timeout_s=timeout_s) as response:
            async for data in data_in(response.content.iter_any()):
                if data == END:
                    return
                yield _whole(
                    self.url, _decoded(self.url, data), sampling, begun, prompt_tokens=len(prompt), routed=routed
                )
        raise EngineFailed(self.url, "the stream ended without [DONE]")

    async def abort(self, id: str | None = None) -> None:
        """Send /abort_request, for one request id or for all."""
        await self._call("POST", "/abort_request", {"abort_all": True} if id is None else {"rid": id})

    async def pause(self, mode: str = "in_place") -> None:
        """Send /pause_generation."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Send /continue_generation."""
        await self._call("POST", "/continue_generation", {})

    async def healthy(self) -> bool:
        """Return whether /health answers 200 in time."""
        try:
            await self._call("GET", "/health")
        except (EngineUnavailable, EngineFailed, BadRequest):
            return False
        return True

    async def info(self) -> EngineInfo:
        """Return the contents of /model_info and /server_info. Raises EngineFailed for a version that is no number."""
        model = await self._call("GET", "/model_info")
        server = await self._call("GET", "/server_info")
        return EngineInfo(
            engine=self.url,
            version=_version(self.url, model.get("weight_version")),
            model_path=str(model.get("model_path", "")),
            model_type=str(model.get("model_type", "")),
            max_context=int(server.get("context_length") or server.get("max_total_tokens") or 0),
            vocab_size=int(model.get("vocab_size") or 0),
            details={**server, **model},
        )

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

    async def _call(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        return await self._api.call(method, path, body, timeout_s=timeout_s or self._command_timeout_s)


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


def _request(
    prompt: Sequence[int] | NDArray[np.int32],
    sampling: Sampling,
    *,
    rid: str,
    min_version: int,
    timeout_s: float,
    begun: Generation | None,
) -> dict[str, object]:
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
    body: dict[str, object] = {
        "rid": rid,
        "input_ids": np.asarray(prompt).tolist(),
        "sampling_params": params,
        "return_logprob": True,
    }
    if begun is not None and len(begun.tokens):
        body["input_ids"] += begun.tokens.tolist()
        body["continued_tokens"] = len(begun.tokens)
        params["max_new_tokens"] -= len(begun.tokens)
    if min_version > 0:
        # A little earlier than our own time limit, so that the engine's reason arrives.
        body |= {"min_version": min_version, "min_version_timeout_s": 0.9 * timeout_s}
    return body


def _decoded(url: str, data: bytes) -> Any:
    """Return the value of an event. Raises EngineFailed for one that is no JSON, or nested too deeply to be read."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineFailed(url, f"an event of its stream: want JSON, got {data[:80]!r}") from error


def _whole(
    url: str,
    answer: Any,
    sampling: Sampling,
    begun: Generation | None,
    *,
    prompt_tokens: int = 0,
    routed: RoutedShape | None = None,
) -> Generation:
    """Return the answer, appended to the response it continues.

    Raises EngineFailed if it cannot be parsed or runs past a stop string.
    """
    generation = _generation(url, answer)
    if routed is not None:
        experts = experts_of(url, answer, generation, begun, prompt_tokens=prompt_tokens, routed=routed)
        generation = replace(generation, routed_experts=experts)
    if begun is None or not len(begun.tokens):
        return generation
    text = generation.text
    if not answer["meta_info"].get("continued_tokens"):  # SGLang: all tokens were its prompt
        text = begun.text + text
        if (crossing := next((stop for stop in sampling.stop if stop in text), None)) is not None:
            raise EngineFailed(url, f"it passed the stop string {crossing!r}, which began in the continued tokens")
    return replace(
        generation,
        tokens=np.concatenate([begun.tokens, generation.tokens]),
        log_probs=np.concatenate([begun.log_probs, generation.log_probs]),
        spans=_merged(begun.spans + generation.spans),
        text=text,
        prompt_tokens=max(0, generation.prompt_tokens - len(begun.tokens)),
        duration_s=begun.duration_s + generation.duration_s,
    )


def _merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Merge neighbouring spans of the same version."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            span = Span(version=span.version, num_tokens=merged.pop().num_tokens + span.num_tokens)
        merged.append(span)
    return tuple(merged)


def _generation(url: str, answer: Any) -> Generation:
    try:
        if "error" in answer:
            raise EngineFailed(url, str(answer["error"].get("message")))
        meta = answer["meta_info"]
        tokens = np.array(answer["output_ids"], np.int32)
        log_probs = np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
        finish = meta["finish_reason"] or {}
        spans = tuple(
            Span(version=_version(url, span["version"]), num_tokens=int(span["end"] - span["start"]))
            for span in meta.get("weight_versions") or ()
        )
        generation = Generation(
            id=meta["id"],
            tokens=tokens,
            log_probs=log_probs,
            spans=spans,
            finish=finish.get("type"),
            matched=finish.get("matched"),
            text=str(answer.get("text") or ""),
            prompt_tokens=int(meta.get("prompt_tokens") or 0),  # SGLang omits it for a request aborted before it began
            cached_tokens=int(meta.get("cached_tokens") or 0),
            retractions=int(meta.get("num_retractions") or 0),
            duration_s=float(meta.get("e2e_latency") or 0.0),
        )
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise EngineFailed(url, f"its answer cannot be parsed: {error!r}") from error
    if tokens.ndim != 1 or log_probs.ndim != 1:
        raise EngineFailed(
            url, f"want lists of tokens and of log-probs, got shapes {tokens.shape} and {log_probs.shape}"
        )
    if len(tokens) != len(log_probs):
        raise EngineFailed(url, f"{len(tokens)} tokens have {len(log_probs)} log-probs")
    if finish and sum(span.num_tokens for span in spans) != len(tokens):
        raise EngineFailed(url, f"{len(tokens)} tokens have spans {spans}")
    return generation


def _version(url: str, version: object) -> int:
    try:
        return int(str(version))
    except ValueError:
        raise EngineFailed(
            url, f"weight_version: want a number, got {version!r} (start it with --weight-version 0)"
        ) from None


FINISHED = ("stop", "length")
"""Finish reasons of a complete response, as ``tidemill.actors.engines.responses`` has them."""


def experts_of(
    url: str, answer: Any, generation: Generation, begun: Generation | None, *, prompt_tokens: int, routed: RoutedShape
) -> RoutedExperts | None:
    """Return the experts of prompt and whole response, [P + R, E, K]; the last token's are unknown. None where the
    answer has none.

    ``generation``: the answer without ``begun``, which it continues. The pass that counts for a token is the one before
    its next token was sampled. A continued response is computed again as a prompt, so of its positions
    ``begun.routed_experts`` counts, or else none. Raises EngineFailed for a finished answer without experts, and for
    wrong ones.
    """
    given, complete = answer["meta_info"].get("routed_experts"), generation.finish in FINISHED
    num_begun = 0 if begun is None else len(begun.tokens)
    num_context, num_tokens = prompt_tokens + num_begun, prompt_tokens + num_begun + len(generation.tokens)
    if given is None:
        if complete:
            raise EngineFailed(url, "its answer has no meta_info.routed_experts, which the request asked for")
        return None if begun is None else _extended(begun.routed_experts, num_tokens, routed)
    rows = _rows(url, given, num_tokens, routed, complete=complete)
    experts = routed.unknown(num_tokens)
    experts[: len(rows)] = rows
    if begun is not None and num_begun:
        experts[: num_context - 1] = _extended(begun.routed_experts, num_context, routed)[: num_context - 1]
    try:
        check_routed_experts(experts, num_tokens, routed)
    except WireError as error:
        raise EngineFailed(url, f"its answer: {error}") from None
    return experts


def _extended(begun: RoutedExperts | None, num_tokens: int, routed: RoutedShape) -> RoutedExperts:
    """Return the experts of a continued response, the other rows unknown."""
    experts = routed.unknown(num_tokens)
    if begun is not None:
        experts[: len(begun)] = begun
    return experts


def _rows(url: str, given: object, num_tokens: int, routed: RoutedShape, *, complete: bool) -> NDArray[np.integer[Any]]:
    """Return the rows of an answer for ``num_tokens`` tokens without layers that have no experts.

    Raises EngineFailed.
    """
    want = f"base64 of int32 [{num_tokens - 1}, {routed.num_layers}, {routed.top_k}]"
    try:
        if not isinstance(given, str):
            raise ValueError(type(given).__name__)
        raw = base64.b64decode(given, validate=True)
        whole = np.frombuffer(raw, "<i4").reshape(-1, routed.num_layers, routed.top_k)
    except (binascii.Error, ValueError) as error:
        raise EngineFailed(url, f"meta_info.routed_experts: want {want}, got {str(given)[:40]!r}: {error}") from None
    rows = whole[:, list(routed.layers)]
    # An aborted request may have fewer: it waited, or ended before its last token was an input.
    lengths = range(num_tokens - 1 if complete else 0, num_tokens)
    if len(rows) not in lengths or (len(rows) and not 0 <= rows.min() <= rows.max() < routed.num_experts):
        raise EngineFailed(
            url, f"meta_info.routed_experts: want {want} with ids < {routed.num_experts}, got {whole.shape}"
        )
    return rows
