"""One push: a version on its way to the engines of all groups, and its outcome.

    transfer to all engines of a group together  -> verify, end: each engine by itself
                    | an engine fails: group closed, failed engine found | fails: that engine alone
                    <- the others begin again over a new group <--------'

Engines that add adapters by themselves receive the adapter of a version alone, once their weights have been found
equal to its base; before that, the base as well.

An engine that is only suspected of a failure is retried alone over a new group, within the same push. Each transfer
ends within its deadlines and leaves fewer engines together than before.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from tidemill.weightstore.errors import PublisherClosed, ReceiverFailed
from tidemill.weightstore.push.member import Check, Member, Updated
from tidemill.weightstore.push.push_groups import PushGroup, PushGroups, all_of
from tidemill.weightstore.push.transfer import Contents, GroupBroken, Transfer, adapter_contents
from tidemill.weightstore.transport.parts import Buckets
from tidemill.weightstore.transport.staging import StagedAdapter, StagedModel

_log = logging.getLogger(__name__)

# Transports by handles, of host memory and of a GPU's; the others are the backends of process groups
HOST_HANDLES, CUDA_HANDLES = "host_handles", "cuda_handles"

# The times of a member that took the version, or the reason that it did not
Outcome = dict[Member, Updated | ReceiverFailed]
CheckOf = Callable[[Member], Check | None]  # Returns the comparison of a member's checksums if it is due, else None


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
            transfer = Transfer(self._version, group, together, contents)
            try:
                served_s = await transfer.send(serve=len(together) == 1 and checks[together[0]] is None)
                break
            except GroupBroken as broken:
                failed = await transfer.find_failed(broken)
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


def _ids(members: Iterable[Member]) -> str:
    return ",".join(sorted(member.id for member in members))
