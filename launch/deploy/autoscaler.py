"""The autoscaler of a run: one process that decides on the numbers of engines and actors, for hosts to follow.

Consumes outcomes, live rows and the queue of tasks (``RunWatch``); produces the row ``all`` of ``wanted``, and its own
row beside it with the reason. Of several autoscalers one decides: it renews its row by compare-and-set, and another one
takes over when the row has not changed for ``DEAD_S`` by its own clock.

    mine? -> wait for the last change to settle: its processes run, steps were taken with them -> decide -> write
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from tidemill.bus.client.rows import Value
from tidemill.bus.errors import BusError, Forbidden
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import beside, first_of
from tidemill.bus.wire.rows import AutoscaleRow, LiveRow
from tidemill.bus.wire.subjects import AUTOSCALE_KEY, nonce
from tidemill.launch.deploy.autoscale import Bounds, Decision, Load, clamped, decide
from tidemill.launch.run import desired
from tidemill.launch.run.watch import SILENT_S, RunWatch

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
DEAD_S = 5.0  # Seconds without a change of its row after which another autoscaler takes over
LEAST_STEPS, MOST_STEPS = 3, 10  # Steps since the last change that a decision needs, and those that it looks at
STALLED = 5.0  # Times ``settle_s`` without enough steps, or without the desired processes, after which it goes on


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
