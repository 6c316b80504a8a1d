"""An inference engine as an actor sees it: token ids in; tokens, log-probs and versions out. Adapters: ``engine_client.py``."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bus.wire.messages import Sampling, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A response, whole or as far as it is. Shape letter: R = its tokens so far."""

    id: str
    """Name of the request, by which it can be aborted."""
    tokens: NDArray[np.int32]
    """[R]; the end-of-sequence id is among them when it ended the response."""
    log_probs: NDArray[np.float32]
    """Nats, under the distribution that was sampled from, [R]; of greedy decoding, untempered."""
    spans: tuple[Span, ...]
    """Versions that made the tokens, in order; their lengths sum to R, no length is 0. May be empty while unfinished."""
    finish: str | None
    """stop | length | abort; None = unfinished (streaming only)."""
    matched: int | str | None = None
    """The token id or stop string that ended it."""
    text: str = ""
    """Without special tokens and without the stop string; empty where the engine has no tokenizer."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed for this response."""
    retractions: int = 0
    """How often its keys and values were thrown away and computed again."""
    duration_s: float = 0.0
    """From arrival at the engine to the end, waiting included."""

    @property
    def version(self) -> int:
        """Of the newest token; -1 when there is none."""
        return self.spans[-1].version if self.spans else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says of itself."""

    engine: str
    """Its address."""
    version: int
    """Of the weights it serves now."""
    model_path: str
    model_type: str
    max_context: int
    """Tokens of prompt + response."""
    vocab_size: int = 0
    """0 = it does not say."""
    details: dict[str, Any]
    """Everything else it says, for onlookers; never for decisions."""


class Engine(Protocol):
    """One engine. Safe for many concurrent calls in one event loop.

    Every verb is bounded in time and raises of ``actors.errors``: EngineUnavailable (not there, not serving, full, too late: ask another
    one, or later), EngineFailed (its fault; the same request may work elsewhere), BadRequest (never repeat it). A call that is cancelled
    aborts its request at the engine. No verb retries.
    """

    async def generate(
        self,
        prompt: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        id: str = "",
        min_version: int = 0,
        timeout_s: float = 300.0,
        begun: Generation | None = None,
    ) -> Generation:
        """One whole response. Requests with the same prompt that are sent together may share its computation.

        A weight update on the way neither ends nor delays it; its tokens then have several spans. ``finish`` is "abort" when somebody
        stopped it: a partial response, no error. ``id`` must be unique among unfinished requests; empty = the adapter chooses.
        ``begun``: an unfinished response to the same prompt, of any engine; it is continued, and the answer is all of it. With the seed and
        the weights it was begun with, the built-in engine draws the tokens that it would have drawn undisturbed.
        Raises VersionUnavailable when no version >= ``min_version`` came to be served within ``timeout_s``.
        """
        ...

    def stream(
        self,
        prompt: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        id: str = "",
        min_version: int = 0,
        timeout_s: float = 300.0,
        begun: Generation | None = None,
    ) -> AsyncIterator[Generation]:
        """The same response as it grows; every item has all tokens so far, the last one has ``finish``. Items may be skipped."""
        ...

    async def abort(self, id: str | None = None) -> None:
        """End one request, or all (None); they are answered with what they have. Unknown ids are ignored."""
        ...

    async def pause(self, mode: str = "in_place") -> None:
        """Stop decoding; requests sent meanwhile wait. ``in_place`` keeps what is running, ``retract`` computes it again later,
        ``abort`` ends it."""
        ...

    async def resume(self) -> None:
        """Go on decoding."""
        ...

    async def healthy(self) -> bool:
        """It can be reached and serves. Raises nothing of ours."""
        ...

    async def info(self) -> EngineInfo:
        """What it is, and which version it serves."""
        ...

    async def close(self) -> None:
        """Free the connections; the engine itself goes on."""
        ...
