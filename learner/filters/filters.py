"""Filters: functions that decide, for a complete group, whether it is trained, which samples of it are masked, and its
priority.

The filters that ship are here. They are called in the feeder's event loop, in time linear in the group's tokens; those
by import path run in child processes (``learner/feed/filtering.py``).
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Prompt, Sample, SequenceSize, Status, Task
from tidemill.learner.data.filter_settings import BUILT_IN
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
    """Sizes of its token sequences, which lie one after the other in ``tokens`` and, with their response regions, in
    ``log_probs``.
    """
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
        ends = np.cumsum([one.num_tokens for one in self.sequences])
        return np.concatenate(
            [self.tokens[end - one.response_length : end] for end, one in zip(ends, self.sequences, strict=True)]
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
        """Return the reward of each sample, or one part of it, [G]. Raises RewardFailed where a sample lacks the
        part.
        """
        if lacking := [sample.index for sample in self.samples if part and part not in sample.parts]:
            raise RewardFailed(
                "",
                f"want part {part!r} in every reward; sample {lacking[0]} has {sorted(self.samples[0].parts)}",
                "filter",
            )
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
                lag=step - 1 - min(steps[span.version] for span in sample.spans) if sample.spans else 0,
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
    return Decision(
        keep=at_least <= mean <= at_most, reason="hard" if mean < at_least else "easy" if mean > at_most else ""
    )


def truncated(group: FilterGroup, *, max_share: float = 1.0) -> Decision:
    """Mask truncated samples; drop a group with a larger share of them than ``max_share``."""
    found = tuple(sample.index for sample in group.samples if sample.status is Status.TRUNCATED)
    return Decision(keep=len(found) <= max_share * len(group.samples), masked=found)


def length(group: FilterGroup, *, at_least: int = 0, at_most: int = 2**31) -> Decision:
    """Mask samples with fewer or more tokens that the model has sampled."""
    counts = [int(np.count_nonzero(sample.loss_mask)) for sample in group.samples]
    return Decision(
        masked=tuple(one.index for one, n in zip(group.samples, counts, strict=True) if not at_least <= n <= at_most)
    )


def repetition(group: FilterGroup, *, window: int = 3000, prob: float = 0.99) -> Decision:
    """Mask samples with at least ``window`` sampled tokens in a row of a probability above ``prob``: loops.

    Source: prime-rl's filter of this name, with its defaults.
    """
    return Decision(masked=tuple(one.index for one in group.samples if longest_run(one, math.log(prob)) >= window))


def longest_run(sample: FilterSample, above: float) -> int:
    """Return the most sampled tokens in a row with a log-prob above ``above``; tokens of the environment in between are
    passed over.
    """
    certain = sample.log_probs[sample.loss_mask.astype(np.bool_)] > above
    edges = np.flatnonzero(~np.concatenate([[False], certain, [False]]))
    return int(np.diff(edges).max() - 1)


def gibberish(group: FilterGroup, *, vocab_size: int, rare_from: int = 100_000, offset: float = 2.0) -> Decision:
    """Mask samples with a rare token drawn at high entropy: its id is above ``rare_from``, its log-prob below
    -ln(vocab_size) - ``offset``.

    Source: prime-rl's filter of this name, with its defaults. Ids grow with rarity in byte-pair vocabularies.
    """
    bound = -math.log(vocab_size) - offset
    return Decision(masked=tuple(one.index for one in group.samples if _is_gibberish(one, rare_from, bound)))


def _is_gibberish(sample: FilterSample, rare_from: int, bound: float) -> bool:
    rare = sample.response_tokens > rare_from
    return bool((rare & (sample.log_probs < bound) & sample.loss_mask.astype(np.bool_)).any())


# ---- contract
TABLE = {name: f"tidemill.learner.filters.filters:{name}" for name in BUILT_IN}
"""Built-in filters."""


def decision_of(name: str, result: object) -> JsonObject:
    """Return a filter's result as the map of a Decision. Raises RewardFailed.

    It may return a Decision, True or None (keep), False (drop), a text (drop for this reason, "" = keep), a map with
    some of the fields of a Decision, or an object with ``keep`` and, if it likes, ``reason``.
    """
    if isinstance(result, str):
        result = {"keep": not result, "reason": result}
    elif result is None or isinstance(result, bool | np.bool_):
        result = {"keep": result is None or bool(result)}
    elif not isinstance(result, Mapping) and hasattr(result, "keep"):
        result = {field: getattr(result, field) for field in _FIELDS if hasattr(result, field)}
    if not isinstance(result, Mapping) or not result.keys() <= set(_FIELDS):
        raise RewardFailed(
            name,
            f"want true, false, a reason or a map with some of {', '.join(_FIELDS)}, got {result!r}"[:500],
            "filter",
        )
    keep, masked = result.get("keep", True), result.get("masked", ())
    if not isinstance(keep, bool | np.bool_):
        raise RewardFailed(name, f"keep: want true or false, got {keep!r}"[:500], "filter")
    if not isinstance(masked, list | tuple) or not all(
        isinstance(one, int) and not isinstance(one, bool) for one in masked
    ):
        raise RewardFailed(name, f"masked: want a list of indexes, got {masked!r}"[:500], "filter")
    try:
        priority = float(result.get("priority", 0.0))
    except (TypeError, ValueError, OverflowError):
        priority = math.nan
    if not abs(priority) <= MAX_PRIORITY:
        raise RewardFailed(
            name, f"priority: want a number within +-1e6, got {result.get('priority')!r}"[:500], "filter"
        )
    return {"keep": bool(keep), "reason": _short(result.get("reason")), "masked": list(masked), "priority": priority}


def decision_in(name: str, found: JsonMapping, group: FilterGroup) -> Decision:
    """Return the Decision in a map of ``decision_of`` for this group. Raises RewardFailed for indexes that it does not
    have.
    """
    indexes = {sample.index for sample in group.samples}
    if wrong := sorted(set(found["masked"]) - indexes):
        raise RewardFailed(name, f"masked: want indexes from 0 to {len(indexes) - 1}, got {wrong[0]}", "filter")
    return Decision(
        keep=found["keep"],
        reason=found["reason"],
        masked=tuple(sorted(set(found["masked"]))),
        priority=found["priority"],
    )


_FIELDS = ("keep", "reason", "masked", "priority")


def _short(reason: object) -> str:
    """Return a reason in characters that subjects, metrics and messages may have."""
    text = "" if reason is None else str(reason)[:MAX_REASON]
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.+-") else "_" for letter in text)


def _encode(group: FilterGroup) -> bytes:
    found = {
        "prompt": group.prompt,
        "label": group.label,
        "metadata": dict(group.metadata),
        "samples": [
            {
                "index": one.index,
                "reward": one.reward,
                "parts": dict(one.parts),
                "response": one.response,
                "tokens": _text(one.tokens, "<i4"),
                "log_probs": _text(one.log_probs, "<f4"),
                "loss_mask": _text(one.loss_mask, "u1"),
                "status": one.status.value,
                "metadata": dict(one.metadata),
                "lag": one.lag,
                "sequences": [list(size) for size in one.sequences],
                "num_turns": one.num_turns,
                "transcript": list(one.transcript),
            }
            for one in group.samples
        ],
    }
    return json.dumps(found).encode()


def _decode(found: JsonMapping) -> FilterGroup:
    samples = tuple(
        FilterSample(
            **{
                **one,
                "tokens": _array(one["tokens"], "<i4"),
                "log_probs": _array(one["log_probs"], "<f4"),
                "loss_mask": _array(one["loss_mask"], "u1"),
                "status": Status(one["status"]),
                "sequences": tuple(SequenceSize(*size) for size in one["sequences"]),
                "transcript": tuple(one["transcript"]),
            }
        )
        for one in found["samples"]
    )
    return FilterGroup(prompt=found["prompt"], label=found["label"], metadata=found["metadata"], samples=samples)


def _text(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def _array(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype)


FILTER = Contract(
    word="filter",
    options="options",
    argument="FilterGroup",
    path="tidemill.learner.filters.filters:FILTER",
    table=TABLE,
    encode=_encode,
    decode=_decode,
    checked=decision_of,
)
"""The contract of filters: a FilterGroup in, a Decision or a shorter form of one out."""
