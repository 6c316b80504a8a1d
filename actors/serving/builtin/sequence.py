"""A response while it is generated: its tokens, log-probs, version spans and finish reason. Knows no tensor.

The decoding thread writes; the loop's thread reads only prefixes that the scheduler has reported to it.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.request import SamplingParams
from tidemill.actors.serving.builtin.captured_experts import CapturedExperts
from tidemill.actors.text.text import StopStrings, Text
from tidemill.bus.wire.json_object import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The properties of a model on which the end of a response depends."""

    eos_ids: frozenset[int]
    max_context: int
    text: Text | None
    """Tokenizer; None = the model has none, and stop strings are not searched for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResponseRequest:
    """One requested response."""

    rid: str
    prompt: NDArray[np.int32]
    params: SamplingParams
    seed: int
    continued_tokens: int = 0
    """Last tokens of the prompt that are the beginning of the response."""


class Sequence:
    """A prompt and the tokens that follow it, with log-probs and the versions that generated them."""

    __slots__ = (
        "arrived_s",
        "begun",
        "cached_tokens",
        "error",
        "experts",
        "finish",
        "key",
        "log_probs",
        "max_new_tokens",
        "params",
        "prompt",
        "retractions",
        "rid",
        "seed",
        "sink",
        "spans",
        "stop_ids",
        "stop_strings",
        "stream",
        "suppressed",
        "tokens",
    )

    def __init__(
        self,
        request: ResponseRequest,
        *,
        model: Model,
        sink: Callable[["Sequence", int, bool], None],
        stream: bool = False,
        experts: CapturedExperts | None = None,
    ) -> None:
        prompt, params = request.prompt, request.params
        self.rid, self.prompt, self.params, self.seed, self.sink, self.stream = request.rid, prompt, params, request.seed, sink, stream
        self.key = prompt.tobytes()
        """Key of the context to prefill: equal keys = equal contexts."""
        self.begun: list[int] = prompt[len(prompt) - request.continued_tokens :].tolist()
        """Tokens of the response that are part of the prompt; only its text and its stop strings need them."""
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.spans: list[tuple[int, int]] = []
        """Spans, as (version, index of its first token)."""
        self.max_new_tokens = min(params.max_new_tokens, model.max_context - len(prompt))
        enders = model.eos_ids | params.stop_token_ids
        self.stop_ids = frozenset() if params.ignore_eos else enders
        self.suppressed = sorted(enders) if params.min_new_tokens else []
        """Ids with probability 0 for the first ``min_new_tokens``."""
        self.stop_strings = StopStrings(model.text, params.stop) if params.stop and model.text else None
        self.finish: JsonObject | None = None
        self.error: str | None = None
        """Failure of the engine that ended the response; None = there was none."""
        self.cached_tokens = 0
        self.experts = experts
        """Experts of its tokens; None = they are not requested."""
        self.retractions = 0
        self.arrived_s = time.perf_counter()

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and of the response so far."""
        return len(self.prompt) + len(self.tokens)

    def context(self) -> NDArray[np.int32]:
        """Return all tokens so far, the prompt's included."""
        return np.concatenate((self.prompt, np.asarray(self.tokens, np.int32))) if self.tokens else self.prompt

    def enter(self, version: int) -> None:
        """Begin a span: tokens appended from now on are of this version."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.tokens)))

    def append(self, token: int, log_prob: float) -> bool:
        """Add a token. Returns True when the response ends with it."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in self.stop_ids:
            self.finish = {"type": "stop", "matched": token}
        elif self.stop_strings is not None and (found := self.stop_strings.find(self.tokens, self.begun)) is not None:
            self.finish = {"type": "stop", "matched": found}
        elif len(self.tokens) >= self.max_new_tokens:
            self.finish = {"type": "length", "length": len(self.tokens)}
        return self.finish is not None

    def abort(self, message: str) -> None:
        """Finish the response with the reason ``abort``, in SGLang's form; its tokens stay."""
        self.finish = {"type": "abort", "message": message, "status_code": None, "err_type": None}

    def fail(self, error: str) -> None:
        """Finish the response with an error of the engine."""
        self.error = error
        self.abort(error)

    def retract(self) -> None:
        """Count a return to the queue. The keys and values are gone, so the key is that of the whole context."""
        self.retractions += 1
        self.key = self.context().tobytes()

    def weight_versions(self, num_tokens: int) -> list[JsonObject]:
        """Return the spans of the first ``num_tokens`` tokens, empty ones left out."""
        edges = [*(start for _, start in self.spans[1:]), num_tokens]
        spans = ((version, start, min(end, num_tokens)) for (version, start), end in zip(self.spans, edges, strict=False))
        return [{"version": str(version), "start": start, "end": end} for version, start, end in spans if end > start]

    def token_logprobs(self, num_tokens: int) -> list[tuple[float, int, None]]:
        """Return (log-prob in nats, token id, None) of the first ``num_tokens`` tokens, as in SGLang's JSON."""
        return list(zip(self.log_probs[:num_tokens], self.tokens[:num_tokens], itertools.repeat(None)))
