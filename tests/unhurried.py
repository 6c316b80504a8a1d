"""Rewards that take time, but no processor time: a run with them makes few steps a second, and leaves the cores to
processes that start.

In a module of its own, so that actors find it by its import path.
"""

import asyncio
import os
import time

import tidemill.rewards.builtin.text
from tidemill.rewards.port import RewardRequest

WAIT_S = 0.4
HELD_S, LOOK_S = 4.0, 0.1
UNHURRIED = "actor.reward=tests.unhurried:digits"
"""The setting that names the reward ``digits``."""


async def digits(request: RewardRequest, *, wait_s: float = WAIT_S) -> float:
    await asyncio.sleep(wait_s)
    return tidemill.rewards.builtin.text.digits(request)


async def held(request: RewardRequest, *, until: str = "") -> float:
    """Take ``HELD_S`` seconds, or until there is the file ``until``: a run cannot end before a test has done its
    part.
    """
    deadline = time.monotonic() + HELD_S
    while time.monotonic() < deadline and not os.path.exists(until):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(LOOK_S)
    return tidemill.rewards.builtin.text.digits(request)
