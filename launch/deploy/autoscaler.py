"""The autoscaler of a run: one process that decides on the numbers of engines and actors, for hosts to follow.

Consumes outcomes, live rows and the queue of tasks (``RunWatch``); produces the row ``all`` of ``wanted``, and its own
row beside it with the reason. Of several autoscalers one decides: it renews its row by compare-and-set, and another
one takes over when the row has not changed for ``DEAD_S`` by its own clock.

    mine? -> wait for the last change to settle: its processes run, steps were taken with them -> decide -> write

The rule:

    the learner waits, engines are busy                      more engines
    the learner waits, engines are idle, tasks are waiting   more actors
    the learner waits, engines are idle, no task is waiting  nothing: rewards or the longest responses are awaited
    the learner does not wait, engines are idle              fewer of both

A number grows by what the learner lacks and shrinks by what engines have too much, so one change reaches the balance,
and the thresholds of both lie so far apart that it is followed by none.
"""

import asyncio
import dataclasses
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tidemill.bus.client.rows import Value
from tidemill.bus.errors import BusError, Forbidden
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import beside, first_of
from tidemill.bus.wire.rows import AutoscaleRow, LiveRow
from tidemill.bus.wire.subjects import AUTOSCALE_KEY, nonce
from tidemill.launch.run import desired
from tidemill.launch.run.desired import MOST
from tidemill.launch.run.watch import SILENT_S, RunWatch

log = logging.getLogger(__name__)


UP_ABOVE, DOWN_BELOW = 0.2, 0.05  # Waiting share of the learner above which numbers grow, below which they may shrink
IDLE_ABOVE = 0.3  # Waiting share of the engines above which they are idle
HEADROOM = 1.1  # Capacity that is left after a reduction, relative to the load
MOST_FACTOR = 2.0  # Largest change at once, in either direction
ROLES = ("engine", "actor")
_WORD = re.compile(r"(engine|actor)s=([0-9]{1,5})\.\.([0-9]{1,5})")
LOOK_EVERY_S = 1.0
DEAD_S = 5.0  # Seconds without a change of its row after which another autoscaler takes over
LEAST_STEPS = 3  # Steps since the last change that a decision needs
MOST_STEPS = 10  # Newest steps that it looks at
STALLED = 5.0  # Times ``settle_s`` without enough steps, or without the desired processes, after which it goes on


