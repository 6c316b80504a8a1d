"""Push groups: engines that share a channel in a push. A pair is a group of one engine.

    open channel -> begin -> bucket, bucket, ...  -> verify, end: each engine by itself
                      | an engine fails: channel closed, failed engine found | fails: that engine alone
                      <- the others begin again over a new channel <--------'

Engines with ``single_request_push`` get begin and all buckets in one request, and the end as well if the engine is alone and is not
verified. All others, and a group that has one of the others, get one request for each.

An engine has failed when it answers nothing any more, or fails with no other engine on its channel. An engine that is only suspected is
retried alone on a new channel, within the same push. Each round ends within its deadlines and leaves fewer engines together than before.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tidemill.bus.client.addresses import Reach
from tidemill.bus.wire.rows import LiveRow
from tidemill.weightstore.errors import PartLost, PeerLost, ReceiverFailed
from tidemill.weightstore.push.channels import Channel, GroupChannel, HandleChannel
from tidemill.weightstore.push.member import Check, Member, Updated
from tidemill.weightstore.transport.deadlines import Deadlines
from tidemill.weightstore.transport.handles import Memory
from tidemill.weightstore.transport.nccl import DeviceEnd, no_nccl, share
from tidemill.weightstore.transport.parts import Buckets, Payload, RemotePart
from tidemill.weightstore.transport.senders import APART

_log = logging.getLogger(__name__)

_BUCKETS_AHEAD = 3
"""Buckets requested at once from an engine that reads them itself: the next requests wait there."""
_JOIN_S = 2.0
"""SGLang usually joins a group within this time. If the learner has gone by then, SGLang retries for minutes without answering."""

Outcome = dict[Member, Updated | ReceiverFailed]
"""The times of a member that took the version, or the reason that it did not."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Rules by which push groups are formed and their channels opened."""

    engines: int
    """Most engines of one group."""
    at: Reach
    """Address at which the learner serves the rendezvous."""
    backend: str
    """auto | gloo | nccl; auto = nccl to engines that can, else gloo."""
    deadlines: Deadlines
    own: DeviceEnd = field(default_factory=DeviceEnd)
    """The learner's GPU."""
    memory: Memory | None = None
    """The staging memory, if other processes can read it; NCCL needs that."""
    apart: tuple[str, ...] = APART
    """Backends with the learner's end in a process of its own."""
    parts: tuple[RemotePart, ...] = ()
    """Parts of the weights that other ranks send."""

    def backend_of(self, row: LiveRow) -> tuple[str, str]:
        """Return the backend to an engine (empty: it is refused), and why it is not NCCL: one backend for all ranks that send."""
        ends = () if self.backend == "gloo" else (self.own, *(part.place.end for part in self.parts))
        reason = next(filter(None, (no_nccl(end, row.capabilities) for end in ends)), "")
        if self.backend == "gloo" or (reason and self.backend == "auto"):
            return "gloo", reason
        return ("" if reason else "nccl"), reason

    async def open(self, members: Sequence[Member]) -> Channel:
        """Open a channel to these members: by handles for one that reads the buckets itself, else a process group. Raises PeerLost."""
        if members[0].receiver.carries:  # and is alone
            return HandleChannel()
        return await GroupChannel.open(
            members,
            at=self.at,
            deadline_s=self.deadlines.of("bucket"),
            memory=self.memory,
            gpu=self.own.uuid,
            apart=self.apart,
            parts=self.parts,
        )


