"""Requests of rewards as JSON, in which they reach child processes and servers."""

import base64
import json

import numpy as np

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Status
from tidemill.rewards.port import RewardRequest


def from_request(request: RewardRequest) -> bytes:
    """Return a request as JSON. Raises TypeError, ValueError or RecursionError for values that JSON does not have."""
    return json.dumps(fields_of(request)).encode()


def fields_of(request: RewardRequest) -> JsonObject:
    """Return the map that is a request's JSON. ``tokens``: base64 of little-endian int32."""
    return {
        "prompt": request.prompt,
        "response": request.response,
        "label": request.label,
        "status": request.status.value,
        "tokens": base64.b64encode(np.ascontiguousarray(request.tokens, "<i4").tobytes()).decode(),
        "metadata": dict(request.metadata),
        "response_length": request.response_length,
        "sampled_length": request.sampled_length,
        "num_turns": request.num_turns,
        "transcript": list(request.transcript),
    }


def to_request(found: JsonMapping) -> RewardRequest:
    """Return the request in the map that ``fields_of`` returned; without the fields of episodes it is a response of one call."""
    return RewardRequest(
        prompt=found["prompt"],
        response=found["response"],
        label=found["label"],
        status=Status(found["status"]),
        tokens=np.frombuffer(base64.b64decode(found["tokens"], validate=True), "<i4").astype(np.int32),
        metadata=found["metadata"],
        response_length=found["response_length"],
        sampled_length=found.get("sampled_length", found["response_length"]),
        num_turns=found.get("num_turns", 1),
        transcript=tuple(found.get("transcript", ())),
    )
