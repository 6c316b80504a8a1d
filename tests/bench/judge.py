"""A slow reward, like a judge behind a network: it costs latency and no computation."""

import asyncio

from tidemill.rewards.digits import digits
from tidemill.rewards.port import RewardRequest


async def judged(request: RewardRequest, *, seconds: float) -> float:
    """Return the reward of ``tidemill.rewards.digits`` after ``seconds``."""
    await asyncio.sleep(seconds)
    return digits(request)
