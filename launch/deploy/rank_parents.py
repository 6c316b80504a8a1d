"""The ranks of a node in the processes that a launcher has started, one in each.

    process of local rank 0: agent of the node (or the learner, on one node) and feeder, parent of local rank 0
        │  start, signals, the exit code of all          ▲  devices, progress, the end of the rank, SIGTERM
        ▼                                                │
    process of local rank 1 ..: parent of its rank, and of nothing else

So every rank has the accelerators, cores and memory that the launcher gave its process. They meet at an abstract Unix
socket that is named after the launcher's job, and accept processes of their own user alone. A process that loses the
other end kills its rank, and ends with code 1.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

from tidemill.bus import exit_codes
from tidemill.bus.system.coroutines import ended, first_error
from tidemill.bus.system.processes import LAST_LINES, Child
from tidemill.launch.deploy.launchers import Launched
from tidemill.launch.deploy.node_channel import (
    MAX_LINE,
    Channel,
    DeviceSeen,
    Drain,
    End,
    Ended,
    Hello,
    Message,
    Progress,
    Signal,
    Start,
)
from tidemill.launch.devices.shapes import Device, Node, PlacementRefused
from tidemill.launch.devices.visible import VARIABLE, this_node
from tidemill.launch.run.learner_process import HERE, RankStarts
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.errors import LearnerEnded
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.ranks.process import start_here

log = logging.getLogger(__name__)

_REPORT_EVERY_S = 30.0
_RETRY_S = 0.2
REFUSED_S = 60.0  # Longest wait of an agent that was refused for the processes that must end with it
BEHIND_S = 15.0  # Time that a parent of a rank lives longer in a drain than the agent, whose code it takes
CLOSE_S = 5.0  # Longest wait for the other processes to take their exit code


class _Rank(Child):
    """A rank that another process of this node is the parent of."""

    def __init__(self, channel: Channel, name: str, progress: int) -> None:
        super().__init__(name, ())
        self._channel, self._progress = channel, progress
        self._end: Ended | None = None
        self._over = asyncio.Event()

    @property
    def returncode(self) -> int | None:
        return None if self._end is None else self._end.code

    def progressed(self, data: bytes) -> None:
        """Pass bytes on to the pipe of this node's ranks."""
        if self._end is None and self._progress >= 0:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._progress, data)

    def note_end(self, end: Ended) -> None:
        self._end = self._end or end
        self._over.set()

    async def wait(self) -> int:
        await self._over.wait()
        assert self._end is not None
        return self._end.code

    exited = wait

    def send(self, number: signal.Signals) -> None:
        if self._end is None:
            self._channel.send(Signal(number))

    def lines(self) -> list[str]:
        return [] if self._end is None else list(self._end.lines)

    def reason(self) -> str:
        return "" if self._end is None else self._end.reason


