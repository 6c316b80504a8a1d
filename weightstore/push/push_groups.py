"""The engines that take part in pushes, in groups that share process groups with the learner. A pair is a group of one
engine.

    live rows -> PushGroups.reconcile -> PushGroup (members, senders)

    rank 0 of the learner  -- tidemill   --> e1, e2        the process groups of all ranks that send,
    rank 2 of the learner  -- tidemill-1 --> e1, e2        one bucket at a time, in the order of the requests

An engine that fails is evicted: it misses the rest of that push, and has left its group. It is tried again in the next
push, and after each further failure only after a longer pause, because each attempt may cost a deadline.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TypeVar, cast

from torch import Tensor

from tidemill.bus.client.addresses import Reach
from tidemill.bus.errors import BusError
from tidemill.bus.http.client import open_session
from tidemill.bus.keys import make_keys
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import LiveRow
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import PeerLost, ReceiverFailed
from tidemill.weightstore.push.member import Member
from tidemill.weightstore.store.registry import VersionRegistry
from tidemill.weightstore.transport.handles import StagingMemory
from tidemill.weightstore.transport.http_receiver import HttpReceiver
from tidemill.weightstore.transport.nccl import DeviceEnd, no_nccl, share
from tidemill.weightstore.transport.parts import Payload, RemoteBucket, RemotePart, RemoteSender
from tidemill.weightstore.transport.port import Deadlines, Identity, OpenReceiver, Rendezvous, WeightReceiver, identity
from tidemill.weightstore.transport.senders import APART, START_S, Sender

_log = logging.getLogger(__name__)

PHASES = ("joining", "catching up", "serving", "stale")  # An engine in one of these phases takes part
# Name of rank 0's process groups, and prefix of the others: an engine that has one of that name leaves it first
GROUP = "tidemill"
_MAX_PAUSE_S = 600.0  # Bound of the pause between two attempts with an engine that keeps failing
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Rules by which push groups are formed and opened."""

    max_engines: int
    """Maximum number of engines in a group."""
    at: Reach
    """Address at which the learner serves the rendezvous."""
    backend: str
    """auto | gloo | nccl; auto = nccl to engines that can, else gloo."""
    deadlines: Deadlines
    end: DeviceEnd = field(default_factory=DeviceEnd)
    """The learner's GPU."""
    memory: StagingMemory | None = None
    """The staging memory, if other processes can read it; NCCL needs that."""
    apart: tuple[str, ...] = APART
    """Backends with the learner's end in a process of its own."""
    parts: tuple[RemotePart, ...] = ()
    """Parts of the weights that other ranks send."""
    adapters: bool = False
    """Engines with this capability receive adapters alone."""

    def backend_of(self, row: LiveRow) -> tuple[str, str]:
        """Return the backend to an engine (empty: refused), and why it is not NCCL: one for all ranks that send."""
        ends = () if self.backend == "gloo" else (self.end, *(part.place.end for part in self.parts))
        reason = next(filter(None, (no_nccl(end, row.capabilities) for end in ends)), "")
        if self.backend == "gloo" or (reason and self.backend == "auto"):
            return "gloo", reason
        return ("" if reason else "nccl"), reason


