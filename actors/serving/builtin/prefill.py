"""Choice of the prompts that are prefilled together. Knows no model."""

from collections import deque
from collections.abc import Container

from tidemill.actors.serving.builtin.sequence import Sequence

PREFILL_TOKENS = 8192
"""Most padded tokens that are prefilled between two decoding steps (one longer prompt is prefilled whole)."""
MAX_PADDING = 1.5
"""A prefill batch has at most this many times the tokens of its prompts."""


def take_prompts(waiting: deque[Sequence], *, free: int, budget: int, shared: Container[bytes] | None) -> dict[bytes, list[Sequence]]:
    """Take prompts of similar length from the head of the queue, each with all neighbours that have the same one.

    Returns the sequences by the key of their prompt; without sharing, by a key of their own.

    At most ``free`` sequences, and ``budget`` padded tokens unless the first prompt is longer. ``shared``: keys of prompts with results
    that can be copied instead; None = prompts are not shared.
    """
    tokens, longest = 0, 0
    prompts: dict[bytes, list[Sequence]] = {}
    while waiting and free > 0:
        sequence = waiting[0]
        if shared is None or sequence.key not in prompts:
            length = sequence.length
            padded = max(longest, length) * (len(prompts) + 1)
            copied = shared is not None and sequence.key in shared
            if prompts and (padded > budget or padded > MAX_PADDING * (tokens + length) or copied):
                break
            longest, tokens = max(longest, length), tokens + length
        key = sequence.key if shared is not None else id(sequence).to_bytes(8)
        prompts.setdefault(key, []).append(waiting.popleft())
        free -= 1
    return prompts
