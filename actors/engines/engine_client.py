"""The Engine port over SGLang's HTTP API: for the built-in engine and for SGLang itself. Knows no bus.

Fields that only the built-in engine supports (``min_version``, ``continued_tokens``) are sent only when they are used.
A group is one request in SGLang's batch form: for short responses an HTTP request costs as much as its tokens do.

The experts of a response's tokens are in ``meta_info.routed_experts``: base64 of int32 [rows, all layers, top_k], a row
for each token but the last, of prompt and response. Shape letters: P = tokens of the prompt, R = tokens of the
response, E = layers with experts, K = experts of a token.
"""

import base64
import binascii
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.port import FINISHED, GENERATE_S, GenerateOptions, Generation, Prompt
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
from tidemill.bus.errors import WireError
from tidemill.bus.http.client import ApiClient, Body, CallFailed, Failure, no_headers
from tidemill.bus.keys import RunKeys
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Sampling, Span
from tidemill.bus.wire.routed_experts import RoutedExperts, RoutedShape, check_routed_experts

COMMAND_S = 30.0
"""Time limit in seconds of every call but generation."""


class HttpEngine:
    """A client of one engine. Connections are opened on first use, one per concurrent request.

    ``keys``: keys of the run, for engines that require one. ``routed_experts``: every response has the experts of its
    tokens; EngineFailed for an engine that does not return them.
    """

    def __init__(
        self,
        url: str,
        *,
        command_timeout_s: float = COMMAND_S,
        keys: RunKeys | None = None,
        routed_experts: bool = False,
    ) -> None:
        self.url, self._command_timeout_s = url.rstrip("/"), command_timeout_s
        self._wants_experts = routed_experts
        self._routed: RoutedShape | None = None
        """Sizes of the routing of the engine's model, from the first request on that needs them."""
        self._api = ApiClient(url, error_of_call, headers=no_headers if keys is None else keys.headers)

    async def generate(self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]) -> Generation:
        """Send /generate."""
        routed, begun = await self._routing(), options.get("begun")
        body = self._body(sampling, options) | {"input_ids": _json_of(_tokens(prompt, begun))}
        answer = await self._call("POST", "/generate", msgspec.json.encode(body), timeout_s=_timeout_s(options))
        return read_answer(self.url, answer, sampling, begun, prompt_tokens=len(prompt), routed=routed)

    async def generate_group(
        self, prompt: Prompt, sampling: Sampling, request_ids: Sequence[str], **options: Unpack[GenerateOptions]
    ) -> list[Generation]:
        """Send /generate in the batch form. Raises EngineFailed also for another number of answers."""
        routed, count = await self._routing(), len(request_ids)
        body = self._body(sampling, {**options, "request_id": request_ids[0]})
        params, seed = body["sampling_params"], sampling.seed
        seeds = [{}] * count if seed is None else [{"sampling_seed": seed + index} for index in range(count)]
        body["sampling_params"] = [params | seeded for seeded in seeds]
        body["rid"], body["input_ids"] = request_ids, [_json_of(_tokens(prompt))] * count
        answers = await self._call("POST", "/generate", msgspec.json.encode(body), timeout_s=_timeout_s(options))
        if not isinstance(answers, list) or len(answers) != count:
            raise EngineFailed(self.url, f"/generate: want a list of {count} answers, got {str(answers)[:80]}")
        size = len(prompt)
        return [read_answer(self.url, answer, sampling, None, prompt_tokens=size, routed=routed) for answer in answers]

    async def stream(
        self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[Generation]:
        """Send /generate and yield a response per event.

        Raises EngineFailed also for a stream that ends without [DONE].
        """
        routed = await self._routing()
        body, begun = self._body(sampling, options) | {"stream": True}, options.get("begun")
        encoded = msgspec.json.encode(body | {"input_ids": _json_of(_tokens(prompt, begun))})
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


def _tokens(prompt: Prompt, begun: Generation | None = None) -> NDArray[np.integer]:
    """Return the tokens of a prompt and of the response that is continued."""
    tokens = np.asarray(prompt)
    return tokens if begun is None else np.concatenate([tokens, begun.tokens])


def _json_of(tokens: NDArray[np.integer]) -> msgspec.Raw:
    """Return the JSON of token ids, encoded once for all requests of a group."""
    # For prompts of thousands of tokens this was the largest part of the processor time of an actor.
    return msgspec.Raw(msgspec.json.encode(tokens.tolist()))


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


def decode_event(url: str, data: bytes) -> Any:
    """Return the value of an event. Raises EngineFailed for one that is no JSON, or nested too deeply to be read."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineFailed(url, f"an event of its stream: want JSON, got {data[:80]!r}") from error


def read_answer(
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
    generation = read_generation(url, answer)
    if routed is not None:
        experts = _experts(url, answer, generation, begun, prompt_tokens=prompt_tokens, routed=routed)
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
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            span = Span(version=span.version, num_tokens=merged.pop().num_tokens + span.num_tokens)
        merged.append(span)
    return tuple(merged)


def read_generation(url: str, answer: Any) -> Generation:
    try:
        if "error" in answer:
            raise EngineFailed(url, str(answer["error"].get("message")))
        meta = answer["meta_info"]
        tokens = np.array(answer["output_ids"], np.int32)
        log_probs = np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
        finish = meta["finish_reason"] or {}
        spans = tuple(
            Span(version=read_version(url, span["version"]), num_tokens=int(span["end"] - span["start"]))
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


def read_version(url: str, version: object) -> int:
    try:
        return int(str(version))
    except ValueError:
        raise EngineFailed(
            url, f"weight_version: want a number, got {version!r} (start it with --weight-version 0)"
        ) from None


def _experts(
    url: str, answer: Any, generation: Generation, begun: Generation | None, *, prompt_tokens: int, routed: RoutedShape
) -> RoutedExperts | None:
    """Return the experts of prompt and whole response, [P + R, E, K]; the last token's are unknown. None where the
    answer has none.

    ``generation``: the answer without ``begun``, which it continues. The pass that counts for a token is the one before
    its next token was sampled. A continued response is computed again as a prompt, so of its positions
    ``begun.routed_experts`` counts, or else none. Raises EngineFailed for a finished answer without experts, and for
    wrong ones.
    """
    encoded, complete = answer["meta_info"].get("routed_experts"), generation.finish in FINISHED
    num_begun = 0 if begun is None else len(begun.tokens)
    num_context, num_tokens = prompt_tokens + num_begun, prompt_tokens + num_begun + len(generation.tokens)
    if encoded is None:
        if complete:
            raise EngineFailed(url, "its answer has no meta_info.routed_experts, which the request asked for")
        return None if begun is None else _extended(begun.routed_experts, num_tokens, routed)
    rows = _rows(url, encoded, num_tokens, routed, complete=complete)
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


def _rows(
    url: str, encoded: object, num_tokens: int, routed: RoutedShape, *, complete: bool
) -> NDArray[np.integer[Any]]:
    """Return the rows of an answer without the layers that have no experts. Raises EngineFailed."""
    want = f"base64 of int32 [{num_tokens - 1}, {routed.num_layers}, {routed.top_k}]"
    try:
        if not isinstance(encoded, str):
            raise ValueError(type(encoded).__name__)
        raw = base64.b64decode(encoded, validate=True)
        all_layers = np.frombuffer(raw, "<i4").reshape(-1, routed.num_layers, routed.top_k)
    except (binascii.Error, ValueError) as error:
        raise EngineFailed(url, f"meta_info.routed_experts: want {want}, got {str(encoded)[:40]!r}: {error}") from None
    rows = all_layers[:, list(routed.layers)]
    # An aborted request may have fewer: it waited, or ended before its last token was an input.
    lengths = range(num_tokens - 1 if complete else 0, num_tokens)
    if len(rows) not in lengths or (len(rows) and not 0 <= rows.min() <= rows.max() < routed.num_experts):
        raise EngineFailed(
            url, f"meta_info.routed_experts: want {want} with ids < {routed.num_experts}, got {all_layers.shape}"
        )
    return rows
