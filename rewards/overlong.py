"""Penalty for long responses, as a part of a sum.

Source: soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13). ``learner.algorithm.overlong_buffer`` does the
same in the learner, for rewards of any actor.
"""

from tidemill.rewards.port import RewardRequest


def overlong(request: RewardRequest, *, max_tokens: int, buffer: int) -> float:
    """Return 0 up to ``max_tokens - buffer`` sampled tokens of the response, then a line to -1 at ``max_tokens``, and -1 beyond."""
    begin = max_tokens - buffer
    if request.sampled_length <= begin:
        return 0.0
    return -min((request.sampled_length - begin) / buffer, 1.0) if buffer > 0 else -1.0
