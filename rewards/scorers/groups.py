"""The scorer of a reward of groups."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rewards.children.limits import Limits
from rewards.children.pool import Children
from rewards.errors import RewardFailed
from rewards.group import GROUP, TABLE, GroupRequest, Reward
from rewards.registry import bind

GRACE_S = 5.0
"""Seconds beyond its limit in which a result must come; child processes end calls by themselves."""
GroupScorer = Callable[[GroupRequest], Awaitable[list[Reward]]]
"""A reward of groups as an actor calls it: one checked reward for each sample. Raises RewardFailed, TimeoutError."""


@asynccontextmanager
async def opened_group(name: str, options: Mapping[str, object], limits: Limits) -> AsyncIterator[GroupScorer]:
    """Give the scorer of a reward of groups: a built-in one runs here, one by import path in child processes.

    Raises UnknownReward, BadRewardOption, RewardFailed (the process with the reward could not be started).
    """
    if name in TABLE or ":" not in name:
        bound = bind(name, options, GROUP)

        async def call(request: GroupRequest) -> Any:
            """Call a built-in reward."""
            return bound.checked(request)

        yield _of_all(name, call, limits.timeout_s)
        return
    async with Children(name, options, limits, GROUP) as pool:
        yield _of_all(name, pool.call, limits.timeout_s)


def _of_all(name: str, call: Callable[[GroupRequest], Awaitable[list[Reward]]], timeout_s: float) -> GroupScorer:
    async def score(request: GroupRequest) -> list[Reward]:
        """Score within the limit, and compare the number of rewards with that of the samples."""
        async with asyncio.timeout(timeout_s + GRACE_S):
            found = await call(request)
        if len(found) != len(request.samples):
            raise RewardFailed(name, f"want {len(request.samples)} rewards, one for each sample, got {len(found)}", GROUP.word)
        return found

    return score