class PushGroup:
    """Some engines, and the process groups that they had with the learner at the last push, if these are still good.

    There is one for each rank of the learner that sends, and none for an engine that reads the buckets itself. The
    errors of one member are ReceiverFailed, the errors of the groups PeerLost.
    """

    def __init__(self, rules: GroupRules, members: Iterable[Member] = ()) -> None:
        self.rules, self.members = rules, list(members)
        # The learner's ends: rank 0's, then the other parts' in their order
        self.senders: list[Sender | RemoteSender] = []
        self._joined: list[Member] = []  # Members of the open process groups
        self._sending = asyncio.Lock()  # Senders take turns: the members receive one bucket after the other
        self._lost: PeerLost | None = None

    @property
    def is_colocated(self) -> bool:
        """True if its engines share the learner's accelerator: all, or none of them."""
        return any(member.colocated for member in self.members)

    @property
    def transport(self) -> str:
        """The backend of its process groups; empty = its engine reads the buckets itself."""
        return "" if self.members[0].receiver.carries else self.members[0].backend

    def has_room(self, member: Member) -> bool:
        """Return whether an engine may be added.

        Engines of a group are all colocated or none, with one backend, over NCCL on different GPUs, and receive all
        adapters or none; one that reads the buckets itself is alone.
        """
        if any(present.adapters != member.adapters for present in self.members):
            return False
        if any(present.receiver.carries or present.backend != member.backend for present in (member, *self.members)):
            return False
        if member.backend == "nccl" and any(share(present.devices, member.devices) for present in self.members):
            return False
        return member.colocated == self.is_colocated and len(self.members) < self.rules.max_engines

    def is_open_for(self, members: Sequence[Member]) -> bool:
        """Return whether exactly these members have joined the process groups."""
        return self._joined == members

    async def open(self, members: Sequence[Member]) -> None:
        """Have all ranks that send listen for these members, which have not joined yet. Raises PeerLost."""
        self.close()
        rules, backend = self.rules, members[0].backend
        if not members[0].receiver.carries:  # one that carries is alone
            deadline_s, size = rules.deadlines.of("bucket"), 1 + sum(member.ranks for member in members)
            local = await Sender.open(
                GROUP,
                size,
                backend,
                deadline_s,
                at=rules.at,
                memory=rules.memory,
                gpu=rules.end.uuid,
                apart=rules.apart,
            )
            self.senders.append(local)
            start_s = deadline_s + (START_S if backend in rules.apart else 0.0)
            hosting = [
                part.host(f"{GROUP}-{number}", size, backend, deadline_s, start_s)
                for number, part in enumerate(rules.parts, 1)
            ]
            remote = await asyncio.gather(*hosting, return_exceptions=True)
            self.senders += [sender for sender in remote if isinstance(sender, RemoteSender)]
            for error in remote:
                if isinstance(error, BaseException):
                    self.close()
                    raise error
        self._joined = list(members)

    def rendezvous(self, member: Member, sender: Sender | RemoteSender) -> Rendezvous:
        """Return where the engine joins a process group; its processes take as many ranks, one engine after another."""
        first = 1 + sum(earlier.ranks for earlier in self._joined[: self._joined.index(member)])
        return Rendezvous(
            host=sender.host,
            port=sender.port,
            rank=first,
            world_size=sender.world_size,
            name=sender.name,
            backend=sender.backend,
        )

    async def send(self, payload: Payload, following: Payload | None = None) -> None:
        """Broadcast a bucket from the rank that has it, in the order in which members are requested to receive them.

        ``following``: the next bucket, if known. After one failed no other is tried: each could block.
        """
        if not self.senders:
            return
        async with self._sending:
            if self._lost is not None:
                reason = f"an earlier message was lost: {self._lost.reason}"
                raise type(self._lost)(self.senders[0].name, "sending", reason)
            try:
                await self._broadcast(payload, following)
            except PeerLost as error:
                self._lost = error
                raise

    async def _broadcast(self, payload: Payload, following: Payload | None) -> None:
        local, deadline_s = self.senders[0], self.rules.deadlines.of("bucket")
        if isinstance(payload, Tensor):
            assert isinstance(local, Sender)
            await local.send(payload, following if isinstance(following, Tensor) else None, deadline_s)
            return
        ahead = following if isinstance(following, RemoteBucket) and following.part is payload.part else None
        [sender] = [end for end in self.senders if isinstance(end, RemoteSender) and end.part is payload.part]
        await sender.send(payload, ahead, deadline_s)

    def close(self) -> None:
        """Close the process groups, without waiting for a call under way, which ends by the deadline of its group.

        The next push opens other ones.
        """
        for sender in self.senders:
            sender.close()
        self.senders, self._joined, self._lost = [], [], None


