"""Penalty for repeated phrases, as a part of a sum.

Source: the n-gram repetition penalty of "Demystifying Long Chain-of-Thought Reasoning" (Yeo et al. 2025, arXiv 2502.03373).
"""

from tidemill.rewards.port import RewardRequest


def repetition(request: RewardRequest, *, ngram: int = 3, penalty: float = 1.0) -> float:
    """Return ``-penalty`` times the share of n-grams of words that occurred before; 0 for a response shorter than ``ngram`` words."""
    words = request.response.lower().split()
    total = len(words) - ngram + 1
    if total <= 0 or ngram <= 0:
        return 0.0
    distinct = len({tuple(words[place : place + ngram]) for place in range(total)})
    return -penalty * (1 - distinct / total)
