"""Progress of one /generate request: which of its responses have new tokens, and which have ended. Used in the loop's thread only."""

import asyncio
from collections.abc import AsyncIterator

from tidemill.actors.serving.builtin.sequence import Sequence


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

    def update(self, sequence: Sequence, num_tokens: int, ended: bool) -> None:
        """Record that ``num_tokens`` tokens of a response may be read, and whether it has ended."""
        if ended:
            self._left -= 1
        if ended or sequence.stream:
            self._moved[self._places[sequence]] = (num_tokens, ended)
        if self.done or sequence.stream:
            self._wake.set()

    async def finished(self) -> list[Sequence]:
        """Return all responses once they have ended. The scheduler ends every sequence that it is given: the bound is the request's own."""
        await self._wake.wait()
        return self.sequences

    async def changes(self) -> AsyncIterator[tuple[int, int, bool]]:
        """Yield (place, number of tokens that may be read, ended) of changed responses, the newest state only, until all have ended."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            moved, self._moved = self._moved, {}
            for place, (num_tokens, ended) in moved.items():
                yield place, num_tokens, ended
            if self.done and not self._moved:
                return
