"""Descriptions of the event that the next plan waits for. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.learner.data.groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Description of the event that the next plan waits for."""

    text: str
    """For status and logs: "13 more groups for step 7, for 42 s; 20 in flight, oldest 311 s"."""
    missing: int
    """Number of missing groups; 0 = there are enough, and they wait for the buffer filters."""
    wake_in_s: float | None = None
    """Seconds after which ``plan`` must be called again even without an event; None = only after an event."""


def waits_for_groups(in_flight: Sequence[Group], missing: int, *, step: int, now: float, since: float, judging: int, head: bool) -> Waits:
    """Return the wait for ``missing`` groups of ``step``, which began at ``since``; 0 = for the buffer filters alone.

    ``in_flight``: open groups that are not complete. ``judging``: number of groups that filters have. ``head``: a version is published.
    """
    wanted = f"{missing} more group{'s' * (missing > 1)}" if missing else "the buffer filters"
    parts = [f"{wanted} for step {step}, for {now - since:.0f} s"]
    if in_flight:
        oldest, silent_s = min(group.task.id for group in in_flight), now - min(group.touched_s for group in in_flight)
        parts.append(f"{len(in_flight)} in flight, oldest task {oldest}, silent for {silent_s:.0f} s")
    else:
        parts.append("none in flight")
    if judging:
        parts.append(f"{judging} wait for the filters")
    if not head:
        parts.append("no version is published yet")
    return Waits(text="; ".join(parts), missing=missing)


def waits_for_old(old: Sequence[Group], *, step: int, now: float, left_s: float) -> Waits:
    """Return the wait for groups in flight that ``step`` could train and the next one could not; it ends in ``left_s``."""
    silent_s = now - min(group.touched_s for group in old)
    text = (
        f"{len(old)} group{'s' * (len(old) > 1)} in flight (task {old[0].task.id}, silent for {silent_s:.0f} s) that would be "
        f"too old for step {step + 1}; step {step} goes without in {left_s:.0f} s"
    )
    return Waits(text=text, missing=len(old), wake_in_s=left_s)
