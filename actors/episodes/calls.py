"""A model call with its answer, and that answer as JSON: SGLang's, and of ``/inference/v1/generate``, by which training
clients ask. Turns of an earlier attempt become the history of an episode.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.port import Generation
from tidemill.actors.engines.responses import EngineResponse
from tidemill.actors.episodes.recorder import TurnOutput
from tidemill.actors.episodes.turn_log import StoredTurn
from tidemill.actors.errors import BadRequest
from tidemill.actors.http_api import json_map
from tidemill.actors.router.exchange import Answer, Handler, Request
from tidemill.actors.router.token_history import ModelText, TokenHistory
from tidemill.actors.router.tree import TokenPiece
from tidemill.bus.wire.json_object import JsonMapping, JsonObject


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A model call with its answer. P = tokens of its prompt."""

    prompt: NDArray[np.int32]
    """[P]."""
    output: TurnOutput
    response: EngineResponse
    stored: StoredTurn | None
    """The answer of an earlier attempt that it was given; None = it is new."""


def answer_of(call: AnsweredCall, answer_id: str, place: int = 0) -> JsonObject:
    """Return SGLang's JSON of a response, whole or unfinished."""
    generation = call.response.generation
    tokens = generation.tokens.tolist()
    return {
        "index": place,
        "text": generation.text,
        "output_ids": tokens,
        "meta_info": {
            "id": answer_id,
            "turn": call.output.id,
            "finish_reason": None
            if generation.finish is None
            else {"type": generation.finish, "matched": generation.matched},
            "prompt_tokens": len(call.prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": generation.cached_tokens,
            "weight_version": str(generation.version),
            "weight_versions": _versions(generation),
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(generation.log_probs.tolist(), tokens, strict=True)
            ],
        },
    }


def _versions(generation: Generation) -> list[JsonObject]:
    """Return the spans of a response with their places in it."""
    versions: list[JsonObject] = []
    begin = 0
    for span in generation.spans:
        end = begin + span.num_tokens
        versions.append({"version": str(span.version), "start": begin, "end": end})
        begin = end
    return versions


INFERENCE_PATH = "/inference/v1/generate"
_PASSED = ("n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logit_bias")
"""Sampling parameters with the same name for both."""
_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


async def inference_answer(request: Request, handler: Handler) -> Answer:
    """Return the answer to a request of this path; ``handler`` answers /generate. Raises BadRequest."""
    body = json_map(request.body)
    if body.get("stream"):
        raise BadRequest("stream: not supported at this path; want false")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise BadRequest(f"sampling_params: want a map, got {sampling!r}")
    params = {name: sampling[name] for name in _PASSED if name in sampling}
    params |= {theirs: sampling[name] for name, theirs in _RENAMED.items() if name in sampling}
    prompt = body.get("token_ids")
    async with await handler(
        request.with_body({"input_ids": prompt, "sampling_params": params}, "/generate")
    ) as answer:
        decoded = await answer.json()
        answers = decoded if isinstance(decoded, list) else [decoded]
        choices = [_choice(response, place) for place, response in enumerate(answers)]
        return Answer.of(answer.status, {"request_id": request.id, "prompt_token_ids": prompt, "choices": choices})


def _choice(answer: JsonMapping, place: int) -> JsonObject:
    meta = answer["meta_info"]
    content = [{"token": f"token_id:{entry[1]}", "logprob": entry[0]} for entry in meta["output_token_logprobs"]]
    return {
        "index": place,
        "token_ids": answer["output_ids"],
        "finish_reason": meta["finish_reason"]["type"],
        "logprobs": {"content": content},
    }


def remember_restored(history: TokenHistory, model: ModelText, turns: Sequence[StoredTurn]) -> None:
    """Remember turns of an earlier life, in order, as the pieces that it had, so that their texts give the very ids
    again.

    A prompt need not begin with the ids of the turn before: the end token that closed a response is not in its text.
    """
    texts: defaultdict[str, list[list[TokenPiece]]] = defaultdict(list)
    """Texts of the turns so far, by agent."""
    for turn in turns:
        record = turn.record
        pieces, behind = _longest_beginning(turn.prompt.tolist(), texts[record.agent])
        if behind:
            pieces.append(TokenPiece(text=model.text.decode(behind, skip_special=False), tokens=tuple(behind)))
        call = AnsweredCall(turn.prompt, turn.output(record.id), turn.response(), turn)
        texts[record.agent].append(history.remember(pieces, answer_of(call, record.id), record.agent))


def _longest_beginning(ids: list[int], texts: list[list[TokenPiece]]) -> tuple[list[TokenPiece], list[int]]:
    """Return the longest beginning of ``ids`` that begins a text in whole pieces, and the ids behind it."""
    best, longest = list[TokenPiece](), 0
    for pieces in reversed(texts):
        end, count = 0, 0
        while count < len(pieces) and ids[end : end + len(pieces[count].tokens)] == [*pieces[count].tokens]:
            end, count = end + len(pieces[count].tokens), count + 1
        if end > longest:
            best, longest = pieces[:count], end
        if count == len(pieces):  # the usual case: behind the newest turn
            break
    return [*best], ids[longest:]
