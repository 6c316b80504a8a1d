"""Server of the feed, in the feeder: registers ranks, sends batches, queues the reports of rank 0. Knows no DataSource.

Consumes the ranks' messages; produces ``outcomes`` (in the order rank 0 sent them) and ``asked``. A rank waits until
its batch is offered, and gets a heartbeat with the reason every second.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import zmq
import zmq.asyncio

from tidemill.bus.exit_codes import CRASHED
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.learner.errors import FeedError, RankFailed, RankSilent, RanksLeft
from tidemill.learner.feed.feed_keys import FeedKeys, Gate
from tidemill.learner.feed.feed_messages import FeedStart, Frame, Last, pack, unpack_from_rank

log = logging.getLogger(__name__)

Frames = Sequence[Frame]
"""Frames of a ZMQ message."""
LEAVE_S = 3.0
"""Seconds between the leave of all ranks and the drain of this node: ranks of other nodes may be drained before."""
_HELLO = 0
"""Value of ``_Rank.waits`` for a rank that waits for its start; steps begin at 1."""
_LOG_REFUSED_S = 60.0
"""Refusals within this time are one line in the log: a port scanner must not fill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A report of rank 0."""

    kind: str
    """done | published | checkpointed."""
    values: JsonObject


@dataclass(slots=True, kw_only=True)
class _Rank:
    rank: int
    dp_rank: int
    metadata: bool
    """True if the rank asks for the metadata of samples, too."""
    requested: int = 0
    """Last step that the rank has requested."""
    waits: int | None = None
    """The step that the rank waits for; None = it is working."""
    since_s: float = field(default_factory=time.monotonic)
    has_last: bool = False
    """True once the rank has received the number of the last step."""
    gone: bool = False
    """True once the rank has received the end of the run, or has signed off."""


@dataclass(frozen=True, slots=True)
class _Step:
    batches: Sequence[Frames]
    """By data-parallel rank."""
    metadata: Frame
    """Metadata of the step's samples; empty = not made."""


