"""Index of a sample: what decisions, columns of a batch and metrics need of it, without its tokens and texts.

It is made once, where the sample was checked, which may be another process: a message of msgpack has many of them.
"""

import hashlib
import reprlib
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np

from tidemill.bus.errors import WireError
from tidemill.bus.wire.codec import decode_sample
from tidemill.bus.wire.messages import Kind, Prompt, Sample, Sampling, SequenceSize, Span, Status, Timings, Turns
from tidemill.bus.wire.routed_experts import RoutedShape, unknown_rows


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How samples are checked, and what of them the feeder gets."""

    vocab_size: int | None = None
    """Number of token ids of the model; None = not known."""
    routed: RoutedShape | None = None
    """Sizes of the model's routing; None = no experts are replayed."""
    with_data: bool = False
    """True if the feeder itself reads the tokens of samples, as filters do."""
    with_metadata: bool = False
    """True if ranks may ask for the metadata of samples."""


NO_TEACHER = -1
"""Value of ``SampleIndex.teacher_top_k`` for a sample without scores of a teacher."""
OVERRIDDEN, MALFORMED = "overridden_sampling", "malformed_calls"
"""Remarks of actors in the metadata of episodes."""
COUNTS = (
    *(("branched_turns", kind) for kind in ("forks", "begins")),
    *(("untrained_turns", kind) for kind in ("asked", "log_probs", "empty")),
)
"""Remarks that have counts, by kind."""
_MAX_COUNT = 2**31


class EpisodeIndex(msgspec.Struct, array_like=True, gc=False, eq=False, kw_only=True):
    """Index of the turns of an episode."""

    num_turns: int
    num_cut: int
    """Turns with the finish reason ``cut``."""
    sampled: int
    """Sampled tokens of all turns."""
    seconds: float
    """Seconds from the begin of the episode to the end of its last turn."""
    timings: Timings
    finish_reason: str
    is_overridden: bool
    is_malformed: bool
    counts: tuple[int, ...]
    """Count of each remark in ``COUNTS``."""
    by_turn: list[tuple[int, int, int]]
    """(turn, version, trainable tokens) of each turn and span, without zeros."""
    rewards: tuple[tuple[int, float], ...]
    """(turn, reward) of the turns with a reward of their own."""


class SampleIndex(msgspec.Struct, array_like=True, gc=False, eq=False, kw_only=True, tag="sample"):
    """Index of a sample that SAMPLES has at ``seq``."""

    seq: int
    run: str
    task: int
    index: int
    group_size: int
    kind: Kind
    status: Status
    rollout: str
    sampling: Sampling
    prompt: Prompt | None
    """Prompt of an episode; None = of a single turn, see ``context``."""
    context: bytes
    """Digest of the tokens before the response of a single turn; empty for an episode."""
    sizes: tuple[SequenceSize, ...]
    response_length: int
    last_token: int
    score: float
    parts: dict[str, float]
    """Parts of the reward; empty = it is one number."""
    by_version: tuple[tuple[int, int], ...]
    """(version, trainable tokens) of each span, zeros included."""
    demonstration: bool
    teacher_top_k: int
    """As in the sample; ``NO_TEACHER`` = it has no scores."""
    known_experts: int
    """Tokens before a target with known experts; 0 where none are replayed."""
    actor: str
    """The actor that the subject names."""
    episode: EpisodeIndex | None = None
    """None = the sample reports no turns."""
    metadata: bytes = b""
    """The sample's metadata as msgpack; empty = not asked for."""
    data: bytes = b""
    """The encoded sample; empty where it is ``sample``, or where the process that checked it has it."""
    sample: Any = None
    """The sample itself, in the process that decoded it."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple([size.num_tokens for size in self.sizes])

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum([size.num_tokens for size in self.sizes])

    @property
    def content(self) -> Sample:
        """The sample with its tokens, where it is at hand. Raises WireError."""
        sample: Sample = decode_sample(self.data) if self.sample is None else self.sample
        return sample


class Unusable(msgspec.Struct, array_like=True, gc=False, eq=False, tag="unusable"):
    """A message of SAMPLES at ``seq`` that is no valid sample."""

    seq: int
    actor: str
    field: str
    want: str
    got: Any

    @property
    def error(self) -> WireError:
        """The reason for which it is none."""
        return WireError(self.field, self.want, self.got)


def unusable(seq: int, error: WireError, actor: str) -> Unusable:
    """Return the entry of a message that is no valid sample."""
    field, want, got = error.args
    try:
        msgspec.msgpack.encode(got, enc_hook=str)
    except (OverflowError, ValueError, RecursionError):  # such as the sum of two numbers of 64 bits
        got = reprlib.repr(got)
    return Unusable(seq, actor, field, want, got)


def context_of(tokens: np.ndarray[Any, Any]) -> bytes:
    """Return the digest of the tokens before a response."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").data).digest()[:16]


