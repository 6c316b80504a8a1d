"""An inference engine as an actor sees it: token ids in; tokens, log-probs, versions out. Adapter: ``HttpEngine``."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.messages import Sampling, Span
from tidemill.bus.wire.routed_experts import RoutedExperts

FINISHED = ("stop", "length")
"""Finish reasons of a complete response. A response with any other reason is unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A response, complete or unfinished. Shape letter: R = its tokens so far."""

    id: str
    """Id of the request, by which it can be aborted."""
    tokens: NDArray[np.int32]
    """Token ids, [R]; the end-of-sequence id is among them when it ended the response."""
    log_probs: NDArray[np.float32]
    """Log-probs in nats under the distribution that was sampled from, [R]; for greedy decoding without temperature."""
    spans: tuple[Span, ...]
    """Versions that generated the tokens, in order; their lengths sum to R, no length is 0. May be empty while
    unfinished."""
    finish: str | None
    """stop | length | abort; None = unfinished (streaming only)."""
    routed_experts: RoutedExperts | None = None
    """Experts of the tokens of prompt and response, [P + R, layers, top_k] (``tidemill.bus.wire.routed_experts``):
    those of unfinished responses, and of positions that were computed for them, are unknown. None = not requested, or
    not known for any token.
    """
    matched: int | str | None = None
    """The token id or stop string that ended it."""
    text: str = ""
    """Text without special tokens and without the stop string; empty where the engine has no tokenizer."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed for this response."""
    retractions: int = 0
    """Number of times that its KV cache was discarded and computed again."""
    duration_s: float = 0.0
    """Seconds from arrival at the engine to the end, waiting included."""

    @property
    def version(self) -> int:
        """Version of the newest token; -1 when there is none."""
        return self.spans[-1].version if self.spans else -1


Prompt = Sequence[int] | NDArray[np.int32]
"""Token ids."""
GENERATE_S = 300.0
"""Time limit of a response, in seconds, where none is given."""


class GenerateOptions(TypedDict, total=False):
    """Further arguments of a request for a response."""

    request_id: str
    """Unique among unfinished requests; absent or empty = the adapter chooses."""
    min_version: int
    timeout_s: float
    begun: Generation | None
    """An unfinished response to the same prompt, of any engine; it is continued, and the result includes it. With the
    seed and the weights it was begun with, the built-in engine samples the tokens that it would have sampled without
    the interruption.
    """


class Engine(Protocol):
    """One engine. Safe for many concurrent calls in one event loop.

    Every method has a time limit and raises errors of ``tidemill.actors.errors``: EngineUnavailable (unreachable, not
    serving, full, too late: try another one, or later), EngineFailed (the engine's fault; the same request may work
    elsewhere), BadRequest (never repeat it). A call that is cancelled aborts its request at the engine. No method
    retries.
    """

    async def generate(self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]) -> Generation:
        """Return one complete response. Requests with the same prompt that are sent together may share its computation.

        A weight update meanwhile neither ends nor delays it; its tokens then have several spans. ``finish`` is "abort"
        when the request was aborted: an unfinished response, no error. Raises VersionUnavailable when no version >=
        ``min_version`` is served within ``timeout_s``.
        """
        ...

    async def generate_group(
        self, prompt: Prompt, sampling: Sampling, request_ids: Sequence[str], **options: Unpack[GenerateOptions]
    ) -> list[Generation]:
        """Return a response for each of ``request_ids``, once the longest is done; one request, whose error ends all.

        Response ``i`` has the seed ``sampling.seed + i``. ``options`` as for ``generate``, without ``request_id`` and
        ``begun``.
        """
        ...

    def stream(
        self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[Generation]:
        """Yield the same response as it grows; every item has all tokens so far, the last one has ``finish``.

        Items may be skipped.
        """
        ...

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all (None); they return their tokens so far. Unknown ids are ignored."""
        ...

    async def healthy(self) -> bool:
        """Return whether it can be reached and serves. Raises no error of ``tidemill.actors.errors``."""
        ...

    async def version(self) -> int:
        """Return the version of the weights that it serves now."""
        ...

    async def close(self) -> None:
        """Close the connections; the engine itself keeps running."""
        ...
