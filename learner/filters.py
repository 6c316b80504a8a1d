"""Filters: functions that decide, for a complete group, whether it is trained, which samples of it are masked, and its
priority; and buffer filters, which see all complete groups before a step is planned, and decide which it takes.

The filters that ship are here. They are called in the feeder's event loop, in time linear in the group's tokens; those
by import path, and all buffer filters, run in child processes (``learner/feed/filtering.py``).
"""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Prompt, Sample, SequenceSize, Status, Task
from tidemill.learner.data import BUILT_IN, FilterConfig
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import Contract

MAX_REASON = 40
"""Characters of a filter's reason for a drop that are kept."""
MAX_PRIORITY = 1e6
"""Bound of a priority's absolute value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterSample:
    """One sample of a complete group."""

    index: int
    reward: float
    """The score that is trained on."""
    parts: Mapping[str, float]
    """Named parts of the reward; empty if it is one number."""
    response: str
    tokens: NDArray[np.int32]
    """Prompt and response of all its sequences, [L]."""
    log_probs: NDArray[np.float32]
    """Rollout log-probs of the response regions, [R]; 0 where ``loss_mask`` is 0."""
    loss_mask: NDArray[np.uint8]
    """1 = sampled by the model and trainable, [R]."""
    status: Status
    """COMPLETED or TRUNCATED."""
    sequences: tuple[SequenceSize, ...]
    """Sizes of its token sequences, one after the other in ``tokens``, and their responses in ``log_probs``."""
    metadata: JsonMapping = field(default_factory=dict)
    lag: int = 0
    """Steps from the weights of its oldest token to the weights of the last planned step."""
    num_turns: int = 1
    """Model calls."""
    transcript: tuple[JsonObject, ...] = ()
    """Messages of an episode; empty for one call."""

    @property
    def response_tokens(self) -> NDArray[np.int32]:
        """The tokens of the response regions, [R], each at the place of its log-prob."""
        ends = np.cumsum([size.num_tokens for size in self.sequences])
        return np.concatenate(
            [self.tokens[end - size.response_length : end] for end, size in zip(ends, self.sequences, strict=True)]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterGroup:
    """A complete group: the argument of a filter."""

    prompt: Prompt
    label: Any
    metadata: JsonMapping
    """Metadata of the task."""
    samples: tuple[FilterSample, ...]
    """In the order of their index."""

    def values(self, part: str = "") -> NDArray[np.float64]:
        """Return the reward of each sample, or a part of it, [G]. Raises RewardFailed where a sample lacks the part."""
        if lacking := [sample.index for sample in self.samples if part and part not in sample.parts]:
            got = f"sample {lacking[0]} has {sorted(self.samples[0].parts)}"
            raise RewardFailed("", f"want part {part!r} in every reward; {got}", "filter")
        return np.array([sample.parts[part] if part else sample.reward for sample in self.samples], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Result of a filter."""

    keep: bool = True
    """False = the group is dropped, and its place is given to another prompt."""
    reason: str = ""
    """Reason of a drop beside the filter's name."""
    masked: tuple[int, ...] = ()
    """Indexes of samples that are not trained; their rewards count in the group's baseline."""
    priority: float = 0.0
    """Complete groups of the highest priority are trained first; priorities of several filters are added."""


def lag_of(sample: Sample, steps: Mapping[int, int], step: int) -> int:
    """Return the lag of the oldest token of a sample in ``step``; 0 for one without tokens."""
    return step - 1 - min((steps[span.version] for span in sample.spans), default=step - 1)