@dataclass(slots=True)
class _Backoff:
    failures: int = 0
    until_s: float = 0.0


class PushGroups:
    """The groups and their members, reconciled with the live rows before every push."""

    def __init__(self, view: LiveView, open_receiver: OpenReceiver, rules: GroupRules) -> None:
        self._view, self._open_receiver, self._rules = view, open_receiver, rules
        self._members: dict[str, Member] = {}
        self._groups: list[PushGroup] = []
        self._backoffs: dict[Identity, _Backoff] = {}
        self._without_nccl: dict[Identity, str] = {}  # Engine -> why it gets no weights over NCCL, as logged
        # Live engine -> why it was evicted; removed when it has taken a version or another process has its name
        self.evicted: dict[str, str] = {}
        # ``evicted`` as recorded on the bus; None = as an earlier learner recorded it
        self._recorded: dict[str, str] | None = None

    async def reconcile(self) -> list[PushGroup]:
        """Drop engines that have gone, and add new ones. Returns the groups. Raises BusUnavailable."""
        alive = {row.id: row for row in await self._view.alive("engine")}
        rows = {row.id: row for row in alive.values() if row.phase in PHASES and row.address}
        failed_ids = {engine_id for engine_id, *_ in {identity(row) for row in rows.values()} & self._backoffs.keys()}
        self.evicted = {engine_id: reason for engine_id, reason in self.evicted.items() if engine_id in failed_ids}
        for member in list(self._members.values()):
            row = rows.get(member.id)
            if row is None or identity(row) != member.identity:
                _log.info(
                    "push group: left engine=%s reason=%s",
                    member.id,
                    "restarted" if row else "no longer live and taking part",
                )
                # An engine that is live and takes no part any more is asked to leave. One that died or restarted has no
                # group left.
                await self._drop(member, leave=row is None and member.id in alive)
        for row in rows.values():
            # A colocated engine is never left out: the learner needs its memory.
            if row.id not in self._members and (row.capabilities.colocated or self._is_due(row)) and self._add(row):
                _log.info("push group: new engine=%s url=%s", row.id, row.address)
        return list(self._groups)

    async def evict(self, member: Member, reason: str) -> None:
        """Leave the engine out of this push; it is stale until an update is completed."""
        backoff = self._backoffs.setdefault(member.identity, _Backoff())
        # The first failure costs nothing: one lost connection must not make an engine stale for a deadline.
        backoff.failures += 1
        self.evicted[member.id] = reason
        pause_s = (
            min(self._rules.deadlines.phase_s * 2 ** (backoff.failures - 2), _MAX_PAUSE_S)
            if backoff.failures > 1
            else 0.0
        )
        backoff.until_s = time.monotonic() + pause_s
        _log.warning(
            "push group: evicted engine=%s failures=%d next_try_in_s=%.0f reason=%s",
            member.id,
            backoff.failures,
            pause_s,
            reason,
        )
        await self._drop(member, leave=True)

    def succeeded(self, member: Member) -> None:
        """Record that the engine has taken a version: it is no longer evicted, and its failures are forgotten."""
        self._backoffs.pop(member.identity, None)
        self.evicted.pop(member.id, None)

    async def succeeding(
        self, members: Iterable[Member], work: Callable[[Member], Awaitable[object]]
    ) -> tuple[str, ...]:
        """Run ``work`` for all members at once, and evict the members that fail. Returns the ids of the others."""

        async def run_for(member: Member) -> str:
            try:
                await work(member)
            except ReceiverFailed as error:
                await self.evict(member, str(error))
                return ""
            return member.id

        return tuple(sorted(filter(None, await all_of(map(run_for, members)))))

    async def record_evicted(self, registry: VersionRegistry) -> None:
        """Record which engines are not pushed to, and why, for `tidemill status`."""
        evicted = dict(self.evicted)
        if evicted == self._recorded:
            return
        try:
            await registry.set_evicted(evicted)
            self._recorded = evicted
        except BusError as error:  # the version is published all the same
            _log.warning("evicted engines not recorded error=%s", error)

    async def close(self) -> None:
        """Ask all engines to leave their groups, and release their receivers."""
        await asyncio.gather(*[self._drop(member, leave=True) for member in list(self._members.values())])

    def _add(self, row: LiveRow) -> bool:
        """Add the engine to the first group with room. Returns False if it cannot have NCCL, and nothing else is
        allowed.
        """
        receiver = self._open_receiver(row)
        backend, reason = ("", "") if receiver.carries else self._rules.backend_of(row)
        if reason:
            self._log_without_nccl(row, backend, reason)
            if not backend:
                receiver.close()
                self.evicted[row.id] = f"weights.backend: nccl is not possible: {reason}"
                return False
        adapters = self._rules.adapters and row.capabilities.adapters and receiver.adapters
        member = Member(row, receiver, deadlines=self._rules.deadlines, backend=backend, adapters=adapters)
        if self._rules.adapters and not adapters:
            _log.info("merged weights are pushed to this engine, it does not add adapters by itself engine=%s", row.id)
        group = next((group for group in self._groups if group.has_room(member)), None)
        if group is None:
            group = PushGroup(self._rules)
            self._groups.append(group)
        group.members.append(member)
        self._members[row.id] = member
        return True

    def _log_without_nccl(self, row: LiveRow, backend: str, reason: str) -> None:
        """Log once why an engine gets no weights over NCCL, unless both ends are on CPUs, where none is expected."""
        is_logged = self._without_nccl.get(identity(row)) == reason
        self._without_nccl[identity(row)] = reason
        if is_logged or (backend and not self._rules.end.uuid and not row.capabilities.devices):
            return
        if backend:
            _log.warning("weights go over %s engine=%s reason=%s", backend, row.id, reason)
        else:
            _log.error("push group: refused engine=%s weights.backend=nccl reason=%s", row.id, reason)

    async def _drop(self, member: Member, *, leave: bool) -> None:
        if self._members.get(member.id) is member:
            del self._members[member.id]
        await member.close(leave=leave)
        for group in [group for group in self._groups if member in group.members]:
            group.members.remove(member)
            if not group.members:
                group.close()
                self._groups.remove(group)

    def _is_due(self, row: LiveRow) -> bool:
        backoff = self._backoffs.get(identity(row))
        return backoff is None or time.monotonic() >= backoff.until_s


