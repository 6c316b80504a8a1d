"""A reward that takes time, but no processor time."""

import asyncio

import rewards.digits
from rewards.port import RewardRequest

WAIT_S = 0.3


async def digits(request: RewardRequest) -> float:
    await asyncio.sleep(WAIT_S)
    return rewards.digits.digits(request)