def group_of(task: Task, samples: Sequence[Sample], steps: Mapping[int, int], step: int) -> FilterGroup:
    """Return the argument of filters for a complete group. ``steps``: step by version; ``step``: the next one."""
    return FilterGroup(
        prompt=task.prompt,
        label=task.label,
        metadata=task.metadata,
        samples=tuple(
            FilterSample(
                index=sample.index,
                reward=sample.score,
                parts=sample.reward if isinstance(sample.reward, dict) else {},
                response=sample.response,
                tokens=sample.tokens,
                log_probs=sample.rollout_log_probs,
                loss_mask=sample.loss_mask,
                status=sample.status,
                metadata=sample.metadata,
                lag=lag_of(sample, steps, step),
                sequences=sample.sizes,
                num_turns=1 if sample.turns is None else len(sample.turns.tokens),
                transcript=sample.transcript,
            )
            for sample in samples
        ),
    )


# ---- the filters that ship
def equal_rewards(group: FilterGroup, *, tolerance: float = 1e-6, part: str = "") -> Decision:
    """Drop a group with rewards that differ by at most ``tolerance``: a baseline within the group leaves no gradient.

    Source: dynamic sampling, DAPO 2503.14476. ``part``: a part of the reward instead of the score.
    """
    values = group.values(part)
    return Decision(keep=bool(values.max() - values.min() > tolerance))


def mean_reward(
    group: FilterGroup, *, at_least: float = -math.inf, at_most: float = math.inf, part: str = ""
) -> Decision:
    """Drop a group with a mean reward below ``at_least`` (reason ``hard``) or above ``at_most`` (reason ``easy``)."""
    mean = float(group.values(part).mean())
    reason = "hard" if mean < at_least else "easy" if mean > at_most else ""
    return Decision(keep=at_least <= mean <= at_most, reason=reason)


def truncated(group: FilterGroup, *, max_share: float = 1.0) -> Decision:
    """Mask truncated samples; drop a group with a larger share of them than ``max_share``."""
    masked = _indexes(group, lambda sample: sample.status is Status.TRUNCATED)
    return Decision(keep=len(masked) <= max_share * len(group.samples), masked=masked)


def length(group: FilterGroup, *, at_least: int = 0, at_most: int = 2**31) -> Decision:
    """Mask samples with fewer or more tokens that the model has sampled."""
    return Decision(masked=_indexes(group, lambda sample: not at_least <= sample.loss_mask.sum() <= at_most))


def repetition(group: FilterGroup, *, window: int = 3000, prob: float = 0.99) -> Decision:
    """Mask samples with at least ``window`` sampled tokens in a row of a probability above ``prob``: loops.

    Source: prime-rl's filter of this name, with its defaults.
    """
    return Decision(masked=_indexes(group, lambda sample: longest_run(sample, math.log(prob)) >= window))


def longest_run(sample: FilterSample, above: float) -> int:
    """Return the longest run of sampled tokens with a log-prob above ``above``; other tokens do not break it."""
    certain = sample.log_probs[sample.loss_mask.astype(np.bool_)] > above
    edges = np.flatnonzero(~np.concatenate([[False], certain, [False]]))
    return int(np.diff(edges).max() - 1)


def gibberish(group: FilterGroup, *, vocab_size: int, rare_from: int = 100_000, offset: float = 2.0) -> Decision:
    """Mask samples with a rare token drawn at high entropy: its id is above ``rare_from``, its log-prob below
    -ln(vocab_size) - ``offset``.

    Source: prime-rl's filter of this name, with its defaults. Ids grow with rarity in byte-pair vocabularies.
    """
    bound = -math.log(vocab_size) - offset

    def has_rare_token(sample: FilterSample) -> bool:
        rare = (sample.response_tokens > rare_from) & (sample.log_probs < bound)
        return bool((rare & sample.loss_mask.astype(np.bool_)).any())

    return Decision(masked=_indexes(group, has_rare_token))


def _indexes(group: FilterGroup, is_masked: Callable[[FilterSample], bool]) -> tuple[int, ...]:
    return tuple(sample.index for sample in group.samples if is_masked(sample))


# ---- contract
TABLE = {name: f"tidemill.learner.filters:{name}" for name in BUILT_IN}
"""Built-in filters."""


