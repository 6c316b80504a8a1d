"""Several rewards in one: named parts with weights, each for all samples or for those with certain metadata.

The score is the weighted sum of the parts that apply. The value of each is kept beside it, so ``tail`` and ``show`` have it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from tidemill.bus.system.coroutines import first_error
from tidemill.bus.wire.messages import score_of
from tidemill.rewards.children.limits import Limits
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.part_settings import SCORE, Part
from tidemill.rewards.port import RewardRequest, Scorer
from tidemill.rewards.registry import checked
from tidemill.rewards.scorers.single import opened


@asynccontextmanager
async def opened_parts(parts: Sequence[Part], limits: Limits) -> AsyncIterator[Scorer]:
    """Give the scorer of a sum; each part has its own processes and limits. Raises as ``opened``."""
    async with AsyncExitStack() as stack:
        yield summed([(part, await stack.enter_async_context(opened(part.reward, part.options, limits))) for part in parts])


def summed(scorers: Sequence[tuple[Part, Scorer]]) -> Scorer:
    """Return a scorer with ``score``, the weighted sum, and the value of each part; a part's own parts are ``part.name``.

    It fails when one part fails, and when no part applies.
    """

    async def score(request: RewardRequest) -> float | dict[str, float]:
        """Score all parts that apply, at the same time."""
        applying = [(part, scorer) for part, scorer in scorers if part.applies(request.metadata)]
        if not applying:
            wanted = "; ".join(f"{part.name}: {dict(part.when)}" for part, _ in scorers)
            raise RewardFailed("reward_parts", f"no part applies to metadata {dict(request.metadata)!r}; they want {wanted}"[:2000])
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_named(part, scorer, request)) for part, scorer in applying]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        found: dict[str, float] = {SCORE: 0.0}
        for (part, _), task in zip(applying, tasks, strict=True):
            value = task.result()
            found[part.name] = score_of(value)
            found[SCORE] += part.weight * found[part.name]
            if isinstance(value, dict):
                found |= {f"{part.name}.{key}": number for key, number in value.items() if key != SCORE}
        return checked("reward_parts", found)

    return score


async def _named(part: Part, scorer: Scorer, request: RewardRequest) -> float | dict[str, float]:
    """Score one part; a failure names the part."""
    try:
        return await scorer(request)
    except RewardFailed as error:
        raise RewardFailed(part.name, f"{part.name}: {error.reason}") from None
    except TimeoutError:
        raise RewardFailed(part.name, f"{part.name}: no result in time") from None