@dataclass(frozen=True, slots=True)
class Bounds:
    """Smallest and largest number of a role's processes."""

    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The observed state of a run since the last change."""

    learner_wait: float  # Share of its time in which the learner waited for samples
    engine_idle: float | None  # Mean share of their time in which engines had no request; None = none reports it
    waiting: int  # Tasks that no actor has leased


@dataclass(frozen=True, slots=True)
class Decision:
    """Desired numbers by role, and the reason for them."""

    counts: Mapping[str, int]
    reason: str


def parse_bounds(words: Sequence[str]) -> dict[str, Bounds]:
    """Return bounds by role from words such as ``engines=1..8``. Raises ValueError."""
    bounds: dict[str, Bounds] = {}
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None or not int(match[2]) <= int(match[3]) <= MOST or int(match[3]) == 0:
            want = f"engines=A..B or actors=A..B with A from 0 to B, and B from 1 to {MOST}"
            raise ValueError(f"--autoscale: want {want}, got {word!r}")
        bounds[match[1]] = Bounds(int(match[2]), int(match[3]))
    if not bounds:
        raise ValueError("--autoscale: want engines=A..B, actors=A..B or both, got none")
    return bounds


def clamped(counts: Mapping[str, int], bounds: Mapping[str, Bounds]) -> dict[str, int]:
    """Return the numbers of the scaled roles, each within its bounds."""
    return {role: min(max(counts.get(role, 0), bound.least), bound.most) for role, bound in bounds.items()}


def decide(load: Load, counts: Mapping[str, int], bounds: Mapping[str, Bounds]) -> Decision:
    """Return the desired numbers of the scaled roles. ``counts``: the present ones, within their bounds."""
    waits, idle = f"the learner waits {load.learner_wait:.0%}", load.engine_idle
    engines_are_idle = idle is not None and idle > IDLE_ABOVE
    of_engines = "" if idle is None else f", engines {idle:.0%}"
    if load.learner_wait > UP_ABOVE:
        if engines_are_idle and not load.waiting:
            return Decision(counts, f"{waits}{of_engines}, and no task is waiting: more processes would not help")
        role = "actor" if engines_are_idle else "engine"
        return _grown(role, 1 / max(1 - load.learner_wait, 1 / MOST_FACTOR), counts, bounds, waits)
    if load.learner_wait < DOWN_BELOW and idle is not None and idle > IDLE_ABOVE:
        factor = max((1 - idle) * HEADROOM, 1 / MOST_FACTOR)
        fewer = clamped({role: math.ceil(counts[role] * factor) for role in counts}, bounds)
        changed = {role: min(fewer[role], counts[role]) for role in counts}
        return Decision(changed, f"{waits}{of_engines}")
    return Decision(counts, f"{waits}{of_engines}: in balance")


def _grown(role: str, factor: float, counts: Mapping[str, int], bounds: Mapping[str, Bounds], waits: str) -> Decision:
    """Return the numbers with more processes of a role, where it is scaled and below its maximum."""
    if role not in bounds:
        return Decision(counts, f"{waits} for {role}s, which are not scaled")
    num_processes = math.ceil(max(counts[role], 1) * factor - 1e-9)
    after = clamped({**counts, role: num_processes}, bounds)
    at_most = f"; {role}s are at their maximum" if after[role] == counts[role] else ""
    return Decision(after, f"{waits} for {role}s{at_most}")


class Autoscaler:
    """Decides until it is drained. ``settle_s``: seconds between two changes, at least."""

    def __init__(self, bus: Bus, bounds: Mapping[str, Bounds], *, settle_s: float) -> None:
        self._bus, self._bounds, self._settle_s = bus, bounds, settle_s
        self._rows, self._watch = bus.rows("wanted"), RunWatch(bus, steps=0)
        self._row = AutoscaleRow(owner=nonce(), reason="starting")
        self._is_decider = False
        self._seen = (-1, 0.0)  # (revision, time of the change) of another one's row
        self._settle()

    async def run(self, draining: asyncio.Event) -> None:
        """Decide until ``draining`` is set; then leave the numbers as they are. Raises Forbidden."""
        async with beside(self._watch.run()):
            while not draining.is_set():
                try:
                    await self._look()
                except BusError as error:
                    if isinstance(error, Forbidden):
                        raise
                    log.info("nothing is decided error=%s", error)
                await first_of(asyncio.sleep(LOOK_EVERY_S), draining.wait())
        if self._is_decider:
            await self._rows.delete(AUTOSCALE_KEY)

    async def _look(self) -> None:
        if not await self._decides():
            return
        rows = await desired.read(self._bus)
        before = {role: rows.total(role) for role in self._bounds}
        decision = self._decision(before)
        reason = decision.reason
        if decision.counts != before:
            numbers = ", ".join(f"{role}s {before[role]} -> {decision.counts[role]}" for role in before)
            reason = f"{numbers}: {reason}"
            log.info("%s", reason)
            await desired.change(self._bus, desired.ALL, decision.counts)
            self._settle()
        await self._renew(counts=dict(decision.counts), reason=reason)

    async def _decides(self) -> bool:
        """Return whether this autoscaler decides; take the row of one that is gone."""
        if self._is_decider:
            return True
        row, revision = await self._rows.read(AUTOSCALE_KEY)
        if self._seen[0] != revision:
            self._seen = revision, time.monotonic()
        if row is not None and time.monotonic() - self._seen[1] < DEAD_S:
            return False
        await self._write(lambda before: before == row)
        if self._is_decider:
            log.info("decides on %ss in_place_of=%s", "s and ".join(self._bounds), row and row.get("owner"))
            self._settle()
        return self._is_decider

    async def _renew(self, **changes: object) -> None:
        self._row = dataclasses.replace(self._row, beats=self._row.beats + 1, **changes)  # type: ignore[arg-type]
        await self._write(lambda before: before is not None and before.get("owner") == self._row.owner)
        if not self._is_decider:
            log.warning("another autoscaler decides now")

    async def _write(self, may: Callable[[Value | None], bool]) -> None:
        """Write its row if ``may`` accepts the present one, and note whether it did."""
        row = dataclasses.asdict(self._row)
        changed = await self._rows.change(
            AUTOSCALE_KEY, lambda before: row if may(before) else None, replace_unreadable=True
        )
        self._is_decider = changed.after is row

    def _settle(self) -> None:
        self._changed_s, self._since_step = time.monotonic(), self._watch.step

    def _decision(self, counts: Mapping[str, int]) -> Decision:
        within = clamped(counts, self._bounds)
        if within != counts:
            return Decision(within, "outside of the bounds")
        if not self._alive("feeder"):
            return Decision(counts, "no learner is running")
        passed_s = time.monotonic() - self._changed_s
        steps = [step for step in sorted(self._watch.outcomes, reverse=True) if step > self._since_step]
        missing = [f"{role}s" for role, count in counts.items() if self._num_alive(role) < count]
        is_patient = passed_s < STALLED * self._settle_s
        if missing and is_patient:
            return Decision(counts, f"waits for {' and '.join(missing)} to start")
        if passed_s < self._settle_s or (len(steps) < LEAST_STEPS and is_patient):
            return Decision(counts, f"waits for {LEAST_STEPS} steps and {self._settle_s:g} s after the last change")
        if not self._watch.outcomes:
            return Decision(counts, "the run has no step yet")
        return decide(self._load(steps), counts, self._bounds)

    def _load(self, steps: Sequence[int]) -> Load:
        metrics = [self._watch.outcomes[step].metrics for step in steps[:MOST_STEPS]]
        waited_s = sum(values.get("train/wait_seconds", 0.0) for values in metrics)
        busy_s = sum(values.get("train/step_seconds", 0.0) for values in metrics)
        # The step that is being waited for has no outcome yet
        since_s = self._watch.elapsed_s - self._watch.reached_s.get(self._watch.step, 0.0)
        waited_s += max(0.0, since_s - 2 * (waited_s + busy_s) / len(metrics)) if metrics else since_s
        idle = [row.load["waiting_share"] for row in self._alive("engine") if "waiting_share" in row.load]
        waiting, _ = self._watch.backlog or (0, 0)
        return Load(
            learner_wait=waited_s / max(waited_s + busy_s, 1e-9),
            engine_idle=sum(idle) / len(idle) if idle else None,
            waiting=waiting,
        )

    def _alive(self, role: str) -> list[LiveRow]:
        return [row for row, age_s in self._watch.rows if row.role == role and age_s < SILENT_S]

    def _num_alive(self, role: str) -> int:
        """Return the number of processes that do their work."""
        return sum(row.phase in ("serving", "working") for row in self._alive(role))
