"""SGLang's JSON for a response: one sequence, finished or so far."""

import time

from tidemill.actors.serving.builtin.sequence import Sequence
from tidemill.actors.text.text import Text
from tidemill.bus.wire.json_object import JsonObject


def response_json(sequence: Sequence, text: Text | None, version: int, *, logprobs: bool, partial: int | None = None) -> JsonObject:
    """Return a sequence in SGLang's JSON; with ``partial``, only its first ``partial`` tokens, as unfinished.

    ``version`` is that of the served weights, for a response without tokens.
    """
    num_tokens = len(sequence.tokens) if partial is None else partial
    finish = sequence.finish if partial is None else None
    spans = sequence.weight_versions(num_tokens)
    meta: dict[str, object] = {
        "id": sequence.rid,
        "finish_reason": finish,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": num_tokens,
        "cached_tokens": sequence.cached_tokens,
        "num_retractions": sequence.retractions,
        "weight_version": spans[-1]["version"] if spans else str(version),
        "weight_versions": spans,
        "e2e_latency": time.perf_counter() - sequence.arrived_s,
    }
    if sequence.begun:
        meta["continued_tokens"] = len(sequence.begun)
    if logprobs:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = sequence.token_logprobs(num_tokens)
        meta["output_token_logprobs_length"] = num_tokens
    if sequence.experts is not None and partial is None:
        meta["routed_experts"] = sequence.experts.encoded()
    state: dict[str, object] = {"output_ids": sequence.tokens[:num_tokens], "meta_info": meta}
    if text is not None:
        state["text"] = response_text(sequence, text, num_tokens, trim=finish is not None)
    return state


def response_text(sequence: Sequence, text: Text, num_tokens: int, *, trim: bool) -> str:
    """Return the whole response as text; with ``trim``, without the stop string or stop id that ended it."""
    params, ids = sequence.params, sequence.begun + sequence.tokens[:num_tokens]
    matched = (sequence.finish or {}).get("matched") if trim and not params.no_stop_trim else None
    if isinstance(matched, int):
        ids = ids[:-1]
    found = text.decode(ids, skip_special=params.skip_special_tokens)
    return found[: found.find(matched)] if isinstance(matched, str) and matched in found else found
