"""Reward for the length of a response, as a part of a sum."""

from tidemill.rewards.port import RewardRequest


def length(request: RewardRequest, *, target: int, slope: float = 1.0, shorter: bool = False) -> float:
    """Return minus ``slope`` times the relative excess over ``target`` sampled tokens, at least -1; 0 up to the target.

    ``shorter``: too short responses lose in the same way (L1-Exact, Aggarwal and Welleck 2025, 2503.04697, in relative terms).
    """
    away = (request.sampled_length - target) / max(1, target)
    return -min(1.0, slope * (abs(away) if shorter else max(0.0, away)))
