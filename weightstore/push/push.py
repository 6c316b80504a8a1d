"""One push: a version on its way to the engines of all groups, and its outcome.

    open group -> begin -> bucket, bucket, ...  -> verify, end: each engine by itself
                    | an engine fails: group closed, failed engine found | fails: that engine alone
                    <- the others begin again over a new group <--------'

Engines with ``single_request_push`` get begin and all buckets in one request, and the end as well if the engine is
alone and is not verified. All others, and a group that has one of the others, get one request for each.

Engines that add adapters by themselves receive the adapter of a version alone, once their weights have been found
equal to its base; before that, the base as well.

An engine has failed when it answers nothing any more, or fails with no other engine in its group. An engine that is
only suspected is retried alone over a new one, within the same push. Each round ends within its deadlines and leaves
fewer engines together than before.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import TypeVar

from tidemill.bus.system.coroutines import ended
from tidemill.weightstore.errors import PartLost, PeerLost, PublisherClosed, ReceiverFailed
from tidemill.weightstore.format.adapters import AdapterHeader
from tidemill.weightstore.push.member import Check, Member, Updated
from tidemill.weightstore.push.push_groups import PushGroup, PushGroups, all_of
from tidemill.weightstore.transport.parts import Buckets, Payload
from tidemill.weightstore.transport.staging import StagedAdapter, StagedModel

_log = logging.getLogger(__name__)

# Transports by handles, of host memory and of a GPU's; the others are the backends of process groups
HOST_HANDLES, CUDA_HANDLES = "host_handles", "cuda_handles"
_BUCKETS_AHEAD = 3  # Buckets requested at once from an engine that reads them itself: the next requests wait there
# SGLang usually joins within this time; if the learner has gone by then, it retries for minutes without answering
_JOIN_S = 2.0

# The times of a member that took the version, or the reason that it did not
Outcome = dict[Member, Updated | ReceiverFailed]
CheckOf = Callable[[Member], Check | None]  # Returns the comparison of a member's checksums if it is due, else None
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """The outcome and the cost of a push."""

    version: int
    step: int
    engines: tuple[str, ...]
    """Engines that serve the version now."""
    evicted: dict[str, str]
    """Engine -> why it does not."""
    prepare_s: float
    """Seconds of copying into the staging memory, in the trainer's thread."""
    transfer_s: float
    """From the first begin to the last end."""
    stall_s: dict[str, float]
    """Engine -> seconds for which the flip paused its generation."""
    verified: tuple[str, ...]
    """Engines of ``engines`` whose checksums were compared with the sent weights before they served the version."""
    verify_s: dict[str, float]
    """Engine -> seconds that the comparison took."""
    seconds: float
    """The whole push without preparation: reserve, join, transfer, head."""
    num_bytes: int
    """Bytes that an engine has received, the most of any; without engines, the size of what is pushed."""
    adapter_engines: tuple[str, ...] = ()
    """Engines of ``engines`` that received an adapter without its base."""
    gb_per_s: Mapping[str, float]
    """Transport -> bytes delivered to its engines in a second, in 10^9; from the first begin to the last end."""


class PushHandle:
    """A push under way."""

    def __init__(self, future: "Future[PushReport]") -> None:
        self._future = future

    @property
    def done(self) -> bool:
        """True once the push has ended, with success or failure."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the push has ended, with success or failure; each of its phases has a deadline."""
        try:
            self._future.exception()
        except CancelledError:
            return

    def result(self, timeout: float | None = None) -> PushReport:
        """Wait for the push, and return its report. Raises PushFailed, Fenced, PublisherClosed, TimeoutError."""
        try:
            return self._future.result(timeout)
        except CancelledError:
            raise PublisherClosed("publisher: closed during the push") from None


