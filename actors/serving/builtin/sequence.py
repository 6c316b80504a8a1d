"""A response while it is generated: its tokens, log-probs, version spans, experts and finish reason. Knows no tensor.

The decoding thread writes; the loop's thread reads only prefixes that the scheduler has reported to it. Beside the
response: the counts of ends.

A position keeps the experts of the pass that came first: after a retraction its keys and values are computed again,
perhaps with other weights, but its next token has been sampled from the first pass. Shape letters: P = positions, G =
layers with experts, J = experts of a token.
"""

import base64
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.generate_body import SamplingParams
from tidemill.actors.serving.builtin.blocks import BLOCK, BlockTable
from tidemill.actors.text.text import StopStrings, Text
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.routed_experts import RoutedShape

DIGEST_BYTES = 16
"""Size of the digests of blocks: among 2^32 blocks two have the same one with a chance of 2^-65."""


class CapturedExperts:
    """Experts of a sequence's first positions. Written by the decoding thread, read once the sequence has ended."""

    def __init__(self, shape: RoutedShape) -> None:
        self._shape = shape
        self._ids = bytearray()

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self._ids) // self._shape.bytes_per_token

    def add(self, experts_PGJ: NDArray[np.int64], first: int) -> None:
        """Add the experts of positions from ``first`` on; positions that are there already are kept."""
        done = len(self)
        assert first <= done, f"positions {done} to {first} are missing"
        self._ids += experts_PGJ[done - first :].astype(self._shape.dtype).tobytes()

    def copy(self, ids: bytes) -> None:
        """Take the first positions of another sequence with the same tokens, unless this one has its own."""
        self._ids += ids[len(self._ids) :]

    def first(self, num_positions: int) -> bytes:
        """Return the experts of the first positions, for ``copy``."""
        return bytes(self._ids[: num_positions * self._shape.bytes_per_token])

    def encoded(self) -> str:
        """Return all positions in every layer as SGLang sends them: int32, base64; 0 in layers without experts."""
        shape = self._shape
        ids = np.zeros((len(self), shape.num_layers, shape.top_k), np.int32)
        ids[:, list(shape.layers)] = np.frombuffer(self._ids, shape.dtype).reshape(
            len(self), len(shape.layers), shape.top_k
        )
        return base64.b64encode(ids.tobytes()).decode()


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
    adapter: str = ""
    """Name of its adapter; "" = the run's own."""


class Sequence:
    """A prompt and the tokens that follow it, with log-probs and the versions that generated them."""

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
        self.rid, self.prompt, self.params, self.seed = request.rid, prompt, params, request.seed
        self.sink, self.stream = sink, stream
        self.adapter = request.adapter
        self.begun: list[int] = prompt[len(prompt) - request.continued_tokens :].tolist()
        """Tokens of the response that are part of the prompt; only its text and its stop strings need them."""
        self.tokens: list[int] = []
        self.key = self._key()
        """Key of the context to prefill: equal keys = equal contexts of one adapter."""
        self.log_probs: list[float] = []
        self.spans: list[tuple[int, int]] = []
        """Spans, as (version, index of its first token)."""
        self.max_new_tokens = min(params.max_new_tokens, model.max_context - len(prompt))
        enders = model.eos_ids | params.stop_token_ids
        self.stop_ids = frozenset() if params.ignore_eos else enders
        self.suppressed = sorted(enders) if params.min_new_tokens else []
        """Ids with probability 0 for the first ``min_new_tokens``."""
        self.stop_strings = StopStrings(model.text, params.stops) if params.stop and model.text else None
        self.finish: JsonObject | None = None
        self.error: str | None = None
        """Failure of the engine that ended the response; None = there was none."""
        self.cached_tokens = 0
        self.table: BlockTable | None = None
        """Blocks of its keys and values, while it runs."""
        self._digests: list[bytes] = []
        self._digest_root = b""
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

    def _key(self) -> bytes:
        return self.adapter.encode() + b"\0" + self.context().tobytes()

    def digests(self, num_tokens: int, version: int) -> list[bytes]:
        """Return the digests of the full blocks of the first tokens: each of the adapter, the ``version`` of its
        weights, and all tokens up to the block's end.
        """
        root = f"{self.adapter}@{version}".encode()
        if root != self._digest_root:
            self._digests, self._digest_root = [], root
        num_blocks = num_tokens // BLOCK
        if len(self._digests) < num_blocks:
            context, digest = self.context(), self._digests[-1] if self._digests else root
            for block in range(len(self._digests), num_blocks):
                tokens = context[block * BLOCK : (block + 1) * BLOCK].tobytes()
                digest = blake2b(digest + tokens, digest_size=DIGEST_BYTES).digest()
                self._digests.append(digest)
        return self._digests[:num_blocks]

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
        elif (
            self.stop_strings is not None
            and (stop_string := self.stop_strings.find(self.tokens, self.begun)) is not None
        ):
            self.finish = {"type": "stop", "matched": stop_string}
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
        """Count a return to the queue. The keys and values are gone, so the key is made of the whole context."""
        self.retractions += 1
        self.key = self._key()

    def weight_versions(self, num_tokens: int) -> list[JsonObject]:
        """Return the spans of the first ``num_tokens`` tokens, empty ones left out."""
        ends = [min(start, num_tokens) for _, start in self.spans[1:]] + [num_tokens]
        spans = zip(self.spans, ends, strict=False)
        return [{"version": str(version), "start": start, "end": end} for (version, start), end in spans if end > start]

    def token_logprobs(self, num_tokens: int) -> list[tuple[float, int, None]]:
        """Return (log-prob in nats, token id, None) of the first ``num_tokens`` tokens, as in SGLang's JSON."""
        return list(zip(self.log_probs[:num_tokens], self.tokens[:num_tokens], itertools.repeat(None)))


CLIENT_GONE, CLOSING, ABORTED_BY_ID = "The client has gone", "The engine is closing", "Aborted"
UNRELATED = (CLIENT_GONE, CLOSING, ABORTED_BY_ID)
"""Reasons of an abort that are not caused by a weight update."""


@dataclass(slots=True)
class Counters:
    """Counters of the thread, which alone writes them; any thread may read them."""

    tokens_generated: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed; shared prefixes have saved the difference to ``prompt_tokens``."""
    preemptions: int = 0
    """Running sequences that were queued again, as there was no block for their next token or an older sequence's."""
    scored_tokens: int = 0
    """Tokens of the sequences of requests for scores."""
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_aborted_by_pushes: int = 0
    """Aborted requests that a pause of mode ``abort`` ended, or an update, not their client or the engine's end."""
    requests_failed: int = 0
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    idle_s: float = 0.0
    """Seconds spent waiting for requests."""
    decode_cpu_s: float = 0.0
    """CPU time of the decoding thread."""
    paused_s: float = 0.0

    def count_end(self, sequence: Sequence, *, updating: bool) -> None:
        """Count a sequence that has ended; ``updating``: while a weight update is open."""
        if sequence.error is not None:
            self.requests_failed += 1
        elif sequence.finish is not None and sequence.finish["type"] == "abort":
            self.requests_aborted += 1
            self.requests_aborted_by_pushes += updating and sequence.finish["message"] not in UNRELATED
        else:
            self.requests_finished += 1


PREFILL_TOKENS = 8192
"""Maximum number of padded tokens prefilled between two decoding steps (a longer prompt is prefilled whole)."""
MAX_PADDING = 1.5
"""A prefill batch has at most this many times the tokens of its prompts."""
