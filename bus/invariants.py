"""What every sample promises (``docs/wire.md``), held where tokens are appended and again where samples are taken in; and every partial."""

import math
from collections.abc import Sequence

import numpy as np

from bus.errors import WireError
from bus.messages import Partial, Sample, Span

LOG_PROB_SLACK = 1e-5
"""A log-probability may be this much above 0: rounding in float32 of a probability of 1."""
_TOKEN_LIMIT = 2**31
_ID_LIMIT = 2**63


def check_sample(sample: Sample, *, vocab_size: int | None = None) -> None:
    """Hold the invariants. Raises WireError naming the field. Costs one pass over each array, no copies."""
    _check_identity(sample)
    _check_lengths(sample)
    _check_tokens(sample, _TOKEN_LIMIT if vocab_size is None else vocab_size)
    _check_response(sample)
    _check_covered(sample.spans, sample.response_length)
    _check_reward(sample)


def check_partial(partial: Partial) -> None:
    """Hold the invariants of what is left of a response. Raises WireError naming the field."""
    if not 1 <= partial.task < _ID_LIMIT or partial.index < 0:
        raise WireError("task, index", f"1 <= task < {_ID_LIMIT} and index >= 0", f"{partial.task}, {partial.index}")
    if not partial.attempt:
        raise WireError("attempt", "a nonce", partial.attempt)
    length, log_probs = len(partial.tokens), partial.rollout_log_probs
    if (length > 0) == (partial.sample_seq > 0) or partial.sample_seq < 0:
        raise WireError("tokens, sample_seq", "tokens or the sequence of a sample, not both", f"{length} tokens, {partial.sample_seq}")
    if length > partial.position or len(log_probs) != length:
        raise WireError("position, rollout_log_probs", f"position >= {length} and as many values", f"{partial.position}, {len(log_probs)}")
    if length and not (partial.tokens.min() >= 0 and log_probs.max() <= LOG_PROB_SLACK and log_probs.min() > -math.inf):
        raise WireError("tokens, rollout_log_probs", "ids >= 0; log-probs finite and <= 0", "something else")
    _check_covered(partial.spans, length)


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
    if len(sample.rollout_log_probs) != response:
        raise WireError("rollout_log_probs", f"response_length = {response} values", len(sample.rollout_log_probs))
    if len(sample.loss_mask) != response:
        raise WireError("loss_mask", f"response_length = {response} values", len(sample.loss_mask))


def _check_tokens(sample: Sample, limit: int) -> None:
    tokens = sample.tokens
    if not len(tokens):
        return
    largest = int(np.maximum.reduce(tokens.view(np.uint32)))  # a negative id shows as a huge one
    if largest >= limit:
        where = int(np.argmax(tokens.view(np.uint32)))
        raise WireError(f"tokens[{where}]", f"0 <= id < {limit}", int(tokens[where]))


def _check_response(sample: Sample) -> None:
    """Trainable tokens: finite log-probability <= 0. Environment tokens: mask 0 and log-probability 0."""
    mask, log_probs = sample.loss_mask, sample.rollout_log_probs
    if not len(mask):
        return
    all_trainable = mask.tobytes() == b"\1" * len(mask)
    if not all_trainable and np.maximum.reduce(mask) > 1:
        raise WireError(f"loss_mask[{int(np.argmax(mask))}]", "0 or 1", int(mask.max()))
    # NaN fails both comparisons
    if not (np.maximum.reduce(log_probs) <= LOG_PROB_SLACK and np.minimum.reduce(log_probs) > -math.inf):
        where = int(np.argmax(~(np.isfinite(log_probs) & (log_probs <= LOG_PROB_SLACK))))
        raise WireError(f"rollout_log_probs[{where}]", "finite and <= 0", float(log_probs[where]))
    if not all_trainable:
        outside = np.flatnonzero((mask == 0) & (log_probs != 0))
        if len(outside):
            raise WireError(f"rollout_log_probs[{outside[0]}]", "0 where loss_mask is 0", float(log_probs[outside[0]]))


def _check_covered(spans: Sequence[Span], length: int) -> None:
    covered = 0
    for span in spans:
        if span.version < 0 or span.num_tokens < 1:
            raise WireError("spans", "version >= 0 and num_tokens >= 1", f"({span.version}, {span.num_tokens})")
        covered += span.num_tokens
    if covered != length:
        raise WireError("spans", f"to cover response_length = {length} tokens", covered)


def _check_reward(sample: Sample) -> None:
    parts = sample.reward if isinstance(sample.reward, dict) else {"": sample.reward}
    for name, value in parts.items():
        if not math.isfinite(value):
            raise WireError(f"reward.{name}".rstrip("."), "finite", value)
    if not parts:
        raise WireError("reward", "a number or a map that is not empty", "an empty map")
