"""How buckets travel to the members of a cohort: sent once over a process group that all of them share, or handed to each by its receiver.

What blocks runs in the channel's own thread. It cannot be interrupted: after an error it ends by the group's deadline, unheard, and the
channel is not used again.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from torch import Tensor

from bus.reach import Reach, bare
from weightstore.broadcast import BroadcastGroup
from weightstore.errors import PeerLost
from weightstore.member import Member
from weightstore.port import Rendezvous

T = TypeVar("T")

GROUP = "tidemill"
"""Name of every group: an engine that still has one of that name leaves it first."""


class Channel(Protocol):
    """A way to the members it was opened for. Errors of one member are ReceiverFailed, of the way itself PeerLost."""

    async def meet(self) -> None:
        """The learner's part of opening."""

    async def join(self, member: Member) -> None:
        """A member's part of opening; asked of all at once, and meanwhile ``meet``."""

    async def send(self, flat: Tensor) -> None:
        """The learner's part of a bucket, once for all members, in the order in which they are asked to take them."""

    def close(self) -> None: ...


class GroupChannel:
    """A process group of the learner (rank 0) and the ranks of the engines, one engine after the other."""

    def __init__(
        self, group: BroadcastGroup, members: Sequence[Member], thread: ThreadPoolExecutor, deadline_s: float, address: str
    ) -> None:
        """``address``: under which the members find the group's port."""
        self._group, self._thread, self._deadline_s, self._address = group, thread, deadline_s, address
        self._lost = False
        self._first: dict[Member, int] = {}
        """The first rank of each engine."""
        rank = 1
        for member in members:
            self._first[member] = rank
            rank += member.ranks

    @classmethod
    async def open(cls, members: Sequence[Member], *, at: Reach, backend: str, deadline_s: float) -> "GroupChannel":
        """Listen; the members have not come yet. Raises PeerLost."""
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"push {members[0].id}")
        size = 1 + sum(member.ranks for member in members)
        try:
            group = await _run(thread, lambda: BroadcastGroup.host(at.bind, GROUP, size, backend, deadline_s))
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(group, members, thread, deadline_s, bare(at.advertised))

    async def meet(self) -> None:
        await _run(self._thread, self._group.meet)

    async def join(self, member: Member) -> None:
        group = self._group
        where = Rendezvous(
            host=self._address,
            port=group.port,
            rank=self._first[member],
            world_size=group.world_size,
            name=group.name,
            backend=group.backend,
        )
        await member.join(where)

    async def send(self, flat: Tensor) -> None:
        await _run(self._thread, lambda: self._send(flat))

    def _send(self, flat: Tensor) -> None:
        """In the channel's thread, where others wait: behind one that failed none is tried, for it may block for a deadline of its own."""
        if self._lost:
            raise PeerLost(self._group.name, "sending", "an earlier message was lost")
        try:
            self._group.send(flat, self._deadline_s)
        except PeerLost:
            self._lost = True
            raise

    def close(self) -> None:
        self._group.close()
        self._thread.shutdown(wait=False)


class HandleChannel:
    """No way of its own: the receivers of its members hand the bytes over themselves."""

    async def meet(self) -> None:
        pass

    async def join(self, member: Member) -> None:
        await member.join(None)

    async def send(self, flat: Tensor) -> None:
        pass

    def close(self) -> None:
        pass


def _run(thread: ThreadPoolExecutor, work: Callable[[], T]) -> "asyncio.Future[T]":
    future = asyncio.get_running_loop().run_in_executor(thread, work)
    future.add_done_callback(_unheard)
    return future


def _unheard(future: "asyncio.Future[T]") -> None:
    if not future.cancelled():
        future.exception()
