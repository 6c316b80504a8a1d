"""Messages between processes: Task, Sample, Plan and their parts. ``tidemill.bus.wire.codec`` has their bytes.

Shape letters: R = tokens of the response, L = tokens of prompt + response, N = samples of a step, M = their token
sequences, G = groups of a step. A sample with several sequences has them one after the other on both axes, L and R.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.routed_experts import RoutedExperts
from tidemill.bus.wire.task_settings import Budget


class SequenceSize(NamedTuple):
    """Size of one token sequence of a sample."""

    num_tokens: int
    """All of its tokens, its own context included."""
    response_length: int
    """Tokens from the first one trained in it to its end."""


def _no_seconds() -> NDArray[np.float32]:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The model calls of an episode as columns, in order of delivery. Columns with a default have C values, or none."""

    at: NDArray[np.int32]
    """Place of the turn's first sampled token on the R axis, [C]."""
    tokens: NDArray[np.int32]
    """Sampled tokens, [C]."""
    begin_s: NDArray[np.float32] = field(default_factory=_no_seconds)
    """Seconds from the begin of the episode to the turn's request."""
    seconds: NDArray[np.float32] = field(default_factory=_no_seconds)
    """Seconds of the model call."""
    tools_s: NDArray[np.float32] = field(default_factory=_no_seconds)
    """Seconds of tools and environment after it, without a model call under way, up to the next one."""
    id: tuple[str, ...] = ()
    finish: tuple[str, ...] = ()
    """Finish reason, as the engine returned it."""
    agent: tuple[str, ...] = ()
    """Name of the agent within the episode; empty = its only one."""
    rewards: tuple[tuple[int, float], ...] = ()
    """(turn, reward) of the turns with a reward of their own."""


SCHEMA = 1  # Schema number of every message that does not need a newer one
EPISODES = 2  # Schema number of several sequences, a rollout or ``rows``, which readers of schema 1 would misread
MASKED_SAMPLES = 3  # Schema number of a plan with ``masked``, for the same reason
# Schema number of a sample that is a demonstration, for the same reason: its log-probs are not known
DEMONSTRATIONS = 3

# Metadata of a field that is not in the message's bytes, which have the others in the order of the class
NOT_ON_WIRE = {"wire": False}

Prompt = str | list[JsonObject]  # Text, or chat messages (``[{"role": ..., "content": ...}]``)


class Kind(StrEnum):
    """Purpose of a task."""

    TRAIN = "train"
    EVAL = "eval"


