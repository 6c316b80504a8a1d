"""The interface of rewards and of users' other functions: what one gets and gives, and how that is written for another
process.

A reward is a function from one finished response to a number. There is one contract for rewards
(``rewards/registry.py``), one for rewards of groups, and one for the filters of the learner
(``learner/filters.py``). Knows no reward and no transport.
"""

import base64
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.system.functions import find_object
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Prompt, Status

Parts = float | Mapping[str, float]  # A number, or named numbers; ``score`` is trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """One finished response: the argument of a reward."""

    prompt: Prompt
    response: str
    label: Any
    """The value under the label key of the prompt file, unchanged."""
    status: Status
    """COMPLETED, or TRUNCATED when the response reached a length limit."""
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Prompt and response, [L]."""
    metadata: JsonMapping = field(default_factory=dict)
    response_length: int = 0
    """Tokens of the response, with the tokens of tools and observations."""
    sampled_length: int = 0
    """Tokens of the response that the model has sampled."""
    num_turns: int = 1
    transcript: tuple[JsonObject, ...] = ()
    """Messages of the episode, results of tools among them; empty for one call without messages."""


# A plain or an async callable, whose keyword parameters are its options.
#
# If it raises, or returns a number that no sample may have (``bus/wire/invariants.py``), the sample is FAILED with that
# reason.
Reward = Callable[[RewardRequest], Parts | Awaitable[Parts]]

# A reward as an actor calls it, with options and a validated result. Raises TimeoutError, else RewardFailed.
Scorer = Callable[[RewardRequest], Awaitable[float | dict[str, float]]]


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


def to_request(fields: JsonMapping) -> RewardRequest:
    """Return the request in a map of ``fields_of``; without the fields of episodes it is a response of one call."""
    return RewardRequest(
        prompt=fields["prompt"],
        response=fields["response"],
        label=fields["label"],
        status=Status(fields["status"]),
        tokens=np.frombuffer(base64.b64decode(fields["tokens"], validate=True), "<i4").astype(np.int32),
        metadata=fields["metadata"],
        response_length=fields["response_length"],
        sampled_length=fields.get("sampled_length", fields["response_length"]),
        num_turns=fields.get("num_turns", 1),
        transcript=tuple(fields.get("transcript", ())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """A kind of functions of users, which child processes run alike."""

    word: str
    """Name of the kind in messages: "reward"."""
    options: str
    argument: str
    path: str
    """Import path of this contract: child processes find it by this."""
    table: Mapping[str, str]
    encode: Callable[[Any], bytes]
    """Writes an argument as JSON. Raises TypeError, ValueError or RecursionError."""
    decode: Callable[[JsonMapping], Any]
    """Returns the argument in the map that ``encode`` has written."""
    checked: Callable[[str, object], Any]
    """Returns the result of the function with this name, as JSON has it. Raises RewardFailed."""


def contract_at(path: str) -> Contract:
    """Return the contract at an import path."""
    contract: Contract = find_object(path)
    return contract
