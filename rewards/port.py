"""The reward interface: a function from one finished response to a number. Knows no reward and no transport."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Prompt, Status

Parts = float | Mapping[str, float]
"""A number, or named numbers of which ``score`` is the one to train on."""


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
    """Metadata of the task."""
    response_length: int = 0
    """Tokens of the response, those of tools and observations included."""
    sampled_length: int = 0
    """Tokens of the response that the model has sampled."""
    num_turns: int = 1
    """Model calls."""
    transcript: tuple[JsonObject, ...] = ()
    """Messages of the episode, results of tools among them; empty for one call without messages."""


Reward = Callable[[RewardRequest], Parts | Awaitable[Parts]]
"""A plain or an async callable. Its keyword parameters are its options. If it raises, or returns a number that no sample
may have (outside +-1e6, ``bus/wire/invariants.py``), the sample is FAILED with that reason."""

Scorer = Callable[[RewardRequest], Awaitable[float | dict[str, float]]]
"""A reward as an actor calls it: options bound, always awaitable, result validated.

Raises TimeoutError after its time limit (``tidemill.rewards.scorers.single.opened``), and RewardFailed for everything else."""
