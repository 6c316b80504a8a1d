"""Runs the filters of a run: built-in ones here, those by import path in child processes, which can be killed.

    DataSource.unjudged() --> filters of groups, in their order --> judged()
                                                                       |
    DataSource.unchosen() --> buffer filters, in their order ------> chosen() --> a record settles the drops

A filter that fails, or is too slow, drops the group with the reason ``failed``, and a buffer filter all that it was
called with: a group that a filter should have seen is not trained unseen.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.messages import Sample, Task
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.groups import Verdict
from tidemill.learner.buffer.step_plan import FILTERED
from tidemill.learner.data import BUILT_IN, FilterConfig
from tidemill.learner.filters import (
    FILTER,
    Decision,
    FilterBuffer,
    FilterGroup,
    buffer_group,
    contract_of,
    decision_in,
    decisions_in,
    group_of,
)
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.processes.function_processes import FunctionProcesses
from tidemill.rewards.registry import bind

log = logging.getLogger(__name__)

Judge = Callable[[Any], Awaitable[Any]]
"""Function from a FilterGroup to the map of a Decision, or from a FilterBuffer to the maps of all its groups."""
Unchosen = tuple[Task, Sequence[int], float]
"""As ``DataSource.unchosen`` returns a group."""
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

    async def choose(self, buffer: FilterBuffer) -> list[Decision]:
        """Return the decision of a buffer filter on each group. Raises RewardFailed, TimeoutError."""
        return decisions_in(self.config.name, await self.judge(buffer), buffer)


@asynccontextmanager
async def opened_filters(configs: Sequence[FilterConfig]) -> AsyncIterator[tuple[OpenFilter, ...]]:
    """Yield the filters, with their processes. Raises UnknownReward, BadRewardOption, RewardFailed."""
    async with AsyncExitStack() as stack:
        filters = []
        for config in configs:
            if config.use in BUILT_IN:
                judge = _built_in(config)
            else:
                limits = ProcessLimits(timeout_s=config.timeout_s, workers=config.workers)
                processes = FunctionProcesses(config.use, config.options, limits, contract_of(config))
                judge = (await stack.enter_async_context(processes)).call
            filters.append(OpenFilter(config, judge))
        yield tuple(filters)


def _built_in(config: FilterConfig) -> Judge:
    bound = replace(bind(config.use, config.options, FILTER), name=config.name)

    async def judge(group: FilterGroup) -> Any:
        """Call a built-in filter."""
        return bound.checked(group)

    return judge


class Filtering:
    """The loop that judges, and its counts."""

    def __init__(
        self,
        filters: Sequence[OpenFilter],
        source: DataSource,
        *,
        may_plan: Callable[[], bool],
        decide: Callable[[], None],
    ) -> None:
        """``may_plan``: returns whether the ranks take another step. ``decide``: called after each verdict."""
        self._filters = [opened for opened in filters if opened.config.scope == "group"]
        self._buffer_filters = [opened for opened in filters if opened.config.scope == "buffer"]
        self._source, self._may_plan, self._decide = source, may_plan, decide
        self.waiter = Waiter()
        """Woken when a group may have become complete, and when a step may be planned that lacks groups."""
        self.counts: Counter[str] = Counter()
        """Counts since this start, by filter: ``NAME`` = groups dropped, ``NAME.masked`` = samples masked,
        ``NAME.failed`` = failed calls. With ``count_only``: what it would have dropped and masked.
        """
        self.judged = 0
        """Groups judged in this start."""
        self._failure = ""
        self._last: deque[str] = deque(maxlen=MAX_AT_ONCE)
        """Reasons of the last groups; empty for a group that is kept."""
        self._running: set[int] = set()
        self._choosing = False

    async def run(self) -> None:
        """Background loop: judge complete groups, several at once, and the buffer."""
        async with asyncio.TaskGroup() as group:
            while True:
                for task, seqs in self._source.unjudged():
                    if task.id not in self._running and len(self._running) < MAX_AT_ONCE:
                        self._running.add(task.id)
                        group.create_task(self._judge(task, seqs, self._samples(task)))
                may_choose = self._buffer_filters and not self._choosing and self._may_plan()
                if may_choose and (unchosen := self._source.unchosen()):
                    self._choosing = True
                    group.create_task(self._choose(self._buffer_groups(unchosen), unchosen))
                await self.waiter.wait(LOOK_AGAIN_S)

    def _samples(self, task: Task) -> list[Sample]:
        """Return the samples that a group has now: it may be settled, or get another one, before a filter runs."""
        return [row.content for row in self._source.group(task.id).rows]

    async def _judge(self, task: Task, seqs: Sequence[int], samples: Sequence[Sample]) -> None:
        try:
            verdict = await self.verdict(task, samples)
        finally:
            self._running.discard(task.id)
        self._source.judged(task.id, verdict, seqs)
        self._decide()
        self.waiter.wake()  # others may have waited for room

    async def verdict(self, task: Task, samples: Sequence[Sample]) -> Verdict:
        """Return the verdict of all filters on a complete group."""
        group = group_of(task, samples, self._source.versions, self._source.step + 1)
        reason, masked, priority = "", set[int](), 0.0
        for opened in self._filters:
            name = opened.config.name
            try:
                decision = await opened.decide(group)
            except (RewardFailed, TimeoutError) as error:
                self._failed(name, error, f"task={task.id}")
                decision = Decision(keep=False, reason=FAILED)
            self.counts[name] += not decision.keep
            self.counts[f"{name}.masked"] += len(decision.masked)
            if opened.config.count_only:
                continue
            masked |= set(decision.masked)
            priority += decision.priority
            if not decision.keep or len(masked) == len(samples):
                reason = _reason(name, decision)
                break
        self.judged += 1
        self._last.append(reason)
        return Verdict(reason=reason, masked=frozenset(masked), priority=priority)

    def _buffer_groups(self, unchosen: Sequence[Unchosen]) -> FilterBuffer:
        step, versions = self._source.step + 1, self._source.versions
        groups = [buffer_group(task, self._samples(task), versions, step, priority) for task, _, priority in unchosen]
        return FilterBuffer(step=step, num_wanted=self._source.rules.groups_per_step, groups=tuple(groups))

    async def _choose(self, buffer: FilterBuffer, unchosen: Sequence[Unchosen]) -> None:
        try:
            choices = await self.choices(buffer)
        finally:
            self._choosing = False
        self._source.chosen(buffer.step, [(task.id, seqs, choices[task.id]) for task, seqs, _ in unchosen])
        self._decide()
        self.waiter.wake()  # another group may have become complete meanwhile

    async def choices(self, buffer: FilterBuffer) -> dict[int, Verdict]:
        """Return the verdict of all buffer filters on each group, by task, with the priorities that they add."""
        verdicts = {group.task: Verdict() for group in buffer.groups}
        for opened in self._buffer_filters:
            name = opened.config.name
            try:
                decisions = await opened.choose(buffer)
            except (RewardFailed, TimeoutError) as error:
                self._failed(name, error, f"step={buffer.step} groups={len(buffer.groups)}")
                decisions = [Decision(keep=False, reason=FAILED)] * len(buffer.groups)
            self.counts[name] += sum(not decision.keep for decision in decisions)
            if opened.config.count_only:
                continue
            kept = []
            for group, decision in zip(buffer.groups, decisions, strict=True):
                reason = "" if decision.keep else _reason(name, decision)
                priority = verdicts[group.task].priority + decision.priority
                verdicts[group.task] = Verdict(reason=reason, priority=priority)
                if decision.keep:
                    kept.append(replace(group, priority=group.priority + decision.priority))
            buffer = replace(buffer, groups=tuple(kept))
            if not kept:
                break
        self._last.extend(verdict.reason for verdict in verdicts.values() if verdict.reason)
        return verdicts

    def _failed(self, name: str, error: RewardFailed | TimeoutError, of: str) -> None:
        self.counts[f"{name}.failed"] += 1
        self._failure = f"filter {name}: {_words(error)}"[:500]
        log.warning("filter failed name=%s %s reason=%s", name, of, _words(error))

    @property
    def trouble(self) -> str:
        """Report for an operator: filters that fail, or that drop nearly everything; empty = nothing."""
        troubles = [self._failure] if self._failure else []
        dropped = Counter(reason for reason in self._last if reason)
        if len(self._last) == MAX_AT_ONCE and dropped.total() >= DROPPED_SHARE * MAX_AT_ONCE:
            reason = dropped.most_common(1)[0][0]
            troubles.append(
                f"filters drop {dropped.total()} of the last {MAX_AT_ONCE} groups, most of them as {reason}"
            )
        return "; ".join(troubles)

    def load(self) -> dict[str, float]:
        """Return the counts for the live row."""
        return {f"filter.{name}": float(count) for name, count in self.counts.items() if count}


def _reason(name: str, decision: Decision) -> str:
    """Return the reason to drop a group for the record that settles it."""
    return ":".join([FILTERED, name, *([decision.reason] if decision.reason else [])])


def _words(error: RewardFailed | TimeoutError) -> str:
    return error.reason if isinstance(error, RewardFailed) else "no result in time"
