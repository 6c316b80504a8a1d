"""Engines that share a channel: each bucket leaves the learner once for all of them. A pair is a cohort of one.

    open channel -> begin -> bucket, bucket, ...  -> verify, end: each engine by itself
                      | somebody fails: channel closed, culprit found | fails: that engine alone
                      <- the others begin again over a new channel <--'

Engines that can are asked for begin and all buckets in one request, and one that is alone, and need not be verified, for the end besides.

An engine fails when it gives no answer any more, or fails with nobody else on its channel. Another's trouble is not its own: who is only
suspected gets a channel to itself, in the same push. Each round ends within its deadlines and leaves fewer engines together than before.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from bus.reach import Reach
from weightstore.channel import Channel, GroupChannel, HandleChannel
from weightstore.errors import PeerLost, ReceiverFailed
from weightstore.manifest import Bucket
from weightstore.member import Check, Member, Updated

_log = logging.getLogger(__name__)

_AHEAD = 3
"""Buckets that are handed over at once: the requests for the next ones wait there."""

_COMING_S = 2.0
"""SGLang, asked to join, comes within this time as a rule. Where nobody listens any more it tries on for minutes, and answers nothing."""

Buckets = Sequence[tuple[Bucket, Tensor]]
Outcome = dict[Member, Updated | ReceiverFailed]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cohorts:
    """How engines are put together."""

    engines: int
    """At most so many in one cohort."""
    at: Reach
    """Where the learner serves the rendezvous."""
    backend: str
    deadline_s: float

    async def open(self, members: Sequence[Member]) -> Channel:
        if members[0].receiver.carries:  # and is alone
            return HandleChannel()
        return await GroupChannel.open(members, at=self.at, backend=self.backend, deadline_s=self.deadline_s)


class Cohort:
    """Some members, and the channel they had at the last push, if it is still good."""

    def __init__(self, cohorts: Cohorts, members: Iterable[Member] = ()) -> None:
        self._cohorts = cohorts
        self.members = list(members)
        self._channel: Channel | None = None
        self._joined: list[Member] = []
        """Who is in the channel."""

    @property
    def is_colocated(self) -> bool:
        """Its members share the learner's accelerator: all, or none."""
        return any(member.colocated for member in self.members)

    def has_room(self, member: Member) -> bool:
        """One that needs no channel shares none, and one that takes turns with the learner none with those that do not."""
        carries = any(one.receiver.carries for one in (member, *self.members))
        return not carries and member.colocated == self.is_colocated and len(self.members) < self._cohorts.engines

    async def update(self, version: int, buckets: Buckets, check_of: Callable[[Member], Check | None]) -> Outcome:
        """Push a version to all members: how each took it, or why it did not. Raises Fenced."""
        going, apart, outcome = list(self.members), list[Member](), Outcome()
        checks = {member: check_of(member) for member in going}
        served: dict[Member, float | None] = {}
        while going:
            try:
                served = await self._transfer(going, version, buckets, serve=len(going) == 1 and checks[going[0]] is None)
                break
            except _Torn as torn:
                if torn.phase == "join" and any(not member.at_once for member in going if member not in torn.errors):
                    await asyncio.sleep(min(_COMING_S, self._cohorts.deadline_s / 4))
                self.close()
                failed = await _failed(going, torn)
                _log.warning("push broke off version=%d phase=%s engines=%d failed=%s", version, torn.phase, len(going), _ids(failed))
                outcome |= failed
                suspects = [] if failed else list(torn.errors) or going
                apart += suspects
                going = [member for member in going if member not in failed and member not in suspects]
        ways = [_finish(member, version, checks[member], served.get(member)) for member in going] + [
            Cohort(self._cohorts, [member])._once(version, buckets, check_of) for member in apart
        ]
        for found in await _all(ways):
            outcome |= found
        return outcome

    async def _once(self, version: int, buckets: Buckets, check_of: Callable[[Member], Check | None]) -> Outcome:
        try:
            return await self.update(version, buckets, check_of)
        finally:
            self.close()

    async def _transfer(self, members: list[Member], version: int, buckets: Buckets, *, serve: bool) -> dict[Member, float | None]:
        """All buckets to all members; with ``serve``, who serves them by now, if it could be asked to. Raises _Torn, Fenced."""
        if self._channel is None or self._joined != members:
            await self._open(members)
        channel = self._channel
        assert channel is not None
        if all(member.at_once for member in members):
            async with _Round() as round:
                return await _send_at_once(round, channel, members, version, buckets, serve, self._cohorts.deadline_s)
        async with _Round() as round:
            await round.each("begin", [(member, member.begin(version)) for member in members])
        async with _Round() as round:
            await _send_in_turn(round, channel, members, buckets)
        return {}

    async def _open(self, members: list[Member]) -> None:
        self.close()
        async with _Round() as round:
            try:
                channel = self._channel = await self._cohorts.open(members)
            except PeerLost as error:
                raise _Torn("join", {}, error) from None
            self._joined = list(members)
            round.start("join", None, channel.meet(), self._cohorts.deadline_s)
            for member in members:
                round.start("join", member, channel.join(member))
            await round.until(round.under_way)

    def close(self) -> None:
        """Drop the channel; another one is opened when it is needed."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self._joined = None, []


async def _send_at_once(
    round: "_Round", channel: Channel, members: Sequence[Member], version: int, buckets: Buckets, serve: bool, deadline_s: float
) -> dict[Member, float | None]:
    """One request for all buckets. The deadline is that of each of them, and then of the answers."""
    specs = [bucket.specs for bucket, _ in buckets]
    sends = [round.start(f"bucket {number} of {len(buckets)}", None, channel.send(flat)) for number, (_, flat) in enumerate(buckets, 1)]
    asked = {member: round.start("transfer", member, member.receive(version, specs, serve=serve)) for member in members}
    await round.until(sends)
    try:
        async with asyncio.timeout(deadline_s):
            await round.until(round.under_way)
    except TimeoutError:
        raise _Torn("transfer", {}, None) from None
    return {member: task.result() for member, task in asked.items()}


async def _send_in_turn(round: "_Round", channel: Channel, members: Sequence[Member], buckets: Buckets) -> None:
    """A request for every bucket. Where they are handed over, the next ones are there before this one is stored."""
    most = _AHEAD if all(member.receiver.carries for member in members) else 1
    under_way: deque[list[asyncio.Task[None]]] = deque()
    for number, (bucket, flat) in enumerate(buckets, 1):
        if len(under_way) == most:
            await round.until(under_way.popleft())
        phase = f"bucket {number} of {len(buckets)}"
        asked = [round.start(phase, member, _in_phase(member, phase, member.receiver.bucket(bucket.specs, flat))) for member in members]
        under_way.append([*asked, round.start(phase, None, channel.send(flat))])
    await round.until(round.under_way)


async def _in_phase(member: Member, phase: str, work: Coroutine[Any, Any, None]) -> None:
    async with member.phase(phase):
        await work


async def _finish(member: Member, version: int, check: Check | None, served_s: float | None) -> Outcome:
    try:
        return {member: await member.finish(version, check, served_s)}
    except ReceiverFailed as error:
        return {member: error}


async def _failed(members: Sequence[Member], torn: "_Torn") -> dict[Member, ReceiverFailed]:
    """Those who are to blame for sure: who gives no answer, and who failed alone or in what is not shared."""
    if torn.phase == "begin" or len(members) == 1:
        return {member: torn.error(member) for member in members if member in torn.errors or len(members) == 1}
    alive = await _all([member.answers() for member in members])
    return {member: torn.error(member) for member, answered in zip(members, alive, strict=True) if not answered}


class _Torn(Exception):
    """A round that cannot go on."""

    def __init__(self, phase: str, errors: Mapping[Member, ReceiverFailed], ours: Exception | None) -> None:
        super().__init__(phase, errors, ours)
        self.phase, self.errors, self.ours = phase, dict(errors), ours

    def error(self, member: Member) -> ReceiverFailed:
        reason = "gives no answer any more" if self.ours is None else str(self.ours)
        return self.errors.get(member) or ReceiverFailed(member.receiver.url, self.phase, reason)


class _Round:
    """What is under way with several members at once: the first error of any ends it for all, and nothing is left running."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], tuple[str, Member | None]] = {}

    async def __aenter__(self) -> "_Round":
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def under_way(self) -> list[asyncio.Task[Any]]:
        return list(self._tasks)

    def start(self, phase: str, member: Member | None, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> asyncio.Task[T]:
        """``member`` None: our own part."""
        task = asyncio.create_task(work if timeout_s is None else _bounded(work, timeout_s))
        self._tasks[task] = phase, member
        return task

    async def until(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Wait for these. Raises _Torn as soon as anything under way has failed."""
        waited = set(tasks)
        while waited & self._tasks.keys():
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._take(done)

    async def each(self, phase: str, work: Iterable[tuple[Member, Coroutine[Any, Any, None]]]) -> None:
        """Wait for all, whoever fails: nothing is shared. Raises _Torn naming all that failed."""
        for member, one in work:
            self.start(phase, member, one)
        done, _ = await asyncio.wait(self._tasks)
        self._take(done)

    def _take(self, done: set[asyncio.Task[Any]]) -> None:
        errors: dict[Member, ReceiverFailed] = {}
        ours: Exception | None = None
        where = ""
        for task in [task for task in self._tasks if task in done]:  # what was asked first names the phase
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
            raise _Torn(where, errors, ours)


async def _bounded(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise PeerLost("tidemill", "waiting for the engines", f"not done within {timeout_s:g} s") from None


async def _all(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All to their end, and then the first error, if there is one."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return list(found)


def _ids(members: Iterable[Member]) -> str:
    return ",".join(sorted(member.id for member in members))