class RankParents:
    """The other processes of this node, as its agent sees them."""

    def __init__(self, place: Launched, node: Node, draining: asyncio.Event) -> None:
        """``node``: this process's view of the machine. ``draining`` is set when another process gets SIGTERM."""
        self._place, self._draining = place, draining
        self._seen = {0: node}
        self._channels: dict[int, Channel] = {}
        self._ranks: dict[int, _Rank] = {}
        self._gone: set[int] = set()
        self._joined, self._left = asyncio.Event(), asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one process until it is gone."""
        channel = Channel(reader, writer)
        try:
            hello = await channel.receive() if channel.is_own() else None
            if isinstance(hello, Hello) and hello.local_rank < self._place.local_world:
                await self._serve(hello, channel)
        finally:
            await channel.close()

    async def _serve(self, hello: Hello, channel: Channel) -> None:
        local = hello.local_rank
        if local in self._channels:
            log.warning("a second process of local rank %d is refused", local)
            return
        devices = tuple(Device(**{name: getattr(row, name) for name in row.__struct_fields__}) for row in hello.devices)
        self._seen[local] = replace(self._seen[0], devices=devices)
        self._channels[local] = channel
        self._joined.set()
        while (message := await channel.receive()) is not None:
            rank = self._ranks.get(local)
            if isinstance(message, Drain):
                self._draining.set()
            elif isinstance(message, Progress) and rank is not None:
                rank.progressed(message.data)
            elif isinstance(message, Ended) and rank is not None:
                rank.note_end(message)
        self._gone.add(local)
        self._left.set()
        if local in self._ranks:
            self._ranks[local].note_end(self._lost(local))

    async def all_there(self, within_s: float) -> None:
        """Wait for the processes of all local ranks, or a drain. Raises LearnerEnded naming the missing ranks."""
        loop = asyncio.get_running_loop()
        deadline, reported_s = loop.time() + within_s, loop.time()
        while missing := [local for local in range(1, self._place.local_world) if local not in self._channels]:
            if self._draining.is_set():
                return
            text = f"local ranks {', '.join(map(str, missing))} of {self._place.local_world} ({self._place.launcher})"
            if loop.time() > deadline:
                raise LearnerEnded(f"not all processes of this node are there after {within_s:.0f} s; missing: {text}")
            if loop.time() - reported_s > _REPORT_EVERY_S:
                reported_s = loop.time()
                log.info("waiting for %s", text)
            self._joined.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._joined.wait()

    def node(self) -> Node:
        """Return this node with the accelerators of all its processes. Raises PlacementRefused."""
        devices = {device.uuid: device for local in sorted(self._seen) for device in self._seen[local].devices}
        self.own()
        return replace(self._seen[0], devices=tuple(devices.values()))

    def own(self) -> tuple[str, ...]:
        """Return the accelerator of each local rank where each process sees its own alone; empty = all see the same.

        Raises PlacementRefused.
        """
        seen = [[device.uuid for device in self._seen[local].devices] for local in sorted(self._seen)]
        if all(set(uuids) == set(seen[0]) for uuids in seen):
            return ()
        uuids = tuple(uuid for own in seen for uuid in own)
        if any(len(own) != 1 for own in seen) or len(set(uuids)) != len(seen):
            want = "the same accelerators in all processes of a node, or one of its own in each"
            got = "; ".join(f"local rank {local}: {', '.join(own) or 'none'}" for local, own in enumerate(seen))
            raise PlacementRefused(VARIABLE, want, got, "bind one to each process (srun --gpus-per-task=1), or none")
        return uuids

    async def start(
        self, local: int, name: str, arguments: Sequence[str], environment: Mapping[str, str], keys: FeedKeys, fd: int
    ) -> Child:
        """Start a rank of this node in its process."""
        if local == 0:
            return await start_here(local, name, arguments, environment, keys, fd)
        rank = self._ranks[local] = _Rank(self._channels[local], name, fd)
        if local in self._gone:
            rank.note_end(self._lost(local))
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(keys).items()}
        start = Start(name=name, arguments=tuple(arguments), environment=dict(environment), keys=values)
        self._channels[local].send(start)
        return rank

    def end(self, code: int) -> None:
        """Let all other processes end with this code."""
        for channel in self._channels.values():
            channel.send(End(code))

    async def close(self) -> None:
        """Wait until the other processes have taken the exit code and left, for a few seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._gone != set(self._channels):
                    self._left.clear()
                    await self._left.wait()
        for channel in self._channels.values():
            await channel.close()

    def _lost(self, local: int) -> Ended:
        reason = f"the process of local rank {local} has ended ({self._place.launcher})"
        return Ended(code=-signal.SIGKILL, lines=(), reason=reason)


@asynccontextmanager
async def gathered(
    place: Launched, node: Node, draining: asyncio.Event, *, wait_s: float, code: Callable[[], int]
) -> AsyncIterator[RankParents]:
    """Yield the other processes of this node, once they are all there; at the end they get the exit code of this one.

    ``code``: of a process that ends without an error. Raises LearnerEnded after ``wait_s``.
    """
    parents, ends = RankParents(place, node, draining), exit_codes.CRASHED
    server = await _served(parents, place, wait_s)
    try:
        await parents.all_there(wait_s)
        yield parents
        ends = code()
    except asyncio.CancelledError:
        ends = exit_codes.NOT_IN_TIME
        raise
    except Exception as error:
        ends = exit_codes.of(first_error(error))
        raise
    finally:
        parents.end(ends)
        await parents.close()
        server.close()


@asynccontextmanager
async def started(
    place: Launched | None, config: RunConfig, draining: asyncio.Event, *, code: Callable[[], int]
) -> AsyncIterator[RankStarts | None]:
    """Yield the way in which the ranks of this node are started; None when drained before all processes are there.

    ``place``: None = no launcher has a process for each. ``code``: as of ``gathered``.
    Raises LearnerEnded, PlacementRefused.
    """
    if place is None or place.local_world == 1:
        yield HERE
        return
    node = await _node(config)
    async with gathered(place, node, draining, wait_s=config.learner.nodes_wait_s, code=code) as parents:
        if draining.is_set():
            yield None
        else:
            yield RankStarts(start=parents.start, node=parents.node(), own=parents.own())