class FeedServer:
    """Server socket at ``listen`` (``tcp://host:*`` = any free port, see ``url``), which admits ranks by ``keys``.

    Other connections and messages are refused: counted, logged once a minute, never an error.
    """

    def __init__(
        self, listen: str, *, keys: FeedKeys, world_size: int, data_parallel: int, rank_silence_s: float = 0.0
    ) -> None:
        """``rank_silence_s``: longest time without a heartbeat of a rank; 0 = ranks send none."""
        self._world_size, self._data_parallel, self._rank_silence_s = world_size, data_parallel, rank_silence_s
        self.last_heartbeat_s: dict[int, float] = {}
        """Time of the last heartbeat of every registered rank."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # no limit: a ROUTER drops messages beyond it without an error
        self._socket.setsockopt(zmq.LINGER, 1_000)
        self._socket.setsockopt(zmq.IPV6, int("[" in listen))
        self._gate = Gate(self._context, self._socket, keys)
        self._socket.bind(listen)
        # With the port that the system has chosen, where ``listen`` names none.
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.outcomes: asyncio.Queue[RankReport] = asyncio.Queue()
        self.on_trained: Callable[[int, bytes], None] = lambda dp_rank, values: None
        """Called with the values of trained tokens that a data-parallel rank sends."""
        self.on_fetched: Callable[[int], None] = lambda step: None
        """Called when all ranks have the rows of a step."""
        self.waiter = Waiter()
        """Woken when ``asked`` has increased."""
        self.asked = 0
        """Highest step that a rank has requested."""
        self.all_ended = asyncio.Event()
        """Set when every rank of the world has registered and has left."""
        self.deserted = asyncio.Event()
        """Set while no rank is registered, or all registered ranks have left."""
        self.deserted.set()
        self.draining = asyncio.Event()
        """Set when a rank has asked for the end of this start; the code that drains the feeder sets it, too."""
        self.refused = 0
        """Number of refused connections and messages."""
        self._refusal_logged_s = -_LOG_REFUSED_S
        self._ranks: dict[bytes, _Rank] = {}
        self._ready: dict[int, _Step] = {}
        self._start: FeedStart | None = None
        self._last: Last | None = None
        self._end_after: int | None = None

    async def close(self) -> None:
        """Send queued messages (for at most a second) and release the port."""
        self._gate.close()
        self._socket.close()
        # Blocks while messages are sent. Shielded: a thread that is cancelled before it begins leaves the context open.
        await asyncio.shield(asyncio.to_thread(self._context.term))

    async def run(self) -> None:
        """Serve the ranks until cancelled. Raises a group of FeedError (a rank violates the protocol) or RankFailed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._gate.run(self._refuse), name="gate")
            while True:
                identity, *frames = await self._socket.recv_multipart()
                await self._received(identity, frames)

    async def _received(self, identity: bytes, frames: Sequence[bytes]) -> None:
        """Handle one message. An invalid one ends the feeder only if an accepted rank sent it; others are refused."""
        rank = self._ranks.get(identity)
        try:
            header = unpack_from_rank(frames[0] if frames else b"", where=f"feed at {self.url}")
            if header["type"] == "failed":  # also of a rank that fails before its hello
                raise RankFailed(header["rank"], header["reason"], header["exit_code"])
            if header["type"] == "alive":
                await self._alive(identity, header["rank"])
            elif rank is None:
                self._hello(identity, header)
            else:
                self._handle(rank, header)
        except FeedError as error:
            await self._send(identity, pack("error", reason=str(error)))
            if rank is not None:
                raise
            self._refuse(str(error))
        else:
            await self._serve()

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._refusal_logged_s >= _LOG_REFUSED_S:
            self._refusal_logged_s = now
            log.warning("feed at %s: refused=%d, the last one because %s", self.url, self.refused, reason)

    async def start(self, start: FeedStart) -> None:
        """Send ``start`` to the ranks, now or when they register."""
        self._start, self.asked = start, max(self.asked, start.step)
        await self._serve()

    @property
    def wants_metadata(self) -> bool:
        """True if a rank asks for the metadata of samples, or might: some are not registered yet."""
        return len(self._ranks) < self._world_size or any(rank.metadata for rank in self._ranks.values())

    async def offer(self, step: int, batches: Sequence[Frames], metadata: Frame = b"") -> None:
        """Offer the frames of a step, by data-parallel rank. ``metadata``: a further frame, for ranks that ask.

        A step behind the end of this start is left out: it was being planned when the end was decided.
        """
        if self._end_after is not None and step > self._end_after:
            return
        self._ready[step] = _Step(batches, metadata)
        await self._serve()

    async def last(self, last: Last) -> None:
        """Answer the first request of each rank for the step after ``last.step``, which has no batch."""
        self._last = last
        await self._serve()

    async def drain(self, states: Mapping[int, bytes]) -> None:
        """End this start behind the newest step that a rank has received: no rank takes another one, offered or not.

        ``states``: state of the data for the checkpoints of steps without one. Ranks that have ``last`` keep it.
        """
        first = 0 if self._start is None else self._start.step
        step = max([first, *map(self._taken, self._ranks.values())])
        self._ready = {offered: ready for offered, ready in self._ready.items() if offered <= step}
        if self._last is None and self._start is not None and step < self._start.steps:
            self._last = Last(step=step, state=states.get(step, b""), drained=True)
        await self.end_after(step)

    async def end_after(self, step: int) -> None:
        """Answer requests for a later step with the end of the run."""
        self._end_after = step
        await self._serve()

    async def end_run(self, step: int, *, within_s: float) -> bool:
        """Send the end of the run, and return whether every rank has received it in time."""
        await self.end_after(step)
        try:
            async with asyncio.timeout(within_s):
                await self.all_ended.wait()
        except TimeoutError:
            return False
        return True

    async def refuse_leave(self, draining: asyncio.Event) -> None:
        """Raise RanksLeft when all ranks have left while they are needed. Does not return when ``draining`` is set."""
        await self.all_ended.wait()
        await asyncio.sleep(LEAVE_S)
        if not draining.is_set():
            raise RanksLeft(self.asked)
        await asyncio.Event().wait()

    async def beat(self, waits_for: str) -> None:
        """Send waiting ranks a heartbeat with the reason of the wait. Raises RankSilent when one sends none."""
        self._refuse_silence()
        for identity, rank in self._ranks.items():
            if rank.waits is not None:
                await self._send(identity, pack("wait", waits_for=waits_for))

    async def fail(self, reason: str, exit_code: int = CRASHED) -> None:
        """Send all ranks the error that ends the feeder, and its exit code."""
        for identity in self._ranks:
            await self._send(identity, pack("error", reason=reason, exit_code=exit_code))

    async def _alive(self, identity: bytes, rank: int) -> None:
        """Note and answer a heartbeat, which has its own connection: the rank may be in a collective."""
        if not 0 <= rank < self._world_size:
            raise FeedError("heartbeat", f"a rank of {self._world_size}", rank)
        self.last_heartbeat_s[rank] = time.monotonic()
        await self._send(identity, pack("alive"))

    def _refuse_silence(self) -> None:
        if not self._rank_silence_s:
            return
        now = time.monotonic()
        for rank in self._ranks.values():
            silent_s = now - self.last_heartbeat_s.get(rank.rank, now)
            if not rank.gone and silent_s > self._rank_silence_s:
                raise RankSilent(rank.rank, silent_s)

    def starved_s(self, now: float) -> float:
        """Return the longest time for which a rank has been waiting for a batch, in seconds; 0 = no rank waits."""
        waiting = [rank.since_s for rank in self._ranks.values() if rank.waits not in (None, _HELLO)]
        return now - min(waiting) if waiting else 0.0

    def _handle(self, rank: _Rank, header: JsonMapping) -> None:
        kind = header["type"]
        if kind == "hello":
            raise _second_hello(header["rank"])
        if kind == "bye":
            rank.waits, rank.gone = None, True
        elif kind == "drain":
            self.draining.set()
            self.waiter.wake()
        elif kind == "next":
            self._requested(rank, header)
        elif kind == "trained":
            self.on_trained(rank.dp_rank, header["values"])
        else:
            self._reported(rank, kind, header)

    def _hello(self, identity: bytes, header: JsonMapping) -> None:
        """Register a rank. Raises FeedError for one that is not of this layout, or is registered already."""
        if header["type"] != "hello":
            raise FeedError(f"feed at {self.url}", "hello first", header["type"])
        rank = _Rank(rank=header["rank"], dp_rank=header["dp_rank"], metadata=header["metadata"], waits=_HELLO)
        if header["dp_size"] != self._data_parallel or not 0 <= rank.dp_rank < self._data_parallel:
            got = (rank.dp_rank, header["dp_size"])
            raise FeedError(f"hello of rank {rank.rank}", f"dp_rank of dp_size {self._data_parallel}", got)
        if not 0 <= rank.rank < self._world_size:
            raise FeedError(f"hello of rank {rank.rank}", f"a rank of {self._world_size}", rank.rank)
        if any(registered.rank == rank.rank for registered in self._ranks.values()):
            raise _second_hello(rank.rank)
        self._ranks[identity] = rank
        self.last_heartbeat_s.setdefault(rank.rank, time.monotonic())

    def _requested(self, rank: _Rank, header: Mapping[str, object]) -> None:
        step = header["step"]
        if self._start is None or step != max(rank.requested, self._start.step) + 1:
            raise FeedError(f"next of rank {rank.rank}", f"the step after {rank.requested}, after the start", step)
        rank.requested = rank.waits = step
        rank.since_s = time.monotonic()
        if step > self.asked:
            self.asked = step
            self.waiter.wake()

    def _reported(self, rank: _Rank, kind: str, header: Mapping[str, object]) -> None:
        if rank.rank != 0:
            raise FeedError(f"{kind} of rank {rank.rank}", "it from rank 0", header)
        values = {key: value for key, value in header.items() if key != "type"}
        self.outcomes.put_nowait(RankReport(kind=kind, values=values))

    async def _serve(self) -> None:
        """Send start, batch or end to every waiting rank for which it is available."""
        for identity, rank in list(self._ranks.items()):
            if rank.waits == _HELLO and self._start is not None:
                rank.waits, rank.requested = None, self._start.step
                await self._send(identity, pack("start", **asdict(self._start)))
            elif rank.waits is not None:
                await self._answer(identity, rank, rank.waits)
        self._forget()
        if not all(rank.gone for rank in self._ranks.values()):
            self.deserted.clear()
            return
        self.deserted.set()
        if len(self._ranks) == self._world_size:
            self.all_ended.set()

    async def _answer(self, identity: bytes, rank: _Rank, step: int) -> None:
        """Answer the request of a rank for a step, if there is an answer."""
        if step in self._ready:
            ready, rank.waits = self._ready[step], None
            await self._send(identity, *ready.batches[rank.dp_rank], *([ready.metadata] if rank.metadata else []))
        elif self._last is not None and not rank.has_last and step > self._last.step:
            # It makes the same request once more, for the end.
            rank.waits, rank.has_last, rank.requested = None, True, self._last.step
            await self._send(identity, pack("last", **asdict(self._last)))
        elif self._end_after is not None and step > self._end_after:
            rank.waits, rank.gone = None, True
            await self._send(identity, pack("end"))

    def _forget(self) -> None:
        """Drop the batches that every rank has received."""
        # A rank that has not registered yet needs every batch. One that waits for a step has received those before it.
        if len(self._ranks) == self._world_size:
            served = min(self._taken(rank) for rank in self._ranks.values())
            self._ready = {step: ready for step, ready in self._ready.items() if step > served}
            # A rank requests a step once it has fetched and packed the one before.
            self.on_fetched(min(rank.requested for rank in self._ranks.values()) - 1)

    @staticmethod
    def _taken(rank: _Rank) -> int:
        """Return the last step whose batch a rank has received."""
        return rank.requested - (rank.waits not in (None, _HELLO))

    async def _send(self, identity: bytes, *frames: Frame) -> None:
        await self._socket.send_multipart([identity, *frames], copy=False)


def _second_hello(rank: int) -> FeedError:
    return FeedError(f"hello of rank {rank}", "each rank once (the learner restarts as a whole)", "a second hello")
