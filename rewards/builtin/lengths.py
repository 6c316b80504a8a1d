"""Rewards for the length of a response, and for the absence of repeated phrases, as parts of a sum.

Sources: ``overlong`` soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13), which
``learner.algorithm.overlong.buffer`` does in the learner, for rewards of any actor. ``repetition`` the n-gram
repetition penalty of "Demystifying Long Chain-of-Thought Reasoning" (Yeo et al. 2025, arXiv 2502.03373).
"""

from tidemill.rewards.port import RewardRequest


def length(request: RewardRequest, *, target: int, slope: float = 1.0, shorter: bool = False) -> float:
    """Return minus ``slope`` times the relative excess over ``target`` sampled tokens, at least -1; 0 up to the target.

    ``shorter``: too short responses lose, too (L1-Exact, Aggarwal and Welleck 2025, 2503.04697, in relative terms).
    """
    away = (request.sampled_length - target) / max(1, target)
    return -min(1.0, slope * (abs(away) if shorter else max(0.0, away)))


def overlong(request: RewardRequest, *, max_tokens: int, buffer: int) -> float:
    """Return 0 up to ``max_tokens - buffer`` sampled tokens, then a line to -1 at ``max_tokens``, and -1 beyond."""
    begin = max_tokens - buffer
    if request.sampled_length <= begin:
        return 0.0
    return -min((request.sampled_length - begin) / buffer, 1.0) if buffer > 0 else -1.0


def repetition(request: RewardRequest, *, ngram: int = 3, penalty: float = 1.0) -> float:
    """Return ``-penalty`` times the share of n-grams of words that occurred before; 0 for fewer than ``ngram`` words."""
    words = request.response.lower().split()
    total = len(words) - ngram + 1
    if total <= 0 or ngram <= 0:
        return 0.0
    distinct = len({tuple(words[place : place + ngram]) for place in range(total)})
    return -penalty * (1 - distinct / total)
