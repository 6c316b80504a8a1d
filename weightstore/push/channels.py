"""The channel over which buckets get to the members of a push group.

A channel sends a bucket once, over a process group that all members share, or leaves it to the receiver of a member that reads the bucket
itself. Where several ranks of the learner send, each has a process group of its own with the members:

    rank 0      -- tidemill   --> e1, e2
    rank 2      -- tidemill-1 --> e1, e2        one bucket at a time, in the order of the requests

Blocking calls run in the channel's own thread. They cannot be interrupted: after an error the call ends by the deadline of the process
group, its result is ignored, and the channel is not used again.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from torch import Tensor

from tidemill.bus.client.addresses import Reach, bare
from tidemill.weightstore.errors import PeerLost
from tidemill.weightstore.push.member import Member
from tidemill.weightstore.transport import senders
from tidemill.weightstore.transport.handles import Memory
from tidemill.weightstore.transport.parts import Payload, RemoteBucket, RemoteGroup, RemotePart
from tidemill.weightstore.transport.port import Rendezvous
from tidemill.weightstore.transport.sender_process import START_S

GROUP = "tidemill"
"""Name of rank 0's process groups, and the beginning of the others': an engine that still has one of that name leaves it first."""
T = TypeVar("T")


class Channel(Protocol):
    """A way to the members for which it was opened. Errors of one member are ReceiverFailed, errors of the channel PeerLost."""

    groups: int
    """Process groups of the members, which they join one after the other; 1 for a channel without one."""

    async def meet(self, group: int) -> None:
        """The learner's part of opening, for one group."""

    async def join(self, member: Member, group: int) -> None:
        """A member's part of opening; called for all members at once, together with ``meet``."""

    async def send(self, payload: Payload, following: Payload | None = None) -> None:
        """The learner's part of a bucket, once for all members, in the order in which they are requested to receive them.

        ``following``: the next bucket; None = not known, or there is none.
        """

    def close(self) -> None:
        """Free the channel. A call under way ends by the deadline of the process group."""
        ...


class GroupChannel:
    """Process groups of the ranks that send, each rank 0 of its own, and the ranks of the engines, one engine after the other."""

    def __init__(
        self,
        own: "LocalGroup",
        remote: Sequence[RemoteGroup],
        members: Sequence[Member],
        deadline_s: float,
    ) -> None:
        """``remote``: the groups of other ranks, in the order of their parts. ``deadline_s``: of a bucket."""
        self._own, self._remote, self._deadline_s = own, list(remote), deadline_s
        self.groups = 1 + len(self._remote)
        self._sending = asyncio.Lock()
        """Senders take their turns: the members receive one bucket after the other."""
        self._lost: PeerLost | None = None
        self._first: dict[Member, int] = {}
        """The first rank of each engine."""
        rank = 1
        for member in members:
            self._first[member] = rank
            rank += member.ranks

    @classmethod
    async def open(
        cls,
        members: Sequence[Member],
        *,
        at: Reach,
        deadline_s: float,
        memory: Memory | None,
        gpu: str,
        apart: tuple[str, ...],
        parts: Sequence[RemotePart] = (),
    ) -> "GroupChannel":
        """Listen, and return the channel; the members have not joined yet. Raises PeerLost.

        ``memory``, ``gpu`` and ``apart`` as for ``senders.host``; ``parts``: those of other ranks, which send them.
        """
        size, backend = 1 + sum(member.ranks for member in members), members[0].backend
        own = await LocalGroup.open(members[0].id, size, backend, at=at, deadline_s=deadline_s, memory=memory, gpu=gpu, apart=apart)
        channel = cls(own, (), members, deadline_s)
        start_s = deadline_s + (START_S if backend in apart else 0.0)
        hosting = [part.host(f"{GROUP}-{number}", size, backend, deadline_s, start_s) for number, part in enumerate(parts, 1)]
        found = await asyncio.gather(*hosting, return_exceptions=True)
        channel._remote = [group for group in found if isinstance(group, RemoteGroup)]
        channel.groups = 1 + len(channel._remote)
        for error in found:
            if isinstance(error, BaseException):
                channel.close()
                raise error
        return channel

    async def meet(self, group: int) -> None:
        """Wait until the ranks of all members have joined the group."""
        await (self._remote[group - 1] if group else self._own).meet()

    async def join(self, member: Member, group: int) -> None:
        """Have the engine join the group; its processes take as many ranks, from its first one."""
        end = self._remote[group - 1] if group else self._own
        where = Rendezvous(
            host=end.host, port=end.port, rank=self._first[member], world_size=end.world_size, name=end.name, backend=end.backend
        )
        await member.join(where)

    async def send(self, payload: Payload, following: Payload | None = None) -> None:
        """Broadcast the bucket to all members, from the rank that has it. After one failed no other is tried: each could block."""
        async with self._sending:
            if self._lost is not None:
                raise type(self._lost)(self._own.name, "sending", f"an earlier message was lost: {self._lost.reason}")
            try:
                await self._broadcast(payload, following)
            except PeerLost as error:
                self._lost = error
                raise

    async def _broadcast(self, payload: Payload, following: Payload | None) -> None:
        if isinstance(payload, Tensor):
            await self._own.send(payload, following if isinstance(following, Tensor) else None, self._deadline_s)
            return
        ahead = following if isinstance(following, RemoteBucket) and following.part is payload.part else None
        [group] = [group for group in self._remote if group.part is payload.part]
        await group.send(payload, ahead, self._deadline_s)

    def close(self) -> None:
        """Close all groups, without waiting for a call under way."""
        self._own.close()
        for group in self._remote:
            group.part.close_group(group)


