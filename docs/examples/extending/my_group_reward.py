"""A reward of groups: what is left of each reward when the best one of the prompt is taken off."""

from tidemill.bus import score_of
from tidemill.rewards import GroupRequest


def behind_the_best(request: GroupRequest, *, scale: float = 1.0) -> list[dict[str, float]]:
    """Give 0 to the best responses and less to the others; the reward by ``actor.reward`` stays as a part."""
    scores = [score_of(reward) for reward in request.rewards]
    best = max(scores, default=0.0)
    return [{"score": scale * (score - best), "own": score} for score in scores]
