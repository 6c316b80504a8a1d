"""One attempt to send the tensors of a version to several engines together, and which of them have failed if it breaks
off.

    open group -> begin -> bucket, bucket, ...

Engines with ``single_request_push`` get begin and all buckets in one request, and the end as well if the engine is
alone and is not verified. All others, and a group that has one of the others, get one request for each.

An engine has failed when it answers nothing any more, or fails with no other engine in its group. What happens with the
others is not decided here.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tidemill.bus.system.coroutines import ended
from tidemill.weightstore.errors import PartLost, PeerLost, ReceiverFailed
from tidemill.weightstore.format.adapters import AdapterHeader
from tidemill.weightstore.push.member import Check, Member
from tidemill.weightstore.push.push_groups import PushGroup, all_of
from tidemill.weightstore.transport.parts import Buckets, Payload
from tidemill.weightstore.transport.staging import StagedAdapter

_BUCKETS_AHEAD = 3  # Buckets requested at once from an engine that reads them itself: the next requests wait there
# SGLang usually joins within this time; if the learner has gone by then, it retries for minutes without answering
_JOIN_S = 2.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors that a group receives."""

    buckets: Buckets
    header: AdapterHeader | None = None
    """The adapter's, without a base; None = there is no adapter."""
    check: Check | None = None
    """Comparison with these tensors; None = the push has it."""
    has_base: bool = True
    """False for an adapter alone."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(bucket.num_bytes for bucket, _ in self.buckets)

    def header_for(self, member: Member) -> AdapterHeader | None:
        """Return the header with the base that the engine holds, unless the base is sent."""
        return self.header if self.header is None or self.has_base else replace(self.header, base=member.base)


async def adapter_contents(copy: StagedAdapter, members: Sequence[Member]) -> Contents:
    """Return the adapter for engines that hold its base; if one of them does not, with the base before it."""
    compare = copy.differences_of(base=True, adapter=False)
    await asyncio.gather(*(member.find_base(compare) for member in members))
    has_base = not all(member.base for member in members)
    buckets = [*(copy.base_buckets if has_base else ()), *copy.adapter_buckets]
    return Contents(buckets, copy.header, copy.differences_of(base=has_base, adapter=True), has_base)


class GroupBroken(Exception):
    """A round that cannot go on: the errors that engines reported, and the error of the learner's own part."""

    def __init__(self, phase: str, errors: Mapping[Member, ReceiverFailed], ours: Exception | None) -> None:
        super().__init__(phase, errors, ours)
        self.phase, self.errors, self.ours = phase, dict(errors), ours

    def error(self, member: Member) -> ReceiverFailed:
        """Return the error of one engine: its own, else the error of the learner's part."""
        reason = "gives no answer any more" if self.ours is None else str(self.ours)
        return self.errors.get(member) or ReceiverFailed(member.receiver.url, self.phase, reason)