async def all_of(work: Iterable[Coroutine[object, None, T]]) -> list[T]:
    """Wait for all, then raise the first error, if there is one."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


async def open_groups(
    stack: AsyncExitStack, bus: Bus, config: WeightsConfig, *, epoch: int, rules: GroupRules, view: LiveView
) -> PushGroups:
    """Return groups without members, with receivers of the configured transport; ``stack`` closes them."""
    keys = await make_keys(bus)
    # No limit: a push sends a request to every engine at the same time, and one that waits for a connection would miss
    # its deadline.
    session = await stack.enter_async_context(open_session(headers=keys.headers))
    for part in rules.parts:
        stack.push_async_callback(part.close)

    def open_receiver(row: LiveRow) -> WeightReceiver:
        return HttpReceiver(session, row.address, epoch=epoch, deadlines=rules.deadlines)

    if config.transport == "handles":
        from tidemill.weightstore.transport.handle_receiver import HandleReceivers

        gpu = rules.end.uuid if config.staging == "cuda" else ""
        assert rules.memory is not None, "weights.transport: handles is staged in memory that engines can read"
        receivers = HandleReceivers(
            rules.memory, open_receiver, epoch=epoch, deadlines=rules.deadlines, gpu=gpu, parts=rules.parts
        )
        stack.callback(receivers.close)
        open_receiver = receivers.open
    groups = PushGroups(view, open_receiver, rules)
    stack.push_async_callback(groups.close)
    return groups
