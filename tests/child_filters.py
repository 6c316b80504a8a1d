"""Filters for the tests of child processes: well-behaved ones, and one for each way in which a filter can fail its
feeder.

In a module of its own, which keepers import: it must need nothing of pytest.
"""

import os
import signal
from typing import Any

from tidemill.learner.filters import Decision, FilterBuffer, FilterGroup


def by_label(group: FilterGroup, *, dropped: list[int]) -> Any:
    """Drop the groups of some prompts, and mask the first sample of the others."""
    assert [sample.index for sample in group.samples] == [0, 1]
    assert all(len(sample.log_probs) == len(sample.loss_mask) for sample in group.samples)
    if group.label in dropped:
        return Decision(keep=False, reason=f"label {group.label}")
    return {"masked": [0]}


def misbehaves(group: FilterGroup) -> Any:
    """Act by the prompt's number: every third group is judged well."""
    match group.label % 3:
        case 0:
            return True
        case 1:
            raise KeyError("filter")
    if group.label == 2:
        signal.pause()
    os._exit(3)


def newest_first(group: FilterGroup) -> dict[str, float]:
    return {"priority": -float(max(sample.lag for sample in group.samples))}


JUDGED = [0]
"""Groups that this process has judged."""


def rare(group: FilterGroup, *, one_of: int) -> bool:
    """Keep one group of so many."""
    JUDGED[0] += 1
    return JUDGED[0] % one_of == 0


def largest_labels_first(buffer: FilterBuffer, *, dropped: list[int]) -> list[Any]:
    """Take the groups with the largest labels first, and drop those of some prompts."""
    assert buffer.step >= 1
    assert len(buffer.groups) >= buffer.num_wanted
    assert all([sample.index for sample in group.samples] == [0, 1] for group in buffer.groups)
    assert all(sample.num_tokens > 0 and sample.lag >= 0 for group in buffer.groups for sample in group.samples)
    return [f"label {group.label}" if group.label in dropped else {"priority": group.label} for group in buffer.groups]


def fails_before_odd_steps(buffer: FilterBuffer) -> list[bool]:
    if buffer.step % 2 and any(group.label % 3 == 1 for group in buffer.groups):
        raise KeyError("buffer")
    return [True] * len(buffer.groups)
