"""The engine as the learner's pushes see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weightstore.checksums import Told
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
    """One engine. Verbs are called one at a time, in the order ``join (begin bucket* [checksums] end)* leave``.

    A push is all or nothing: until ``end`` has answered, the engine serves what it served before, and a new ``begin`` discards what
    an unfinished push has brought. After ``end`` every token it starts to compute is of the new version; no request is aborted.

    Every verb answers within the deadline the adapter was made with, or raises: ``weightstore.errors.ReceiverFailed`` when the
    engine refuses, fails, is gone or is too slow, ``bus.errors.Fenced`` when it has seen the epoch of a newer learner.
    """

    url: str

    async def join(self, rendezvous: Rendezvous) -> None:
        """Enter the process group; answers when all its members have met. A group of the same name is left first."""

    async def begin(self, version: int) -> None:
        """Open a push of this version."""

    async def bucket(self, specs: "Sequence[TensorSpec]") -> None:
        """Receive one flat bucket over the process group; answers when it is stored, so send it meanwhile."""

    async def checksums(self) -> "Told | None":
        """Of what the open push has brought, as it will be served; None when this engine cannot tell."""

    async def end(self) -> float:
        """Serve the new version; seconds for which this held up generation. Refused unless every tensor came exactly once."""
        raise NotImplementedError

    async def leave(self) -> None:
        """Leave the process group."""

    async def load_snapshot(self, directory: str, version: int) -> float:
        """Take the weights from a directory that the engine can read, whole or not at all; seconds as of ``end``."""
        raise NotImplementedError
