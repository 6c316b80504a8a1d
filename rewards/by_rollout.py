"""For runs in which every episode gets its reward from its rollout."""

from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.part_settings import BY_ROLLOUT
from tidemill.rewards.port import RewardRequest


def by_rollout(request: RewardRequest) -> float:
    """Raise RewardFailed: it is asked only for a response that has no reward yet."""
    raise RewardFailed(BY_ROLLOUT, "the rollout gave the episode no reward; let its program return one, or name a reward for such episodes")
