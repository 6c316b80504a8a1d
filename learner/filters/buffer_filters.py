"""Buffer filters: functions that see all complete groups before a step is planned, and decide which of them it takes.

They are users' functions, which run in child processes (``learner/feed/filtering.py``). Each is called when there are
enough groups for a step, and again with new groups after its drops left too few.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Prompt, Sample, Status, Task
from tidemill.learner.data import FilterConfig
from tidemill.learner.filters.filters import FILTER, Decision, decision_of, encode_argument
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSample:
    """One sample of a group in the buffer, without its tokens."""

    index: int
    reward: float
    """The score that is trained on."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward; empty if it is one number."""
    num_tokens: int = 0
    """Tokens that the model has sampled."""
    status: Status = Status.COMPLETED
    """COMPLETED or TRUNCATED."""
    lag: int = 0
    """Steps from the weights of its oldest token to the weights of the last planned step."""
    metadata: JsonMapping = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferGroup:
    """One complete group in the buffer."""

    task: int
    """Id of its task: smaller ones were issued earlier."""
    prompt: Prompt
    label: Any = None
    metadata: JsonMapping = field(default_factory=dict)
    """Metadata of the task."""
    priority: float = 0.0
    """The sum that the filters of single groups have given."""
    samples: tuple[BufferSample, ...] = ()
    """In the order of their index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterBuffer:
    """All complete groups: the argument of a buffer filter."""

    step: int
    """The next step, from 1."""
    num_wanted: int
    """Groups that the step takes."""
    groups: tuple[BufferGroup, ...]
    """In the order of their tasks, without groups that another filter has dropped."""


def buffer_group(
    task: Task, samples: Sequence[Sample], steps: Mapping[int, int], step: int, priority: float
) -> BufferGroup:
    """Return one group of a FilterBuffer. ``steps``: step by version; ``step``: the next one."""
    return BufferGroup(
        task=task.id,
        prompt=task.prompt,
        label=task.label,
        metadata=task.metadata,
        priority=priority,
        samples=tuple(
            BufferSample(
                index=sample.index,
                reward=sample.score,
                parts=sample.reward if isinstance(sample.reward, dict) else {},
                num_tokens=int(sample.loss_mask.sum()),
                status=sample.status,
                lag=step - 1 - min(steps[span.version] for span in sample.spans) if sample.spans else 0,
                metadata=sample.metadata,
            )
            for sample in samples
        ),
    )


def decisions_of(name: str, result: object) -> list[JsonObject] | None:
    """Return the result of a buffer filter as maps of Decisions, one for each group; None keeps all. Raises
    RewardFailed.

    It is a list with one result for each group, of the forms that ``filters.decision_of`` takes, without ``masked``.
    """
    if result is None:
        return None
    if not isinstance(result, list | tuple):
        want = f"want a list with a result for each group, or None, got {result!r}"
        raise RewardFailed(name, want[:500], "buffer filter")
    decisions = [decision_of(name, group_result) for group_result in result]
    if masking := [place for place, decision in enumerate(decisions) if decision["masked"]]:
        want = f"result {masking[0]}: want no 'masked' from a buffer filter, which sees no tokens"
        raise RewardFailed(name, want, "buffer filter")
    return decisions


def decisions_in(name: str, results: Sequence[JsonMapping] | None, buffer: FilterBuffer) -> list[Decision]:
    """Return the Decisions on the groups of a buffer. Raises RewardFailed for another number of results."""
    if results is None:
        return [Decision() for _ in buffer.groups]
    if len(results) != len(buffer.groups):
        want = f"want a result for each of the {len(buffer.groups)} groups, got {len(results)}"
        raise RewardFailed(name, want, "buffer filter")
    return [Decision(**{**result, "masked": ()}) for result in results]


BUFFER_FILTER = Contract(
    word="buffer filter",
    options="options",
    argument="FilterBuffer",
    path="tidemill.learner.filters.buffer_filters:BUFFER_FILTER",
    table={},
    encode=encode_argument,
    decode=lambda values: msgspec.convert(values, FilterBuffer),
    checked=decisions_of,
)
"""The contract of buffer filters: a FilterBuffer in, a result for each of its groups out."""


def contract_of(config: FilterConfig) -> Contract:
    """Return the contract of the function that a filter names."""
    return BUFFER_FILTER if config.scope == "buffer" else FILTER
