"""Parts of messages about episodes of several turns: sizes of token sequences, turns in columns. Knows no transport.

Shape letters: L = tokens of all sequences, R = tokens of all response regions, C = turns of the episode.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SequenceSize(NamedTuple):
    """Size of one token sequence of a sample."""

    num_tokens: int
    """All of its tokens, its own context included."""
    response_length: int
    """Tokens from the first one trained in it to its end."""


def _no_seconds() -> NDArray[np.float32]:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The model calls of an episode as columns, in order of delivery. Each of the columns with a default has C values, or none."""

    at: NDArray[np.int32]
    """Place of the turn's first sampled token on the R axis, [C]."""
    tokens: NDArray[np.int32]
    """Sampled tokens, [C]."""
    begin_s: NDArray[np.float32] = field(default_factory=_no_seconds)
    """Seconds from the begin of the episode to the turn's request."""
    seconds: NDArray[np.float32] = field(default_factory=_no_seconds)
    """Seconds of the model call."""
    tools_s: NDArray[np.float32] = field(default_factory=_no_seconds)
    """Seconds of tools and environment after it: those without a model call under way, up to the next call or the end of the episode."""
    id: tuple[str, ...] = ()
    finish: tuple[str, ...] = ()
    """Finish reason, as the engine returned it."""
    agent: tuple[str, ...] = ()
    """Name of the agent within the episode; empty = its only one."""
    rewards: tuple[tuple[int, float], ...] = ()
    """(turn, reward) of the turns with a reward of their own."""