async def _node(config: RunConfig) -> Node:
    """Return this machine, with the accelerators that a rank in this process may have."""
    node = await asyncio.to_thread(this_node, os.environ)
    return replace(node, devices=()) if config.learner.device == "cpu" else node


async def end_all(place: Launched, code: int) -> None:
    """Let the other processes of this node end with ``code``: this one was refused before it began."""
    with contextlib.suppress(LearnerEnded):
        async with gathered(place, Node(), asyncio.Event(), wait_s=REFUSED_S, code=lambda: code):
            log.info("the processes of this node end with code %d", code)


async def _served(parents: RankParents, place: Launched, wait_s: float) -> asyncio.Server:
    """Return the server at this node's address, which an agent of an earlier start may still have."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        try:
            return await asyncio.start_unix_server(parents.serve, _address(place), limit=MAX_LINE)
        except OSError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise LearnerEnded(f"another learner of this launch runs on this node: {error}") from None
            await asyncio.sleep(_RETRY_S)


def _address(place: Launched) -> str:
    words = "\n".join((str(os.getuid()), place.launcher, str(place.node), str(place.world), *place.job))
    return f"\0tidemill-{hashlib.sha256(words.encode()).hexdigest()[:32]}"


class RankParent:
    """This process: the parent of one rank, for the agent of its node."""

    def __init__(self, place: Launched, node: Node, channel: Channel) -> None:
        self._place, self._channel = place, channel
        self._rank: Child | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._hello = Hello(
            local_rank=place.local_rank,
            devices=tuple(DeviceSeen(**asdict(device)) for device in node.devices),
        )

    async def run(self, draining: asyncio.Event) -> int:
        """Run the rank as often as the agent wants it. Returns the exit code that the agent has sent."""
        self._channel.send(self._hello)
        loop = asyncio.get_running_loop()
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        loop.add_reader(reading, lambda: self._channel.send(Progress(os.read(reading, 4096))))
        drain = asyncio.create_task(self._report_drain(draining))
        try:
            while not isinstance(message := await self._channel.receive(), End):
                if message is None:
                    log.error("the process of local rank 0 has ended, so this one does (%s)", self._place.launcher)
                    return exit_codes.CRASHED
                await self._obey(message, writing)
            return message.code
        finally:
            loop.remove_reader(reading)
            await ended(drain, *([self._reporting] if self._reporting else []))
            if self._rank is not None:
                self._rank.send(signal.SIGKILL)
                await self._rank.exited()
            os.close(reading)
            os.close(writing)
            await self._channel.close()

    async def _obey(self, message: Message, progress: int) -> None:
        if isinstance(message, Signal) and self._rank is not None:
            self._rank.send(signal.Signals(message.number))
        elif isinstance(message, Start):
            keys = FeedKeys.of(message.keys)
            local, arguments = self._place.local_rank, message.arguments
            self._rank = await start_here(local, message.name, arguments, message.environment, keys, progress)
            self._reporting = asyncio.create_task(self._report_end(self._rank))

    async def _report_end(self, rank: Child) -> None:
        code = await rank.wait()
        self._channel.send(Ended(code=code, lines=tuple(rank.lines()[-LAST_LINES:]), reason=rank.reason()))

    async def _report_drain(self, draining: asyncio.Event) -> None:
        await draining.wait()
        self._channel.send(Drain())


async def run_parent(place: Launched, config: RunConfig, draining: asyncio.Event) -> int | None:
    """Be the parent of one rank until the agent of this node ends it. Returns the exit code; None if drained before.

    Raises LearnerEnded.
    """
    loop, wait_s, node = asyncio.get_running_loop(), config.learner.nodes_wait_s, await _node(config)
    deadline = loop.time() + wait_s
    while not draining.is_set():
        try:
            channel = Channel(*await asyncio.open_unix_connection(_address(place), limit=MAX_LINE))
        except OSError:
            if loop.time() > deadline:
                why = "each container of a node needs its host's network namespace"
                raise LearnerEnded(
                    f"no process of local rank 0 after {wait_s:.0f} s ({place.launcher}; {why})"
                ) from None
            await asyncio.sleep(_RETRY_S)
            continue
        if not channel.is_own():
            raise LearnerEnded("the process of local rank 0 is another user's")
        return await RankParent(place, node, channel).run(draining)
    return None
