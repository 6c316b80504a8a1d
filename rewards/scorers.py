"""Scorers: a reward, a sum of rewards or a reward of groups as an actor calls it, in its own process or in child
processes.

A sum has named parts with weights, each for all samples or for those with certain metadata. Its score is the weighted
sum of the parts that apply; the value of each is kept beside it, so ``tail`` and ``show`` have it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tidemill.bus.system.coroutines import first_error
from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.messages import score_of
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.group import ASKING as ASKING_OF_GROUPS
from tidemill.rewards.group import GROUP, GroupRequest, Reward
from tidemill.rewards.group import TABLE as TABLE_OF_GROUPS
from tidemill.rewards.part_settings import SCORE, RewardPart
from tidemill.rewards.port import RewardRequest, Scorer
from tidemill.rewards.processes.function_processes import FunctionProcesses
from tidemill.rewards.registry import IN_THREAD, REWARD, TABLE, bind, checked, is_unbounded, load


@asynccontextmanager
async def opened(
    name: str, options: Mapping[str, object] | None = None, limits: ProcessLimits | None = None
) -> AsyncIterator[Scorer]:
    """Give the scorer of a reward: a built-in one runs here, one by import path in child processes, with their limits.

    The option ``in_thread`` keeps a reward by import path in this process. A scorer raises TimeoutError after
    ``limits.timeout_s``. Raises UnknownReward, BadRewardOption, RewardFailed (no process could be started).
    """
    limits = limits or ProcessLimits()
    if never_waits(name, options) or IN_THREAD in (options or {}):
        scorer = load(name, options)
        # A function in the event loop cannot be ended, and a timer for each call costs as much as a short one.
        yield _within(scorer, limits.timeout_s) if IN_THREAD in (options or {}) else scorer
        return
    if ":" not in name and name not in TABLE:
        load(name, options)  # raises UnknownReward
    async with FunctionProcesses(name, options or {}, limits, REWARD) as pool:
        yield pool.call


def never_waits(name: str, options: Mapping[str, object] | None = None) -> bool:
    """Return whether a reward is a short built-in function that runs in the event loop."""
    return name in TABLE and not is_unbounded(name, options) and IN_THREAD not in (options or {})


def _within(score: Scorer, timeout_s: float) -> Scorer:
    async def bounded(request: RewardRequest) -> float | dict[str, float]:
        async with asyncio.timeout(timeout_s):
            return await score(request)

    return bounded


@asynccontextmanager
async def opened_parts(parts: Sequence[RewardPart], limits: ProcessLimits) -> AsyncIterator[Scorer]:
    """Give the scorer of a sum; each part has its own processes and limits. Raises as ``opened``."""
    async with AsyncExitStack() as stack:
        scorers = [await stack.enter_async_context(opened(part.reward, part.options, limits)) for part in parts]
        yield summed(list(zip(parts, scorers, strict=True)))


def summed(scorers: Sequence[tuple[RewardPart, Scorer]]) -> Scorer:
    """Return a scorer with ``score``, the weighted sum, and the value of each part (its own parts as ``part.name``).

    It fails when one part fails, and when no part applies.
    """

    async def score(request: RewardRequest) -> float | dict[str, float]:
        applying = [(part, scorer) for part, scorer in scorers if part.applies(request.metadata)]
        if not applying:
            conditions = "; ".join(f"{part.name}: {dict(part.when)}" for part, _ in scorers)
            reason = f"no part applies to metadata {dict(request.metadata)!r}; they want {conditions}"
            raise RewardFailed("reward_parts", reason[:2000])
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_named(part, scorer, request)) for part, scorer in applying]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        values: dict[str, float] = {SCORE: 0.0}
        for (part, _), task in zip(applying, tasks, strict=True):
            value = task.result()
            values[part.name] = score_of(value)
            values[SCORE] += part.weight * values[part.name]
            if isinstance(value, dict):
                values |= {f"{part.name}.{key}": number for key, number in value.items() if key != SCORE}
        return checked("reward_parts", values)

    return score


async def _named(part: RewardPart, scorer: Scorer, request: RewardRequest) -> float | dict[str, float]:
    """Score one part; a failure names the part."""
    try:
        return await scorer(request)
    except RewardFailed as error:
        raise RewardFailed(part.name, f"{part.name}: {error.reason}", outside=error.outside) from None
    except TimeoutError:
        raise RewardFailed(part.name, f"{part.name}: no result in time") from None


# A reward of groups as an actor calls it: one checked reward for each sample. Raises RewardFailed, TimeoutError.
GroupScorer = Callable[[GroupRequest], Awaitable[list[Reward]]]


@asynccontextmanager
async def opened_group(name: str, options: Mapping[str, object], limits: ProcessLimits) -> AsyncIterator[GroupScorer]:
    """Give the scorer of a reward of groups; one by import path, or that asks a server, runs in child processes.

    Raises UnknownReward, BadRewardOption, RewardFailed (no process could be started).
    """
    if name not in ASKING_OF_GROUPS and (name in TABLE_OF_GROUPS or ":" not in name):
        bound = bind(name, options, GROUP)

        async def call(request: GroupRequest) -> Any:
            return bound.checked(request)

        yield _of_all(name, call)
        return
    async with FunctionProcesses(name, options, limits, GROUP) as pool:
        yield _of_all(name, pool.call)


def _of_all(name: str, call: Callable[[GroupRequest], Awaitable[list[Reward]]]) -> GroupScorer:
    async def score(request: GroupRequest) -> list[Reward]:
        rewards = await call(request)
        if len(rewards) != len(request.samples):
            want = f"{len(request.samples)} rewards, one for each sample"
            raise RewardFailed(name, f"want {want}, got {len(rewards)}", GROUP.word)
        return rewards

    return score
