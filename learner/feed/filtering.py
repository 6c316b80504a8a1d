"""Runs the filters of a run on complete groups: built-in ones here, those by import path in child processes, which can be killed.

    DataSource.unjudged() --> filters, in their order --> judged() --> a record settles the drops

A filter that fails, or is too slow, drops the group with the reason ``failed``: a group that a filter should have seen is not trained
unseen.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from bus.client.waiter import Waiter
from bus.wire.messages import Sample, Task
from learner.data.datasource import DataSource
from learner.data.filter_settings import BUILT_IN, FilterConfig
from learner.data.filters import FILTER, Decision, FilterGroup, decision_in, group_of
from learner.data.groups import Verdict
from learner.data.selection import FILTERED
from rewards.children.limits import Limits
from rewards.children.pool import Children
from rewards.errors import RewardFailed
from rewards.registry import bind

log = logging.getLogger(__name__)

Judge = Callable[[FilterGroup], Awaitable[Any]]
"""Returns the map of a Decision for a group (``decision_of``)."""
FAILED = "failed"
"""Reason of a group that a filter could not decide on."""
LOOK_AGAIN_S = 5.0
"""Longest sleep of the loop, which is normally woken."""
DROPPED_SHARE = 0.9
"""Share of dropped groups among the last ones that is named as trouble."""
MAX_AT_ONCE = 64
"""Groups that are judged at the same time."""


@dataclass(frozen=True, slots=True)
class OpenFilter:
    """A filter that can be called."""

    config: FilterConfig
    judge: Judge

    async def decide(self, group: FilterGroup) -> Decision:
        """Return its decision. Raises RewardFailed, TimeoutError."""
        return decision_in(self.config.name, await self.judge(group), group)


@asynccontextmanager
async def opened_filters(configs: Sequence[FilterConfig]) -> AsyncIterator[tuple[OpenFilter, ...]]:
    """Give the filters, with their processes. Raises UnknownReward, BadRewardOption, RewardFailed."""
    async with AsyncExitStack() as stack:
        filters = []
        for config in configs:
            if config.use in BUILT_IN:
                judge = _here(config)
            else:
                limits = Limits(timeout_s=config.timeout_s, workers=config.workers)
                judge = (await stack.enter_async_context(Children(config.use, config.options, limits, FILTER))).call
            filters.append(OpenFilter(config, judge))
        yield tuple(filters)


def _here(config: FilterConfig) -> Judge:
    bound = replace(bind(config.use, config.options, FILTER), name=config.name)

    async def judge(group: FilterGroup) -> Any:
        """Call a built-in filter."""
        return bound.checked(group)

    return judge


class Filtering:
    """The loop that judges, and its counts."""

    def __init__(
        self, filters: Sequence[OpenFilter], source: DataSource, samples: Callable[[], Mapping[int, Sample]], decide: Callable[[], None]
    ) -> None:
        """``samples``: the buffered samples by sequence. ``decide``: called after each verdict."""
        self._filters, self._source, self._samples, self._decide = filters, source, samples, decide
        self.waiter = Waiter()
        """Woken when a group may have become complete."""
        self.counts: Counter[str] = Counter()
        """Counts since this start, by filter: ``NAME`` = groups dropped, ``NAME.masked`` = samples masked, ``NAME.failed`` = failed calls.
        With ``count_only``: those that it would have dropped and masked."""
        self.judged = 0
        """Groups judged in this start."""
        self._failure = ""
        self._last: deque[str] = deque(maxlen=MAX_AT_ONCE)
        """Reasons of the last groups; empty for those that are kept."""
        self._running: set[int] = set()

    async def run(self) -> None:
        """Background loop: judge complete groups, several at once."""
        async with asyncio.TaskGroup() as group:
            while True:
                for task, seqs in self._source.unjudged():
                    if task.id not in self._running and len(self._running) < MAX_AT_ONCE:
                        self._running.add(task.id)
                        group.create_task(self._judge(task, seqs))
                await self.waiter.wait(LOOK_AGAIN_S)

    async def _judge(self, task: Task, seqs: Sequence[int]) -> None:
        try:
            verdict = await self.verdict(task, [self._samples()[seq] for seq in seqs])
        finally:
            self._running.discard(task.id)
        self._source.judged(task.id, verdict, seqs)
        self._decide()
        self.waiter.wake()  # others may have waited for room

    async def verdict(self, task: Task, samples: Sequence[Sample]) -> Verdict:
        """Return the verdict of all filters on a complete group."""
        group = group_of(task, samples, self._source.versions, self._source.step + 1)
        reason, masked, priority = "", set[int](), 0.0
        for one in self._filters:
            name = one.config.name
            try:
                decision = await one.decide(group)
            except (RewardFailed, TimeoutError) as error:
                self.counts[f"{name}.failed"] += 1
                self._failure = f"filter {name}: {_words(error)}"[:500]
                log.warning("filter failed name=%s task=%d reason=%s", name, task.id, _words(error))
                decision = Decision(keep=False, reason=FAILED)
            self.counts[name] += not decision.keep
            self.counts[f"{name}.masked"] += len(decision.masked)
            if one.config.count_only:
                continue
            masked |= set(decision.masked)
            priority += decision.priority
            if not decision.keep or len(masked) == len(samples):
                reason = ":".join([FILTERED, name, *([decision.reason] if decision.reason else [])])
                break
        self.judged += 1
        self._last.append(reason)
        return Verdict(reason=reason, masked=frozenset(masked), priority=priority)

    @property
    def trouble(self) -> str:
        """Report for an operator: filters that fail, or that drop nearly everything; empty = nothing."""
        found = [self._failure] if self._failure else []
        dropped = Counter(reason for reason in self._last if reason)
        if len(self._last) == MAX_AT_ONCE and dropped.total() >= DROPPED_SHARE * MAX_AT_ONCE:
            most = dropped.most_common(1)[0][0]
            found.append(f"filters drop {dropped.total()} of the last {MAX_AT_ONCE} groups, most of them as {most}")
        return "; ".join(found)

    def load(self) -> dict[str, float]:
        """Return the counts for the live row."""
        return {f"filter.{name}": float(count) for name, count in self.counts.items() if count}


def _words(error: RewardFailed | TimeoutError) -> str:
    return error.reason if isinstance(error, RewardFailed) else "no result in time"
