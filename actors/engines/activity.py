"""Counters of an actor's work, for its live row and its tests."""

import time
from dataclasses import asdict, dataclass
from typing import Self

REASON_SIZE = 300
"""Characters of a reason that fit into a live row; the sample's own metadata has the whole reason."""


@dataclass(slots=True, kw_only=True)
class RolloutCounters:
    """Counts since the start of an actor."""

    samples_published: int = 0
    tokens_generated: int = 0
    """Tokens of finished responses, published or not, including tokens that another actor had generated."""
    tasks_done: int = 0
    tasks_handed_back: int = 0
    failures: int = 0
    """Samples that could not be generated or scored."""
    tool_calls_hung: int = 0
    """Calls of tools in rollouts that had no result in time, and still ran."""
    teacher_failures: int = 0
    """Samples that no teacher has scored."""
    partials_stored: int = 0
    """Unfinished responses stored for other actors."""
    partials_continued: int = 0
    """Finished responses that another actor had begun."""
    turns_redone: int = 0
    """Turns of episodes that were handed back and are not stored: the next actor generates them again."""
    samples_found: int = 0
    """Samples of leased tasks that another actor had stored; they are not generated again."""
    requests_aborted: int = 0
    """Requests that ended early because the engine failed, aborted them or died."""


class Activity:
    """Counters, and the share of wall time since the start in which nothing was generated or scored.

    A context manager: something is being generated or scored while it is entered, any number of times at once.
    """

    def __init__(self) -> None:
        self.counters = RolloutCounters()
        self._began_s = time.monotonic()
        self.busy = 0
        """Number of requests and rewards that run now."""
        self._last_failure = ""
        self._last_hung = ""
        self._idle_s = 0.0
        self._idle_since_s = self._began_s

    def __enter__(self) -> Self:
        if not self.busy:
            self._idle_s += time.monotonic() - self._idle_since_s
        self.busy += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self.busy -= 1
        if not self.busy:
            self._idle_since_s = time.monotonic()

    @property
    def waiting_share(self) -> float:
        """Share of wall time since the start without generation or scoring: 0 = always busy, 1 = never."""
        now = time.monotonic()
        idle_s = self._idle_s + (0.0 if self.busy else now - self._idle_since_s)
        return idle_s / max(now - self._began_s, 1e-9)

    def failed(self, reason: str) -> None:
        """Count a sample that could not be generated or scored."""
        self.counters.failures += 1
        self._last_failure = _cut(reason)

    def tool_hung(self, text: str) -> None:
        """Count a call of a tool that hangs: its episode may go on, and no sample fails."""
        self.counters.tool_calls_hung += 1
        self._last_hung = _cut(text)

    @property
    def trouble(self) -> str:
        """Summary of the failures and of the calls that hang, for the live row; empty while there are none."""
        counters, texts = self.counters, []
        if counters.failures:
            share = f"{counters.failures} of {counters.samples_published}"
            texts.append(f"{share} samples failed, the last: {self._last_failure}")
        if counters.tool_calls_hung:
            texts.append(f"{counters.tool_calls_hung} calls of tools hung, the last: {self._last_hung}")
        return "; ".join(texts)

    def load(self) -> dict[str, float]:
        """Return the counters and the waiting share for the live row."""
        return {
            **{name: float(value) for name, value in asdict(self.counters).items()},
            "waiting_share": self.waiting_share,
        }


def _cut(reason: str) -> str:
    return reason if len(reason) <= REASON_SIZE else f"{reason[:REASON_SIZE]}…"
