"""Limits of an episode, as part of its task. Settings use it, too, so it loads no numpy."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of an episode; 0 = none."""

    turns: int = 0
    tokens: int = 0
    """Sampled tokens."""
    context: int = 0
    """Tokens of one sequence."""
    total_tokens: int = 0
    """Tokens of all sequences, L."""
    seconds: float = 0.0
