"""Log-probs of given tokens: forward passes of several sequences at once, and their JSON. Shape letters: U = sequences
of a pass, T = tokens per sequence (padded), P = its scored places, K = listed tokens, V = vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.lora import AdapterRows
from tidemill.actors.serving.builtin.sequence import MAX_PADDING, PREFILL_TOKENS
from tidemill.actors.serving.builtin.weights import Weights
from tidemill.bus.wire.json_object import JsonObject

LOGITS_AT_ONCE = 1 << 23
"""Number of logits in memory at once (32 MB in float32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputScores:
    """Scores of the tokens of one sequence behind its first scored place."""

    log_probs_P: NDArray[np.float32]
    """Log-probs (nats) at the temperature of the request; untempered for a greedy request (temperature 0)."""
    top_ids_PK: NDArray[np.int64]
    top_log_probs_PK: NDArray[np.float32]
    version: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scoring:
    """A sequence to score, and its result."""

    tokens: NDArray[np.int32]
    start: int
    """The tokens behind this place are scored."""
    temperature: float
    top_k: int
    adapter: str = ""
    """Name of its adapter; "" = the run's own."""
    done: "Future[InputScores]" = field(default_factory=Future)
    arrived_s: float = field(default_factory=time.perf_counter)


def take_scorings(waiting: deque[Scoring]) -> list[Scoring]:
    """Take sequences of similar length from the queue's head: ``PREFILL_TOKENS`` padded tokens, or one longer one."""
    batch: list[Scoring] = []
    longest = tokens = 0
    while waiting:
        length = len(waiting[0].tokens)
        padded = max(longest, length) * (len(batch) + 1)
        if batch and (padded > PREFILL_TOKENS or padded > MAX_PADDING * (tokens + length)):
            break
        scoring = waiting.popleft()
        if scoring.done.set_running_or_notify_cancel():
            batch.append(scoring)
            longest, tokens = max(longest, length), tokens + length
    return batch


def scores(
    weights: Weights,
    batch: Sequence[Scoring],
    angles: tuple[Tensor, Tensor],
    version: int,
    adapters: Sequence[AdapterRows] = (),
) -> list[InputScores]:
    """Return the scores of every sequence. ``angles``: for the longest. Raises ValueError for NaN."""
    lengths = [len(scoring.tokens) for scoring in batch]
    tokens_UT = np.zeros((len(batch), max(lengths)), np.int64)
    for row, scoring in enumerate(batch):
        tokens_UT[row, : len(scoring.tokens)] = scoring.tokens
    ids_UT = torch.from_numpy(tokens_UT).to(weights.device)
    x_UTE = decoder.forward(weights, ids_UT, angles, without_cache, adapters=adapters)
    return [_scores(weights, scoring, x_UTE[row], version) for row, scoring in enumerate(batch)]


def without_cache(layer: int, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor) -> Tensor:
    """Attend causally, as ``decoder.Attention``, keeping no keys and values: nothing is generated."""
    return decoder.causal_attention(query_BTHD, key_BTKD, value_BTKD)


def _scores(weights: Weights, scoring: Scoring, x_TE: Tensor, version: int) -> InputScores:
    x_PE = x_TE[scoring.start : len(scoring.tokens) - 1]
    return scores_of(
        scoring, lambda places: decoder.logits(weights, x_PE[places]), weights.shape.vocab_size, version=version
    )


def scores_of(scoring: Scoring, logits_of: Callable[[slice], Tensor], vocab_size: int, *, version: int) -> InputScores:
    """Return the scores of a sequence. ``logits_of`` returns the logits at some of its scored places, fp32, [P, V].
    Raises ValueError for NaN.
    """
    targets_P = torch.from_numpy(scoring.tokens[scoring.start + 1 :].astype(np.int64))
    picked, ids, values = [], [], []
    width = max(1, LOGITS_AT_ONCE // vocab_size)
    for first in range(0, max(len(targets_P), 1), width):  # once where there is none: for empty results
        places = slice(first, first + width)
        log_probs_PV = (logits_of(places) / (scoring.temperature or 1.0)).log_softmax(-1)
        picked.append(log_probs_PV.gather(-1, targets_P[places, None].to(log_probs_PV.device))[:, 0])
        top = log_probs_PV.topk(scoring.top_k, -1)
        ids.append(top.indices)
        values.append(top.values)
    result = InputScores(
        log_probs_P=torch.cat(picked).cpu().numpy(),
        top_ids_PK=torch.cat(ids).cpu().numpy(),
        top_log_probs_PK=torch.cat(values).cpu().numpy(),
        version=version,
    )
    if not np.isfinite(result.log_probs_P).all():
        raise ValueError(f"the model's scores are not finite under version {version}")
    return result


def scores_json(scoring: Scoring, rid: str, result: InputScores) -> JsonObject:
    """Return the scores in SGLang's JSON, with the temperature in addition: SGLang scores at 1 alone."""
    ids = scoring.tokens[scoring.start :].tolist()
    entries: list[tuple[float | None, int, None]] = [(None, ids[0], None)]
    entries += [(value, token, None) for value, token in zip(result.log_probs_P.tolist(), ids[1:], strict=True)]
    meta: dict[str, object] = {
        "id": rid,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(scoring.tokens),
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_version": str(result.version),
        "input_token_logprobs": entries,
        "input_logprobs_temperature": scoring.temperature,
        "output_token_logprobs": [],
        "e2e_latency": time.perf_counter() - scoring.arrived_s,
    }
    if scoring.top_k:
        listed = zip(result.top_log_probs_PK.tolist(), result.top_ids_PK.tolist(), strict=True)
        meta["input_top_logprobs"] = [
            None,
            *([(value, token, None) for value, token in zip(*pair, strict=True)] for pair in listed),
        ]
    return {"text": "", "output_ids": [], "meta_info": meta}
