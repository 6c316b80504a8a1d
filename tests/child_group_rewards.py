"""Rewards of groups for tests of child processes, in a module that imports nothing of pytest or torch: every child
imports it.
"""

from tidemill.bus.wire.messages import score_of
from tidemill.rewards.group import GroupRequest


def ranks(request: GroupRequest, *, offset: float = 0.0) -> list[float]:
    """Rank the responses by their text; without the rewards of each."""
    order = sorted(sample.response for sample in request.samples)
    return [order.index(sample.response) + offset for sample in request.samples]


async def with_own(request: GroupRequest) -> list[dict[str, float]]:
    return [{"score": 10.0 + score_of(reward), "own": score_of(reward)} for reward in request.rewards]


def of_episodes(request: GroupRequest) -> list[dict[str, float]]:
    """Score each episode with its place, and return sizes of it as parts."""
    return [
        {"score": float(place), "sampled": one.sampled_length, "turns": one.num_turns, "messages": len(one.transcript)}
        for place, one in enumerate(request.samples)
    ]


def too_few(request: GroupRequest) -> list[float]:
    return [1.0]


def raises(request: GroupRequest) -> list[float]:
    raise KeyError("group")
