"""The experts of a response's tokens in an engine's answer, and those that a continued response keeps. Knows no HTTP.

    meta_info.routed_experts: base64 of int32 [rows, all layers, top_k], a row for each token but the last, of prompt and response

Shape letters: P = tokens of the prompt, B = those of a continued response, E = layers with experts, K = experts of a token.
"""

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.port import Generation
from tidemill.actors.errors import EngineFailed
from tidemill.bus.errors import WireError
from tidemill.bus.wire.routed_experts import RoutedExperts, RoutedShape, check_routed_experts

FINISHED = ("stop", "length")
"""Finish reasons of a complete response, as ``tidemill.actors.engines.responses`` has them."""


def experts_of(
    url: str, answer: Any, generation: Generation, begun: Generation | None, *, prompt_tokens: int, routed: RoutedShape
) -> RoutedExperts | None:
    """Return the experts of prompt and whole response, [P + R, E, K]; the last token's are unknown. None where the answer has none.

    ``generation``: the answer without ``begun``, which it continues. The pass that counts for a token is the one before its next token was
    sampled. A continued response is computed again as a prompt, so of its positions ``begun.routed_experts`` counts, or else none.
    Raises EngineFailed for a finished answer without experts, and for wrong ones.
    """
    given, complete = answer["meta_info"].get("routed_experts"), generation.finish in FINISHED
    num_begun = 0 if begun is None else len(begun.tokens)
    num_context, num_tokens = prompt_tokens + num_begun, prompt_tokens + num_begun + len(generation.tokens)
    if given is None:
        if complete:
            raise EngineFailed(url, "its answer has no meta_info.routed_experts, which the request asked for")
        return None if begun is None else _extended(begun.routed_experts, num_tokens, routed)
    rows = _rows(url, given, num_tokens, routed, complete=complete)
    found = routed.unknown(num_tokens)
    found[: len(rows)] = rows
    if begun is not None and num_begun:
        found[: num_context - 1] = _extended(begun.routed_experts, num_context, routed)[: num_context - 1]
    try:
        check_routed_experts(found, num_tokens, routed)
    except WireError as error:
        raise EngineFailed(url, f"its answer: {error}") from None
    return found


def _extended(begun: RoutedExperts | None, num_tokens: int, routed: RoutedShape) -> RoutedExperts:
    """Return the experts of a continued response, the other rows unknown."""
    found = routed.unknown(num_tokens)
    if begun is not None:
        found[: len(begun)] = begun
    return found


def _rows(url: str, given: object, num_tokens: int, routed: RoutedShape, *, complete: bool) -> NDArray[np.integer[Any]]:
    """Return the rows of an answer for ``num_tokens`` tokens without layers that have no experts. Raises EngineFailed."""
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
        raise EngineFailed(url, f"meta_info.routed_experts: want {want} with ids < {routed.num_experts}, got {whole.shape}")
    return rows
