"""Token ids in and out, as training clients ask (``/inference/v1/generate``): its body and answer made of those of /generate."""

from tidemill.actors.errors import BadRequest
from tidemill.actors.http_api import json_map
from tidemill.actors.router.exchange import Answer, Handler, Request
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

PATH = "/inference/v1/generate"
_PASSED = ("n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logit_bias")
"""Sampling parameters with the same name for both."""
_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


async def answered(request: Request, handler: Handler) -> Answer:
    """Return the answer to a request of this path; ``handler`` answers /generate. Raises BadRequest."""
    body = json_map(request.body)
    if body.get("stream"):
        raise BadRequest("stream: not supported at this path; want false")
    given = body.get("sampling_params") or {}
    if not isinstance(given, dict):
        raise BadRequest(f"sampling_params: want a map, got {given!r}")
    params = {name: given[name] for name in _PASSED if name in given}
    params |= {theirs: given[name] for name, theirs in _RENAMED.items() if name in given}
    prompt = body.get("token_ids")
    async with await handler(request.with_body({"input_ids": prompt, "sampling_params": params}, "/generate")) as answer:
        found = await answer.json()
        answers = found if isinstance(found, list) else [found]
        choices = [_choice(each, place) for place, each in enumerate(answers)]
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
