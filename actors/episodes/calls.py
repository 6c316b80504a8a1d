"""A model call with its answer, and SGLang's JSON of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.port import Generation
from tidemill.actors.engines.responses import Response
from tidemill.actors.episodes.recorder import Output
from tidemill.actors.episodes.turn_log import StoredTurn
from tidemill.bus.wire.json_object import JsonObject


@dataclass(frozen=True, slots=True)
class Called:
    """A model call with its answer. P = tokens of its prompt."""

    prompt: NDArray[np.int32]
    """[P]."""
    output: Output
    response: Response
    stored: StoredTurn | None
    """The answer of an earlier attempt that it was given; None = it is new."""


def answer_of(called: Called, id: str, place: int = 0) -> JsonObject:
    """Return SGLang's JSON of a response, whole or unfinished."""
    made = called.response.generation
    tokens = made.tokens.tolist()
    return {
        "index": place,
        "text": made.text,
        "output_ids": tokens,
        "meta_info": {
            "id": id,
            "turn": called.output.id,
            "finish_reason": None if made.finish is None else {"type": made.finish, "matched": made.matched},
            "prompt_tokens": len(called.prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": made.cached_tokens,
            "weight_version": str(made.version),
            "weight_versions": _versions(made),
            "output_token_logprobs": [[value, token, None] for value, token in zip(made.log_probs.tolist(), tokens, strict=True)],
        },
    }


def _versions(made: Generation) -> list[JsonObject]:
    """Return the spans of a response with their places in it."""
    found: list[JsonObject] = []
    begin = 0
    for span in made.spans:
        end = begin + span.num_tokens
        found.append({"version": str(span.version), "start": begin, "end": end})
        begin = end
    return found
