"""Invariants of samples, partials, tasks and plans (``docs/wire.md``).

The bounds of numbers are here and nowhere else. They make values safe to compute with: no later sum, square or
exponential overflows.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.errors import WireError
from tidemill.bus.wire.messages import Partial, Plan, Sample, Span, Task, Timings, Turns, score_of
from tidemill.bus.wire.routed_experts import RoutedShape, check_routed_experts
from tidemill.bus.wire.task_settings import RUN_NAME, Budget, check_template_args

# Largest absolute value of a reward, of each of its parts and of the score made of them.
#
# The largest number that a step makes of a reward is the squared norm of the gradient in float32, which ends at 3.4e38.
# An advantage is at most two rewards (one less the mean of the others of its group), an unbounded importance weight
# e^20 = 4.9e8 (``DELTA_BOUND`` of ``learner/algorithms/tokens.py``): (2 x 1e6 x 4.9e8)^2 = 9.4e29 leaves a factor of
# 19,000 for the norm of grad log pi. Sums and squares of the rewards themselves (means, the standard deviation of a
# group) are far below. Rewards near the bound that differ by 1 still differ in float32, in which batches carry them.
MAX_REWARD = 1e6
# Smallest log-probability (nats). e^-700 and e^700 are both normal float64 numbers, so ratios of probabilities and
# perplexities are finite. No sampler draws such a token: the smallest probability above 0 in float32 is e^-103.
MIN_LOG_PROB = -700.0
LOG_PROB_SLACK = 1e-5  # A log-probability may be this much above 0: rounding in float32 of a probability of 1
# Largest absolute value of a time in seconds: as Unix time the year 2286; sums over all samples of a run are finite
MAX_SECONDS = 1e10
_TOKEN_LIMIT = 2**31
_ID_LIMIT = 2**63


def check_sample(sample: Sample, *, vocab_size: int | None = None, routed: RoutedShape | None = None) -> None:
    """Check a sample; ``routed``: sizes of the model's routing, None = not known. Raises WireError naming the field.

    Costs one pass over each array, and copies of routed experts alone.
    """
    token_limit = _TOKEN_LIMIT if vocab_size is None else vocab_size
    _check_identity(sample)
    _check_lengths(sample)
    _check_ids(sample.tokens, token_limit, "tokens")
    _check_response(sample)
    if sample.demonstration and sample.rollout_log_probs.any():
        raise WireError("rollout_log_probs", "0 everywhere in a demonstration, whose log-probs are not known", "others")
    _check_teacher(sample, token_limit)
    check_covered(sample.spans, sample.response_length)
    _check_sequences(sample)
    if sample.turns is not None:
        _check_turns(sample, sample.turns)
    check_reward(sample.reward)
    _check_seconds(sample.timings, sample.created_s)
    if sample.routed_experts is not None:
        check_routed_experts(sample.routed_experts, len(sample.tokens), routed)


def check_partial(partial: Partial) -> None:
    """Check a partial. Raises WireError naming the field."""
    if not 1 <= partial.task < _ID_LIMIT or partial.index < 0:
        raise WireError("task, index", f"1 <= task < {_ID_LIMIT} and index >= 0", f"{partial.task}, {partial.index}")
    if not partial.attempt:
        raise WireError("attempt", "a nonce", partial.attempt)
    length, log_probs = len(partial.tokens), partial.rollout_log_probs
    if (length > 0) == (partial.sample_seq > 0) or partial.sample_seq < 0:
        got = f"{length} tokens, {partial.sample_seq}"
        raise WireError("tokens, sample_seq", "tokens or the sequence of a sample, not both", got)
    if length > partial.position or len(log_probs) != length:
        got = f"{partial.position}, {len(log_probs)}"
        raise WireError("position, rollout_log_probs", f"position >= {length} and as many values", got)
    if length and partial.tokens.min() < 0:
        raise WireError("tokens", "ids >= 0", int(partial.tokens.min()))
    check_log_probs(log_probs)
    check_covered(partial.spans, length)
    _check_seconds(partial.timings)


def _check_identity(sample: Sample) -> None:
    if not 1 <= sample.task < _ID_LIMIT:
        raise WireError("task", f"1 <= id < {_ID_LIMIT}", sample.task)
    if not 0 <= sample.index < sample.group_size:
        raise WireError("index", f"0 <= index < group_size = {sample.group_size}", sample.index)
    if not sample.attempt:
        raise WireError("attempt", "a nonce", sample.attempt)


def _check_lengths(sample: Sample) -> None:
    response, total = sample.response_length, len(sample.tokens)
    if not 0 <= response <= total:
        raise WireError("response_length", f"0 <= response_length <= {total} tokens", response)
    for name, column in (("rollout_log_probs", sample.rollout_log_probs), ("loss_mask", sample.loss_mask)):
        if len(column) != response:
            raise WireError(name, f"response_length = {response} values", len(column))


def _check_ids(ids: NDArray[np.int32], limit: int, field: str) -> None:
    unsigned = ids.view(np.uint32)  # a negative id shows as a huge one
    if len(ids) and np.maximum.reduce(unsigned) >= limit:
        where = int(np.argmax(unsigned))
        raise WireError(f"{field}[{where}]", f"0 <= id < {limit}", int(ids[where]))


def _check_response(sample: Sample) -> None:
    """Check trainable tokens (log-prob from MIN_LOG_PROB to 0) and environment tokens (mask 0 and log-prob 0)."""
    mask, log_probs = sample.loss_mask, sample.rollout_log_probs
    if not len(mask):
        return
    all_trainable = mask.tobytes() == b"\1" * len(mask)
    if not all_trainable and np.maximum.reduce(mask) > 1:
        raise WireError(f"loss_mask[{int(np.argmax(mask))}]", "0 or 1", int(mask.max()))
    check_log_probs(log_probs)
    if not all_trainable:
        _check_masked(log_probs, mask, "rollout_log_probs")


def _check_masked(log_probs: NDArray[np.float32], mask: NDArray[np.uint8], field: str) -> None:
    outside = np.flatnonzero((mask == 0) & (log_probs != 0))
    if len(outside):
        raise WireError(f"{field}[{outside[0]}]", "0 where loss_mask is 0", float(log_probs[outside[0]]))


def check_log_probs(log_probs: NDArray[np.float32], field: str = "rollout_log_probs") -> None:
    """Check the log-probs of tokens in ``field``. Raises WireError."""
    # NaN fails both comparisons
    if not len(log_probs) or (
        np.maximum.reduce(log_probs) <= LOG_PROB_SLACK and np.minimum.reduce(log_probs) >= MIN_LOG_PROB
    ):
        return
    where = int(np.argmax(~((log_probs >= MIN_LOG_PROB) & (log_probs <= LOG_PROB_SLACK))))
    raise WireError(f"{field}[{where}]", f"{MIN_LOG_PROB:g} to 0", float(log_probs[where]))


def _check_teacher(sample: Sample, token_limit: int) -> None:
    response, log_probs = sample.response_length, sample.teacher_log_probs
    ids, top = sample.teacher_top_ids, sample.teacher_top_log_probs
    if log_probs is None:
        if ids is None and top is None:
            return
        raise WireError("teacher_log_probs", "values with teacher_top_ids or teacher_top_log_probs", "none")
    if len(log_probs) != response:
        raise WireError("teacher_log_probs", f"response_length = {response} values", len(log_probs))
    check_log_probs(log_probs, "teacher_log_probs")
    _check_masked(log_probs, sample.loss_mask, "teacher_log_probs")
    if (ids is None) != (top is None):
        raise WireError("teacher_top_ids, teacher_top_log_probs", "both or none", "one of them")
    if ids is None or top is None:
        return
    if len(ids) != len(top) or len(ids) != response * sample.teacher_top_k:
        want = f"as many values, a multiple of response_length = {response}"
        raise WireError("teacher_top_ids, teacher_top_log_probs", want, f"{len(ids)}, {len(top)}")
    check_log_probs(top, "teacher_top_log_probs")
    _check_ids(ids, token_limit, "teacher_top_ids")


def check_covered(spans: Sequence[Span], length: int) -> None:
    """Check that spans cover ``length`` tokens. Raises WireError."""
    covered = 0
    for span in spans:
        if span.version < 0 or span.num_tokens < 1:
            raise WireError("spans", "version >= 0 and num_tokens >= 1", f"({span.version}, {span.num_tokens})")
        covered += span.num_tokens
    if covered != length:
        raise WireError("spans", f"to cover response_length = {length} tokens", covered)


def check_reward(reward: float | dict[str, float]) -> None:
    """Check the bounds of a reward, or of its parts and the score made of them. Raises WireError naming the part."""
    if not isinstance(reward, dict) and abs(reward) <= MAX_REWARD:
        return
    parts = reward if isinstance(reward, dict) else {"": reward}
    if not parts:
        raise WireError("reward", "a number or a map that is not empty", "an empty map")
    for name, value in parts.items():
        if not abs(value) <= MAX_REWARD:  # NaN fails it too
            raise WireError(f"reward.{name}".rstrip("."), f"a finite number within +-{MAX_REWARD:g}", value)
    if not abs(score := score_of(reward)) <= MAX_REWARD:
        raise WireError("reward", f"parts whose sum is within +-{MAX_REWARD:g}", score)


def _check_seconds(timings: Timings, created_s: float = 0.0) -> None:
    seconds = {
        "created_s": created_s,
        "timings.queued_s": timings.queued_s,
        "timings.generating_s": timings.generating_s,
        "timings.tools_s": timings.tools_s,
        "timings.reward_s": timings.reward_s,
    }
    for field, value in seconds.items():
        if not abs(value) <= MAX_SECONDS:  # NaN fails it too
            raise WireError(field, f"a finite number within +-{MAX_SECONDS:g} s", value)


def _check_sequences(sample: Sample) -> None:
    """Check the sizes of the sequences, and that spans end where sequences end."""
    if not sample.sequences:
        if 0 < sample.response_length == len(sample.tokens):
            want = f"< {len(sample.tokens)} tokens: a token of context before the response"
            raise WireError("response_length", want, sample.response_length)
        return
    for place, size in enumerate(sample.sequences):
        if not 1 <= size.response_length < size.num_tokens:
            raise WireError(f"sequences[{place}]", "[L, R] with 1 <= R < L", list(size))
    for axis, total, name in ((0, len(sample.tokens), "tokens"), (1, sample.response_length, "response tokens")):
        if (actual := sum(size[axis] for size in sample.sequences)) != total:
            raise WireError("sequences", f"to sum to {total} {name}", actual)
    lengths = np.array([size.response_length for size in sample.sequences])
    ends = np.cumsum(lengths)
    crossed = np.setdiff1d(ends, np.cumsum([span.num_tokens for span in sample.spans]))
    if len(crossed):
        want = f"to end where a sequence ends, at response token {int(crossed[0])}"
        raise WireError("spans", want, "a span that crosses it")
    empty = np.flatnonzero(np.add.reduceat(sample.loss_mask, ends - lengths, dtype=np.int64) == 0)
    if len(empty):
        raise WireError("loss_mask", f"a trainable token in sequence {int(empty[0])}", "none")


def _check_turns(sample: Sample, turns: Turns) -> None:
    """Check that turns lie in one sequence each, do not overlap, and cover the trainable tokens."""
    _check_columns(turns)
    at_C, tokens_C = turns.at.astype(np.int64), turns.tokens.astype(np.int64)
    end_C = at_C + tokens_C
    wrong = np.flatnonzero((at_C < 0) | (tokens_C < 1) | (end_C > sample.response_length))
    if len(wrong):
        place = int(wrong[0])
        want = f"at >= 0, tokens >= 1 and their sum <= response_length = {sample.response_length}"
        raise WireError(f"turns[{place}]", want, f"{int(at_C[place])} and {int(tokens_C[place])}")
    _check_places(sample, at_C, end_C)
    rewarded: set[int] = set()
    for turn, reward in turns.rewards:
        if not 0 <= turn < len(turns.at) or turn in rewarded:
            raise WireError("turns.rewards", f"turns from 0 to {len(turns.at) - 1}, each once", turn)
        if not abs(reward) <= MAX_REWARD:
            raise WireError(f"turns.rewards of turn {turn}", f"a finite number within +-{MAX_REWARD:g}", reward)
        rewarded.add(turn)


def _check_columns(turns: Turns) -> None:
    count = len(turns.at)
    if len(turns.tokens) != count:
        raise WireError("turns.tokens", f"{count} values, as turns.at", len(turns.tokens))
    for name in ("begin_s", "seconds", "tools_s", "id", "finish", "agent"):
        if (length := len(getattr(turns, name))) not in (0, count):
            raise WireError(f"turns.{name}", f"{count} values or none", length)
    for name in ("begin_s", "seconds", "tools_s"):
        column: NDArray[np.float32] = getattr(turns, name)
        wrong = np.flatnonzero(~(np.abs(column) <= MAX_SECONDS))  # NaN fails the comparison, too
        if len(wrong):
            want = f"a finite number within +-{MAX_SECONDS:g} s"
            raise WireError(f"turns.{name}[{wrong[0]}]", want, float(column[wrong[0]]))


def _check_places(sample: Sample, at_C: NDArray[np.int64], end_C: NDArray[np.int64]) -> None:
    ends = np.cumsum([size.response_length for size in sample.sizes])
    first_C, last_C = (np.searchsorted(ends, places, side="right") for places in (at_C, end_C - 1))
    crossing = np.flatnonzero(first_C != last_C)
    if len(crossing):
        turn = crossing[0]
        raise WireError(f"turns[{turn}]", "tokens of one sequence", f"{int(at_C[turn])} to {int(end_C[turn])}")
    # +1 at every begin and -1 behind every end: the running sum is the number of turns at each token.
    edges = np.zeros(sample.response_length + 1, np.int64)
    np.add.at(edges, at_C, 1)
    np.subtract.at(edges, end_C, 1)
    covered = np.cumsum(edges)[:-1]
    wrong = np.flatnonzero(covered != sample.loss_mask)
    if len(wrong):
        place = int(wrong[0])
        mask = int(sample.loss_mask[place])
        want = f"{mask} turns at response token {place}, whose loss_mask is {mask}"
        raise WireError("turns", want, int(covered[place]))


def check_task(task: Task) -> None:
    """Check rollout, budget and template arguments of a task. Raises WireError naming the field."""
    if task.rollout and not RUN_NAME.fullmatch(task.rollout):
        raise WireError("rollout", "1 to 64 of A-Z a-z 0-9 _ -", task.rollout[:80])
    for name in ("budget", "chat_template_args"):
        if not task.rollout and getattr(task, name) is not None:
            raise WireError(name, "a task with a rollout", "one without")
    if task.budget is not None:
        _check_budget(task.budget)
    if task.chat_template_args is not None:
        check_template_args(task.chat_template_args)


def _check_budget(budget: Budget) -> None:
    for name in ("turns", "tokens", "context", "total_tokens"):
        if getattr(budget, name) < 0:
            raise WireError(f"budget.{name}", ">= 0 (0 = no limit)", getattr(budget, name))
    if not 0 <= budget.seconds < math.inf:
        raise WireError("budget.seconds", "a finite number >= 0 (0 = no limit)", budget.seconds)


def check_plan(plan: Plan) -> None:
    """Check the columns ``rows`` and ``masked`` of a plan against the others. Raises WireError naming the field."""
    if plan.masked is not None and not (len(plan.masked) and np.isin(plan.masked, plan.seqs).all()):
        raise WireError("masked", "one or more of seqs", plan.masked.tolist()[:5])
    if plan.rows is None:
        return
    if len(plan.rows) != len(plan.seqs) or (len(plan.rows) and plan.rows.min() < 1):
        raise WireError("rows", f"{len(plan.seqs)} numbers >= 1, one for each of seqs", f"{len(plan.rows)} numbers")
    total = int(plan.rows.sum(dtype=np.int64))
    for name in ("ranks", "micro_batches"):
        if len(getattr(plan, name)) != total:
            raise WireError(name, f"{total} values, the sum of rows", len(getattr(plan, name)))
