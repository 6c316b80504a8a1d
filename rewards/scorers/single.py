"""The scorer of one reward: a built-in one runs in this process, one by import path in child processes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tidemill.rewards.children.limits import Limits
from tidemill.rewards.children.pool import Children
from tidemill.rewards.port import RewardRequest, Scorer
from tidemill.rewards.registry import IN_THREAD, REWARD, TABLE, is_unbounded, load


@asynccontextmanager
async def opened(name: str, options: Mapping[str, object] | None = None, limits: Limits | None = None) -> AsyncIterator[Scorer]:
    """Give the scorer of a reward: a built-in one runs in this process, one by import path in children, with their limits.

    The option ``in_thread`` keeps a reward by import path in this process. A scorer raises TimeoutError after ``limits.timeout_s``.
    Raises UnknownReward, BadRewardOption, RewardFailed (the process with the reward could not be started).
    """
    limits = limits or Limits()
    if (name in TABLE and not is_unbounded(name, options)) or IN_THREAD in (options or {}):
        yield _within(load(name, options), limits.timeout_s)
        return
    if ":" not in name and name not in TABLE:
        load(name, options)  # raises UnknownReward
    async with Children(name, options or {}, limits, REWARD) as pool:
        yield pool.call


def _within(score: Scorer, timeout_s: float) -> Scorer:
    async def bounded(request: RewardRequest) -> float | dict[str, float]:
        """Score within the limit."""
        async with asyncio.timeout(timeout_s):
            return await score(request)

    return bounded
