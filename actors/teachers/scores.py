"""The scores of one token sequence by a teacher, from an answer of /generate in SGLang's JSON. Knows no connection.

Shape letters: R = tokens of the response, K = listed tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.errors import EngineFailed
from tidemill.bus.wire.invariants import LOG_PROB_SLACK, MIN_LOG_PROB
from tidemill.bus.wire.json_object import JsonMapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probs (nats) under a teacher at the sampling temperature."""

    log_probs: NDArray[np.float32]
    """Log-probs of the response's tokens, [R]."""
    top_ids: NDArray[np.int32]
    """The most probable tokens of each place, [R x K] in one dimension."""
    top_log_probs: NDArray[np.float32]
    """Their log-probs, [R x K] in one dimension."""


def request_of(tokens: NDArray[np.int32], response_length: int, *, temperature: float, top_k: int, rid: str) -> dict[str, object]:
    """Return the body of /generate for the scores of the last ``response_length`` tokens, of which at least one has a token before it."""
    return {
        "rid": rid,
        "input_ids": tokens.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": temperature},
        "return_logprob": True,
        # The entry of this place has no log-prob, neither in SGLang's answer: the tokens behind it have.
        "logprob_start_len": len(tokens) - response_length - 1,
        "top_logprobs_num": top_k,
    }


def scores_in(answer: object, response: NDArray[np.int32], *, temperature: float, top_k: int, url: str) -> Scores:
    """Return the scores in an answer. Raises EngineFailed for any other answer, also for scores at another temperature."""
    try:
        meta = answer["meta_info"]  # type: ignore[index]
        _require_temperature(meta, temperature, url)
        entries = meta["input_token_logprobs"][-len(response) :]
        ids = [entry[1] for entry in entries]
        log_probs = np.array([entry[0] for entry in entries], np.float32)
        listed = meta["input_top_logprobs"][-len(response) :] if top_k else []
        top_ids = np.array([[one[1] for one in place[:top_k]] for place in listed], np.int32).reshape(len(listed), top_k)
        top = np.array([[one[0] for one in place[:top_k]] for place in listed], np.float32).reshape(len(listed), top_k)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise EngineFailed(url, f"its scores cannot be parsed: {error!r}") from error
    if ids != response.tolist():
        raise EngineFailed(url, f"want scores of the {len(response)} tokens of the response, got those of {len(ids)} others: {ids[:8]}")
    if top_k and len(top) != len(response):
        raise EngineFailed(url, f"want {top_k} listed tokens at each of {len(response)} places, got {len(top)} places")
    for values in (log_probs, top):
        if not (np.isfinite(values) & (values <= LOG_PROB_SLACK)).all():
            raise EngineFailed(url, "want finite log-probs of at most 0, got others")
    return Scores(
        log_probs=_bounded(log_probs),
        top_ids=top_ids.ravel(),
        top_log_probs=_bounded(top).ravel(),
    )


def _require_temperature(meta: JsonMapping, temperature: float, url: str) -> None:
    """Raise EngineFailed for scores at another temperature. SGLang names none, and scores input at 1 (0.5.23)."""
    found = float(meta.get("input_logprobs_temperature", 1.0))
    if found != temperature:
        raise EngineFailed(
            url,
            f"its scores are at temperature {found:g}, the samples at {temperature:g}; want a teacher that scores at the sampling "
            "temperature (tidemill teacher), or temperature 1 in the run and in its rows",
        )


def _bounded(log_probs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return log-probs within the bounds of a sample: a teacher may exclude a token further than any sampler draws one."""
    return np.clip(log_probs, MIN_LOG_PROB, 0.0).astype(np.float32)
