"""Number of samples that an actor has in flight: it follows the queues of the engines. Knows no engine, bus or clock.

    the limit holds tasks back, and engines have free rows   -> twice the limit
    the limit holds tasks back, and no long queue            -> some more (the same number for every actor)
    the responses that wait exceed a share of the rows       -> a quarter less, once the cut before has had its effect
    no figures for a while, or ones that cannot be right     -> at most ``FALLBACK`` for each engine

All actors see the same queues, add the same and cut in proportion, so their limits become equal. A step belongs to an
observation, not to a time: an actor that was stopped goes on where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.bus.section import AUTO

FALLBACK = 64
"""Samples in flight for each engine at the start, and where the engines report nothing that can be right."""
LOWEST, HIGHEST = 4, 4096
"""Bounds of the limit; the highest is the default of ``engine.max_waiting``."""
MOST_ROWS = 1e6
FREE = 0.75
"""Share of the rows in use below which the limit doubles."""
QUEUE = 0.5
"""Share of the rows that may wait. An engine with a queue has no idle row, and a short queue strands little work at it
when another engine joins."""
CUT = 0.75
"""A queue of ``QUEUE`` is cut to 9/8 of the rows: the engines stay full."""
STEPS = 16
"""Part of the rows by which the limit grows, beside free rows."""
SETTLING = 2
"""Observations after a cut that took effect, before the next one: rows of engines are about a second old."""
DOUBTS = 10
"""Observations without figures before the limit falls back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Figures of one engine that serves."""

    running: float = 0.0
    """Responses that it decodes, by its own report."""
    waiting: float = 0.0
    """Responses that wait in it, by its own report."""
    rows: float = 0.0
    """Responses that it can decode at once; 0 = not reported."""
    requests: int = 0
    """Requests of this actor that it has not answered."""

    @property
    def usable(self) -> bool:
        """True unless the figures are absent or negative, or leave out half of this actor's requests."""
        accepted = self.running + self.waiting
        return 1 <= self.rows <= MOST_ROWS and min(self.running, self.waiting) >= 0 and accepted >= self.requests / 2


class SampleLimit:
    """Limit of the samples in flight of one actor: a fixed number, or one that follows its observations."""

    def __init__(self, setting: int | str) -> None:
        self._fixed = setting != AUTO
        self.value = FALLBACK if self._fixed is False else int(setting)
        self._held_back = self._cutting = False
        """Whether it held a task back since the last observation; whether no task was admitted since the last cut."""
        self._settling = self._doubts = 0

    def admits(self, in_flight: int) -> bool:
        """Return whether another task may be leased beside so many samples."""
        admitted = in_flight < self.value
        self._held_back |= not admitted
        self._cutting &= not admitted
        return admitted

    def observe(self, engines: Sequence[EngineLoad], in_flight: int, *, scoring: int = 0) -> None:
        """Take the figures of the engines that serve. ``scoring``: samples in flight that wait for their reward."""
        held_back = self._held_back or in_flight >= self.value
        self._held_back = False
        if self._fixed or not engines:  # without an engine the samples wait for one, whatever their number
            return
        usable = [engine for engine in engines if engine.usable]
        self._doubts = 0 if usable else self._doubts + 1
        if usable:
            self._follow(usable, grows=held_back and 2 * scoring < in_flight)
        elif self._doubts >= DOUBTS:
            self.value = FALLBACK * len(engines) if self.value >= FALLBACK else min(2 * self.value, FALLBACK)

    def _follow(self, engines: Sequence[EngineLoad], *, grows: bool) -> None:
        rows = sum(engine.rows for engine in engines)
        # One that counts its waiting responses as running, as SGLang's host does, reports more of them than rows.
        queued = sum(max(engine.waiting, engine.running + engine.waiting - engine.rows) for engine in engines)
        if not self._cutting and self._settling:
            self._settling -= 1
        if queued > QUEUE * rows:
            if not self._cutting and not self._settling:
                self.value, self._cutting, self._settling = max(LOWEST, int(CUT * self.value)), True, SETTLING
        elif grows:
            free = sum(engine.running + engine.waiting for engine in engines) < FREE * rows
            self.value = min(HIGHEST, 2 * self.value if free else self.value + max(1, int(rows / STEPS)))
