"""The stream of samples: publish until stored, read gapless from a cursor, fetch, trim, tail."""

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from typing import Literal, overload

from bus.errors import WireError
from bus.messages import Cursor, Kind, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message of SAMPLES."""

    seq: int
    sample: Sample | WireError
    """What it holds, or why it cannot be used (undecodable, invariant broken, parts missing)."""
    headers: dict[str, str]
    pending: int
    """Messages behind this one when it was delivered."""
    stored_s: float
    """Unix time at which the server stored it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glimpse:
    """The headers of a message of SAMPLES, without its payload."""

    seq: int
    headers: dict[str, str]
    pending: int
    stored_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    created: str
    first_seq: int
    last_seq: int
    messages: int
    bytes: int


@dataclass(slots=True, kw_only=True)
class PublishStats:
    published: int = 0
    duplicates: int = 0
    retries: int = 0
    waiting_full: int = 0
    """Publishes that wait now because the stream is full."""
    full: int = 0
    """Refusals because the stream was full."""
    last_error: str = field(default="")


class SampleStream:
    stats: PublishStats

    async def publish(self, sample: Sample) -> int:
        """Store a sample, for ever under the same message id; its sequence. Cancellable. Does not check invariants."""
        raise NotImplementedError

    def read(
        self, cursor: Cursor | None, *, kinds: Collection[Kind] | None = None, vocab_size: int | None = None, check: bool = True
    ) -> AsyncIterator[Received]:
        """Every message behind the cursor in stream order, for ever (ends only by cancellation or ``aclose``).

        Settled sequences of the cursor are skipped. Samples are decoded and checked. Survives server restarts.
        Raises StreamReplaced, StreamTrimmed.
        """
        raise NotImplementedError

    async def cursor(self) -> Cursor:
        """A cursor at the beginning of the stream as it is now (floor = first_seq - 1)."""
        raise NotImplementedError

    async def fetch(self, seq: int) -> Sample:
        """One sample by sequence, joined. Raises NotFound, WireError."""
        raise NotImplementedError

    async def info(self) -> StreamState:
        raise NotImplementedError

    async def trim(self, below: int) -> None:
        """Forget messages with sequences < ``below``."""

    @overload
    def tail(self, *, last: int = 0, follow: bool = True, headers_only: Literal[False] = False) -> AsyncIterator[Received]: ...
    @overload
    def tail(self, *, last: int = 0, follow: bool = True, headers_only: Literal[True]) -> AsyncIterator[Glimpse]: ...
    def tail(self, *, last: int = 0, follow: bool = True, headers_only: bool = False) -> AsyncIterator[Received] | AsyncIterator[Glimpse]:
        """The ``last`` messages, then (``follow``) what comes. Disturbs nobody."""
        raise NotImplementedError
