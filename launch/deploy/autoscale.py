"""The rule of the autoscaler: numbers of engines and actors that follow the waits of learner and engines.

    the learner waits, engines are busy                      more engines
    the learner waits, engines are idle, tasks are waiting   more actors
    the learner waits, engines are idle, no task is waiting  nothing: rewards or the longest responses are awaited
    the learner does not wait, engines are idle              fewer of both

A number grows by what the learner lacks and shrinks by what engines have too much, so one change reaches the balance,
and the thresholds of both lie so far apart that it is followed by none. Knows no bus.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill.launch.run.desired import MOST

UP_ABOVE, DOWN_BELOW = 0.2, 0.05  # Waiting share of the learner above which numbers grow, below which they may shrink
IDLE_ABOVE = 0.3  # Waiting share of the engines above which they are idle
HEADROOM = 1.1  # Capacity that is left after a reduction, relative to the load
MOST_FACTOR = 2.0  # Largest change at once, in either direction
ROLES = ("engine", "actor")
_WORD = re.compile(r"(engine|actor)s=([0-9]{1,5})\.\.([0-9]{1,5})")


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


def parse(words: Sequence[str]) -> dict[str, Bounds]:
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
