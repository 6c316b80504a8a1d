"""Validation of /generate bodies that ask for the log-probs of given tokens, as a teacher is asked. Knows no HTTP and no model.

SGLang's form: ``max_new_tokens: 0``, ``return_logprob: true``, and ``logprob_start_len``, the place from which tokens are scored.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.errors import BadRequest
from tidemill.actors.request import Limits, check_integer, check_temperature, refuse_unknown, token_ids

MOST_LISTED = 1024
"""Most tokens that are listed at each position."""
_FIELDS = frozenset(
    {"input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "min_version", "stream"}
)
_SAMPLING = frozenset({"max_new_tokens", "temperature"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A checked request: token sequences, and the places from which their tokens are scored."""

    sequences: list[NDArray[np.int32]]
    starts: list[int]
    """Place of the first scored token of each sequence; the token at place 0 has no log-prob, because nothing comes before it."""
    temperature: float
    top_k: int
    """Tokens listed at each position; 0 = none."""
    many: bool
    """True when the answer is a list."""


def asks_for_scores(body: object) -> bool:
    """Return whether a body of /generate asks for log-probs of its input and for no new token."""
    if not isinstance(body, Mapping) or body.get("logprob_start_len") in (None, -1):
        return False
    params = body.get("sampling_params")
    return isinstance(params, Mapping) and params.get("max_new_tokens") == 0


def parse_scores(body: Mapping[str, object], limits: Limits) -> ScoreRequest:
    """Return a validated request for scores. Raises BadRequest naming the field."""
    refuse_unknown(body, _FIELDS, {}, "body")
    params = body["sampling_params"]
    assert isinstance(params, Mapping)
    refuse_unknown(params, _SAMPLING, {"top_p": (None, 1, 1.0), "top_k": (None, -1)}, "sampling_params")
    if body.get("return_logprob") is not True or body.get("stream"):
        got = f"return_logprob {body.get('return_logprob')!r:.40}, stream {body.get('stream')!r:.40}"
        raise BadRequest(f"return_logprob, stream: want true and false with max_new_tokens: 0, got {got}")
    ids = body.get("input_ids")
    many = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    given = ids if many else [ids]
    assert isinstance(given, list)
    if len(given) > limits.max_responses:
        raise BadRequest(f"input_ids: want at most {limits.max_responses} sequences in a request, got {len(given)}")
    sequences = [token_ids(each, f"input_ids[{place}]" if many else "input_ids", limits, room=0) for place, each in enumerate(given)]
    start = body["logprob_start_len"]
    places = start if isinstance(start, list) else [start] * len(sequences)
    if len(places) != len(sequences):
        raise BadRequest(f"logprob_start_len: want one for each of {len(sequences)} sequences, got {len(places)}")
    starts = [check_integer(0)(each, "logprob_start_len") for each in places]
    for each, tokens in zip(starts, sequences, strict=True):
        if each >= len(tokens):
            raise BadRequest(f"logprob_start_len: want a place in the {len(tokens)} tokens, got {each}")
    top_k = check_integer(0)(body.get("top_logprobs_num") or 0, "top_logprobs_num")
    if top_k > min(MOST_LISTED, limits.vocab_size):
        raise BadRequest(f"top_logprobs_num: want at most {min(MOST_LISTED, limits.vocab_size)}, got {top_k}")
    temperature = params.get("temperature")
    return ScoreRequest(
        sequences=sequences,
        starts=starts,
        temperature=1.0 if temperature is None else check_temperature(temperature, "sampling_params.temperature"),
        top_k=top_k,
        many=many,
    )
