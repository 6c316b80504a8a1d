"""The responses of one request: followed in the loop's thread while they are generated (``Progress``), and written in
SGLang's JSON (``response_json``).
"""

import asyncio
import time
from collections.abc import AsyncIterator

from tidemill.actors.serving.builtin.sequence import Sequence
from tidemill.actors.text.text import Text
from tidemill.bus.wire.json_object import JsonObject


class Progress:
    """Responses of one request, in order; ``update`` is the sink of its sequences."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._places: dict[Sequence, int] = {}
        self._moved: dict[int, tuple[int, bool]] = {}
        """Place -> (number of tokens that may be read, ended), since the last read."""
        self._left = 0
        self._wake = asyncio.Event()

    def add(self, sequence: Sequence) -> None:
        """Append a response to the request, before it is submitted."""
        self._places[sequence] = len(self.sequences)
        self.sequences.append(sequence)
        self._left += 1

    @property
    def done(self) -> bool:
        """True when all responses have ended."""
        return self._left == 0

    def update(self, sequence: Sequence, num_tokens: int, has_ended: bool) -> None:
        """Record that ``num_tokens`` tokens of a response may be read, and whether it has ended."""
        if has_ended:
            self._left -= 1
        if has_ended or sequence.stream:
            self._moved[self._places[sequence]] = (num_tokens, has_ended)
        if self.done or sequence.stream:
            self._wake.set()

    async def finished(self) -> list[Sequence]:
        """Return all responses once they have ended; the scheduler ends every sequence that it is given."""
        await self._wake.wait()
        return self.sequences

    async def changes(self) -> AsyncIterator[tuple[int, int, bool]]:
        """Yield the newest (place, number of readable tokens, ended) of changed responses, until all have ended."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            moved, self._moved = self._moved, {}
            for place, (num_tokens, has_ended) in moved.items():
                yield place, num_tokens, has_ended
            if self.done and not self._moved:
                return


def response_json(
    sequence: Sequence, text: Text | None, version: int, *, logprobs: bool, partial: int | None = None
) -> JsonObject:
    """Return a sequence in SGLang's JSON, or its first ``partial`` tokens, as unfinished. ``version``: without any."""
    num_tokens = len(sequence.tokens) if partial is None else partial
    finish = sequence.finish if partial is None else None
    spans = sequence.weight_versions(num_tokens)
    meta: dict[str, object] = {
        "id": sequence.rid,
        "finish_reason": finish,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": num_tokens,
        "cached_tokens": sequence.cached_tokens,
        "num_retractions": sequence.retractions,
        "weight_version": spans[-1]["version"] if spans else str(version),
        "weight_versions": spans,
        "e2e_latency": time.perf_counter() - sequence.arrived_s,
    }
    if sequence.begun:
        meta["continued_tokens"] = len(sequence.begun)
    if logprobs:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = sequence.token_logprobs(num_tokens)
        meta["output_token_logprobs_length"] = num_tokens
    if sequence.experts is not None and partial is None:
        meta["routed_experts"] = sequence.experts.encoded()
    state: dict[str, object] = {"output_ids": sequence.tokens[:num_tokens], "meta_info": meta}
    if text is not None:
        state["text"] = response_text(sequence, text, num_tokens, trim=finish is not None)
    return state


def response_text(sequence: Sequence, text: Text, num_tokens: int, *, trim: bool) -> str:
    """Return the whole response as text; with ``trim``, without the stop string or stop id that ended it."""
    params, ids = sequence.params, sequence.begun + sequence.tokens[:num_tokens]
    matched = (sequence.finish or {}).get("matched") if trim and not params.no_stop_trim else None
    if isinstance(matched, int):
        ids = ids[:-1]
    response = text.decode(ids, skip_special=params.skip_special_tokens)
    return response[: response.find(matched)] if isinstance(matched, str) and matched in response else response