class PushGroup:
    """Some engines, and the channel they had at the last push, if it is still good."""

    def __init__(self, rules: GroupRules, members: Iterable[Member] = ()) -> None:
        self._rules = rules
        self.members = list(members)
        self._channel: Channel | None = None
        self._joined: list[Member] = []
        """The members of the channel."""

    @property
    def is_colocated(self) -> bool:
        """True if its engines share the learner's accelerator: all, or none of them."""
        return any(member.colocated for member in self.members)

    @property
    def transport(self) -> str:
        """The backend of its process group; empty = its engine reads the buckets itself."""
        return "" if self.members[0].receiver.carries else self.members[0].backend

    def has_room(self, member: Member) -> bool:
        """Return whether an engine may be added.

        Engines of one group are all colocated or none, and have one backend, over NCCL on different GPUs; one that reads the buckets
        itself has a group of its own.
        """
        if any(one.receiver.carries or one.backend != member.backend for one in (member, *self.members)):
            return False
        if member.backend == "nccl" and any(share(one.devices, member.devices) for one in self.members):
            return False
        return member.colocated == self.is_colocated and len(self.members) < self._rules.engines

    async def update(self, version: int, buckets: Buckets, check_of: Callable[[Member], Check | None]) -> Outcome:
        """Push a version to all engines of the group. Returns how each took it, or why it did not.

        Raises Fenced, and PartLost where another rank of the learner cannot send its part: no engine has failed then.
        """
        going, apart, outcome = list(self.members), list[Member](), Outcome()
        # Decided once for all rounds of this push.
        checks = {member: check_of(member) for member in going}
        served: dict[Member, float | None] = {}
        while going:
            try:
                served = await self._transfer(going, version, buckets, serve=len(going) == 1 and checks[going[0]] is None)
                break
            except _GroupBroken as broken:
                await self._check_parts(broken)
                # An engine that did not fail may still be joining, and SGLang gets the time to end that: see ``_JOIN_S``.
                if broken.phase == "join" and any(not member.single_request for member in going if member not in broken.errors):
                    await asyncio.sleep(min(_JOIN_S, self._rules.deadlines.phase_s / 4))
                self.close()
                failed = await _failed(going, broken)
                _log.warning("push broke off version=%d phase=%s engines=%d failed=%s", version, broken.phase, len(going), _ids(failed))
                outcome |= failed
                # Where no engine has certainly failed, those that reported an error are retried alone, or all of them if none did:
                # the error of one reaches the others as a lost peer (docs/decisions/013-pairs-unless-asked.md).
                suspects = [] if failed else list(broken.errors) or going
                apart += suspects
                going = [member for member in going if member not in failed and member not in suspects]
        ways = [_finish(member, version, checks[member], served.get(member)) for member in going] + [
            PushGroup(self._rules, [member])._once(version, buckets, check_of) for member in apart
        ]
        for found in await _all(ways):
            outcome |= found
        return outcome

    async def _check_parts(self, broken: "_GroupBroken") -> None:
        """Raise PartLost if another rank of the learner is the reason: its end of a group fails the engines' ends, too."""
        try:
            if isinstance(broken.ours, PartLost):
                raise broken.ours
            for part in self._rules.parts:
                await part.check()
        except PartLost:
            self.close()
            raise

    async def _once(self, version: int, buckets: Buckets, check_of: Callable[[Member], Check | None]) -> Outcome:
        try:
            return await self.update(version, buckets, check_of)
        finally:
            self.close()

    async def _transfer(self, members: list[Member], version: int, buckets: Buckets, *, serve: bool) -> dict[Member, float | None]:
        """Send all buckets to all members. With ``serve``, returns the seconds for which each that serves them already paused generation.

        Raises _GroupBroken, Fenced.
        """
        if self._channel is None or self._joined != members:
            await self._open(members)
        channel = self._channel
        assert channel is not None
        if all(member.single_request for member in members):
            async with _PushRound() as round:
                return await _send_in_one_request(round, channel, members, version, buckets, serve, self._rules.deadlines.of("bucket"))
        async with _PushRound() as round:
            # A round of its own, in which the answer of every member is awaited: a member that fails here has failed by itself.
            await round.each("begin", [(member, member.begin(version)) for member in members])
        async with _PushRound() as round:
            await _send_in_turn(round, channel, members, buckets)
        return {}

    async def _open(self, members: list[Member]) -> None:
        self.close()
        async with _PushRound() as round:
            try:
                channel = self._channel = await self._rules.open(members)
            except PeerLost as error:
                raise _GroupBroken("join", {}, error) from None
            self._joined = list(members)
            # One group after the other: an engine that is blocked while it joins one answers no request to join another.
            for group in range(channel.groups):
                round.start("join", None, channel.meet(group), self._rules.deadlines.of("join"))
                for member in members:
                    round.start("join", member, channel.join(member, group))
                await round.until(round.under_way)

    def close(self) -> None:
        """Close the channel; the next push opens another one."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self._joined = None, []


async def _send_in_one_request(
    round: "_PushRound", channel: Channel, members: Sequence[Member], version: int, buckets: Buckets, serve: bool, deadline_s: float
) -> dict[Member, float | None]:
    """Send one request for all buckets. The deadline holds for each bucket, and then for the answers.

    A receiver that reads the buckets itself has both deadlines of its own.
    """
    # All sends are queued at once: the channel keeps them in order.
    sends = [
        round.start(f"bucket {number} of {len(buckets)}", None, channel.send(payload, following))
        for number, (payload, following) in enumerate(_with_next(buckets), 1)
    ]
    requests = {member: round.start("transfer", member, member.receive(version, buckets, serve=serve)) for member in members}
    await round.until(sends)
    try:
        async with asyncio.timeout(None if all(member.receiver.carries for member in members) else deadline_s):
            await round.until(round.under_way)
    except TimeoutError:
        raise _GroupBroken("transfer", {}, None) from None
    return {member: task.result() for member, task in requests.items()}


async def _send_in_turn(round: "_PushRound", channel: Channel, members: Sequence[Member], buckets: Buckets) -> None:
    """Send a request for every bucket. An engine that reads them itself has the next requests before it has stored this bucket."""
    most = _BUCKETS_AHEAD if all(member.receiver.carries for member in members) else 1
    under_way: deque[list[asyncio.Task[None]]] = deque()
    for number, ((bucket, _), (payload, following)) in enumerate(zip(buckets, _with_next(buckets), strict=True), 1):
        if len(under_way) == most:
            await round.until(under_way.popleft())
        phase = f"bucket {number} of {len(buckets)}"
        requests = [
            round.start(phase, member, _in_phase(member, phase, member.receiver.bucket(bucket.specs, payload))) for member in members
        ]
        under_way.append([*requests, round.start(phase, None, channel.send(payload, following))])
    await round.until(round.under_way)


def _with_next(buckets: Buckets) -> list[tuple[Payload, Payload | None]]:
    """Return the bytes of each bucket and those of the next one."""
    payloads = [payload for _, payload in buckets]
    return list(zip(payloads, [*payloads[1:], None], strict=True))


async def _in_phase(member: Member, phase: str, work: Coroutine[object, None, None]) -> None:
    async with member.phase(phase):
        await work


async def _finish(member: Member, version: int, check: Check | None, served_s: float | None) -> Outcome:
    try:
        return {member: await member.finish(version, check, served_s)}
    except ReceiverFailed as error:
        return {member: error}


async def _failed(members: Sequence[Member], broken: "_GroupBroken") -> dict[Member, ReceiverFailed]:
    """Return the engines that have certainly failed: they do not answer, or failed alone or in a phase that shares nothing."""
    if broken.phase == "begin" or len(members) == 1:
        return {member: broken.error(member) for member in members if member in broken.errors or len(members) == 1}
    alive = await _all([member.answers() for member in members])
    return {member: broken.error(member) for member, answered in zip(members, alive, strict=True) if not answered}


class _GroupBroken(Exception):
    """A round that cannot go on: the errors of the engines that reported one, and that of the learner's own part."""

    def __init__(self, phase: str, errors: Mapping[Member, ReceiverFailed], ours: Exception | None) -> None:
        super().__init__(phase, errors, ours)
        self.phase, self.errors, self.ours = phase, dict(errors), ours

    def error(self, member: Member) -> ReceiverFailed:
        """Return the error of one engine: its own, else that of the learner's part."""
        reason = "gives no answer any more" if self.ours is None else str(self.ours)
        return self.errors.get(member) or ReceiverFailed(member.receiver.url, self.phase, reason)