def decision_of(name: str, result: object) -> JsonObject:
    """Return a filter's result as the map of a Decision. Raises RewardFailed.

    It may return a Decision, True or None (keep), False (drop), a text (drop for this reason, "" = keep), a map with
    some fields of a Decision, or an object with ``keep`` and perhaps ``reason``.
    """
    if isinstance(result, str):
        result = {"keep": not result, "reason": result}
    elif result is None or isinstance(result, bool | np.bool_):
        result = {"keep": result is None or bool(result)}
    elif not isinstance(result, Mapping) and hasattr(result, "keep"):
        result = {field: getattr(result, field) for field in _FIELDS if hasattr(result, field)}
    if not isinstance(result, Mapping) or not result.keys() <= set(_FIELDS):
        raise _failed(name, f"want true, false, a reason or a map with some of {', '.join(_FIELDS)}, got {result!r}")
    keep, masked = result.get("keep", True), result.get("masked", ())
    if not isinstance(keep, bool | np.bool_):
        raise _failed(name, f"keep: want true or false, got {keep!r}")
    if not isinstance(masked, list | tuple) or not all(type(index) is int for index in masked):
        raise _failed(name, f"masked: want a list of indexes, got {masked!r}")
    try:
        priority = float(result.get("priority", 0.0))
    except (TypeError, ValueError, OverflowError):
        priority = math.nan
    if not abs(priority) <= MAX_PRIORITY:
        raise _failed(name, f"priority: want a number within +-1e6, got {result.get('priority')!r}")
    return {"keep": bool(keep), "reason": _short(result.get("reason")), "masked": list(masked), "priority": priority}


def _failed(name: str, text: str, kind: str = "filter") -> RewardFailed:
    return RewardFailed(name, text[:500], kind)


def decision_in(name: str, result: JsonMapping, group: FilterGroup) -> Decision:
    """Return the Decision of a map for this group. Raises RewardFailed for indexes that it does not have."""
    indexes, masked = {sample.index for sample in group.samples}, set(result["masked"])
    if wrong := sorted(masked - indexes):
        raise _failed(name, f"masked: want indexes from 0 to {len(indexes) - 1}, got {wrong[0]}")
    return Decision(**{**result, "masked": tuple(sorted(masked))})


_FIELDS = ("keep", "reason", "masked", "priority")


def _short(reason: object) -> str:
    """Return a reason in characters that subjects, metrics and messages may have."""
    text = "" if reason is None else str(reason)[:MAX_REASON]
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.+-") else "_" for letter in text)


def encode_argument(argument: object) -> bytes:
    """Return the argument of a filter as JSON, with arrays as base64. Raises TypeError, ValueError, RecursionError."""
    return json.dumps(msgspec.to_builtins(argument, builtin_types=(bytes,), enc_hook=_array_text)).encode()


def _array_text(values: object) -> str:
    if not isinstance(values, np.ndarray):
        raise TypeError(f"want values of JSON, got {type(values).__name__}")
    return base64.b64encode(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()).decode()


def _array(kind: Any, text: str) -> NDArray[Any]:
    (dtype,) = get_args(get_args(kind)[1])  # of NDArray[np.int32], which is ndarray[shape, dtype[int32]]
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<"))


FILTER = Contract(
    word="filter",
    options="options",
    argument="FilterGroup",
    path="tidemill.learner.filters:FILTER",
    table=TABLE,
    encode=encode_argument,
    decode=lambda values: msgspec.convert(values, FilterGroup, dec_hook=_array),
    checked=decision_of,
)
"""The contract of filters: a FilterGroup in, a Decision or a shorter form of one out."""


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
                lag=lag_of(sample, steps, step),
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
    path="tidemill.learner.filters:BUFFER_FILTER",
    table={},
    encode=encode_argument,
    decode=lambda values: msgspec.convert(values, FilterBuffer),
    checked=decisions_of,
)
"""The contract of buffer filters: a FilterBuffer in, a result for each of its groups out."""


def contract_of(config: FilterConfig) -> Contract:
    """Return the contract of the function that a filter names."""
    return BUFFER_FILTER if config.scope == "buffer" else FILTER
