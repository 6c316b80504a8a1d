"""Answers of engines to /generate, decoded: SGLang's JSON to ``Generation``.

The experts of a response's tokens are in ``meta_info.routed_experts``: base64 of int32 [rows, all layers, top_k], a row
for each token but the last, of prompt and response. Shape letters: P = tokens of the prompt, R = tokens of the
response, E = layers with experts, K = experts of a token.
"""

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.port import FINISHED, Generation
from tidemill.actors.errors import EngineFailed
from tidemill.bus.errors import WireError
from tidemill.bus.wire.messages import Sampling, Span
from tidemill.bus.wire.routed_experts import RoutedExperts, RoutedShape, check_routed_experts


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
