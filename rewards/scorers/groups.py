"""The scorer of a reward of groups."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tidemill.rewards.children.limits import Limits
from tidemill.rewards.children.pool import Children
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.group import ASKING, GROUP, TABLE, GroupRequest, Reward
from tidemill.rewards.registry import bind

GroupScorer = Callable[[GroupRequest], Awaitable[list[Reward]]]
"""A reward of groups as an actor calls it: one checked reward for each sample. Raises RewardFailed, TimeoutError."""


@asynccontextmanager
async def opened_group(name: str, options: Mapping[str, object], limits: Limits) -> AsyncIterator[GroupScorer]:
    """Give the scorer of a reward of groups: a built-in one runs here, one that asks a server, or by import path, in child processes.

    Raises UnknownReward, BadRewardOption, RewardFailed (the process with the reward could not be started).
    """
    if name not in ASKING and (name in TABLE or ":" not in name):
        bound = bind(name, options, GROUP)

        async def call(request: GroupRequest) -> Any:
            """Call a built-in reward."""
            return bound.checked(request)

        yield _of_all(name, call)
        return
    async with Children(name, options, limits, GROUP) as pool:
        yield _of_all(name, pool.call)


def _of_all(name: str, call: Callable[[GroupRequest], Awaitable[list[Reward]]]) -> GroupScorer:
    async def score(request: GroupRequest) -> list[Reward]:
        """Score, and compare the number of rewards with that of the samples."""
        found = await call(request)
        if len(found) != len(request.samples):
            raise RewardFailed(name, f"want {len(request.samples)} rewards, one for each sample, got {len(found)}", GROUP.word)
        return found

    return score