def index_of(
    seq: int, sample: Sample, actor: str = "", *, routed: RoutedShape | None = None, metadata: bytes = b""
) -> SampleIndex:
    """Return the index of the sample that SAMPLES has at ``seq``, with the sample. ``routed``: sizes of the routing, if
    the experts in samples are replayed.
    """
    is_episode = bool(sample.rollout)
    reward, tokens = sample.reward, sample.tokens
    return SampleIndex(
        seq=seq,
        run=sample.run,
        task=sample.task,
        index=sample.index,
        group_size=sample.group_size,
        kind=sample.kind,
        status=sample.status,
        rollout=sample.rollout,
        sampling=sample.sampling,
        prompt=sample.prompt if is_episode else None,
        context=b"" if is_episode else context_of(tokens[: len(tokens) - sample.response_length]),
        sizes=sample.sizes,
        response_length=sample.response_length,
        last_token=int(tokens[-1]) if len(tokens) else -1,
        score=sample.score,
        parts=reward if isinstance(reward, dict) else {},
        by_version=_by_version(sample),
        demonstration=sample.demonstration,
        teacher_top_k=NO_TEACHER if sample.teacher_log_probs is None else sample.teacher_top_k,
        known_experts=0 if routed is None else _known_experts(sample, routed),
        actor=actor,
        episode=None if sample.turns is None else _episode(sample, sample.turns),
        metadata=metadata,
        sample=sample,
    )


def _by_version(sample: Sample) -> tuple[tuple[int, int], ...]:
    if len(sample.spans) == 1:
        return ((sample.spans[0].version, int(np.count_nonzero(sample.loss_mask))),)
    ends = accumulate((span.num_tokens for span in sample.spans), initial=0)
    counts = [np.count_nonzero(sample.loss_mask[begin:end]) for begin, end in pairwise(ends)]
    return tuple([(span.version, int(count)) for span, count in zip(sample.spans, counts, strict=True)])


def _known_experts(sample: Sample, routed: RoutedShape) -> int:
    experts = sample.routed_experts
    # Samples of recorded plans are not checked again: with other sizes they were recorded for another setting.
    if experts is None or experts.shape != (len(sample.tokens), len(routed.layers), routed.top_k):
        return 0
    is_target_L = np.ones(len(sample.tokens), np.bool_)
    is_target_L[np.cumsum([size.num_tokens for size in sample.sizes]) - 1] = False
    return int(np.count_nonzero(~unknown_rows(experts) & is_target_L))


def _episode(sample: Sample, turns: Turns) -> EpisodeIndex:
    remarks = sample.metadata
    return EpisodeIndex(
        num_turns=len(turns.at),
        num_cut=turns.finish.count("cut"),
        sampled=int(turns.tokens.sum()),
        seconds=_seconds(turns),
        timings=sample.timings,
        finish_reason=sample.finish_reason,
        is_overridden=bool(remarks.get(OVERRIDDEN)),
        is_malformed=bool(remarks.get(MALFORMED)),
        counts=tuple(_count(remarks.get(remark), kind) for remark, kind in COUNTS),
        by_turn=list(_by_turn(turns, sample.spans, sample.loss_mask)),
        rewards=turns.rewards,
    )


def _seconds(turns: Turns) -> float:
    """Return the end of the last turn; a column that an actor has left out counts as zeros."""
    columns = [column for column in (turns.begin_s, turns.seconds) if len(column)]
    return float(sum(columns, np.zeros(len(turns.at), np.float32)).max(initial=0.0))


def _count(remark: object, kind: str) -> int:
    """Return a count in a remark; anything else that an actor wrote there counts as 0."""
    count = remark.get(kind) if isinstance(remark, Mapping) else 0
    return int(count) if isinstance(count, int) and 0 <= count <= _MAX_COUNT else 0


def _by_turn(turns: Turns, spans: tuple[Span, ...], mask_R: np.ndarray[Any, Any]) -> "list[tuple[int, int, int]]":
    """Return (turn, version, trainable tokens) of each turn and span that have such tokens in common."""
    turn_R = np.full(len(mask_R), -1, np.int64)
    for number, (at, tokens) in enumerate(zip(turns.at.tolist(), turns.tokens.tolist(), strict=True)):
        turn_R[at : at + tokens] = number
    span_R = np.repeat(np.arange(len(spans)), [span.num_tokens for span in spans])
    kept_R = mask_R.astype(np.bool_) & (turn_R >= 0)
    places, counts = np.unique(turn_R[kept_R] * max(1, len(spans)) + span_R[kept_R], return_counts=True)
    pairs = [divmod(place, max(1, len(spans))) for place in places.tolist()]
    return [(turn, spans[span].version, count) for (turn, span), count in zip(pairs, counts.tolist(), strict=True)]
