"""The engine as the learner's pushes see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from weightstore.checksums import ChecksumReport
    from weightstore.manifest import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where a process group meets."""

    host: str
    port: int
    rank: int
    """Of the engine; the learner is 0."""
    world_size: int
    name: str
    backend: str
    """gloo | nccl."""


class WeightReceiver(Protocol):
    """One engine. Verbs are called one at a time, in the order ``join (begin bucket* [checksums] end)* leave``; ``close`` at any time.

    A colocated engine, which shares an accelerator with the learner, is asked to ``release`` its memory before each step. Then it wants
    ``resume("weights")`` before ``begin``, and ``resume("kv_cache")`` after ``end``. Both may be repeated, and are nothing to an engine
    that has all its memory.

    A push is all or nothing: until ``end`` has answered, the engine serves what it served before, and a new ``begin`` discards what
    an unfinished push has brought. After ``end`` every token it starts to compute is of the new version; no request is aborted.

    Every verb answers within the deadline the adapter was made with, or raises: ``weightstore.errors.ReceiverFailed`` when the
    engine refuses, fails, is gone or is too slow, ``bus.errors.Fenced`` when it has seen the epoch of a newer learner.
    """

    url: str
    carries: bool
    """It hands the bytes of a bucket over itself: no process group is met, and nothing is to be sent."""

    async def join(self, rendezvous: Rendezvous | None) -> None:
        """Enter the process group; answers when all its members have met. One of the same name is left first. None if it ``carries``."""

    async def begin(self, version: int) -> None:
        """Open a push of this version."""

    async def bucket(self, specs: "Sequence[TensorSpec]", flat: "Tensor") -> None:
        """Receive one flat bucket over the process group; answers when it is stored, so send it meanwhile (unless it ``carries``).

        After the answer, or an error, nothing that is served depends on ``flat`` any more. One that ``carries`` may be asked for the next
        ones meanwhile: it takes them in any order.
        """

    async def checksums(self) -> "ChecksumReport | None":
        """Of what the open push has brought, as it will be served; None when this engine cannot tell."""

    async def end(self) -> float:
        """Serve the new version; seconds for which this held up generation. Refused unless every tensor came exactly once."""
        raise NotImplementedError

    async def leave(self) -> None:
        """Leave the process group."""

    async def release(self) -> None:
        """Generate nothing more, and give up the memory of weights, keys and values; what runs is computed again later, none is aborted."""

    async def resume(self, what: str) -> None:
        """Take memory again, of ``weights``: empty, for an update to fill; of ``kv_cache``: and go on generating."""

    def close(self) -> None:
        """Let go of what the adapter holds here; tells nobody."""

    async def load_snapshot(self, directory: str, version: int) -> float:
        """Take the weights from a directory that the engine can read, whole or not at all; seconds as of ``end``."""
        raise NotImplementedError


@runtime_checkable
class PushReceiver(WeightReceiver, Protocol):
    """Of an engine whose live row says ``at_once``: it may be asked to ``receive`` instead of ``begin bucket*``, or of all to ``end``."""

    async def receive(self, version: int, buckets: "Sequence[Sequence[TensorSpec]]", *, serve: bool) -> float | None:
        """Open a push, receive these flat buckets one after the other, and with ``serve`` serve them: then seconds as of ``end``.

        Send them meanwhile. This has no deadline of its own: the engine gives each bucket the one that the adapter was made with.
        """
