"""Counters of the decoding thread, and the aborts that count as caused by weight updates."""

from dataclasses import dataclass

from tidemill.actors.serving.builtin.sequence import Sequence

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
    scored_tokens: int = 0
    """Tokens of the sequences of requests for scores."""
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_aborted_by_pushes: int = 0
    """Number of aborted requests that were ended by a pause of mode ``abort``, or while a weight update was open by
    anything but their client or the engine's end."""
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