class Throughput:
    """Engines that took a version, by transport, and the time until the last of them had it."""

    def __init__(self) -> None:
        self._num_bytes: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def add(self, transport: str, num_bytes: int, seconds: float) -> None:
        """Count ``num_bytes`` delivered to the engines of a push group in ``seconds``; the groups of a push are updated
        at the same time.
        """
        if num_bytes:
            self._num_bytes[transport] = self._num_bytes.get(transport, 0) + num_bytes
            self._seconds[transport] = max(self._seconds.get(transport, 0.0), seconds)

    @property
    def gb_per_s(self) -> Mapping[str, float]:
        """10^9 bytes a second by transport; none for one without engines."""
        return {
            transport: num_bytes / 1e9 / self._seconds[transport]
            for transport, num_bytes in self._num_bytes.items()
            if self._seconds[transport] > 0
        }


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors that a group receives."""

    buckets: Buckets
    header: AdapterHeader | None = None
    """The adapter's, without a base; None = there is no adapter."""
    check: Check | None = None
    """Comparison with these tensors; None = ``CheckOf`` makes it."""
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


class Push:
    """One version: ``send`` it to all groups; ``updated`` and ``evicted`` are the outcome."""

    def __init__(
        self,
        version: int,
        buckets: Buckets,
        check_of: CheckOf,
        *,
        handles: str = HOST_HANDLES,
        adapter: StagedAdapter | None = None,
    ) -> None:
        """``handles``: the name of the transport of engines that read the buckets themselves. ``adapter``: the version
        for engines that receive adapters; ``buckets`` are for the others.
        """
        self._version, self._buckets, self._check_of, self._handles = version, buckets, check_of, handles
        self._adapter = adapter
        self._contents: dict[Member, Contents] = {}  # What each engine was sent
        self.updated: dict[str, Updated] = {}  # Engines that serve the version now
        self.evicted: dict[str, str] = {}  # Engine -> why it does not
        self.transfer_s = 0.0  # From the first begin to the last end
        self.throughput = Throughput()

    def report(self, copy: StagedModel | StagedAdapter, *, seconds: float) -> PushReport:
        """Return the report of a push that has succeeded, and log it."""
        verify_s = {engine: times.verify_s for engine, times in self.updated.items() if times.verify_s is not None}
        report = PushReport(
            version=copy.version,
            step=copy.step,
            engines=tuple(sorted(self.updated)),
            evicted=self.evicted,
            prepare_s=copy.prepare_s,
            transfer_s=self.transfer_s,
            stall_s={engine: times.stall_s for engine, times in self.updated.items()},
            verified=tuple(sorted(verify_s)),
            verify_s=verify_s,
            seconds=seconds,
            num_bytes=max((contents.num_bytes for contents in self._contents.values()), default=copy.num_bytes),
            adapter_engines=tuple(
                sorted(member.id for member, contents in self._contents.items() if self._took_adapter(member, contents))
            ),
            gb_per_s=self.throughput.gb_per_s,
        )
        _log.info(
            (
                "pushed version=%d step=%d bytes=%d engines=%d adapters=%d verified=%d evicted=%d prepare_s=%.3f "
                "transfer_s=%.3f seconds=%.3f max_stall_s=%.4f"
            ),
            report.version,
            report.step,
            report.num_bytes,
            len(report.engines),
            len(report.adapter_engines),
            len(report.verified),
            len(report.evicted),
            report.prepare_s,
            report.transfer_s,
            report.seconds,
            max(report.stall_s.values(), default=0.0),
        )
        return report

    def _took_adapter(self, member: Member, contents: Contents) -> bool:
        return member.id in self.updated and not contents.has_base

    async def send(self, groups: Sequence[PushGroup], roster: PushGroups) -> None:
        """Push to these groups of ``roster`` at once, and evict the engines that fail. Raises Fenced, PartLost."""
        since = time.perf_counter()
        # All groups end before an error is raised: none may go on with a copy that the caller then releases.
        await all_of([self._send_to(group, roster) for group in groups])
        self.transfer_s = time.perf_counter() - since

    async def _send_to(self, group: PushGroup, roster: PushGroups) -> None:
        since, transport = time.perf_counter(), group.transport or self._handles
        outcome = await self.update(group)
        updated = {member: times for member, times in outcome.items() if isinstance(times, Updated)}
        errors = {member: error for member, error in outcome.items() if isinstance(error, ReceiverFailed)}
        num_bytes = sum(self._contents[member].num_bytes for member in updated)
        self.throughput.add(transport, num_bytes, time.perf_counter() - since)
        self.updated |= {member.id: times for member, times in updated.items()}
        self.evicted |= {member.id: f"{error.phase}: {error.reason}" for member, error in errors.items()}
        await asyncio.gather(*[roster.evict(member, str(error)) for member, error in errors.items()])
        for member in updated:
            roster.succeeded(member)

    async def update(self, group: PushGroup) -> Outcome:
        """Push to all engines of a group. Returns how each took the version, or why not.

        Raises Fenced, and PartLost when another rank of the learner cannot send its part: no engine has failed then.
        """
        together, apart, outcome = list(group.members), list[Member](), Outcome()
        # Decided once for all rounds of this push.
        contents = Contents(self._buckets)
        if self._adapter is not None and all(member.adapters for member in together):
            contents = await adapter_contents(self._adapter, together)
        self._contents |= dict.fromkeys(together, contents)
        checks = {member: self._check_of(member) for member in together}
        checks = {member: check and (contents.check or check) for member, check in checks.items()}
        served_s: dict[Member, float | None] = {}
        while together:
            try:
                served_s = await self._transfer(
                    group, together, contents, serve=len(together) == 1 and checks[together[0]] is None
                )
                break
            except _GroupBroken as broken:
                await _check_parts(group, broken)
                await _let_join(group, together, broken)
                group.close()
                failed = await _failed(together, broken)
                _log.warning(
                    "push broke off version=%d phase=%s engines=%d failed=%s",
                    self._version,
                    broken.phase,
                    len(together),
                    _ids(failed),
                )
                outcome |= failed
                # Where no engine has certainly failed, the engines that reported an error are retried alone, or all of
                # them if none did: the error of one reaches the others as a lost peer
                # (docs/decisions/013-pairs-unless-asked.md).
                suspects = [] if failed else list(broken.errors) or together
                apart += suspects
                together = [member for member in together if member not in failed and member not in suspects]
        ends = [self._finish(member, checks[member], served_s.get(member)) for member in together]
        for part in await all_of([*ends, *(self._retry(group, member) for member in apart)]):
            outcome |= part
        return outcome

    async def _retry(self, group: PushGroup, member: Member) -> Outcome:
        alone = PushGroup(group.rules, [member])
        try:
            return await self.update(alone)
        finally:
            alone.close()

    async def _finish(self, member: Member, check: Check | None, served_s: float | None) -> Outcome:
        try:
            return {member: await member.finish(self._version, check, served_s)}
        except ReceiverFailed as error:
            return {member: error}

    async def _transfer(
        self, group: PushGroup, members: list[Member], contents: Contents, *, serve: bool
    ) -> dict[Member, float | None]:
        """Send all buckets to all members. Returns the pauses of serving engines. Raises _GroupBroken, Fenced."""
        if not group.is_open_for(members):
            await _open(group, members)
        if all(member.single_request for member in members):
            async with _PushRound() as round_:
                return await self._send_in_one_request(round_, group, members, contents, serve=serve)
        async with _PushRound() as round_:
            # A round of its own, in which the answer of every member is awaited: a member that fails here has failed by
            # itself.
            begins = [(member, member.begin(self._version, contents.header_for(member))) for member in members]
            await round_.each("begin", begins)
        async with _PushRound() as round_:
            await self._send_in_turn(round_, group, members, contents.buckets)
        return {}

    async def _send_in_one_request(
        self, round_: "_PushRound", group: PushGroup, members: list[Member], contents: Contents, *, serve: bool
    ) -> dict[Member, float | None]:
        # All sends are queued at once: the group keeps them in order.
        sends = [
            round_.start(phase, None, group.send(payload, following))
            for phase, payload, following in _messages(contents.buckets)
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
            raise _GroupBroken("transfer", {}, None) from None
        return {member: task.result() for member, task in requests.items()}

    async def _send_in_turn(
        self, round_: "_PushRound", group: PushGroup, members: list[Member], buckets: Buckets
    ) -> None:
        """Send a request for every bucket; an engine that reads them itself has the next ones before it stored one."""
        max_ahead = _BUCKETS_AHEAD if all(member.receiver.carries for member in members) else 1
        under_way: deque[list[asyncio.Task[None]]] = deque()
        for (bucket, _), (phase, payload, following) in zip(buckets, _messages(buckets), strict=True):
            if len(under_way) == max_ahead:
                await round_.until(under_way.popleft())
            requests = [
                round_.start(phase, member, _in_phase(member, phase, member.receiver.bucket(bucket.specs, payload)))
                for member in members
            ]
            under_way.append([*requests, round_.start(phase, None, group.send(payload, following))])
        await round_.until(round_.under_way)


def _messages(buckets: Buckets) -> list[tuple[str, Payload, Payload | None]]:
    payloads: list[Payload] = [payload for _, payload in buckets]
    phases = [f"bucket {number} of {len(payloads)}" for number in range(1, len(payloads) + 1)]
    return list(zip(phases, payloads, [*payloads[1:], None], strict=True))


async def _open(group: PushGroup, members: list[Member]) -> None:
    async with _PushRound() as round_:
        try:
            await group.open(members)
        except PeerLost as error:
            raise _GroupBroken("join", {}, error) from None
        deadline_s = group.rules.deadlines.of("join")
        if not group.senders:
            await round_.until([round_.start("join", member, member.join(None)) for member in members])
        # One group after the other: an engine that is blocked while it joins one answers no request to join another.
        for sender in group.senders:
            round_.start("join", None, sender.meet(), deadline_s)
            for member in members:
                round_.start("join", member, member.join(group.rendezvous(member, sender)))
            await round_.until(round_.under_way)


async def _check_parts(group: PushGroup, broken: "_GroupBroken") -> None:
    """Raise PartLost if another rank of the learner is the reason: its end of a group fails the engines' ends, too."""
    try:
        if isinstance(broken.ours, PartLost):
            raise broken.ours
        for part in group.rules.parts:
            await part.check()
    except PartLost:
        group.close()
        raise


async def _let_join(group: PushGroup, members: Iterable[Member], broken: "_GroupBroken") -> None:
    """Give an engine that did not fail, and may still be joining, the time to end that: see ``_JOIN_S``."""
    if broken.phase == "join" and any(not member.single_request for member in members if member not in broken.errors):
        await asyncio.sleep(min(_JOIN_S, group.rules.deadlines.phase_s / 4))


async def _in_phase(member: Member, phase: str, work: Coroutine[object, None, None]) -> None:
    async with member.phase(phase):
        await work


async def _failed(members: Sequence[Member], broken: "_GroupBroken") -> dict[Member, ReceiverFailed]:
    """Return the engines that have certainly failed: without an answer, alone, or in a phase that shares nothing."""
    if broken.phase == "begin" or len(members) == 1:
        return {member: broken.error(member) for member in members if member in broken.errors or len(members) == 1}
    alive = await all_of([member.answers() for member in members])
    return {member: broken.error(member) for member, answered in zip(members, alive, strict=True) if not answered}


class _GroupBroken(Exception):
    """A round that cannot go on: the errors that engines reported, and the error of the learner's own part."""

    def __init__(self, phase: str, errors: Mapping[Member, ReceiverFailed], ours: Exception | None) -> None:
        super().__init__(phase, errors, ours)
        self.phase, self.errors, self.ours = phase, dict(errors), ours

    def error(self, member: Member) -> ReceiverFailed:
        """Return the error of one engine: its own, else the error of the learner's part."""
        reason = "gives no answer any more" if self.ours is None else str(self.ours)
        return self.errors.get(member) or ReceiverFailed(member.receiver.url, self.phase, reason)


class _PushRound:
    """The tasks of one round with several engines: the first error of any cancels all of them."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], tuple[str, Member | None]] = {}

    async def __aenter__(self) -> "_PushRound":
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
        """Wait for these tasks. Raises _GroupBroken as soon as any task of the round has failed."""
        waited = set(tasks)
        while waited & self._tasks.keys():
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._raise_errors(done)

    async def each(self, phase: str, work: Iterable[tuple[Member, Coroutine[object, None, None]]]) -> None:
        """Wait for all, also after an error: nothing is shared. Raises _GroupBroken naming all that failed."""
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
            raise _GroupBroken(first_phase, errors, ours)


async def _bounded(work: Coroutine[object, None, T], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise PeerLost("tidemill", "waiting for the engines", f"not done within {timeout_s:g} s") from None


def _ids(members: Iterable[Member]) -> str:
    return ",".join(sorted(member.id for member in members))
