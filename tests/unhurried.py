"""A reward that takes time, but no processor time: a run with it makes two or three steps a second, and leaves the cores to what starts.

In a module of its own, so that actors find it by its import path.
"""

import asyncio

import rewards.digits
from rewards.port import RewardRequest

WAIT_S = 0.4
UNHURRIED = "actor.reward=tests.unhurried:digits"
"""The setting that names this reward."""


async def digits(request: RewardRequest) -> float:
    await asyncio.sleep(WAIT_S)
    return rewards.digits.digits(request)