class _PushRound:
    """The tasks of one round with several engines: the first error of any cancels all of them."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], tuple[str, Member | None]] = {}

    async def __aenter__(self) -> "_PushRound":
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def under_way(self) -> list[asyncio.Task[object]]:
        """Tasks of the round that have not been waited for to their end."""
        return list(self._tasks)

    def start(self, phase: str, member: Member | None, work: Coroutine[object, None, T], timeout_s: float | None = None) -> asyncio.Task[T]:
        """Start and return a task of ``member``; None = of the learner itself. With ``timeout_s`` a late one fails as PeerLost."""
        task = asyncio.create_task(work if timeout_s is None else _bounded(work, timeout_s))
        self._tasks[task] = phase, member
        return task

    async def until(self, tasks: Iterable[asyncio.Task[object]]) -> None:
        """Wait for these tasks. Raises _GroupBroken as soon as any task of the round has failed."""
        waited = set(tasks)
        while waited & self._tasks.keys():
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._take(done)

    async def each(self, phase: str, work: Iterable[tuple[Member, Coroutine[object, None, None]]]) -> None:
        """Wait for all, also after an error: nothing is shared. Raises _GroupBroken naming all that failed."""
        for member, one in work:
            self.start(phase, member, one)
        done, _ = await asyncio.wait(self._tasks)
        self._take(done)

    def _take(self, done: set[asyncio.Task[object]]) -> None:
        errors: dict[Member, ReceiverFailed] = {}
        ours: Exception | None = None
        where = ""
        for task in [task for task in self._tasks if task in done]:  # the task that was started first names the phase
            phase, member = self._tasks.pop(task)
            error = task.exception()
            if error is None:
                continue
            where = where or phase
            if isinstance(error, ReceiverFailed) and member is not None:
                errors.setdefault(member, error)
            elif isinstance(error, PeerLost):
                ours = error
            else:
                raise error
        if where:
            raise _GroupBroken(where, errors, ours)


async def _bounded(work: Coroutine[object, None, T], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise PeerLost("tidemill", "waiting for the engines", f"not done within {timeout_s:g} s") from None


async def _all(work: Iterable[Coroutine[object, None, object]]) -> list[Any]:
    """Wait for all, then raise the first error, if there is one."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return list(found)


def _ids(members: Iterable[Member]) -> str:
    return ",".join(sorted(member.id for member in members))