class Transfer:
    """One attempt to send the contents to all members. After GroupBroken, ``find_failed`` names those that failed."""

    def __init__(self, version: int, group: PushGroup, members: Sequence[Member], contents: Contents) -> None:
        """``members``: of the group, some or all."""
        self._version, self._group, self._members, self._contents = version, group, list(members), contents

    async def send(self, *, serve: bool) -> dict[Member, float | None]:
        """Send all buckets to all members; with ``serve`` a request with all of them ends the update, too. Returns the
        pauses of serving engines. Raises GroupBroken, Fenced.
        """
        if not self._group.is_open_for(self._members):
            await self._open()
        if all(member.single_request for member in self._members):
            async with _Round() as round_:
                return await self._send_in_one_request(round_, serve=serve)
        async with _Round() as round_:
            # A round of its own, in which the answer of every member is awaited: a member that fails here has failed by
            # itself.
            header_for = self._contents.header_for
            begins = [(member, member.begin(self._version, header_for(member))) for member in self._members]
            await round_.each("begin", begins)
        async with _Round() as round_:
            await self._send_in_turn(round_)
        return {}

    async def find_failed(self, broken: GroupBroken) -> dict[Member, ReceiverFailed]:
        """Close the group, and return the members that have certainly failed: without an answer, alone, or in a phase
        that shares nothing. Raises PartLost when another rank of the learner is the reason: no engine has failed then.
        """
        try:
            await self._check_parts(broken)
            await self._let_join(broken)
        finally:
            self._group.close()
        is_alone = len(self._members) == 1
        if broken.phase == "begin" or is_alone:
            return {member: broken.error(member) for member in self._members if member in broken.errors or is_alone}
        alive = await all_of([member.answers() for member in self._members])
        return {
            member: broken.error(member) for member, answered in zip(self._members, alive, strict=True) if not answered
        }

    async def _open(self) -> None:
        group, members = self._group, self._members
        async with _Round() as round_:
            try:
                await group.open(members)
            except PeerLost as error:
                raise GroupBroken("join", {}, error) from None
            deadline_s = group.rules.deadlines.of("join")
            if not group.senders:
                await round_.until([round_.start("join", member, member.join(None)) for member in members])
            # One group after the other: an engine that is blocked while it joins one answers no request to join
            # another.
            for sender in group.senders:
                round_.start("join", None, sender.meet(), deadline_s)
                for member in members:
                    round_.start("join", member, member.join(group.rendezvous(member, sender)))
                await round_.until(round_.under_way)

    async def _send_in_one_request(self, round_: "_Round", *, serve: bool) -> dict[Member, float | None]:
        group, members, contents = self._group, self._members, self._contents
        # All sends are queued at once: the group keeps them in order.
        sends = [
            round_.start(phase, None, group.send(payload, following)) for phase, payload, following in self._messages()
        ]
        requests = {
            member: round_.start(
                "transfer",
                member,
                member.receive(self._version, contents.buckets, serve=serve, adapter=contents.header_for(member)),
            )
            for member in members
        }
        await round_.until(sends)
        deadline_s = None if all(member.receiver.carries for member in members) else group.rules.deadlines.of("bucket")
        try:
            async with asyncio.timeout(deadline_s):
                await round_.until(round_.under_way)
        except TimeoutError:
            raise GroupBroken("transfer", {}, None) from None
        return {member: task.result() for member, task in requests.items()}

    async def _send_in_turn(self, round_: "_Round") -> None:
        """Send a request for every bucket; an engine that reads them itself has the next ones before it stored one."""
        group, members, buckets = self._group, self._members, self._contents.buckets
        max_ahead = _BUCKETS_AHEAD if all(member.receiver.carries for member in members) else 1
        under_way: deque[list[asyncio.Task[None]]] = deque()
        for (bucket, _), (phase, payload, following) in zip(buckets, self._messages(), strict=True):
            if len(under_way) == max_ahead:
                await round_.until(under_way.popleft())
            requests = [
                round_.start(phase, member, _in_phase(member, phase, member.receiver.bucket(bucket.specs, payload)))
                for member in members
            ]
            under_way.append([*requests, round_.start(phase, None, group.send(payload, following))])
        await round_.until(round_.under_way)

    def _messages(self) -> list[tuple[str, Payload, Payload | None]]:
        """Return of each bucket its phase, its payload, and the payload that follows."""
        payloads: list[Payload] = [payload for _, payload in self._contents.buckets]
        phases = [f"bucket {number} of {len(payloads)}" for number in range(1, len(payloads) + 1)]
        return list(zip(phases, payloads, [*payloads[1:], None], strict=True))

    async def _check_parts(self, broken: GroupBroken) -> None:
        """Raise PartLost if another rank is the reason: its end of a group fails the engines' ends, too."""
        if isinstance(broken.ours, PartLost):
            raise broken.ours
        for part in self._group.rules.parts:
            await part.check()

    async def _let_join(self, broken: GroupBroken) -> None:
        """Give an engine that did not fail, and may still be joining, the time to end that: see ``_JOIN_S``."""
        others = [member for member in self._members if member not in broken.errors]
        if broken.phase == "join" and any(not member.single_request for member in others):
            await asyncio.sleep(min(_JOIN_S, self._group.rules.deadlines.phase_s / 4))


class _Round:
    """The tasks of one round with several engines: the first error of any cancels all of them."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], tuple[str, Member | None]] = {}

    async def __aenter__(self) -> "_Round":
        return self

    async def __aexit__(self, *error: object) -> None:
        await ended(*self._tasks)

    @property
    def under_way(self) -> list[asyncio.Task[object]]:
        """Tasks of the round that have not been waited for to their end."""
        return list(self._tasks)

    def start(
        self, phase: str, member: Member | None, work: Coroutine[object, None, T], timeout_s: float | None = None
    ) -> asyncio.Task[T]:
        """Start a task of ``member`` (None = the learner); with ``timeout_s`` a late one fails as PeerLost."""
        task = asyncio.create_task(work if timeout_s is None else _bounded(work, timeout_s))
        self._tasks[task] = phase, member
        return task

    async def until(self, tasks: Iterable[asyncio.Task[object]]) -> None:
        """Wait for these tasks. Raises GroupBroken as soon as any task of the round has failed."""
        waited = set(tasks)
        while waited & self._tasks.keys():
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._raise_errors(done)

    async def each(self, phase: str, work: Iterable[tuple[Member, Coroutine[object, None, None]]]) -> None:
        """Wait for all, also after an error: nothing is shared. Raises GroupBroken naming all that failed."""
        for member, verb in work:
            self.start(phase, member, verb)
        done, _ = await asyncio.wait(self._tasks)
        self._raise_errors(done)

    def _raise_errors(self, done: set[asyncio.Task[object]]) -> None:
        errors: dict[Member, ReceiverFailed] = {}
        ours: Exception | None = None
        first_phase = ""
        for task in [task for task in self._tasks if task in done]:  # the task that was started first names the phase
            phase, member = self._tasks.pop(task)
            error = task.exception()
            if error is None:
                continue
            first_phase = first_phase or phase
            if isinstance(error, ReceiverFailed) and member is not None:
                errors.setdefault(member, error)
            elif isinstance(error, PeerLost):
                ours = error
            else:
                raise error
        if first_phase:
            raise GroupBroken(first_phase, errors, ours)


async def _in_phase(member: Member, phase: str, work: Coroutine[object, None, None]) -> None:
    async with member.phase(phase):
        await work


async def _bounded(work: Coroutine[object, None, T], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise PeerLost("tidemill", "waiting for the engines", f"not done within {timeout_s:g} s") from None
