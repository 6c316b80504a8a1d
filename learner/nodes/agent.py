"""The agent of a node: parent of its ranks, and on the leader's node of the feeder.

    look      rows of all nodes, row ``attempt`` ──► decide (rendezvous.py) ──► start, drain, end ranks; write ``attempt``
    keep      own row, every second
    ranks     run_part (ranks/process.py), while an attempt runs

Consumes rows and the ends of its children. Produces its row and, as the leader, the attempts. Waits for the other nodes (at most
``nodes_wait_s``, its row names them) and for its children. Unblocked by a change of a row, the end of a child, or ``draining``.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace

from bus import exit_codes
from bus.client.ids import nonce
from bus.client.rows import Value
from bus.client.waiter import Waiter
from bus.errors import BusError, RowConflict
from bus.liveness.epoch import raise_epoch
from bus.server.ports import KeptPort
from bus.streams.bus import Bus
from learner.feed.feed_keys import FeedKeys
from learner.nodes import agreement
from learner.nodes.errors import LearnerEnded, NodeRefused
from learner.nodes.node_rows import ATTEMPT_KEY, NODE_KEY, Attempt, NodeRow, Phase, State, attempt_of, cut, node_of, row_value
from learner.nodes.own_row import OwnRow
from learner.nodes.port import Work
from learner.nodes.rendezvous import (
    LEADER,
    Action,
    Drain,
    End,
    Form,
    Leave,
    Record,
    Renew,
    Seen,
    Start,
    Wait,
    decide,
)
from learner.nodes.silence import Silences
from learner.ranks.process import ChildFailed, Part

log = logging.getLogger(__name__)

LOOK_S = 1.0
READ_S = 5.0
"""Seconds after which a reading without an answer counts as an outage of the bus."""
RENEWED_S = 10.0
"""Seconds in which the last state of the row should be stored before the agent ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Deadlines of a node agent, in seconds."""

    wait_s: float = 600.0
    """Time for all nodes to be there."""
    silence_s: float = 30.0
    """Time without a heartbeat after which a node counts as dead."""
    fence_s: float = 60.0
    """Time without an answer of the bus, and without a step, after which the ranks end."""
    leave_s: float = 120.0
    """Time for the ranks to end by themselves after the last step."""
    bad_ends: int = 6
    window_s: float = 300.0
    """An agent gives up after ``bad_ends`` failed attempts within this time."""


class Agent:
    """One node's agent, from its claim of the node rank to its end."""

    def __init__(self, bus: Bus, row: NodeRow, work: Work, *, bind: str, limits: Limits, on_wait: Callable[[str], None]) -> None:
        """``row``: the facts of this node, without nonces and keys. ``bind``: address to listen on, which may differ from the advertised.

        ``on_wait`` is called with what the agent waits for, whenever that changes.
        """
        self._bus, self._rows, self._work, self._bind, self._limits, self._on_wait = bus, bus.rows("run"), work, bind, limits, on_wait
        self._keys = FeedKeys.new()
        self._own = OwnRow(self._rows, replace(row, nonce=nonce(), agent=nonce(), key=self._keys.ranks_public))
        self._wake = Waiter()
        self._silences = Silences()
        self._view: tuple[dict[int, Seen], Attempt | None, int] | None = None
        """Rows of the nodes, the attempt and its revision; None while the bus is away."""
        self._read_s = time.monotonic()
        self._ranks: asyncio.Task[None] | None = None
        self._drain = asyncio.Event()
        self._raised = 0
        """Epoch that this agent raised last."""
        self._writes = 0
        self._ports = ExitStack()
        self._stopped = False
        self._missing_since: float | None = None
        self._bad_ends: deque[float] = deque(maxlen=limits.bad_ends)
        self._stepped_s = time.monotonic()
        """Time of the last step of this node's ranks, or of their start."""

    @property
    def row(self) -> NodeRow:
        """The row of this agent, as it is now."""
        return self._own.row

    async def run(self, draining: asyncio.Event) -> None:
        """Run attempts until the last step is done, or drained. Raises NodeRefused, NodeReplaced, LearnerEnded, BusUnavailable."""
        await self._own.claim(self._limits.silence_s)
        async with AsyncExitStack() as stack:
            loops = [asyncio.create_task(work, name=name) for name, work in (("row", self._own.keep()), ("look", self._look()))]
            loops.append(asyncio.create_task(self._stop_on(draining), name="stop"))
            for loop in loops:
                loop.add_done_callback(lambda _: self._wake.wake())
            stack.push_async_callback(_cancel, loops)
            await stack.enter_async_context(self._work.opened(self._bus))
            stack.push_async_callback(self._end_ranks)
            try:
                await self._act_until_left(loops)
            except LearnerEnded as error:  # the row stays: it has the reason
                self._own.update(phase=Phase.FAILED, reason=cut(error.reason), exit_code=error.exit_code)
                await self._own.stored(RENEWED_S)
                raise
        await self._own.remove()

    async def _act_until_left(self, loops: list[asyncio.Task[None]]) -> None:
        """Act on each change of rows and children until an action ends the agent."""
        while True:
            for loop in loops[:2]:
                if loop.done():
                    loop.result()  # NodeReplaced; the loops have no other end
            await self._reap()
            if self._stopped and self._ranks is None and self.row.phase is Phase.READY:
                return
            if self._stopped and self.row.phase is Phase.RUNNING:
                self._own.update(phase=Phase.DRAINING)  # the leader drains the ranks of all nodes
            action = self._decide()
            if isinstance(action, Leave):
                await self._leave(action)
                return
            await self._act(action)
            await self._wake.wait(LOOK_S)

    def _decide(self) -> Action:
        now = time.monotonic()
        if self._view is None:
            away = now - max(self._read_s, self._stepped_s)
            if self._ranks is not None and away > self._limits.fence_s:
                return End(f"the bus has not answered, and no step was made, for {away:.0f} s")
            return Wait("the bus")
        seen, attempt, _ = self._view
        return decide(self.row, seen, attempt, silence_s=self._limits.silence_s)

    async def _act(self, action: Action) -> None:
        """Carry out an action. A write to the bus that fails is decided upon again."""
        self._note_wait(action)
        try:
            match action:
                case Form():
                    await self._form(action)
                case Record():
                    await self._record(action.state, action.reason, action.exit_code)
                case Start():
                    await self._start(action.attempt)
                case Drain():
                    self._drain.set()
                case End():
                    await self._ended_badly(action.reason)
                case Renew():
                    self._renew(action.reason)
                case _:
                    return
        except RowConflict:
            log.info("another agent has written the attempt; it is read again")
        except (BusError, TimeoutError) as error:
            log.warning("the bus did not answer action=%s error=%s", type(action).__name__, str(error) or "no answer")

    def _note_wait(self, action: Action) -> None:
        """Report a wait in the row, and give up when nodes have been missing for too long. Raises LearnerEnded."""
        text = action.waits_for if isinstance(action, Wait) else ""
        if text.partition(" (silent")[0] != self.row.waits_for.partition(" (silent")[0]:
            log.info("node=%d %s", self.row.node, f"waiting for {text}" if text else type(action).__name__.lower())
            self._own.update(waits_for=cut(text))
            self._on_wait(text)
        now = time.monotonic()
        missing = isinstance(action, Wait) and action.missing
        self._missing_since = (self._missing_since or now) if missing else None
        if self._missing_since is not None and now - self._missing_since > self._limits.wait_s:
            raise LearnerEnded(f"not all {self.row.nodes} nodes are there after {self._limits.wait_s:.0f} s; missing: {text}")

    # ---- the leader's writes

    async def _form(self, action: Form) -> None:
        """Write the next attempt. Raises LearnerEnded for nodes that do not fit together, after it is recorded."""
        assert self._view is not None
        revision = self._view[2]
        refused: NodeRefused | None = None
        ranks = tuple(1 for _ in action.offers)
        try:
            agreement.refuse_unlike(action.offers)
            ranks = self._work.layout(action.offers)
        except NodeRefused as error:
            refused = error
        epoch = self._raised = await raise_epoch(self._bus)
        self._ports.close()
        feeder, master = (self._ports.enter_context(KeptPort(self._bind)).number for _ in range(2))
        proof = nonce()
        await self._work.prove(proof)
        attempt = Attempt(
            epoch=epoch,
            nonces=tuple(row.nonce for row in action.offers),
            ranks=ranks,
            master=f"{self.row.address}:{master}",
            feeder=f"tcp://{bracketed(self.row.address)}:{feeder}",
            feeder_key=self._keys.feeder_public,
            proof=proof,
            state=State.FAILED if refused else State.FORMING,
            reason=cut(str(refused or "")),
            exit_code=refused.exit_code if refused else 0,
        )
        self._keys = replace(self._keys, others_public=tuple(row.key for row in action.offers if row.node != self.row.node))
        log.info("attempt epoch=%d nodes=%d ranks=%s state=%s", epoch, len(ranks), ranks, attempt.state)
        await self._write(attempt, revision)

    async def _record(self, state: State, reason: str, exit_code: int = 0) -> None:
        """Write the state of the present attempt, if it is this agent's."""
        if self._view is None or self._view[1] is None or not self._view[1].has(self.row):
            return
        attempt, revision = self._view[1], self._view[2]
        log.info("attempt epoch=%d state=%s reason=%s", attempt.epoch, state, reason or "-")
        await self._write(replace(attempt, state=state, reason=cut(reason), exit_code=exit_code), revision)

    async def _write(self, attempt: Attempt, revision: int) -> None:
        async with asyncio.timeout(READ_S):
            written = await self._rows.update(ATTEMPT_KEY, row_value(attempt), revision)
        self._writes += 1
        if self._view is not None:
            self._view = (self._view[0], attempt, written)
        self._wake.wake()

    # ---- ranks

    async def _start(self, attempt: Attempt) -> None:
        """Start the processes of this node. Raises LearnerEnded for a node that cannot run them."""
        me = self.row
        if me.node == LEADER and attempt.epoch != self._raised:  # a write that was taken for lost
            await self._record(State.ENDING, "a later epoch was raised")
            return
        host, _, port = attempt.master.rpartition(":")
        part = Part(
            first_rank=attempt.first_rank(me.node),
            num_ranks=attempt.ranks[me.node],
            world=sum(attempt.ranks),
            master=(host, int(port)),
            feeder_url=attempt.feeder,
            listen=f"tcp://{bracketed(self._bind)}:{attempt.feeder.rpartition(':')[2]}" if me.node == LEADER else "",
            keys=replace(self._keys, feeder_public=attempt.feeder_key),
            epoch=attempt.epoch,
        )
        try:
            await self._work.check(attempt.proof)
        except NodeRefused as error:
            await self._give_up(str(error), error.exit_code)
        self._drain.clear()
        self._stepped()
        self._own.update(phase=Phase.RUNNING, epoch=attempt.epoch, reason="")
        self._ranks = asyncio.create_task(self._work.run(part, self._drain, self._stepped), name="ranks")
        self._ranks.add_done_callback(lambda _: self._wake.wake())

    def _stepped(self) -> None:
        self._stepped_s = time.monotonic()

    async def _reap(self) -> None:
        """Note the end of the ranks. Raises LearnerEnded for one that no restart cures."""
        if self._ranks is None or not self._ranks.done():
            return
        ranks, self._ranks = self._ranks, None
        try:
            ranks.result()
        except ChildFailed as error:
            log.error("%s", error)
            reason = f"{error.name} {exit_codes.how(error.code)}" + (f": {error.reason}" if error.reason else "")
            if error.exit_code in exit_codes.FINAL:
                await self._give_up(str(error), error.exit_code)
            await self._ended_badly(reason)
        else:
            self._own.update(phase=Phase.FINISHED)

    async def _ended_badly(self, reason: str) -> None:
        """End the ranks of a failed attempt, and offer again. Raises LearnerEnded after too many failures."""
        await self._end_ranks()
        now = time.monotonic()
        self._bad_ends.append(now)
        if len(self._bad_ends) == self._limits.bad_ends and now - self._bad_ends[0] < self._limits.window_s:
            await self._give_up(f"{len(self._bad_ends)} failed attempts within {self._limits.window_s:.0f} s; the last one: {reason}")
        if self.row.node == LEADER:
            await self._try_record(State.ENDING, reason)
        self._renew(reason)

    async def _give_up(self, reason: str, exit_code: int = exit_codes.CRASHED) -> None:
        """Record that no attempt follows, as far as the bus can be reached, and raise LearnerEnded."""
        await self._end_ranks()
        if self.row.node == LEADER:
            await self._try_record(State.FAILED, reason, exit_code)
        raise LearnerEnded(reason, exit_code)

    async def _try_record(self, state: State, reason: str, exit_code: int = 0) -> None:
        """Record a state for the other agents, who also see it in this node's row."""
        try:
            if self._view is not None and self._view[1] is not None and self._view[1].state not in (State.ENDING, State.FAILED, State.DONE):
                await self._record(state, reason, exit_code)
        except (BusError, TimeoutError) as error:
            log.warning("attempt not recorded as %s: %s", state, str(error) or "no answer")

    def _renew(self, reason: str) -> None:
        """Offer this node again, under a new nonce and with a new key. No rank of it is alive."""
        assert self._ranks is None
        self._ports.close()
        if reason:
            log.warning("node=%d offers itself again: %s", self.row.node, reason)
        self._keys = FeedKeys.new()
        self._own.update(nonce=nonce(), key=self._keys.ranks_public, phase=Phase.READY, reason=cut(reason))
        self._wake.wake()

    async def _leave(self, action: Leave) -> None:
        """End the agent. Raises LearnerEnded unless the last step is done."""
        if action.exit_code:
            await self._end_ranks()
            raise LearnerEnded(action.reason, action.exit_code)
        if self._ranks is not None:
            await asyncio.wait({self._ranks}, timeout=self._limits.leave_s)
            await self._end_ranks()

    async def _end_ranks(self) -> None:
        """End the processes of this node, if there are any, whatever they do."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.cancel()
            await asyncio.gather(ranks, return_exceptions=True)
        self._ports.close()

    # ---- loops

    async def _stop_on(self, draining: asyncio.Event) -> None:
        await draining.wait()
        self._stopped = True
        self._wake.wake()

    async def _look(self) -> None:
        """Background loop: read the rows of the nodes and the attempt, at every change and every second."""
        changed = Waiter()
        while True:
            try:
                async with self._rows.on_change(f"{NODE_KEY}.*", changed.wake), self._rows.on_change(ATTEMPT_KEY, changed.wake):
                    while True:
                        await self._look_once()
                        self._wake.wake()
                        await changed.wait(LOOK_S)
            except BusError as error:
                log.warning("rows not watched: %s", error)
                await asyncio.sleep(LOOK_S)

    async def _look_once(self) -> None:
        """Read once. The nodes come first: an agent that leaves has recorded the end of the attempt before."""
        writes = self._writes
        try:
            async with asyncio.timeout(READ_S):
                found = await self._rows.all(NODE_KEY)
                value, revision = await self._rows.read(ATTEMPT_KEY)
        except (BusError, TimeoutError):
            self._silences.lost(time.monotonic())
            self._view = None
            return
        rows = {row.node: (row, stamp) for key, (row_map, stamp) in found.items() if (row := self._node(key, row_map, stamp)) is not None}
        now = time.monotonic()
        silent = self._silences.read({node: stamp for node, (_, stamp) in rows.items()}, now)
        seen = {node: Seen(row, silent[node]) for node, (row, _) in rows.items()}
        if writes == self._writes:  # else it may be older than an own write that ended meanwhile
            self._view, self._read_s = (seen, self._attempt(value, revision), revision), now

    def _node(self, key: str, value: Value, revision: int) -> NodeRow | None:
        return self._bus.refusals.read("run", f"{key} (revision {revision})", lambda: node_of(key, value))

    def _attempt(self, value: Value | None, revision: int) -> Attempt | None:
        if value is None:
            return None
        return self._bus.refusals.read("run", f"{ATTEMPT_KEY} (revision {revision})", lambda: attempt_of(value))


def bracketed(host: str) -> str:
    """Return a host as an URL has it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