class Status(StrEnum):
    """Outcome of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"  # stopped by itself (end-of-sequence or a stop string)
    TRUNCATED = "truncated"  # ran into max_new_tokens or the context length
    ABORTED = "aborted"  # stopped from outside
    FAILED = "failed"  # could not be generated or scored; the reason is in ``metadata["error"]``


class Span(NamedTuple):
    """A stretch of a response generated under one version of the weights; on the wire a pair."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling distribution, and when to stop."""

    temperature: float = 1.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 = the whole vocabulary."""
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens besides the tokenizer's end-of-sequence id."""
    seed: int | None = None
    """Sampler seed of the group; sample ``index`` uses ``seed + index``. None = the engine chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt handed out. Its id is its sequence in the stream TASKS (not on the wire; set by the reader)."""

    run: str
    epoch: int
    kind: Kind = Kind.TRAIN
    prompt: Prompt
    prompt_tokens: NDArray[np.int32]
    group_size: int
    sampling: Sampling
    prompt_epoch: int
    """Passes over the prompts before this one."""
    offset: int
    """Position in the shuffled order of this pass."""
    label: Any = None
    reissue_of: int | None = None
    """Id of the first task for this prompt, when it was dropped and is issued again."""
    reissues: int = 0
    min_version: int = 0
    """Oldest version of the weights with which an engine may work on it."""
    issue_step: int = 0
    """Step of the newest published version when it was issued."""
    metadata: JsonObject = field(default_factory=dict)
    rollout: str = ""
    """Name of the rollout that answers it; empty = a single turn."""
    budget: Budget | None = None
    chat_template_args: JsonObject | None = None
    """Variables of the chat template in an episode's chats."""
    row_digest: int | None = None
    """Digest of its row of the prompts, by which a later start finds a changed row; None = not known."""
    id: int = field(default=0, metadata=NOT_ON_WIRE)
    extra: JsonObject = field(default_factory=dict, metadata=NOT_ON_WIRE)
    """Unknown fields, kept and passed on."""

    @property
    def schema(self) -> int:
        """Lowest schema that has its meaning."""
        return EPISODES if self.rollout or self.budget is not None else SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds that a sample spent in each place."""

    queued_s: float = 0.0
    generating_s: float = 0.0
    tools_s: float = 0.0
    reward_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response to a task, or one episode: the unit on the wire."""

    run: str
    task: int
    index: int
    """Number of the sample in its group, 0 <= index < group_size."""
    group_size: int
    attempt: str
    """Nonce of the lease under which it was made; the message id is ``<task>.<index>.<attempt>``."""
    kind: Kind = Kind.TRAIN
    prompt: Prompt
    tokens: NDArray[np.int32]
    """Prompt and response, [L]."""
    response_length: int
    """Number of tokens of the response, R."""
    response: str
    rollout_log_probs: NDArray[np.float32]
    """Log-probability (nats) under the distribution that was sampled from, [R]; 0 where loss_mask is 0."""
    loss_mask: NDArray[np.uint8]
    """1 = sampled by the model and trainable, 0 = environment, [R]."""
    spans: tuple[Span, ...]
    reward: float | dict[str, float]
    status: Status
    sampling: Sampling
    label: Any = None
    metadata: JsonObject = field(default_factory=dict)
    actor: str = ""
    engine: str = ""
    timings: Timings = field(default_factory=Timings)
    finish_reason: str = ""
    created_s: float = 0.0
    """Unix time at which it was finished; for onlookers, never for decisions."""
    rollout: str = ""
    sequences: tuple[SequenceSize, ...] = ()
    """Sizes of its token sequences; empty = one, of all its tokens."""
    turns: Turns | None = None
    """The sample's model calls; None = not reported."""
    transcript: tuple[JsonObject, ...] = ()
    """Messages for viewers; the learner never reads them."""
    demonstration: bool = False
    """A recorded response without known log-probs, which are 0; only the cross-entropy trains it."""
    teacher_log_probs: NDArray[np.float32] | None = None
    """Log-probabilities (nats) under a teacher at the sampling temperature, [R]; 0 where loss_mask is 0."""
    teacher_top_ids: NDArray[np.int32] | None = None
    """Ids of the K most probable next tokens under the teacher, [R x K]; with ``teacher_log_probs`` only."""
    teacher_top_log_probs: NDArray[np.float32] | None = None
    """Their log-probabilities (nats), [R x K]; None = without ``teacher_top_ids``."""
    routed_experts: RoutedExperts | None = None
    """Experts that the engine chose for each token as an input, [L, layers with experts, top_k]."""
    extra: JsonObject = field(default_factory=dict, metadata=NOT_ON_WIRE)

    @property
    def schema(self) -> int:
        """Lowest schema that has its meaning."""
        if self.demonstration:
            return DEMONSTRATIONS
        return EPISODES if len(self.sequences) > 1 else SCHEMA

    @property
    def sizes(self) -> tuple[SequenceSize, ...]:
        """Sizes of its sequences, at least one."""
        return self.sequences or (SequenceSize(len(self.tokens), self.response_length),)

    @property
    def sampled_length(self) -> int:
        """Number of tokens of the response that the model has sampled."""
        return self.loss_mask.tobytes().count(1)  # a fraction of numpy's time for a short response

    @property
    def teacher_top_k(self) -> int:
        """Number of tokens that its teacher listed at each position, K; 0 = none."""
        ids = self.teacher_top_ids
        return 0 if ids is None or not self.response_length else len(ids) // self.response_length

    @property
    def message_id(self) -> str:
        """Id under which the sample is stored once, however often it is sent: ``task.index.attempt``."""
        return f"{self.task}.{self.index}.{self.attempt}"

    @property
    def score(self) -> float:
        """Scalar that is trained on (``score_of``)."""
        return score_of(self.reward)

    @property
    def min_version(self) -> int:
        """Oldest version that generated one of its tokens (-1 for an empty response)."""
        return min([span.version for span in self.spans], default=-1)

    @property
    def max_version(self) -> int:
        """Newest version that generated one of its tokens (-1 for an empty response)."""
        return max([span.version for span in self.spans], default=-1)