class HandleChannel:
    """No transport of its own: the receivers of its members pass handles of the buckets."""

    groups = 1

    async def meet(self, group: int) -> None:
        pass

    async def join(self, member: Member, group: int) -> None:
        """Have the engine join without a process group."""
        await member.join(None)

    async def send(self, payload: Payload, following: Payload | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class LocalGroup:
    """The process group of this rank, whose blocking calls run in a thread: one that hangs until its deadline delays no other channel."""

    def __init__(self, sender: senders.Sender, thread: ThreadPoolExecutor, host: str) -> None:
        """``host``: at which the members reach the group's port."""
        self._sender, self._thread, self.host = sender, thread, host
        self.name, self.port, self.world_size, self.backend = sender.name, sender.port, sender.world_size, sender.backend

    @classmethod
    async def open(
        cls,
        first: str,
        size: int,
        backend: str,
        *,
        at: Reach,
        deadline_s: float,
        memory: Memory | None,
        gpu: str,
        apart: tuple[str, ...],
    ) -> "LocalGroup":
        """Listen. ``first``: id of the first member, for the name of the thread. Raises PeerLost."""
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"push {first}")
        try:
            hosting = _run(thread, lambda: senders.host(at.bind, GROUP, size, backend, deadline_s, memory=memory, gpu=gpu, apart=apart))
            return cls(await hosting, thread, bare(at.advertised))
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def meet(self) -> None:
        """Wait until every rank is connected. Raises PeerLost."""
        await _run(self._thread, self._sender.meet)

    async def send(self, flat: Tensor, following: Tensor | None, timeout_s: float) -> None:
        """Broadcast a bucket. Raises PeerLost."""
        await _run(self._thread, lambda: self._sender.send(flat, timeout_s, following))

    def close(self) -> None:
        """Close the group and let its thread end, without waiting for a call under way."""
        self._sender.close()
        self._thread.shutdown(wait=False)


def _run(thread: ThreadPoolExecutor, work: Callable[[], T]) -> "asyncio.Future[T]":
    future = asyncio.get_running_loop().run_in_executor(thread, work)
    future.add_done_callback(_retrieve)
    return future


def _retrieve(future: "asyncio.Future[T]") -> None:
    """Mark the exception as retrieved: the caller may have gone."""
    if not future.cancelled():
        future.exception()
