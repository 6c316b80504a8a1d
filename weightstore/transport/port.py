"""The interface of an engine for the learner's pushes, and the deadlines of requests to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tidemill.bus.wire.rows import LiveRow
    from tidemill.weightstore.format.adapters import AdapterHeader
    from tidemill.weightstore.format.checksums import ChecksumReport
    from tidemill.weightstore.format.manifest import TensorSpec
    from tidemill.weightstore.transport.parts import Buckets, Payload
import time
from collections.abc import Iterator
from contextlib import contextmanager


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Address and members of a process group that is to be opened."""

    host: str
    port: int
    rank: int
    """The first rank of the engine; the learner is 0."""
    world_size: int
    name: str
    backend: str
    """gloo | nccl."""


class WeightReceiver(Protocol):
    """One engine.

    Verbs are called one at a time, in the order ``join (begin bucket* [checksums] end)* leave``; ``close`` at any time.

    A colocated engine, which shares an accelerator with the learner, gets ``release`` before each step. Afterwards it
    needs ``resume("weights")`` before ``begin``, and ``resume("kv_cache")`` after ``end``. Both may be repeated, and do
    nothing on an engine that has all its memory.

    A push is all or nothing: until ``end`` has answered, the engine serves the weights of before, and a new ``begin``
    discards the weights received so far. After ``end`` every token it starts to compute is of the new version; no
    request is aborted.

    Every verb answers within the deadline the adapter was made with, or raises:
    ``tidemill.weightstore.errors.ReceiverFailed`` when the engine refuses, fails, is gone or is too slow,
    ``tidemill.bus.errors.Fenced`` when it has seen the epoch of a newer learner.
    """

    url: str
    carries: bool
    """It delivers the bytes of a bucket itself: no process group is opened, and no bucket is sent over one."""
    adapters: bool
    """It delivers adapters, too. False: an engine behind it gets merged weights."""

    async def join(self, rendezvous: Rendezvous | None) -> None:
        """Join the process group, after leaving one of the same name; answers when all members have joined.

        Called once for every rank of the learner that sends; None if it ``carries``.
        """

    async def begin(self, version: int, adapter: "AdapterHeader | None" = None) -> None:
        """Begin a push of this version; with ``adapter`` it has an adapter, and no other tensors unless ``base`` is "".

        Only engines with the capability ``adapters`` get one.
        """

    async def bucket(self, specs: "Sequence[TensorSpec]", flat: "Payload") -> None:
        """Receive one flat bucket over the process group; answers when it is stored, so send it meanwhile (unless it
        ``carries``).

        ``flat``: uint8 in this process, or a ``RemoteBucket``, which another rank of the learner sends in its own
        process group.

        After the answer, or an error, the served weights do not depend on ``flat``. A receiver that ``carries`` may get
        the next requests before it has answered this one, in any order.
        """

    async def receive(
        self, version: int, buckets: "Buckets", *, serve: bool, adapter: "AdapterHeader | None" = None
    ) -> float | None:
        """Begin a push and receive these flat buckets one after the other, in place of ``begin bucket*``.

        For engines with ``single_request_push``.

        With ``serve`` also end it, and return seconds as ``end`` does.

        None: it is not ended yet. One that ``carries`` never ends it: its engine may have read the buckets too late.

        Send the buckets meanwhile, unless it ``carries``. The engine applies the deadline of the adapter to each
        bucket; one that ``carries`` has no other deadline, and the request of any other has none: its answer is due
        when all buckets are sent.
        """

    async def checksums(self, of: str = "update") -> "ChecksumReport | None":
        """Return the checksums of the weights received in the open push, or with ``base`` of the weights to which
        adapters are added; None when this engine has no checksums.
        """

    async def end(self) -> float:
        """Serve the new version, unless a tensor did not come exactly once. Returns seconds of paused generation."""
        raise NotImplementedError

    async def leave(self) -> None:
        """Leave the process groups."""

    async def release(self) -> None:
        """Stop generating, and free weights, keys and values; requests are computed again later, none is aborted."""

    async def resume(self, what: str) -> None:
        """Take memory back: ``weights`` (empty, for an update to fill), or ``kv_cache`` (and generate again)."""

    def close(self) -> None:
        """Free the resources of the adapter in this process; sends nothing."""

    async def load_snapshot(self, directory: str, version: int) -> float:
        """Load the weights of a directory that the engine can read, whole or not at all. Returns seconds as ``end``."""
        raise NotImplementedError


OpenReceiver = Callable[["LiveRow"], WeightReceiver]  # Makes the receiver of a live engine
# Id, address and pid of an engine. Another one is another process, which has joined no group.
Identity = tuple[str, str, int]


def identity(row: "LiveRow") -> Identity:
    """Return the identity of a live engine."""
    return row.id, row.address, row.pid


# Phases with work on all weights: memory for a second copy (``begin`` or the first bucket), checksums, loading
BY_SIZE = frozenset({"begin", "bucket", "verify", "end", "resume"})
# Minimum speed of an engine in such a phase, until it is measured: a busy laptop computed checksums at 18e6
FIRST_BYTES_PER_S = 20e6
SLOWER = 4.0  # Factor of the longest time measured: machines and networks are shared


class Deadlines:
    """Bounds of the requests of one learner, in seconds. All its engines share the measured times."""

    def __init__(self, phase_s: float, load_s: float = 600.0) -> None:
        """``phase_s``: of a phase without work on the weights. ``load_s``: of a load from disk, the longest phase."""
        self.phase_s, self.load_s = phase_s, load_s
        self.num_bytes = 0  # Size of the weights of this push
        self._longest_s: dict[str, float] = {}

    def of(self, phase: str) -> float:
        """Return the seconds of a phase, whose name may have a detail ("bucket 1 of 3")."""
        kind = phase.partition(" ")[0]
        if kind == "load":
            return self.load_s
        if kind not in BY_SIZE:
            return self.phase_s
        longest_s = self._longest_s.get(kind)
        work_s = self.num_bytes / FIRST_BYTES_PER_S if longest_s is None else SLOWER * longest_s
        return min(self.phase_s + work_s, max(self.phase_s, self.load_s))

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Measure a phase, unless it fails."""
        since = time.perf_counter()
        yield
        kind = phase.partition(" ")[0]
        self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), time.perf_counter() - since)