def score_of(reward: float | dict[str, float]) -> float:
    """Return the scalar that is trained on: the reward, its part "score" or "reward", or the sum of its parts."""
    if not isinstance(reward, dict):
        return float(reward)
    for name in ("score", "reward"):
        if name in reward:
            return float(reward[name])
    return float(sum(reward.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """One response of a task that was nak'ed: its tokens so far, or the sequence of its finished sample."""

    run: str
    task: int
    index: int
    attempt: str
    """Nonce of the lease under which it was stored; the message id is ``partial.<task>.<index>.<attempt>``."""
    tokens: NDArray[np.int32]
    """Tokens of the response so far, [R]; none when the sample is stored."""
    rollout_log_probs: NDArray[np.float32]
    spans: tuple[Span, ...]
    response: str = ""
    seed: int | None = None
    """Sampler seed of this response; None = the engine chose one."""
    position: int = 0
    """Sampler position of the next token: tokens of the prompt + R."""
    sample_seq: int = 0
    """Sequence of the finished sample in SAMPLES; 0 = it is not finished."""
    actor: str = ""
    timings: Timings = field(default_factory=Timings)
    """Timings of all attempts at it so far."""
    extra: JsonObject = field(default_factory=dict, metadata=NOT_ON_WIRE)

    @property
    def message_id(self) -> str:
        """Id under which the partial is stored once: ``partial.task.index.attempt``."""
        return f"partial.{self.task}.{self.index}.{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The exact content of one step, recorded before it is trained. Columns, not rows."""

    epoch: int
    step: int
    """1-based; trains weights of step - 1 into weights of step."""
    tasks: NDArray[np.int64]
    """Task ids, [G]."""
    seqs: NDArray[np.int64]
    """SAMPLES sequences, grouped by task in the order of ``tasks``, by index within, [N]."""
    group_sizes: NDArray[np.int32]
    """Samples of each group, [G]."""
    ranks: NDArray[np.int32]
    """Data-parallel rank that trains each sequence, [M]; without ``rows`` M = N."""
    micro_batches: NDArray[np.int32]
    """Micro-batch on that rank, [M]."""
    version_steps: dict[int, int]
    """Step of every version that occurs in these samples."""
    oldest_step: int | None
    """Tokens of a version with a smaller step are masked; None = nothing is masked."""
    data_parallel: int
    num_micro_batches: int
    """On every rank; a multiple of ``num_minibatches``, the same number for each of them, in order."""
    num_minibatches: int = 1
    """Number of optimizer steps that the plan is trained in."""
    config_digest: str
    chain: str
    """SHA-256 over the previous plan's chain and this plan's columns (see ``tidemill.learner.buffer.step_plan``)."""
    rows: NDArray[np.int32] | None = None
    """Sequences of each sample, [N]; None = every sample has one."""
    masked: NDArray[np.int64] | None = None
    """``seqs`` that a filter masked: not trained, but their rewards count in the baselines. None = none are."""

    @property
    def schema(self) -> int:
        """Lowest schema that has its meaning."""
        if self.masked is not None:
            return MASKED_SAMPLES
        return SCHEMA if self.rows is None else EPISODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Outcome of a step."""

    epoch: int
    step: int
    metrics: dict[str, float]
    weights_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Tasks that will never be trained, with the reason; recorded before their prompts are issued again."""

    epoch: int
    reason: str
    """stale | lost | dead | empty | filtered, or filtered:NAME with the filter, or filtered:NAME:REASON."""
    tasks: NDArray[np.int64]
    seqs: NDArray[np.int64]
    """The SAMPLES sequences given up with them."""
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """An operator's decision that the prompt of a dead task is issued again; recorded once, before the issue."""

    epoch: int
    task: int
    root: int
    """Id of the first task for this prompt."""
    count: int
    """``Task.reissues`` of the task to be issued."""
    prompt_epoch: int
    offset: int
    step: int
    """The step that was being planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """First message of a learner on a stream: later messages of an older epoch are void."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Scores of one evaluation set at one version. Of several for the same version and set the newest counts."""

    epoch: int
    version: int
    step: int
    dataset: str
    metrics: dict[str, float]


PlanRecord = Plan | Done | Settle | Requeue | Fence | Evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """A task that could not be processed, with the reason."""

    task: int
    reason: str
    attempts: int
    actor: str
    prompt: Prompt
    root: int = -1
    """Id of the first task for this prompt; -1 = not known, and then it cannot be requeued."""
    reissues: int = 0
    prompt_epoch: int = 0
    offset: int = 0
    """Position of the prompt, as in the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterDecision:
    """An operator's decision on a dead task (requeue or drop). The first one stored wins."""

    task: int
    word: str
    """The decision: requeue | drop."""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A reader's place in a stream: all sequences up to ``floor`` are settled, and those in ``settled`` above it."""

    created: str
    """Creation time of the stream as reported by the server: another value means another stream."""
    floor: int
    settled: tuple[int, ...] = ()
    floors: tuple[int, ...] = ()
    """Floor of each shard where there are several (``subjects.Shards``); ``floor`` is the smallest."""

    @property
    def position(self) -> tuple[int, ...]:
        """Sequence of each shard up to which all are settled."""
        return self.floors or (self.floor,)
