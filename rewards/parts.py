"""Several rewards in one: named parts with weights, each for all samples or for those with certain metadata.

The score is the weighted sum of the parts that apply. The value of each is kept beside it, so ``tail`` and ``show`` have it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bus.system.coroutines import first_error
from bus.wire.messages import score_of
from rewards.children.limits import Limits
from rewards.children.pool import opened
from rewards.errors import RewardFailed
from rewards.port import RewardRequest, Scorer
from rewards.registry import checked

SCORE = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One reward of a sum."""

    name: str
    reward: str
    """Name or import path."""
    weight: float = 1.0
    """Factor of its score in the sum; 0 = it is only recorded."""
    options: Mapping[str, Any] = field(default_factory=dict)
    when: Mapping[str, Any] = field(default_factory=dict)
    """Metadata that a sample must have for this part to apply; empty = any."""

    def applies(self, metadata: Mapping[str, Any]) -> bool:
        """Return whether this part is for a sample with such metadata."""
        return all(metadata.get(key) == value for key, value in self.when.items())


def read_parts(values: Mapping[str, Any]) -> list[Part]:
    """Return the parts of the setting ``reward_parts``. Raises ValueError naming the field."""
    return [_part(name, value) for name, value in values.items()]


def _part(name: str, value: Any) -> Part:
    where = f"reward_parts.{name}"
    if name == SCORE:
        raise ValueError(f"{where}: want another name; the sum has this one")
    if isinstance(value, str):
        value = {"reward": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("reward"), str):
        raise ValueError(f"{where}: want a reward, or a map with reward and, if needed, weight, options and when, got {value!r}")
    if unknown := sorted(map(str, value.keys() - {"reward", "weight", "options", "when"})):
        raise ValueError(f"{where}.{unknown[0]}: want one of reward, weight, options and when")
    weight = value.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not abs(weight) <= 1e6:
        raise ValueError(f"{where}.weight: want a number within +-1e6, got {weight!r}")
    for key in ("options", "when"):
        if not isinstance(value.get(key, {}), Mapping):
            raise ValueError(f"{where}.{key}: want a map, got {value[key]!r}")
    return Part(
        name=name, reward=value["reward"], weight=float(weight), options=dict(value.get("options", {})), when=dict(value.get("when", {}))
    )


@asynccontextmanager
async def opened_parts(parts: Sequence[Part], limits: Limits) -> AsyncIterator[Scorer]:
    """Give the scorer of a sum; each part has its own processes and limits. Raises what ``opened`` raises."""
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
    """Score one part; a failure says which."""
    try:
        return await scorer(request)
    except RewardFailed as error:
        raise RewardFailed(part.name, f"{part.name}: {error.reason}") from None
    except TimeoutError:
        raise RewardFailed(part.name, f"{part.name}: no result in time") from None
    except Exception as error:  # a reward in this process raises anything
        raise RewardFailed(part.name, f"{part.name}: {error!r}") from error
