"""Failures that should not go on unseen: actors that send only invalid samples, and tasks that fail one after another.

An actor that sends ``INVALID_IN_A_ROW`` invalid samples and no usable one between them is *refused*: it is named in the
log and in the feeder's live row, and its row ``refused.<actor>`` in the bucket ``run`` requests it to end. Whether a
sample is trained depends on the sample alone, so a refusal changes no plan, and one usable sample revokes it. While no
usable sample arrives, tasks are issued slowly. A run in which no task succeeds ends.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.messages import Dead
from tidemill.bus.wire.subjects import REFUSED_KEY, refused
from tidemill.learner.buffer.ledger import count_of
from tidemill.learner.buffer.sample_index import NO_TEACHER, SampleIndex, Unusable
from tidemill.learner.errors import TasksFail

log = logging.getLogger(__name__)

INVALID_IN_A_ROW = 64
"""Invalid samples in a row after which an actor is refused: one bad prompt causes fewer, as few groups are larger."""
MAX_ACTORS = 256
"""Maximum number of actors with a counter; a new actor replaces the one with the shortest run of invalid samples."""
MAX_WORDS = 300
"""Maximum number of characters of a reason; parts of it come from outside."""
SLOW_S = 1.0
"""Seconds between two tasks while no usable sample arrives."""
_IDLE_S = 60.0
"""Longest sleep while there is nothing to write."""
UNTRAINED_SHARE = 0.1
"""Share of ``learner.failing_s`` after which a run ends that has trained no step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Content of the row of a refused actor."""

    actor: str
    invalid: int
    """Number of invalid samples in a row."""
    reason: str
    """Reason for which the last one is invalid."""


class Senders:
    """Counts invalid samples by actor, and refuses actors. No part of the data's state: a restart counts anew."""

    def __init__(self, earlier: tuple[str, ...] = ()) -> None:
        """``earlier``: actors that an earlier start has refused."""
        self.refused = set(earlier)
        self.invalid_streaks: dict[str, int] = {}
        """Invalid samples of each actor since its last valid one."""
        self._totals: Counter[str] = Counter()
        self._fruitless = 0
        self._unwritten: dict[str, Refusal | None] = {}
        """Rows to write; None = to delete."""
        self._woken = Waiter()

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next task is issued."""
        return SLOW_S if self._fruitless >= INVALID_IN_A_ROW else 0.0

    def usable(self, actor: str) -> None:
        """Register a buffered sample of an actor."""
        self._fruitless = 0
        if self.invalid_streaks:
            self.invalid_streaks.pop(actor, None)
        if actor in self.refused:
            self.refused.discard(actor)
            self._schedule(actor, None)

    def invalid(self, actor: str, reason: str) -> None:
        """Register an invalid sample of an actor, and refuse the actor after ``INVALID_IN_A_ROW`` of them."""
        self._fruitless += 1
        if actor not in self.invalid_streaks and len(self.invalid_streaks) >= MAX_ACTORS:
            del self.invalid_streaks[min(self.invalid_streaks, key=lambda name: self.invalid_streaks[name])]
        self.invalid_streaks[actor] = count = self.invalid_streaks.get(actor, 0) + 1
        total = count_of(self._totals, actor)
        if total & (total - 1) == 0:  # at 1, 2, 4, 8 ... samples, so that a flood of them does not fill the log
            log.warning("sample invalid actor=%s so_far=%d error=%s", actor, total, reason)
        # An actor that is refused already updates its row.
        if count % INVALID_IN_A_ROW == 0 and (actor in self.refused or len(self.refused) < MAX_ACTORS):
            log.error("actor refused: it sends only invalid samples actor=%s in_a_row=%d last=%s", actor, count, reason)
            self.refused.add(actor)
            self._schedule(actor, Refusal(actor=actor, invalid=count, reason=reason))

    def _schedule(self, actor: str, refusal: Refusal | None) -> None:
        self._unwritten[actor] = refusal
        self._woken.wake()

    async def publish(self, bus: Bus) -> None:
        """Write and delete the rows of refused actors until cancelled."""
        rows = bus.rows("run")
        while True:
            while self._unwritten:
                actor, refusal = self._unwritten.popitem()
                key = refused(actor)
                write = partial(rows.delete, key) if refusal is None else partial(rows.put, key, asdict(refusal))
                await bus.retry(write)
            await self._woken.wait(_IDLE_S)

    def load(self, by_reason: Mapping[str, int], by_actor: Mapping[str, int]) -> dict[str, int]:
        """Return counters for the live row: ``invalid/<reason>``, ``invalid_of/<actor>``, ``refused/<actor>``."""
        reasons = {f"invalid/{reason}": count for reason, count in by_reason.items()}
        actors = {f"invalid_of/{actor}": count for actor, count in by_actor.items()}
        return {**reasons, **actors, **{f"refused/{actor}": 1 for actor in sorted(self.refused)}}


def describe_invalid(sample: SampleIndex | Unusable, reason: str) -> str:
    """Return the reason for which a sample is invalid, in one line."""
    if isinstance(sample, Unusable):
        defect = str(sample.error)
    elif reason == "version":
        versions = sorted({version for version, _ in sample.by_version})
        defect = f"spans: want versions that existed when it was stored, got {versions}"
    elif reason == "teacher_log_probs":
        scores = f"scores with {sample.teacher_top_k} tokens listed at each position"
        got = "no scores" if sample.teacher_top_k == NO_TEACHER else scores
        defect = f"{reason}: want the scores of a teacher, as learner.algorithm.distill.loss needs them, got {got}"
    else:
        defect = f"{reason}: want what task {sample.task} has"
    return f"sequence {sample.seq}: {defect}"[:MAX_WORDS]


async def refused_before(bus: Bus) -> tuple[str, ...]:
    """Return the actors that an earlier start of the feeder has refused and that have sent no usable sample since."""
    return tuple(str(row.get("actor", "")) for row, _ in (await bus.rows("run").all(REFUSED_KEY)).values())


class FailingTasks:
    """Training tasks that have died since the last complete group: where all of them fail, the run ends.

    No part of the data's state: a restart begins to count anew.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count, self._since_s = 0, 0.0
        self.reason = ""
        """Reason of the last task that died."""

    def died(self, letter: Dead) -> None:
        """Register a task that no actor tries again."""
        self._since_s = self._since_s if self._count else self._clock()
        self._count += 1
        self.reason = " ".join(letter.reason.split())

    def completed(self) -> None:
        """Register a complete group: not every task fails."""
        self._count = 0

    @property
    def trouble(self) -> str:
        """Description for the live row; empty while a task may fail alone."""
        return f"the last {self._count} tasks failed for good: {self.reason}" if self._count > 1 else ""

    def refuse(self, limit: int, within_s: float) -> None:
        """Raise TasksFail once ``limit`` tasks in a row have died over ``within_s`` seconds or more; 0 = never."""
        seconds = self._clock() - self._since_s
        if 0 < limit <= self._count and seconds >= within_s:
            raise TasksFail(self._count, seconds, self.reason)
