"""What a reward is: a function from one finished response to a number. Knows no reward and no transport."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.messages import Prompt, Status

Parts = float | Mapping[str, float]
"""A number, or named numbers of which ``score`` is the one to train on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """One finished response, as a reward sees it."""

    prompt: Prompt
    response: str
    label: Any
    """Whatever the prompt file has under its label key."""
    status: Status
    """COMPLETED, or TRUNCATED when it ran into a length limit."""
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Prompt and response, [L]."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Of the task."""


Reward = Callable[[RewardRequest], Parts | Awaitable[Parts]]
"""A plain or an async callable. Its keyword parameters are its options. It may raise, or
give a number that no sample may have (not within +-1e6, ``bus/invariants.py``): the sample is FAILED then, with the reason."""

Scorer = Callable[[RewardRequest], Awaitable[float | dict[str, float]]]
"""A reward as ``rewards.registry.load`` gives it: options bound, always awaitable, its result checked."""
